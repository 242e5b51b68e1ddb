"""Batches that are drawn ahead, in another thread, are those that would be drawn when they are needed.

Clients train on the CPU here; only what draws their batches believes that there is a GPU.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from polyfed.engines import VectorizedEngine
from polyfed.engines.client.batches import AUGMENTATION, Epoch, all_epochs, epochs
from polyfed.engines.hosts import Host, HostTraits
from polyfed.engines.stacked import drawer
from polyfed.engines.stacked.drawer import Drawer
from polyfed.engines.stacked.plan import Plan, new_plan
from polyfed.errors import ClientError
from polyfed.message import Message, State
from polyfed.methods import FedGen
from polyfed.methods.base import Method, Phase
from tests import support
from tests.engines.groups import assert_same, run_both, run_joint, seeds, start
from tests.engines.pretended import OTHER

THREAD = "polyfed-drawing"
AUGMENTED: dict[str, Any] = {"models": (support.Wide,), "training": {"augment": True, "epochs": 2}}


def drawing() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(THREAD)]


@pytest.fixture
def aside(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Batches are drawn as if clients trained on a GPU."""
    made, drawers = Drawer.__init__, list[Drawer]()

    def init(self: Drawer, population: Any, *rest: Any) -> None:
        made(self, replace(population, device=OTHER), *rest)
        drawers.append(self)

    monkeypatch.setattr(Drawer, "__init__", init)
    yield
    for each in drawers:
        each.clear()
    assert not drawing()


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch, aside: None) -> None:
    """The same, and a round lasts longer than drawing for the next one."""
    begin = Drawer.draw_ahead

    def awaited(self: Drawer, round: int) -> None:
        begin(self, round)
        wait(self._ahead.values())

    monkeypatch.setattr(Drawer, "draw_ahead", awaited)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, int, int, str]]:
    """Whether it was drawn ahead, the round, the client and the phase, of all that a drawer drew."""
    happened: list[tuple[bool, int, int, str]] = []
    draw = drawer.client_batches

    def recorded(population: Any, client: int, width: int, phase: Phase, round: int, **rest: Any) -> Any:
        happened.append((threading.current_thread().name.startswith(THREAD), round, client, phase.name))
        return draw(population, client, width, phase, round, **rest)

    monkeypatch.setattr(drawer, "client_batches", recorded)
    return happened


def expecting(method: Any = "standalone", **settings: Any) -> tuple[VectorizedEngine, Drawer]:
    """An engine that has seen all networks, and its drawer."""
    engine = VectorizedEngine(support.population(method, **{**AUGMENTED, "rounds": 9, **settings}))
    for client in engine.population.clients:
        engine._trial.of(client)
    return engine, engine._drawer


def assert_drawn(engine: VectorizedEngine, clients: list[int], round: int) -> None:
    """The plans of a cohort are those that are drawn without any expectation."""
    found = engine._drawer.plans(clients, round)
    for phase, plan in zip(engine.population.method.phases_in(round), found, strict=True):
        normed = phase.name in engine._trial.of(clients[0]).normed
        width = engine._width(clients[0])
        expected = new_plan(engine.population, clients, width, len(clients), phase, round, normed=normed)
        assert_equal(plan, expected)


