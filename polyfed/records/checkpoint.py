"""Checkpoints that survive anything: a kill or a power cut at any moment, a full disk, a damaged file.

A checkpoint is a manifest that lists files with their lengths and hashes: the server's state, the progress so far, the
clients' states; and how much of the run's records it relies on. Only clients that changed since the last checkpoint
are written again. The manifest is moved into place last, when everything it lists is on disk. The previous checkpoint
is kept with its files, and so is one from some rounds earlier, to go back to after a divergence. A file that several
checkpoints need has a second copy, so that one damaged file never spoils them all.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load

from polyfed.errors import InputError
from polyfed.message import State, state_bytes
from polyfed.records import disk
from polyfed.records.log import Extent, digest
from polyfed.records.states import ClientStates, Damaged, Shard, StoredFile, copy_name, write_file, write_shards

NEWEST = "manifest.json"
SPACING = 10
"""The first checkpoint of every block of this many rounds is kept, until it is twice as many rounds old."""


@dataclass(frozen=True)
class Restored:
    """What a checkpoint holds."""

    round: int
    server: State
    progress: dict[str, Any]
    clients: Mapping[int, State]
    """Read from disk when asked for."""
    records: Mapping[str, Extent]
    notes: tuple[str, ...] = ()
    """What was damaged, and what was done about it."""
    lost: tuple[int, ...] = ()
    """Clients whose states could not be read; they start again from their initial weights."""


@dataclass(frozen=True)
class Manifest:
    """The content of a manifest."""

    run: str
    round: int
    server: StoredFile
    progress: StoredFile
    clients: tuple[Shard, ...]
    records: Mapping[str, Extent]

    @staticmethod
    def parse(text: bytes) -> Manifest:
        """Read what `to_json` wrote; raises `Damaged` for anything else."""
        try:
            values = json.loads(text)
            manifest = Manifest(
                str(values["run"]),
                int(values["round"]),
                StoredFile.from_dict(values["server"]),
                StoredFile.from_dict(values["progress"]),
                tuple(Shard.from_dict(shard) for shard in values["clients"]),
                {str(name): Extent(**extent) for name, extent in values["records"].items()},
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise Damaged(f"it can't be read ({error})") from error
        if values.get("hash") != manifest.hash:
            raise Damaged("it is not as it was written")
        return manifest

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "hash": self.hash})

    @property
    def hash(self) -> str:
        """Shows whether a number in it has changed; otherwise it would be believed."""
        return digest(json.dumps(asdict(self)).encode())

    @property
    def files(self) -> set[str]:
        """The names of all files that it lists."""
        shards = {shard.file for shard in self.clients}
        return {self.server.file, self.progress.file} | shards | {copy_name(name) for name in shards}


class Checkpoints:
    """The checkpoints of one run, in one folder. The run's id is in all file names, so that other files are safe."""

    def __init__(self, folder: Path, run: str) -> None:
        self.folder = folder
        self.run = run
        self._current: Manifest | None = None
        """The newest intact checkpoint; the next save keeps it as the previous one."""

    def save(
        self,
        round: int,
        server: State,
        progress: Mapping[str, Any],
        changed: Iterable[int] = (),
        state: Callable[[int], State] = lambda client: {},
        records: Callable[[], Mapping[str, Extent]] = dict,
    ) -> None:
        """Write a checkpoint of a finished round; `state` gives a client's state, `records` syncs the run's records."""
        disk.make_folder(self.folder)
        changed = set(changed)
        try:
            self._save(round, server, progress, changed, state, records)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not self._forget_earlier():
                raise
            self._save(round, server, progress, changed, state, records)
        finally:
            self._clean()

    def rounds(self) -> list[int]:
        """The rounds that have a checkpoint, intact or not, in ascending order."""
        return sorted({manifest.round for _, manifest in self._own()})

    def restore(self, round: int | None = None, *, repair: bool = False) -> Restored | None:
        """The newest intact checkpoint, or that of a given round; None if there has never been one.

        If all are damaged this raises, except with `repair`: then clients whose states are lost are left out.
        """
        found = [(name, m) for name, m in self._manifests() if round is None or getattr(m, "round", round) == round]
        problems: list[str] = []
        for name, manifest in found:
            try:
                return self._open(name, manifest, problems)
            except Damaged as error:
                problems.append(f"{name}: {error}")
        for name, manifest in found if repair else ():
            try:
                return self._open(name, manifest, problems, repair=True)
            except Damaged:
                continue
        if problems:
            more = "" if repair else "let clients whose states are lost start from their initial weights (--repair), "
            raise InputError(
                f"no checkpoint in '{self.folder}' is intact ({'; '.join(problems)}): restore the files if you have "
                f"copies, {more}or start the run again from the beginning (--from 0)."
            )
        return None

    def go_back(self, saved: Restored) -> None:
        """Forget all checkpoints that are newer than this one."""
        assert self._current is not None and self._current.round == saved.round
        disk.write(self.folder / NEWEST, self._current.to_json())
        for round in self.rounds():
            if round > saved.round:
                disk.remove(self.folder / history_name(round))
        self._clean()

    def remove(self, names: Collection[str] = ()) -> None:
        """Delete all checkpoints of the run and these other files of its own; nothing else is touched."""
        if not self.folder.is_dir() or self.folder.is_symlink():
            return
        self._current = None
        for name in [*(name for name, _ in self._own()), *names]:
            disk.remove(self.folder / name)
        self._clean()
        disk.remove_folder(self.folder)

    def _save(
        self,
        round: int,
        server: State,
        progress: Mapping[str, Any],
        changed: set[int],
        state: Callable[[int], State],
        records: Callable[[], Mapping[str, Extent]],
    ) -> None:
        kept = self._kept_shards(changed)
        moved = changed | {
            client for shard in (self._current.clients if self._current else ()) for client in shard.live
        } - {client for shard in kept for client in shard.live}
        new = write_shards(self.folder, lambda number: self._name(f"clients-{number}", round), sorted(moved), state)
        manifest = Manifest(
            self.run,
            round,
            write_file(self.folder, self._name("server", round), state_bytes(server)),
            write_file(self.folder, self._name("progress", round, "json"), json.dumps(progress).encode()),
            (*kept, *new),
            records(),
        )
        disk.sync_folder(self.folder)
        if self._current is not None:  # not manifest.json, which may be the damaged one we fell back from
            disk.write(self.folder / history_name(self._current.round), self._current.to_json(), sync_name=False)
        disk.write(self.folder / NEWEST, manifest.to_json())
        self._current = manifest

    def _kept_shards(self, changed: Collection[int]) -> list[Shard]:
        """The files of the last checkpoint that the next one needs too, each with a second copy.

        One that is mostly out of date, or damaged, is not kept; its clients are written again.
        """
        kept = []
        for shard in self._current.clients if self._current else ():
            left = shard.less(changed)
            if 2 * len(left.live) < len(left.clients):
                continue
            try:
                kept.append(left if left.copied else left.with_copy(self.folder))
            except Damaged:
                continue
        return kept

    def _open(self, name: str, manifest: Manifest | Damaged, problems: list[str], *, repair: bool = False) -> Restored:
        """The checkpoint of a manifest, if it is intact; with `repair`, clients' states may be damaged."""
        if isinstance(manifest, Damaged):
            raise manifest
        if manifest.run != self.run:
            raise InputError(
                f"'{self.folder / name}' is the checkpoint of another run: restore this run's own, or start again in "
                "a new folder (--out)."
            )
        notes, lost = [], list[Shard]()
        for shard in manifest.clients:
            try:
                if shard.mend(self.folder):
                    notes.append(f"'{shard.file}' in the checkpoint was damaged and has been restored from its copy")
            except Damaged:
                if not repair:
                    raise
                lost.append(shard)
        without = tuple(sorted(client for shard in lost for client in shard.live))
        if lost:
            clients = ", ".join(str(client) for client in without)
            notes.append(f"the states of clients {clients} are lost; they start again from their initial weights")
        elif problems:
            notes.append(
                f"a checkpoint is damaged, so the run continues after round {manifest.round}: {'; '.join(problems)}"
            )
        server, progress = (entry.read(self.folder) for entry in (manifest.server, manifest.progress))
        try:
            state, content = load(server), dict(json.loads(progress))
        except Exception as error:  # safetensors raises its own errors
            raise Damaged(f"the server's state can't be read ({error})") from error
        whole = [shard for shard in manifest.clients if shard not in lost]
        self._current = Manifest(**{**vars(manifest), "clients": tuple(whole)})
        return Restored(
            manifest.round,
            state,
            content,
            ClientStates(self.folder, whole),
            manifest.records,
            tuple(notes),
            without,
        )

    def _manifests(self) -> list[tuple[str, Manifest | Damaged]]:
        """All manifests, the newest first."""
        rounds = [r for path in self.folder.glob("manifest.*.json") if (r := _round_of(path.name)) is not None]
        found: list[tuple[str, Manifest | Damaged]] = []
        for name in [NEWEST, *(history_name(round) for round in sorted(rounds, reverse=True))]:
            text = disk.read(self.folder / name)
            if text is None:
                continue
            try:
                manifest = Manifest.parse(text)
            except Damaged as error:
                found.append((name, error))
                continue
            found.append((name, manifest))
        return found

    def _own(self) -> list[tuple[str, Manifest]]:
        """The manifests of this run that can be read, the newest first."""
        return [(name, m) for name, m in self._manifests() if isinstance(m, Manifest) and m.run == self.run]

    def _name(self, what: str, round: int, ending: str = "safetensors") -> str:
        return f"{what}.{round}.{self.run}.{ending}"

    def _forget_earlier(self) -> bool:
        """To make room, drop all checkpoints but the two newest; returns whether there were any."""
        earlier = self.rounds()[:-2]
        for round in earlier:
            disk.remove(self.folder / history_name(round))
        self._clean()
        return bool(earlier)

    def _clean(self) -> None:
        """Delete checkpoints that are no longer kept, and the run's files that no manifest lists."""
        manifests = self._own()
        keep = kept_rounds([manifest.round for _, manifest in manifests])
        listed: set[str] = set()
        for name, manifest in manifests:
            if manifest.round in keep:
                listed |= manifest.files
            else:
                disk.remove(self.folder / name)
        for path in self.folder.iterdir():
            unlisted = f".{self.run}." in path.name and path.name not in listed
            if unlisted or (path.name.startswith(".manifest.") and path.name.endswith(disk.NEW)):
                disk.remove(path)


def kept_rounds(rounds: Iterable[int]) -> set[int]:
    """Which of these checkpoints are kept: the two newest, and the first of this and of the previous block of rounds.

    >>> sorted(kept_rounds(range(1, 34)))
    [20, 30, 32, 33]
    """
    newest = sorted(set(rounds))
    block = newest[-1] // SPACING if newest else 0
    firsts = [min((r for r in newest if r // SPACING == b), default=None) for b in (block - 1, block)]
    return {*newest[-2:], *(first for first in firsts if first is not None)}


def history_name(round: int) -> str:
    """The name of a manifest that is no longer the newest."""
    return f"manifest.{round}.json"


def _round_of(name: str) -> int | None:
    number = name.split(".")[1]
    return int(number) if number.isdigit() and name == history_name(int(number)) else None
