"""The command line in this process: exit status, output, errors."""

from __future__ import annotations

import sys
from typing import NamedTuple

import pytest

from polyfed import cli


class Ended(NamedTuple):
    status: int
    output: str
    error: str


class Shell:
    """Runs polyfed in this process, in a folder of its own."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._capsys = capsys
        self._monkeypatch = monkeypatch

    def __call__(self, *arguments: str) -> Ended:
        self._monkeypatch.setattr(sys, "argv", ["polyfed", *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        output, error = self._capsys.readouterr()
        return Ended(int(caught.value.code or 0), output, error)


def is_one_sentence(error: str) -> bool:
    return error.startswith("polyfed: ") and error.endswith((".\n", "?\n")) and error.count("\n") == 1
