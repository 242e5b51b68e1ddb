"""Clients' states on disk, many in one file: writing and syncing a file takes as long as writing hundreds of states.

A file holds clients whose states have the same form (one architecture), with each tensor stacked over them:
`model.head.weight` is [clients, classes, features]. So it has few entries, and one client's state can be read without
the others'.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from safetensors.torch import save

from polyfed.errors import InputError
from polyfed.message import State, state_bytes, state_size
from polyfed.records import disk
from polyfed.records.log import digest

MOST_CLIENTS = 256
MOST_BYTES = 1 << 26
"""What goes into one file at most; a single state may be larger."""


@dataclass(frozen=True)
class StoredFile:
    """A file that is listed with its length and hash."""

    file: str
    length: int
    hash: str

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> StoredFile:
        """A file as a manifest lists it; only one in the manifest's own folder."""
        name = str(values["file"])
        if name != Path(name).name:
            raise Damaged(f"it lists '{name}', which is not in its folder")
        return StoredFile(name, int(values["length"]), str(values["hash"]))

    def read(self, folder: Path) -> bytes:
        """Its content; raises `Damaged` if it is not the one that was listed."""
        data = disk.read(folder / self.file)
        if data is None:
            raise Damaged(f"'{self.file}' is missing")
        if len(data) != self.length or digest(data) != self.hash:
            raise Damaged(f"'{self.file}' is damaged")
        return data

    def change(self, folder: Path) -> str:
        """What has happened to it since it was listed, in words; empty if nothing has."""
        if disk.read(folder / self.file) is None:
            return f"{self.file} is missing"
        try:
            self.read(folder)
        except Damaged:
            return f"{self.file} has changed since the run ended"
        return ""


class Damaged(ValueError):
    """A file is not as it was written."""


@dataclass(frozen=True)
class Shard(StoredFile):
    """A file of clients' states."""

    clients: tuple[int, ...]
    """Whose states its rows are; −1 where a client's state has since been written into another file."""
    copied: bool = False
    """Whether there is a second copy of it."""

    @property
    def live(self) -> list[int]:
        """The clients whose state is to be read from here."""
        return [client for client in self.clients if client >= 0]

    def less(self, moved: Collection[int]) -> Shard:
        """The same without clients whose states are in other files now."""
        return replace(self, clients=tuple(-1 if client in moved else client for client in self.clients))

    @property
    def copy(self) -> StoredFile:
        """The second copy."""
        return StoredFile(copy_name(self.file), self.length, self.hash)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Shard:
        clients = tuple(int(client) for client in values["clients"])
        return Shard(**asdict(StoredFile.from_dict(values)), clients=clients, copied=bool(values["copied"]))

    def with_copy(self, folder: Path) -> Shard:
        """The same after a second copy was written; the caller syncs the folder."""
        disk.write(folder / copy_name(self.file), self.read(folder), sync_name=False)
        return replace(self, copied=True)

    def mend(self, folder: Path) -> bool:
        """Check that the file is intact, or restore it from its copy; returns whether it did. Raises `Damaged`."""
        try:
            self.read(folder)
        except Damaged:
            if not self.copied:
                raise
            disk.write(folder / self.file, self.copy.read(folder))
            return True
        return False


class States(Protocol):
    """Where clients' states are while a run is in progress: what a checkpoint is made of."""

    def changed_clients(self) -> set[int]:
        """Clients whose state changed since `mark_saved`."""

    def get_state(self, client: int) -> State:
        """A client's state; further training changes it."""

    def mark_saved(self) -> None:
        """All states are in a checkpoint now."""


def misfit(whose: str) -> InputError:
    """The error for a state that does not belong to this run."""
    return InputError(
        f"the checkpoint's state of {whose} does not fit the run's networks and method: resume with the settings and "
        "the version of polyfed that the run had, or start a new one."
    )


def copy_name(file: str) -> str:
    """The name of a file's second copy."""
    return f"{file}.copy"


def write_file(folder: Path, name: str, data: bytes) -> StoredFile:
    """Write a file and list it; the caller syncs the folder."""
    disk.write(folder / name, data, sync_name=False)
    return StoredFile(name, len(data), digest(data))


def write_shards(
    folder: Path,
    name: Callable[[int], str],
    clients: Iterable[int],
    state: Callable[[int], State],
) -> list[Shard]:
    """Write the states of these clients; `name` gives the name of the file with that number."""
    shards: list[Shard] = []

    def write(some: Sequence[tuple[int, State]]) -> None:
        file = write_file(folder, name(len(shards)), stacked(some))
        shards.append(Shard(**asdict(file), clients=tuple(client for client, _ in some)))

    waiting: dict[Hashable, list[tuple[int, State]]] = {}
    for client in clients:
        own = state(client)
        kind = tuple((key, tensor.shape, tensor.dtype) for key, tensor in own.items())
        alike = waiting.setdefault(kind, [])
        alike.append((client, own))
        if len(alike) >= min(MOST_CLIENTS, max(1, MOST_BYTES // max(1, state_size(own)))):
            write(waiting.pop(kind))
    for alike in waiting.values():
        write(alike)
    return shards


def write_models(folder: Path, clients: list[int], state: Callable[[int], State]) -> list[Shard]:
    """Each client's state in its own file; if there are many, in files of many clients."""
    if len(clients) > MOST_CLIENTS:
        return write_shards(folder, lambda number: f"clients-{number:04d}.safetensors", clients, state)
    files = [write_file(folder, f"client-{client:04d}.safetensors", state_bytes(state(client))) for client in clients]
    return [Shard(**asdict(file), clients=(client,)) for file, client in zip(files, clients, strict=True)]


def stacked(states: Sequence[tuple[int, State]]) -> bytes:
    """States of the same form as one safetensors file."""
    names = list(states[0][1])
    tensors = {name: torch.stack([own[name].detach() for _, own in states]).cpu().contiguous() for name in names}
    return save(tensors, {"clients": " ".join(str(client) for client, _ in states)})


class ClientStates(Mapping[int, State]):
    """States in files that are known to be intact; those of a large federation would not fit into memory at once."""

    def __init__(self, folder: Path, shards: Iterable[Shard]) -> None:
        self._folder = folder
        self._files = {client: shard.file for shard in shards for client in shard.live}
        self._open = ""
        self._rows: dict[str, int] = {}
        self._tensors: State = {}

    def __getitem__(self, client: int) -> State:
        name = self._files[client]
        if self._open != name:  # clients are mostly asked for in the order of their files
            with safe_open(self._folder / name, "pt") as file:
                self._rows = _rows(file)
                self._tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            self._open = name
        row = self._rows.get(str(client))
        return {key: (tensor if row is None else tensor[row]).clone() for key, tensor in self._tensors.items()}

    def changed_clients(self) -> set[int]:
        """All of them: they are to be written elsewhere."""
        return set(self._files)

    def get_state(self, client: int) -> State:
        return self[client]

    def mark_saved(self) -> None:
        pass

    def __iter__(self) -> Iterator[int]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def read_client(path: Path, client: int) -> State:
    """One client's state from a file, without reading the others'."""
    with safe_open(path, "pt") as file:
        row = _rows(file).get(str(client))
        names = list(file.keys())
        return {name: file.get_tensor(name) if row is None else file.get_slice(name)[row] for name in names}


def _rows(file: Any) -> dict[str, int]:
    """Which row belongs to which client; empty for a file of a single client, whose tensors are not stacked."""
    clients = (file.metadata() or {}).get("clients", "")
    return {client: row for row, client in enumerate(clients.split())}
