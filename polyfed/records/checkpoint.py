"""Checkpoints that survive anything: a kill at any moment, a full disk, a truncated file.

A checkpoint is a manifest that lists files with their lengths and hashes: the server's state, the progress so far, and
one file per client. Only clients that changed since the last checkpoint are written again. The manifest is moved into
place last, and the one before is kept with its files, so a damaged checkpoint falls back to the previous one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load

from polyfed.message import State, state_bytes
from polyfed.records import atomic

_NOW, _BEFORE = "manifest.json", "manifest.previous.json"


@dataclass(frozen=True)
class Restored:
    """What a checkpoint holds."""

    round: int
    server: State
    progress: dict[str, Any]
    clients: Mapping[int, State]
    """Read from disk one at a time, when asked for."""


class ClientStates(Mapping[int, State]):
    """Clients' states on disk; a large federation's would not fit into memory at once."""

    def __init__(self, entries: dict[int, dict[str, Any]], read: Callable[[dict[str, Any]], bytes]) -> None:
        self._entries = entries
        self._read = read

    def __getitem__(self, client: int) -> State:
        state: State = load(self._read(self._entries[client]))
        return state

    def __iter__(self) -> Iterator[int]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


@dataclass
class Checkpoints:
    """The checkpoints of one run, in one folder."""

    folder: Path
    damaged: str = ""
    """What `restore` found unusable, if anything."""
    _clients: dict[str, dict[str, Any]] = field(default_factory=dict)
    _manifest: str = ""
    """The newest whole checkpoint's; the next save keeps it as the one before."""

    def save(
        self, round: int, server: State, progress: dict[str, Any], changed: Iterable[int], state: Callable[[int], State]
    ) -> None:
        """Write a checkpoint of a finished round; `state` gives the state of each changed client."""
        self.folder.mkdir(parents=True, exist_ok=True)
        clients = dict(self._clients)
        try:
            for client in sorted(changed):
                name = f"client-{client:04d}.{round}.safetensors"
                clients[str(client)] = self._write(name, state_bytes(state(client)))
            content = {
                "round": round,
                "server": self._write(f"server.{round}.safetensors", state_bytes(server)),
                "progress": self._write(f"progress.{round}.json", json.dumps(progress).encode()),
                "clients": clients,
            }
            manifest = json.dumps(content)
            if self._manifest:  # not what lies in manifest.json: that may be the damaged one we fell back from
                atomic.write(self.folder / _BEFORE, self._manifest)
            atomic.write(self.folder / _NOW, manifest)
            self._clients, self._manifest = clients, manifest
        finally:
            self._clean()

    def restore(self) -> Restored | None:
        """The newest checkpoint that is whole, or None if there is none."""
        self.damaged = ""
        for name in (_NOW, _BEFORE):
            if not (self.folder / name).exists():
                continue
            try:
                return self._read(name)
            except (OSError, ValueError, KeyError, TypeError) as error:
                self.damaged = f"{self.damaged}; {name}: {error}" if self.damaged else f"{name}: {error}"
        return None

    def remove(self) -> None:
        """Delete all checkpoints of the run."""
        for path in self.folder.glob("*"):
            path.unlink()
        if self.folder.exists():
            self.folder.rmdir()

    def _read(self, name: str) -> Restored:
        manifest = (self.folder / name).read_text()
        content = json.loads(manifest)
        for entry in content["clients"].values():
            self._load(entry)  # is it whole?
        restored = Restored(
            content["round"],
            load(self._load(content["server"])),
            json.loads(self._load(content["progress"])),
            ClientStates({int(client): entry for client, entry in content["clients"].items()}, self._load),
        )
        self._clients, self._manifest = content["clients"], manifest
        return restored

    def _write(self, name: str, data: bytes) -> dict[str, Any]:
        atomic.write(self.folder / name, data)
        return {"file": name, "bytes": len(data), "hash": digest(data)}

    def _load(self, entry: dict[str, Any]) -> bytes:
        data = (self.folder / str(entry["file"])).read_bytes()
        if len(data) != entry["bytes"] or digest(data) != entry["hash"]:
            raise ValueError(f"'{entry['file']}' is damaged")
        return data

    def _clean(self) -> None:
        """Delete the files that neither manifest lists."""
        kept = {_NOW, _BEFORE}
        for name in (_NOW, _BEFORE):
            try:
                content = json.loads((self.folder / name).read_text())
                entries = [content["server"], content["progress"], *content["clients"].values()]
            except (OSError, ValueError, KeyError, TypeError):  # there is none, or it is damaged
                continue
            kept |= {entry["file"] for entry in entries}
        for path in self.folder.iterdir():
            if path.name not in kept:
                path.unlink()


def digest(data: bytes) -> str:
    """A short hash that tells a damaged file from a whole one."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()
