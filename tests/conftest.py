"""Fixtures for several tests."""

import signal
from pathlib import Path

import pytest

from tests.shell import Shell


def pytest_configure() -> None:
    """A shell's background jobs ignore Ctrl-C, and `make test` runs half of the tests as one; some tests interrupt."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def shell(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(tmp_path)
    return Shell(capsys, monkeypatch)