def assert_equal(plan: Plan, expected: Plan) -> None:
    assert (plan.active, plan.samples, plan.real) == (expected.active, expected.samples, expected.real)
    for one, two in ((plan.inputs, expected.inputs), (plan.left_out, expected.left_out)):
        torch.testing.assert_close(one, two, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("fedproto", {**AUGMENTED, "participation": 0.5, "clients": 6}),
        ("pfedes", {"participation": 0.5, "clients": 6}),
        ("fedgen", {}),
        ("standalone", {"models": (support.Normed,), "partition": "iid", "batch_size": 23}),
    ],
    ids=["augmented", "several phases", "draws of its own", "small batches left out"],
)
def test_a_run_has_the_same_numbers(
    tmp_path: Path, method: str, settings: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    settings = {"rounds": 3, **settings}
    expected, _, plain = support.run(tmp_path / "plain", VectorizedEngine, method, **settings)
    request.getfixturevalue("aside")
    actual, _, ahead = support.run(tmp_path / "ahead", VectorizedEngine, method, **settings)
    pd.testing.assert_frame_equal(actual, expected, check_exact=True)
    for client in range(plain.config.clients):
        torch.testing.assert_close(ahead.engine.get_state(client), plain.engine.get_state(client), rtol=0, atol=0)


@pytest.mark.parametrize("participation", [0.5, 1.0])
def test_everything_is_drawn_once_and_from_the_second_round_on_ahead(
    tmp_path: Path, unhurried: None, drawn: list[tuple[bool, int, int, str]], participation: float
) -> None:
    settings: dict[str, Any] = {"rounds": 3, "participation": participation, "clients": 6}
    *_, run = support.run(tmp_path, VectorizedEngine, "fedproto", **AUGMENTED, **settings)
    expected = [(round > 1, round, client, "model") for round in (1, 2, 3) for client in run.participants(round)]
    assert sorted(drawn) == sorted(expected)


def noise(generator: torch.Generator, count: int) -> State:
    return {"noise": torch.rand(count, 2, generator=generator)}


@pytest.mark.parametrize(
    "options",
    [{}, {"augment": False}, {"views": 2}, {"part": (0.3, 0.8)}, {"draw": noise}],
    ids=lambda options: "-".join(options) or "plain",
)
def test_all_passes_at_once_are_those_one_after_another(options: dict[str, Any]) -> None:
    """What a phase's own `draw` takes from its generator comes in between, pass by pass."""
    people = support.population("standalone", training={"augment": True})
    phase = Phase("model", ("model",), people.method.loss, 3, **options)
    single = list(epochs(people, 1, phase, 5))
    found = all_epochs(people, 1, phase, 5)
    assert found is not None and len(found.samples) == len(single) == 3
    for number, own in enumerate(single):
        assert torch.equal(found.samples[number], own.samples)
        assert found.augmentations.keys() == own.augmentations.keys()
        several, one = ({"drawn": each.drawn, **each.augmentations} for each in (found, own))
        for purpose, draws in one.items():
            torch.testing.assert_close({n: t[number] for n, t in several[purpose].items()}, draws, rtol=0, atol=0)
    assert all_epochs(people, 1, replace(phase, epochs=0), 5) is None


def test_a_pass_takes_its_numbers_in_an_order_that_earlier_results_depend_on() -> None:
    people = support.population("standalone", training={"augment": True})
    phase = Phase("model", ("model",), people.method.loss, 1, views=2, draw=noise)
    generator, samples = people.generator("batches/model", 5, 1), people.data[1].train
    order = torch.randperm(len(samples), generator=generator)
    shape = people.task.input_shape
    images = {name: AUGMENTATION.draw(generator, len(samples), shape) for name in ("image", "first", "second")}
    expected = Epoch(samples[order], images, noise(generator, len(samples)))
    (found,) = epochs(people, 1, phase, 5)
    torch.testing.assert_close(vars(found), vars(expected), rtol=0, atol=0)


def test_on_a_cpu_nothing_is_drawn_ahead(tmp_path: Path, drawn: list[tuple[bool, int, int, str]]) -> None:
    support.run(tmp_path, VectorizedEngine, "standalone", rounds=3)
    assert len(drawn) == 12 and not any(ahead for ahead, *_ in drawn)


def test_clients_may_be_in_any_cohort_of_the_round_they_were_expected_in(unhurried: None) -> None:
    """With two phases that have nothing but their names to tell them apart."""

    class Twice(Method):
        name, title, paper, sends = "twice", "Twice", "none", "nothing"

        def phases(self) -> list[Phase]:
            return [Phase(name, ("model",), self.loss, 2) for name in ("first", "second")]

    engine, own = expecting({"name": Twice}, clients=6)
    own.expect(2, range(6))
    own.draw_ahead(1)
    assert len(own._ahead) == 12
    assert_drawn(engine, [4, 1], 2)
    assert_drawn(engine, [1], 2)  # a second time, as after a lack of memory
    assert_drawn(engine, [0, 5, 3], 3)
    assert_drawn(engine, [0, 5, 3, 2], 2)
    assert not own._ahead


def test_a_phase_that_has_changed_meanwhile_is_drawn_anew(unhurried: None) -> None:
    class Grows(Method):
        name, title, paper, sends = "grows", "Grows", "none", "nothing"
        epochs, part, views, augment, noise = 1, (0.0, 0.5), 1, True, None

        def phases(self) -> list[Phase]:
            first = Phase("first", ("model",), self.loss, self.epochs, views=self.views, draw=self.noise)
            return [first, Phase("second", ("model",), self.loss, 1, part=self.part, augment=self.augment)]

    engine, own = expecting({"name": Grows})
    changes = {"epochs": 2, "part": (0.5, 1.0), "views": 2, "augment": False, "noise": noise}
    for name, value in changes.items():
        own.expect(2, range(4))
        own.draw_ahead(1)
        setattr(engine.population.method, name, value)
        assert_drawn(engine, [0, 1, 2, 3], 2)
        assert len(own._ahead) == 4  # which is for the phase as it was
        own.clear()


def test_what_is_not_needed_is_dropped(unhurried: None) -> None:
    engine, own = expecting()
    own.expect(2, [0, 1])
    own.draw_ahead(1)
    for round in (2, 3):
        assert_drawn(engine, [0], round)
        own.expect(round + 1, [0])
        own.draw_ahead(round)
    assert {key[:2] for key in own._ahead} == {(4, 0)}


def test_what_is_not_needed_is_dropped_although_nobody_is_expected_any_more(unhurried: None) -> None:
    """As on a host whose clients all took part only once."""
    engine, own = expecting()
    own.expect(2, [0, 1])
    own.draw_ahead(1)
    assert_drawn(engine, [0], 2)
    own.draw_ahead(2)
    assert {key[:2] for key in own._ahead} == {(2, 1)}  # which may be in a later cohort of this round
    own.draw_ahead(3)
    assert not own._ahead


def test_an_expectation_is_for_the_next_round_only(aside: None) -> None:
    _, own = expecting()
    own.expect(3, [0, 1])
    own.draw_ahead(1)
    assert not own._ahead and not drawing()


def test_no_more_is_drawn_than_fits(monkeypatch: pytest.MonkeyPatch, aside: None) -> None:
    engine, own = expecting()
    visits = [2 * len(engine.population.data[client].train) for client in range(3)]
    monkeypatch.setattr(drawer, "MOST_AHEAD", sum(visits) - 1)
    own.expect(2, range(4))
    own.draw_ahead(1)
    assert [key[1] for key in own._ahead] == [0, 1]


class Yours(FedGen):
    """A method that is not polyfed's own."""

    name = "yours"


def test_nothing_is_tried_and_no_code_of_a_user_called_in_the_thread(aside: None) -> None:
    """Networks that have not been tried yet, those that the plain loop trains, and phases with a user's `draw`."""
    engine = VectorizedEngine(support.population("standalone", models=(support.Wide, support.Narrow), rounds=9))
    engine._trial.of(0)
    engine.expect(2, range(4))
    engine._drawer.draw_ahead(1)
    assert [key[1] for key in engine._drawer._ahead] == [0, 2]
    engine._trial.of(1).reason = "odd"
    engine.expect(2, range(4))
    engine._drawer.draw_ahead(1)
    assert [key[1] for key in engine._drawer._ahead] == [0, 2]
    _, own = expecting({"name": Yours})
    own.expect(2, range(4))
    own.draw_ahead(1)
    assert not own._ahead and not drawing()


def test_what_a_method_of_polyfed_draws_itself_is_drawn_ahead_too(unhurried: None) -> None:
    """Its `draw` depends on nothing that a round changes."""
    engine, own = expecting("fedgen")
    own.expect(2, range(4))
    own.draw_ahead(1)
    assert len(own._ahead) == 4
    assert_drawn(engine, [3, 0, 2, 1], 2)
    assert not own._ahead


def failing(monkeypatch: pytest.MonkeyPatch, *, always: bool) -> None:
    draw = drawer.client_batches

    def fails(population: Any, client: int, width: int, phase: Phase, round: int, **rest: Any) -> Any:
        if round == 2 and client == 1 and (always or threading.current_thread() in drawing()):
            raise ValueError("no such sample")
        return draw(population, client, width, phase, round, **rest)

    monkeypatch.setattr(drawer, "client_batches", fails)


def test_an_error_is_told_as_if_nothing_were_drawn_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    failing(monkeypatch, always=True)
    told = []
    for where in ("plain", "ahead"):
        with pytest.raises(ClientError) as error:
            support.run(tmp_path / where, VectorizedEngine, "standalone", **AUGMENTED)
        assert isinstance(error.value.__cause__, ValueError)
        told.append(str(error.value))
        request.getfixturevalue("unhurried")
    assert told[0] == told[1] and "failed in round 2: no such sample" in told[0]


def test_what_fails_only_in_the_thread_is_drawn_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """As when memory is short for a moment."""
    expected, *_ = support.run(tmp_path / "plain", VectorizedEngine, "standalone", **AUGMENTED)
    request.getfixturevalue("unhurried")
    failing(monkeypatch, always=False)
    actual, *_ = support.run(tmp_path / "ahead", VectorizedEngine, "standalone", **AUGMENTED)
    pd.testing.assert_frame_equal(actual, expected, check_exact=True)


def test_what_is_being_drawn_is_waited_for_and_the_rest_is_not(
    monkeypatch: pytest.MonkeyPatch, aside: None, drawn: list[tuple[bool, int, int, str]]
) -> None:
    """By whoever needs it, and by whoever closes the engine."""
    engine, own = expecting()
    draw, begun, allowed = drawer.client_batches, threading.Event(), threading.Semaphore(0)

    def held(*given: Any, **named: Any) -> Any:
        if threading.current_thread() in drawing():
            begun.set()
            allowed.acquire(timeout=30)
        return draw(*given, **named)

    monkeypatch.setattr(drawer, "client_batches", held)
    own.expect(2, range(4))
    own.draw_ahead(1)
    assert begun.wait(30)
    threading.Timer(0.05, allowed.release).start()
    assert_drawn(engine, [3, 0], 2)
    assert drawn == [(False, 2, 3, "model"), (True, 2, 0, "model")]
    threading.Timer(0.05, allowed.release).start()
    engine.close()
    assert not drawing() and not own._ahead
    assert drawn[2:] in ([], [(True, 2, 1, "model")])  # the second, if it had begun; not the third


def test_an_engine_that_is_stopped_while_it_waits_for_the_thread_still_frees_its_files(
    monkeypatch: pytest.MonkeyPatch, aside: None
) -> None:
    engine, closed = expecting()[0], list[bool]()
    monkeypatch.setattr(engine.store, "close", lambda: closed.append(True))
    with monkeypatch.context() as patch:
        patch.setattr(Drawer, "clear", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            engine.close()
    assert closed == [True]


def test_without_a_thread_batches_are_drawn_when_they_are_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """As under a limit on processes; it is noted once, and not tried again."""
    expected, *_ = support.run(tmp_path / "plain", VectorizedEngine, "standalone", **AUGMENTED, rounds=4)
    request.getfixturevalue("aside")
    tried: list[threading.Thread] = []

    def refuses(self: threading.Thread) -> None:
        tried.append(self)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(drawer.Thread, "start", refuses)
    actual, notes, run = support.run(tmp_path / "ahead", VectorizedEngine, "standalone", **AUGMENTED, rounds=4)
    pd.testing.assert_frame_equal(actual, expected, check_exact=True)
    assert notes == ["batches are drawn when they are needed, not ahead (can't start new thread)"]
    assert len(tried) == 1 and not run.engine._drawer._ahead
    run.engine.close()


LEAVING = """
import time
from polyfed.engines.stacked import drawer
from tests.engines import pretended, test_drawing

def slow(*given, **named):
    print("drawn", flush=True)
    time.sleep(0.5)

own = test_drawing.expecting(clients=8)[1]
own._population = test_drawing.replace(own._population, device=pretended.OTHER)
drawer.client_batches = slow
own.expect(2, range(8))
own.draw_ahead(1)
own.expect(3, range(8))
own.draw_ahead(2)
"""


def test_a_program_that_ends_without_closing_its_engine_ends_soon() -> None:
    """It waits for what is being drawn, and for nothing else that was to be drawn for two rounds."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", LEAVING], capture_output=True, text=True, check=True)
    assert done.stderr == "" and 0 < done.stdout.count("drawn") < 5


def test_a_second_thread_begins_when_the_first_has_ended(aside: None, drawn: list[tuple[bool, int, int, str]]) -> None:
    """As where many cohorts train after each other: the rest of this round is drawn before the next."""
    _, own = expecting()
    for round in (1, 2):
        own.expect(round + 1, range(4))
        own.draw_ahead(round)
    wait(own._ahead.values())
    assert drawn == [(True, round, client, "model") for round in (2, 3) for client in range(4)]


@pytest.mark.parametrize("method", ["fedproto", "fedgen"])
def test_runs_that_train_together_draw_ahead_for_all_of_them(
    tmp_path: Path, unhurried: None, drawn: list[tuple[bool, int, int, str]], calls: list[list[int]], method: str
) -> None:
    """Three runs with other participants each, under common numbers."""
    runs = seeds(method, participation=0.5, rounds=3)
    assert run_both(tmp_path, runs) == {}
    assert_same(tmp_path, runs)
    together = drawn[-18:]  # two clients of each run in each round; before that, every run alone
    expected = [(number > 1, number, client, "model") for number, own in enumerate(calls, 1) for client in own]
    assert len(calls) == 3 and sorted(together) == sorted(expected)


def test_a_run_that_leaves_takes_nothing_from_the_others(
    tmp_path: Path, unhurried: None, drawn: list[tuple[bool, int, int, str]]
) -> None:
    """One run diverges in the first round, which is repeated without it; so that drawing for it was in vain."""
    runs = seeds("fedproto", participation=0.5, rounds=3)
    for name in ("seed0", "seed2"):
        start(tmp_path / "alone" / name, *runs[name])
    runs["seed1"][1]["training"] = {"lr": 1e9}
    drawn.clear()
    assert list(run_joint(tmp_path, runs)) == ["seed1"]
    assert_same(tmp_path, ["seed0", "seed2"])
    assert all(ahead for ahead, round, *_ in drawn if round > 1)
    assert max(Counter(one for one in drawn if one[1] > 1).values()) == 1


def test_a_host_expects_the_same_clients_if_all_of_them_train(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, list[int]]] = []
    host = Host(support.population("standalone", rounds=3), HostTraits())
    monkeypatch.setattr(host._engine, "expect", lambda round, clients: told.append((round, sorted(clients))))
    for round, clients in enumerate(([0, 1, 2, 3], [0, 1], [0, 1, 2, 3]), start=1):
        host.train(round, dict.fromkeys(clients, Message()), False)  # type: ignore[arg-type]
    assert told == [(2, [0, 1, 2, 3])]
