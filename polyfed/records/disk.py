"""Files of a run on disk: complete or absent, safe from a power cut once synced, never reached through a link.

Everything that a run writes or deletes goes through here. A file's content is durable once it is synced, its name
once its folder is synced; `write` does both. Where many files are written at once, the folder is synced once.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
import sys
from collections.abc import Callable
from pathlib import Path

from polyfed.errors import InputError

_NO_LINKS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
NEW = ".new"


def file_name(text: str) -> str:
    """The text as a name that every file system accepts; Windows has no colon, as in the address of a method.

    >>> file_name("my_methods:Thief")
    'my_methods_Thief'
    """
    return re.sub(r"[^\w.+=-]", "_", text)


def write(path: Path, content: bytes | str, *, sync_name: bool = True) -> None:
    """Write beside the old file, sync it, and move it into place; a failure leaves the old file.

    Without `sync_name`, call `sync_folder` before anything relies on the file.
    """
    beside = _write_beside(path, content)
    _or_remove(beside, lambda: beside.replace(path))
    if sync_name:
        sync_folder(path.parent)


def write_first(path: Path, content: bytes | str, *, mode: int = 0o666) -> None:
    """Write a file that nobody else has written; of several processes that try, one succeeds.

    The others get a `FileExistsError`. Whoever sees the file sees all of it; a failure leaves no file. It has the
    permissions `mode`, less what the umask forbids, before the first byte is in it.
    """
    beside = _write_beside(path, content, mode)
    try:
        try:
            os.link(beside, path)
        except FileExistsError:
            raise
        except OSError:  # a file system without hard links
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINKS, mode))
            _or_remove(path, lambda: beside.replace(path))
    finally:
        remove(beside)
    _or_remove(path, lambda: sync_folder(path.parent))


def append(path: Path, content: bytes, *, sync: bool = False) -> None:
    """Add to the end of a file, all of it or nothing; durable only with `sync`."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | _NO_LINKS, 0o666)
    try:
        before = os.fstat(file).st_size
        try:
            _write_all(file, content)
            if sync:
                os.fsync(file)
        except BaseException:
            os.ftruncate(file, before)
            raise
    finally:
        os.close(file)


def sync(path: Path) -> None:
    """Force a file's content to disk."""
    file = os.open(path, os.O_RDWR | _NO_LINKS)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def sync_folder(path: Path) -> None:
    """Force a folder's list of names to disk."""
    if sys.platform == "win32":
        return
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a file system that can't do it
            raise
    finally:
        os.close(folder)


def make_folder(path: Path, *, private: bool = False) -> None:
    """Make a folder and its missing parents, unless it exists; a private one is its owner's only."""
    if path.is_dir() and not path.is_symlink():
        return
    if not path.parent.exists():
        make_folder(path.parent)
    path.mkdir(0o700 if private else 0o777, exist_ok=not path.is_symlink())
    sync_folder(path.parent)


def remove(path: Path) -> None:
    """Delete a file of our own, if it exists; a link or a folder of that name is left alone."""
    if is_file(path):
        path.unlink(missing_ok=True)


def remove_folder(path: Path) -> None:
    """Delete a folder if nothing is in it."""
    if path.is_dir() and not path.is_symlink() and not any(path.iterdir()):
        path.rmdir()


def is_file(path: Path) -> bool:
    """Whether there is a file of that name that is not a link."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def read(path: Path) -> bytes | None:
    """A file's content; None if there is no such file or it is a link."""
    return path.read_bytes() if is_file(path) else None


def check_no_links(folder: Path, names: tuple[str, ...]) -> None:
    """Raise if one of these is a link: a run must not change what it points to."""
    for name in names:
        if (folder / name).is_symlink():
            raise InputError(
                f"'{folder / name}' is a link, and a run changes only files in its own folder: put what the link "
                "points to in its place."
            )


def remove_unfinished(folder: Path, names: tuple[str, ...]) -> None:
    """Delete what `write` had not yet moved into place when its process was killed, for files of these names."""
    for path in folder.iterdir():
        name, _, token = path.name.removesuffix(NEW).rpartition(".")
        ours = name.removeprefix(".") in names and len(token) == 8 and not set(token) - set("0123456789abcdef")
        if ours and path.name.startswith(".") and path.name.endswith(NEW):
            remove(path)


def _or_remove(path: Path, work: Callable[[], object]) -> None:
    """Do the last steps for a file of our own; if they fail, delete it."""
    try:
        work()
    except BaseException:
        remove(path)
        raise


def _write_beside(path: Path, content: bytes | str, mode: int = 0o666) -> Path:
    data = content.encode() if isinstance(content, str) else content
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}{NEW}")
    file = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINKS, mode)
    try:
        try:
            _write_all(file, data)
            os.fsync(file)
        finally:
            os.close(file)
    except BaseException:
        remove(beside)
        raise
    return beside


def _write_all(file: int, content: bytes) -> None:
    left = memoryview(content)
    while left:
        left = left[os.write(file, left) :]
