"""Who owns a folder: a run uses only a new or empty one, and one process at a time works on it."""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from yaml import YAMLError

from polyfed.addresses import names_code
from polyfed.errors import FolderError
from polyfed.records import disk
from polyfed.yaml_text import parse_yaml


def new_id() -> str:
    """The id of a new run. It is part of the names of its files, so that no other file is ever deleted."""
    return secrets.token_hex(4)


def read_claim(path: Path) -> dict[str, Any]:
    """What run.json says; empty if there is none, or if it is damaged."""
    try:
        content = json.loads((path / "run.json").read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    token = content.get("id") if isinstance(content, dict) else None
    named = isinstance(token, str) and len(token) == 8 and not set(token) - set("0123456789abcdef")
    sound = named and all(isinstance(content.get(part, {}), dict) for part in ("settings", "facts"))
    return dict(content) if sound else {}


def resume_command(path: Path) -> str:
    """The command that continues a run, with --trust if its settings name code that has to be imported."""
    claim = read_claim(path)
    if own_command(claim):
        return own_command(claim)
    settings = claim.get("settings", {})
    code = [value for name, value in settings.items() if name in ("models", "auxiliary") or name.startswith("method.")]
    trust = any(map(names_code, [*code, _engine(path)]))
    return f"polyfed resume {path}{' --trust' if trust else ''}"


def own_command(claim: Mapping[str, Any]) -> str:
    """The command that continues a run which `polyfed resume` can't; empty if it can."""
    return str(claim.get("command", ""))


def _engine(path: Path) -> object:
    """The engine in a run's config.yaml; run.json has only settings that determine its numbers."""
    try:
        content = parse_yaml((path / "config.yaml").read_text())
    except (OSError, ValueError, YAMLError, RecursionError):
        return None
    return content.get("engine") if isinstance(content, dict) else None


@contextmanager
def writable(path: Path, setting: str = "--out") -> Iterator[None]:
    """Inside, a folder that can't be written to is one sentence, with the setting that names it."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise FolderError(f"can't write to '{path}': {reason}; choose another folder ({setting}).") from error


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Inside, no other process works on this run folder."""
    if sys.platform == "win32":
        yield
        return
    import fcntl

    folder = os.open(path, os.O_RDONLY)
    try:
        for moment in (0.02, 0.1, 0.0):  # `is_locked` of another process may hold it for an instant
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if not moment:
                    raise FolderError(
                        f"another process is working on '{path}'; wait until it has ended, or stop it first."
                    ) from error
                time.sleep(moment)
            except OSError:
                break  # a file system without locks
        yield
    finally:
        os.close(folder)


def is_locked(path: Path) -> bool | None:
    """Whether a process works on this folder; None where that can't be known."""
    if sys.platform == "win32":
        return None
    import fcntl

    try:
        folder = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(folder, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(folder)
    return False


def check_free(path: Path, begun: Collection[str], setting: str = "--out") -> None:
    """Raise unless the folder is empty; a run that was killed before it began is removed.

    Such a run has `run.json` and perhaps these files, but no config.yaml yet.
    """
    found = {entry.name for entry in path.iterdir()}
    if "run.json" in found and found <= {"run.json", *begun} and read_claim(path):
        for name in found:
            disk.remove(path / name)
        found = set()
    if found:
        raise taken(path, setting)


def taken(path: Path, setting: str = "--out") -> FolderError:
    """The error for a folder that a run can't use, with the setting that names it."""
    if (path / "run.json").exists() or (path / "config.yaml").exists():
        return FolderError(
            f"'{path}' already holds a run; continue it with `{resume_command(path)}`, or choose another folder "
            f"({setting})."
        )
    if path.is_dir():
        return FolderError(
            f"'{path}' is not empty, and a run overwrites nothing: choose a new or empty folder ({setting})."
        )
    return FolderError(f"'{path}' is a file: choose a new or empty folder ({setting}).")
