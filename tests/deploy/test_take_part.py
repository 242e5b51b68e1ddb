"""The log of a site, and what must not end it."""

import errno
from pathlib import Path
from typing import NoReturn

import pytest

from polyfed.deploy.take_part import Log


def test_a_full_disk_does_not_end_the_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the log nor the screen, which may be a file on the same disk, can be written; then there is room."""

    def full(*args: object) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    with Log(tmp_path / "site.log", full) as log:
        with monkeypatch.context() as patch:
            patch.setattr(log, "_file", type("Full", (), {"write": full, "close": full})())
            log.add("lost")
        log.add("kept")
    assert [line.split("  ")[1] for line in (tmp_path / "site.log").read_text().splitlines()] == ["kept"]
