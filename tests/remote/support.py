"""Sites in memory, for tests: an experiment, its agreement, its sites, and a run over them."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

import polyfed
from polyfed.assemble import assemble
from polyfed.config import Experiment, experiment
from polyfed.population import Population
from polyfed.records import RunFolder
from polyfed.remote import Agreement, InMemoryTransport, Packet, RemoteEngine, Site
from polyfed.remote.transport import Kind
from polyfed.server.federation import Federation, Watcher
from tests import support

NAMES = ("amber", "birch", "cedar", "dune")
Answer = Callable[[Kind, Packet], Packet]
SETTINGS: dict[str, Any] = {"split": "6:2:2", "participation": 0.5, "rounds": 3}


def setting(method: str | dict[str, Any], **settings: Any) -> tuple[Experiment, Population]:
    name = method if isinstance(method, str) else method["name"]
    models = [support.Wide] if "network" in polyfed.METHODS[name].requires else [support.Wide, support.Narrow]
    values = {**support.DEFAULTS, **SETTINGS, **settings, "method": method}
    config = experiment(**values, data="python:tiny", models="python:tiny")
    return config, assemble(config, support.tiny_dataset(), models)


def agreement(people: Population, run: str = "run-1", **settings: Any) -> Agreement:
    members = {name: client for client, name in enumerate(NAMES)}
    dataset = people.dataset
    return Agreement(run, {}, dataset.classes, dataset.input_shape, members, dataset.mean, dataset.std, **settings)


def new_sites(people: Population, folder: Path, terms: Agreement) -> dict[str, Site]:
    """Each with only its own data."""
    return {name: Site(name, terms, people.slice([number]), folder / name) for name, number in terms.members.items()}


def remote(
    folder: Path, config: Experiment, people: Population, *, record: bool = False, **settings: Any
) -> tuple[Federation, InMemoryTransport]:
    terms = agreement(people, **settings)
    sites = new_sites(people, folder / "sites", terms)
    transport = InMemoryTransport({name: site.answer for name, site in sites.items()}, record=record)
    run = RunFolder.create(folder / "run", config)
    return Federation(config, people.method, RemoteEngine(terms, transport, people.method), run), transport


NOT_TOLD = ["accuracy_weighted", "flops"]
"""What needs counts that sites keep to themselves."""


def rows(run: Path) -> dict[str, pd.DataFrame]:
    rounds = pd.read_csv(run / "rounds.csv", dtype=str).drop(columns=["seconds", *NOT_TOLD])
    accuracies = ["client", "accuracy_final", "accuracy_at_best_validation", "accuracy_best"]
    return {
        "rounds": rounds,
        "evaluations": pd.read_csv(run / "evaluations.csv", dtype=str).drop(columns="accuracy_weighted"),
        "clients": pd.read_csv(run / "clients.csv", dtype=str)[accuracies],
    }


def same_rows(one: Path, other: Path) -> None:
    for (name, mine), theirs in zip(rows(one).items(), rows(other).values(), strict=True):
        pd.testing.assert_frame_equal(mine, theirs, obj=name)


def ask(site: Site, kind: Kind, **facts: Any) -> Packet:
    return site.answer(kind, Packet({"run": "run-1", "name": site.name, **facts}))


class Seen(Watcher):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.members: list[tuple[str, str]] = []

    def on_note(self, note: str) -> None:
        self.notes.append(note)

    def on_members(self, present: Mapping[int, str], absent: Mapping[int, str]) -> None:
        self.members.append((" ".join(present.values()), " ".join(absent.values())))


class Run:
    """A federation of four sites, of which only some are there at the start."""

    def __init__(
        self,
        folder: Path,
        *there: str,
        method: Any = "fedproto",
        rounds: int = 4,
        evaluate: str = "after-training",
        **terms: Any,
    ) -> None:
        self.config, self.people = setting(method, participation=1.0, rounds=rounds, evaluate=evaluate)
        self.agreed = agreement(self.people, **terms)
        self.sites = new_sites(self.people, folder / "sites", self.agreed)
        self.transport = InMemoryTransport({name: self.sites[name].answer for name in there or NAMES}, record=True)
        self.seen = Seen()
        self.federation = self.started(RunFolder.create(folder / "run", self.config))

    def started(self, folder: RunFolder) -> Federation:
        engine = RemoteEngine(self.agreed, self.transport, self.people.method)
        return Federation(self.config, self.people.method, engine, folder, self.seen)

    def restarted(self) -> Federation:
        """From the last checkpoint, as after a kill."""
        folder = RunFolder(self.federation.folder.path)
        again = self.started(folder)
        saved, _ = folder.restore()
        assert saved is not None
        again.restore(saved)
        return again

    def comes(self, name: str, answer: Answer | None = None) -> None:
        self.transport.sites[name] = answer or self.sites[name].answer
        self.transport.connections[name] += 1

    def goes(self, *names: str) -> None:
        for name in names:
            del self.transport.sites[name]

    def column(self, name: str) -> list[Any]:
        return list(self.federation.folder.rounds()[name])

    def asked(self, kind: Kind, node: str) -> int:
        """How often a site was asked that."""
        return sum((what, name) == (kind, node) for what, name, _, _ in (self.transport.record or ())[::2])


def changed(answer: Answer, kind: Kind, change: Callable[[Packet], Packet]) -> Answer:
    """A site that answers one kind of question in its own way."""
    return lambda asked, packet: change(answer(asked, packet)) if asked == kind else answer(asked, packet)
