"""Exactly what could ever leave a site: found out by asking the site itself, in a trial on one batch of its samples.

The names come from the objects that send: the site's own answers, and the schema that every upload must fit. So the
announcement can't name less than what is sent. `unannounced` compares a recorded answer with it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from polyfed.data import ClientData
from polyfed.deploy.member import Member
from polyfed.errors import RunError
from polyfed.message import Counts, Floats, Labels, Message, Schema
from polyfed.methods.base import Method, Server
from polyfed.population import Population
from polyfed.remote import Packet, Site
from polyfed.remote.transport import Kind

FAILURE = "failure"
"""What an answer holds instead, if a site can't do what it was asked: a sentence."""


@dataclass(frozen=True)
class Entry:
    """One tensor of an upload."""

    name: str
    kind: str
    """floats, labels or counts."""
    shape: tuple[int | str, ...]
    """A name stands for a size that depends on the site's samples."""
    optional: bool
    trial: tuple[int, ...] | None
    """Its shape in the trial; None if the trial did not send it."""

    @property
    def numbers(self) -> int | None:
        """How many numbers the trial sent."""
        return None if self.trial is None else torch.Size(self.trial).numel()

    @property
    def bytes(self) -> int | None:
        """How many bytes they take: 4 for a float, 8 for an integer."""
        return None if self.numbers is None else self.numbers * (4 if self.kind == "floats" else 8)


