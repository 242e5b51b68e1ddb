"""A folder for temporary files that does not outlive its process for long, even if that is killed."""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

_PREFIX = "polyfed-clients-"
_LOCK = "in-use"


class ScratchFolder:
    """A new folder under TMPDIR, locked as long as this process lives."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        lock = self.path / f"{_LOCK}.new"
        self._lock = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o600)
        _locked(self._lock)
        lock.rename(self.path / _LOCK)  # only now can another process consider the folder abandoned

    def remove(self) -> None:
        """Delete the folder."""
        os.close(self._lock)
        _remove(self.path)


def remove_abandoned() -> None:
    """Delete the folders of processes that were killed before they could."""
    if sys.platform == "win32":
        return
    with suppress(OSError):
        for entry in list(os.scandir(tempfile.gettempdir())):
            if entry.name.startswith(_PREFIX) and entry.is_dir(follow_symlinks=False):
                _remove_if_abandoned(Path(entry.path))


def _remove_if_abandoned(folder: Path) -> None:
    with suppress(OSError):  # someone else's, or already gone
        if folder.lstat().st_uid != os.getuid():
            return
        file = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
        try:
            if _locked(file):
                _remove(folder)
        finally:
            os.close(file)


def _locked(file: int) -> bool:
    """Take the lock if nobody has it."""
    if sys.platform == "win32":
        return False
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _remove(folder: Path) -> None:
    """Delete our files in the folder, and the folder if it is then empty."""
    for pattern in ("client-*.safetensors", f"{_LOCK}*"):
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()
