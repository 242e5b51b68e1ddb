"""What a method keeps in attributes of its own is in no checkpoint: the run says so, and again when it is resumed."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polyfed
from polyfed.methods.base import Batch, ClientNetwork, Method, Reply, Server
from polyfed.methods.parts.tools import cross_entropy
from polyfed.server.unsaved import unsaved
from tests import support
from tests.stopping import notes, records, stopped, tiny

SAID = (
    "the method's attribute 'scale' has changed, and no checkpoint holds it: if losses or messages depend on it, a "
    "resumed run may give other numbers; keep it as a tensor in server.state"
)
SAID_AGAIN = (
    "the method's attribute 'scale' had changed by round 2 and starts anew, because no checkpoint holds it: if losses "
    "or messages depend on it, numbers from round 3 on may not be what they would have been; keep it as a tensor in "
    "server.state"
)


class Scales(Method):
    """Weights its loss by a number that the server changes in every round."""

    name, title, paper, sends = "scales", "Scales", "none", "nothing"

    def __init__(self, config: Any, task: Any, training: Any) -> None:
        super().__init__(config, task, training)
        self.scale = 1.0

    def aggregate(self, server: Server, replies: Sequence[Reply]) -> None:
        self.scale /= 2

    def loss(self, net: ClientNetwork, batch: Batch) -> Tensor:
        return cross_entropy(net(batch.x), batch.y) * self.scale


class Saves(Scales):
    """The same, with its number where it belongs."""

    name = "saves"

    def start(self, server: Server) -> None:
        server.state["scale"] = torch.ones(())

    def aggregate(self, server: Server, replies: Sequence[Reply]) -> None:
        server.state["scale"] = server.state["scale"] / 2

    def loss(self, net: ClientNetwork, batch: Batch) -> Tensor:
        return cross_entropy(net(batch.x), batch.y)


def test_a_run_that_can_not_be_resumed_as_it_was_says_so_once_and_again_when_it_is(tmp_path: Path) -> None:
    run = stopped(tmp_path / "run", method=Scales)
    assert notes(run) == [SAID]
    polyfed.resume(run, **tiny())
    assert notes(run) == [SAID, SAID_AGAIN]
    settings = {**support.DEFAULTS, "method": Scales, "rounds": 4}
    polyfed.run(**settings, **tiny(), out=tmp_path / "whole")
    assert records(run) != records(tmp_path / "whole")
    assert notes(tmp_path / "whole") == [SAID]  # it may be continued to more rounds


def test_a_finished_run_that_goes_on_says_it_too(tmp_path: Path) -> None:
    polyfed.run(**{**support.DEFAULTS, "method": Scales}, **tiny(), out=tmp_path / "run")
    polyfed.resume(tmp_path / "run", **tiny(), rounds=3)
    assert notes(tmp_path / "run") == [SAID, SAID_AGAIN]


def test_a_method_that_was_put_right_is_not_blamed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = stopped(tmp_path / "run", method=Scales)
    monkeypatch.setattr(Scales, "aggregate", Method.aggregate)
    polyfed.resume(run, **tiny())
    polyfed.resume(run, **tiny(), rounds=5)
    assert notes(run) == [SAID, SAID_AGAIN]


def test_what_starts_from_the_beginning_has_lost_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = stopped(tmp_path / "run", method=Scales)
    monkeypatch.setattr(Scales, "aggregate", Method.aggregate)
    polyfed.resume(run, **tiny(), from_round=0)
    assert SAID_AGAIN not in notes(run)


def test_a_method_that_saves_its_numbers_has_nothing_to_say(tmp_path: Path) -> None:
    run = stopped(tmp_path / "run", method=Saves)
    polyfed.resume(run, **tiny())
    assert notes(run) == []


@pytest.mark.parametrize("method", polyfed.METHODS)
def test_no_method_of_polyfed_keeps_anything(tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    models = (support.Wide,) if "network" in polyfed.METHODS[method].requires else (support.Wide, support.Narrow)
    run = support.federation(tmp_path, method, models=models, split="6:2:2")
    run.run()
    started: list[Server] = []
    monkeypatch.setattr(type(run.method), "start", lambda self, server: started.append(server))
    assert unsaved(run.method, run.server) is None
    assert started == []  # it may take long
    assert [event for event in run.folder.events() if "attribute" in event.get("note", "")] == []


class Keeps(Method):
    """Has an attribute that the test chooses, made by a function."""

    name, title, paper, sends = "keeps", "Keeps", "none", "nothing"
    make: Any = staticmethod(lambda: None)

    def __init__(self, config: Any, task: Any, training: Any) -> None:
        super().__init__(config, task, training)
        self.kept = type(self).make()


def keeping(monkeypatch: pytest.MonkeyPatch, make: Any) -> Any:
    monkeypatch.setattr(Keeps, "make", staticmethod(make))
    given = support.new_method("standalone")
    return Keeps(given.config, given.task, given.training)


class Odd:
    """Can't be compared."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        raise TypeError("neither equal nor different")

    __hash__ = None  # type: ignore[assignment]


def zeros() -> nn.Module:
    layer = nn.Linear(2, 2)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (lambda: torch.full((2,), torch.nan), lambda kept: kept.fill_(1)),
        (lambda: [float("nan"), {"a": 1}], lambda kept: kept[1].update(a=2)),
        (lambda: random.Random(3), lambda kept: kept.random()),
        (zeros, lambda kept: nn.init.ones_(kept.bias)),
        (lambda: [threading.Lock(), threading.RLock(), set()], lambda kept: kept[2].add(1)),
    ],
    ids=["tensor", "containers", "random numbers", "module", "locks"],
)
def test_values_count_and_not_who_holds_them(monkeypatch: pytest.MonkeyPatch, make: Any, change: Any) -> None:
    method = keeping(monkeypatch, make)
    assert unsaved(method, Server(0)) is None
    change(method.kept)
    assert unsaved(method, Server(0)) == "kept"


@pytest.mark.parametrize("make", [Odd, torch.Generator, lambda: torch.rand(2)], ids=["odd", "generator", "drawn"])
def test_what_a_resumed_run_may_have_otherwise_is_named(monkeypatch: pytest.MonkeyPatch, make: Any) -> None:
    """What can't be compared, what is there to change, and what was drawn without a seed; nothing is drawn by that."""
    method = keeping(monkeypatch, make)
    before = torch.get_rng_state()
    assert unsaved(method, Server(0)) == "kept"
    assert torch.equal(torch.get_rng_state(), before)


class Caches(Method):
    """Sets an attribute from what it is given before the first round, and computes another when it is needed."""

    name, title, paper, sends = "caches", "Caches", "none", "nothing"

    def start(self, server: Server) -> None:
        self.first = server.seed

    @cached_property
    def later(self) -> Tensor:
        return torch.rand(3)


def test_what_is_made_anew_in_a_resumed_run_too_is_no_loss() -> None:
    given = support.new_method("standalone")
    method = Caches(given.config, given.task, given.training)
    server = Server(5)
    method.start(server)
    assert method.later is not None
    assert unsaved(method, server) is None
    method.first += 1
    assert unsaved(method, server) == "first"


def test_a_method_that_can_be_made_only_once_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    makes = iter([1])
    method = keeping(monkeypatch, lambda: next(makes))
    method.kept = 2
    assert unsaved(method, Server(0)) is None