@dataclass(frozen=True)
class Announcement:
    """What a site would send, by kind of question."""

    site: str
    method: str
    sends: str
    reveals: str
    share: str
    join: Mapping[str, Any]
    """The facts that it tells when it joins, with their values."""
    train: Mapping[str, Any]
    """The facts beside an upload, with the trial's values."""
    upload: tuple[Entry, ...]
    """All that an upload may hold."""
    upload_bytes: int
    """The size of the trial's upload as it travels."""
    evaluate: Mapping[str, Any]
    """The facts of an answer to an evaluation alone, with the trial's values."""
    finish: Mapping[str, Any]
    """The facts of the answer when the run is finished."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        upload = [{**asdict(entry), "numbers": entry.numbers, "bytes": entry.bytes} for entry in self.upload]
        return json.loads(json.dumps({**asdict(self), "upload": upload}))  # type: ignore[no-any-return]

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Announcement:
        """What `to_dict` gave, perhaps by way of JSON."""
        entries = [
            Entry(
                entry["name"],
                entry["kind"],
                tuple(entry["shape"]),
                entry["optional"],
                None if entry["trial"] is None else tuple(entry["trial"]),
            )
            for entry in values["upload"]
        ]
        return Announcement(**{**values, "upload": tuple(entries)})

    def unannounced(self, kind: Kind, answer: Packet) -> str | None:
        """The first thing in an answer to this kind of question that was not announced; None if there is none."""
        facts = dict(answer.facts)
        if answer.failed:
            facts.pop(FAILURE)
            announced: Mapping[str, Any] = {"round": 0}
        else:
            announced = {"join": self.join, "train": self.train, "evaluate": self.evaluate, "finish": self.finish}[kind]
        found = _unannounced_fact("", facts, announced, same=kind == "join")
        if found is None and answer.message is not None:
            found = self._unannounced_entry(answer.message) if kind == "train" else "a message with tensors"
        return found

    def _unannounced_entry(self, message: Message) -> str | None:
        entries, sizes = {entry.name: entry for entry in self.upload}, dict[str, int]()
        for name, tensor in {**message.tensors, **message.metadata}.items():
            entry = entries.get(name)
            if entry is None:
                return f"the tensor '{name}'"
            dtype = torch.float32 if entry.kind == "floats" else torch.int64
            fits = len(entry.shape) == tensor.dim() and all(
                actual == (sizes.setdefault(size, actual) if isinstance(size, str) else size)
                for size, actual in zip(entry.shape, tensor.shape, strict=True)
            )
            if not fits or tensor.dtype != dtype:
                return f"the tensor '{name}' with shape {tuple(tensor.shape)} of {tensor.dtype}"
        return None


def announce(member: Member, population: Population | None = None) -> Announcement:
    """What this member would send, after one training step on a batch of its own samples."""
    population = population or member.population()
    method, (client,) = population.method, population.clients
    with TemporaryDirectory(prefix="polyfed-") as folder:
        joining = member.site(population, Path(folder) / "join")
        trying = member.site(_shortened(population, client), Path(folder) / "trial")
        try:
            run = {"run": member.terms.name, "name": member.name, "terms": member.terms.plain()}
            join = _answer(joining, "join", Packet(run))
            download = _first_download(population, client)
            train = _answer(trying, "train", Packet({**run, "round": 1, "score": True}, download))
            evaluate = _answer(trying, "evaluate", Packet({**run, "round": 1}))
            finish = _answer(trying, "finish", Packet({**run, "round": 1}, download))
        finally:
            joining.close()
            trying.close()
    upload = train.message or Message()
    return Announcement(
        member.name,
        method.name,
        method.sends,
        method.reveals,
        member.settings.share,
        join.facts,
        train.facts,
        _entries(method.agreed_schema, upload),
        len(upload.to_bytes()) if train.message is not None else 0,
        evaluate.facts,
        finish.facts,
    )


def _entries(schema: Schema, upload: Message) -> tuple[Entry, ...]:
    sent = {**upload.tensors, **upload.metadata}

    def entry(name: str, form: Floats | Labels | Counts) -> Entry:
        shape = (form.size,) if isinstance(form, Labels) else form.shape
        trial = tuple(sent[name].shape) if name in sent else None
        return Entry(name, type(form).__name__.lower(), shape, form.optional, trial)

    return tuple(entry(name, form) for name, form in [*schema.tensors.items(), *schema.metadata.items()])


def _answer(site: Site, kind: Kind, question: Packet) -> Packet:
    answer = site.answer(kind, question)
    if answer.failed:
        reason = site.notes[-1] if site.notes else answer.facts[FAILURE]
        raise RunError(f"the trial of '{kind}' failed: {str(reason).removesuffix('.')}.")
    # As it would arrive: tuples become lists, and what JSON can't hold fails here.
    return Packet.from_bytes(*answer.to_bytes())


def _shortened(population: Population, client: int) -> Population:
    """The same client with one batch, which has a sample of each of its classes, and one epoch."""
    own, size, method = population.data[client], population.training.batch_size, population.method
    labels = population.labels[own.train].tolist()
    firsts = {label: place for place, label in reversed(list(enumerate(labels)))}
    seen = set(firsts.values())
    rest = [place for place in range(len(labels)) if place not in seen]
    chosen = sorted([*seen, *rest[: max(0, max(2, size) - len(seen))]])
    data = ClientData(own.train[chosen], own.validation[:size], own.test[:size])
    return replace(population, data={client: data}, method=_hurried(method))


def _hurried(method: Method) -> Method:
    return type(method)(method.config, method.task, method.training.model_copy(update={"epochs": 1}))


def _first_download(population: Population, client: int) -> Message:
    """What a server would send in round one."""
    method = _hurried(population.method)
    server = Server(population.seed, population.device, round=1)
    method.start(server)
    classes = population.knowledge(client, 1).classes if method.announces_classes else None
    return method.download(server, client, classes)


def _unannounced_fact(place: str, found: Any, announced: Any, *, same: bool) -> str | None:
    if isinstance(found, Mapping):
        if not isinstance(announced, Mapping):
            return f"the fact '{place}' with names inside"
        for name, value in found.items():
            inner = f"{place}.{name}" if place else str(name)
            if name not in announced:
                return f"the fact '{inner}'"
            deeper = _unannounced_fact(inner, value, announced[name], same=same)
            if deeper is not None:
                return deeper
        return None
    differs = found != announced if same else not _alike(found, announced)
    return f"the fact '{place}' with the value {str(found)[:60]}" if differs else None


def _alike(found: object, announced: object) -> bool:
    """Whether a value is of the announced kind: numbers (or none, where a number is unknown), or the same otherwise."""
    numbers = all(isinstance(value, int | float | None) for value in (found, announced))
    return numbers or found == announced
