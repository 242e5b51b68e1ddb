"""One client of a federation beside its own data: it trains when asked, and keeps its state and its answers itself.

A site knows no transport: `answer` takes a packet and returns one. Its state after each of the last two rounds is on
disk before an answer leaves. So if it is asked the same again (because the server was killed before it kept the
answer), it answers the same, and after a crash of its own it continues where it was.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from safetensors.torch import load

from polyfed.engines import SequentialEngine
from polyfed.errors import BadMessage, DivergedError, FolderError, InputError
from polyfed.evaluation import Evaluation
from polyfed.message import Message, State, state_bytes, state_size
from polyfed.methods.base import Reply
from polyfed.population import Population
from polyfed.records import disk
from polyfed.records.claim import locked
from polyfed.records.states import Damaged, StoredFile, write_file
from polyfed.remote.agreement import Agreement, first_difference
from polyfed.remote.checks import check_download, checked_round
from polyfed.remote.transport import Kind, Packet

KEPT_ROUNDS = 2
Share: TypeAlias = Literal["scores", "nothing"]
Compare: TypeAlias = Callable[[Mapping[str, Any]], str | None]
"""In what the server's terms differ from a site's own, in words; None if in nothing."""


class Site:
    """A member of a federation. `population` holds this one client, with its own data and network.

    `share` is what it tells of its results: shares of correct predictions and the training loss, or nothing. `terms`
    are those that this site agreed to (by default the agreement's), or a function that compares them with the server's.
    `keep` is given the client's final state when the run is finished.
    """

    def __init__(
        self,
        name: str,
        agreement: Agreement,
        population: Population,
        folder: Path,
        *,
        share: Share = "scores",
        terms: Mapping[str, Any] | Compare | None = None,
        keep: Callable[[State], None] = lambda state: None,
    ) -> None:
        if share not in get_args(Share):
            raise InputError(f"share is {share!r}, but must be 'scores' or 'nothing'.")
        self.share = share
        self._keep = keep
        own = agreement.terms if terms is None else terms
        self._difference = own if callable(own) else partial(first_difference, own)
        self.name = name
        self.agreement = agreement
        self.client = agreement.number(name)
        if population.clients != [self.client]:
            raise InputError(f"'{name}' is client {self.client}, but has the data of clients {population.clients}.")
        self.population = population
        self.notes: list[str] = []
        """Remarks on the training, which stay here."""
        self._engine = SequentialEngine(population)
        self._lock = threading.Lock()
        disk.make_folder(folder, private=True)
        self._diary = Diary(folder, agreement.run, name)
        self._at: int | None = None
        """The round that the engine's state is from; None: read it again before the next training."""

    def answer(self, kind: Kind, packet: Packet) -> Packet:
        """What the site answers; a problem is a `failure` in words, never an exception.

        The words say `it`: who reads them has put the site's name before them.
        """
        with self._lock:
            try:
                if packet.facts.get("run") != self.agreement.run:
                    raise InputError(f"it takes part in run {self.agreement.run}, not in another.")
                asked = str(packet.facts.get("name"))[:100]
                if asked != self.name:
                    raise InputError(
                        f"its name is '{self.name}', but it was asked as '{asked}': compare names and keys."
                    )
                answers = {
                    "join": self._join,
                    "train": self._train,
                    "evaluate": self._evaluate,
                    "finish": self._finish,
                }
                return answers[kind](packet)
            except Exception as error:
                self._at = None
                if self._tells(error):
                    return Packet({"failure": str(error)})
                self.notes.append(str(error))
                return Packet({"failure": "it failed; its own notes say why"})

    def _tells(self, error: Exception) -> bool:
        """Whether the server may read an error: others may hold paths, names, and values that are not shared."""
        if isinstance(error, DivergedError):
            return self.share == "scores"
        return isinstance(error, BadMessage | InputError) and not isinstance(error, FolderError)

    @property
    def largest_question(self) -> int:
        """Bytes that no question needs: several times what the client's state has, and room for the terms."""
        return 4 * state_size(self._engine.get_state(self.client)) + 2**24

    def close(self) -> None:
        """Release the engine's files."""
        self._engine.close()

    def export(self, path: Path) -> None:
        """Write the client's own state, with its private model, into a file."""
        with self._lock:
            self._go_to(self._diary.newest)
            disk.write(path, state_bytes(self._engine.get_state(self.client)))

    def newest_state(self) -> State | None:
        """The client's own state after the last round that it trained; None before the first."""
        with self._lock:
            if self._diary.newest is None:
                return None
            self._go_to(self._diary.newest)
            return self._engine.get_state(self.client)

    def _join(self, packet: Packet) -> Packet:
        difference = self._difference(packet.facts.get("terms", {}))
        if difference:
            raise InputError(f"it agreed to other terms: {difference}.")
        profile = self.population.profile(self.client).told_for(self.population.method)
        return Packet({"profile": {**profile.to_dict(), "name": self.name}, "share": self.share})

    def _train(self, packet: Packet) -> Packet:
        round, score = self._round(packet), packet.facts.get("score") is True
        kept = self._diary.find(round)
        if kept is None:
            kept = self._new_answer(round, packet.message or Message(), score=score)
        shared = ("loss", "evaluation") if self.share == "scores" else ()
        told = {name: kept.facts[name] for name in shared if name in kept.facts}
        return Packet({"round": round, **told}, kept.message(self._diary.folder))

    def _round(self, packet: Packet, later: int = 0) -> int:
        return checked_round(packet.facts.get("round"), self.population.task.rounds + later)

    def _check(self, download: Message, round: int) -> None:
        check_download(self.population, self._engine.get_state(self.client), download, round)

    def _new_answer(self, round: int, download: Message, *, score: bool) -> Entry:
        before = self._diary.before(round)
        if before is None and round > 1:  # it joined late, or somebody deleted its folder
            self.notes.append(f"there is no earlier state here, so round {round} starts from the initial weights")
        self._go_to(before)
        self._check(download, round)
        self._at = None  # in case the training fails
        (reply,) = self._engine.train(round, {self.client: download})
        scores = self._engine.evaluate([self.client], round) if score and self.share == "scores" else {}
        entry = self._diary.add(round, self._engine.get_state(self.client), reply, scores.get(self.client))
        self.notes += reply.notes
        self._at = round
        return entry

    def _evaluate(self, packet: Packet) -> Packet:
        round = self._round(packet, later=1)  # what comes after the last download is scored too
        if self.share == "nothing":
            return Packet()
        self._go_to(self._diary.newest)
        received = {}
        if packet.message is not None:
            self._check_evaluated(packet.message)
            self._check(packet.message, round)
            received = {self.client: packet.message}
        scores = self._engine.evaluate([self.client], round, received)
        return Packet({"evaluation": scores[self.client].told()})

    def _check_evaluated(self, download: Message) -> None:
        """Else a server could have any values of its own scored on this site's samples, time and again."""
        method, agreed = self.population.method, self.agreement.experiment.get("evaluate", "after-download")
        if not method.kept_fresh and agreed != "after-download" and (download.tensors or download.metadata):
            raise BadMessage(f"{method.name} evaluates with nothing that a server sends.")

    def _finish(self, packet: Packet) -> Packet:
        """Keep the final state; where the method predicts with what the server knows, with what it knew at the end."""
        self._go_to(self._diary.newest)
        state, method = self._engine.get_state(self.client), self.population.method
        round, download = self._round(packet), packet.message or Message()
        if method.kept_fresh:
            self._check(download, round)
        self._keep(method.refreshed(state, download, self.population.knowledge(self.client, round)))
        return Packet()

    def _go_to(self, entry: Entry | None) -> None:
        """Load the state after that round, or the initial weights."""
        wanted = entry.round if entry else 0
        if self._at != wanted:
            if entry is not None:
                self._engine.set_state(self.client, load(entry.state.read(self._diary.folder)))
            elif self._at is not None or self._engine.store.has(self.client):
                self._engine.set_state(self.client, self._engine.first_state(self.client))
            self._at = wanted


@dataclass(frozen=True)
class Entry:
    """What a site keeps of a round: its state after it, and what it answered."""

    round: int
    state: StoredFile
    facts: Mapping[str, Any]
    reply: StoredFile | None

    def message(self, folder: Path) -> Message | None:
        """The message that it answered."""
        return None if self.reply is None else Message.from_bytes(self.reply.read(folder))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Entry:
        reply = values["reply"]
        stored = None if reply is None else StoredFile.from_dict(reply)
        return Entry(int(values["round"]), StoredFile.from_dict(values["state"]), values["facts"], stored)


class Diary:
    """The last rounds of a site, on disk: a list that is replaced once everything it names is synced."""

    def __init__(self, folder: Path, run: str, name: str) -> None:
        self.folder = folder
        self._run = run
        self._name = name
        self._entries: list[Entry] = []
        self._dropped = False
        """Whether there were rounds before those that are kept."""
        content = disk.read(folder / "site.json")
        if content is not None:
            self._read(content)

    def _read(self, content: bytes) -> None:
        try:
            values = json.loads(content)
            if values["run"] != self._run:
                raise InputError(
                    f"'{self.folder}' holds the state of another run ({values['run']}): give this one "
                    "its own folder (folder in site.yaml)."
                )
            self._entries = [Entry.from_dict(entry) for entry in values["rounds"]]
            self._dropped = bool(values["dropped"])
            for entry in self._entries:
                entry.state.read(self.folder)
        except (ValueError, KeyError, TypeError, Damaged) as error:
            raise InputError(f"the state of site '{self._name}' in '{self.folder}' is damaged: {error}.") from error

    @property
    def newest(self) -> Entry | None:
        """The last round, or None before the first."""
        return self._entries[-1] if self._entries else None

    def find(self, round: int) -> Entry | None:
        """That round, if it is kept."""
        return next((entry for entry in self._entries if entry.round == round), None)

    def before(self, round: int) -> Entry | None:
        """The round whose state that round starts from; None for the initial weights."""
        earlier = [entry for entry in self._entries if entry.round < round]
        if not earlier and self._dropped:
            kept = " and ".join(str(entry.round) for entry in self._entries)
            raise InputError(
                f"it keeps what it had after rounds {kept} and can't go back to round {round}: "
                "restore a newer checkpoint of the server, or start a new run."
            )
        return earlier[-1] if earlier else None

    def add(self, round: int, state: State, reply: Reply, evaluation: Evaluation | None) -> Entry:
        """Keep a round and the last ones before it; later ones are dropped, because the run went back."""
        facts: dict[str, Any] = {"loss": None if math.isnan(reply.loss) else reply.loss}
        if evaluation is not None:
            facts["evaluation"] = evaluation.told()
        sent = bool(reply.message.tensors or reply.message.metadata)
        with locked(self.folder):
            entry = Entry(
                round,
                write_file(self.folder, f"state.{round}.{self._run}.safetensors", state_bytes(state)),
                facts,
                write_file(self.folder, f"reply.{round}.{self._run}.safetensors", reply.message.to_bytes())
                if sent
                else None,
            )
            disk.sync_folder(self.folder)
            entries = [*(old for old in self._entries if old.round < round), entry]
            dropped = self._dropped or len(entries) > KEPT_ROUNDS
            kept = entries[-KEPT_ROUNDS:]
            content = {"run": self._run, "dropped": dropped, "rounds": [one.to_dict() for one in kept]}
            disk.write(self.folder / "site.json", json.dumps(content))
            listed = {file.file for one in kept for file in (one.state, one.reply) if file is not None}
            for path in self.folder.glob(f"*.{self._run}.safetensors"):
                if path.name not in listed:
                    disk.remove(path)
        self._entries, self._dropped = kept, dropped
        return entry
