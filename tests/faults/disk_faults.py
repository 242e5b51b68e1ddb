"""A disk that dies, and one that forgets what was not synced: the file operations of a process, watched and broken.

Only real files are used. Every operation through `os` that changes something is counted; at a chosen one the process
"dies": that operation and all later ones raise, so nothing is tidied up, as after kill -9. `Journal` also keeps what a
power cut would leave: of each file the content at its last sync, of each folder the names at its last sync.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

CHANGES = ("write", "fsync", "replace", "link", "unlink", "mkdir", "rmdir", "ftruncate", "open")


class Killed(BaseException):
    """Stands for the end of the process."""


@dataclass
class File:
    """What is durably known of a file."""

    content: bytes = b""


@dataclass
class Folder:
    """What is durably known of a folder: its names."""

    names: dict[str, File | Folder] = field(default_factory=dict)


class Journal:
    """Watches all file operations below a folder."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, die_at: int = -1) -> None:
        self.root = root
        self.die_at = die_at
        self.operations = 0
        self.dead = False
        self._known: dict[int, File | Folder] = {}
        self._real = {name: getattr(os, name) for name in CHANGES}
        for name in CHANGES:
            monkeypatch.setattr(os, name, self._watched(name))

    def _watched(self, name: str) -> Callable[..., Any]:
        real = self._real[name]

        def call(*arguments: Any, **options: Any) -> Any:
            if not self._concerns(name, arguments):
                return real(*arguments, **options)
            if self.dead or self.operations == self.die_at:
                self.dead = True
                raise Killed
            self.operations += 1
            if name in ("unlink", "rmdir"):
                self._forget(Path(arguments[0]))
            elif name == "replace" and Path(arguments[1]).exists():
                self._forget(Path(arguments[1]))
            done = real(*arguments, **options)
            if name == "fsync":
                self._synced(arguments[0])
            return done

        return call

    def _concerns(self, name: str, arguments: tuple[Any, ...]) -> bool:
        """Whether an operation changes something below the watched folder; reading is not counted."""
        if name == "open" and not (len(arguments) > 1 and arguments[1] & (os.O_CREAT | os.O_TRUNC)):
            return False
        place = arguments[0]
        path = Path(f"/proc/self/fd/{place}").readlink() if isinstance(place, int) else Path(os.fsdecode(place))
        return path.is_absolute() and (path == self.root or self.root in path.parents)

    def _synced(self, number: int) -> None:
        facts = os.fstat(number)
        path = Path(f"/proc/self/fd/{number}").readlink()
        known = self._of(facts)
        if isinstance(known, File):
            known.content = path.read_bytes()
        else:
            known.names = {entry.name: self._of(entry.lstat()) for entry in path.iterdir()}

    def _of(self, facts: os.stat_result) -> File | Folder:
        if facts.st_ino not in self._known:
            self._known[facts.st_ino] = Folder() if stat.S_ISDIR(facts.st_mode) else File()
        return self._known[facts.st_ino]

    def _forget(self, path: Path) -> None:
        """A file whose last name goes: the next one may get its number."""
        facts = path.lstat()
        if stat.S_ISDIR(facts.st_mode) or facts.st_nlink == 1:
            self._known.pop(facts.st_ino, None)

    def after_power_cut(self, place: Path) -> None:
        """Build what would be found at the next start; the watched folder itself is known to exist."""
        _build(self._of(self.root.stat()), place)

    def with_names_kept(self, place: Path) -> None:
        """The same on a disk that had written names, but not yet contents: files are as they were last synced."""

        def build(folder: Path, target: Path) -> None:
            target.mkdir(exist_ok=True)
            for entry in folder.iterdir():
                if entry.is_dir():
                    build(entry, target / entry.name)
                else:
                    known = self._of(entry.stat())
                    assert isinstance(known, File)
                    (target / entry.name).write_bytes(known.content)

        build(self.root, place)


def _build(known: File | Folder, place: Path) -> None:
    if isinstance(known, File):
        place.write_bytes(known.content)
        return
    place.mkdir(exist_ok=True)
    for name, inner in known.names.items():
        _build(inner, place / name)
