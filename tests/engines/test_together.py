"""Runs that train together give what each gives alone: records, states, draws, failures, interruptions."""

from __future__ import annotations

import _thread
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from polyfed.engines import together
from polyfed.errors import DivergedError
from polyfed.message import Message
from polyfed.methods.base import Trained
from polyfed.methods.fedproto import FedProto
from polyfed.records import RunFolder
from polyfed.server.federation import Interrupted, Watcher
from tests import support
from tests.engines.groups import assert_same, notes, run_both, run_joint, seeds, start


@pytest.mark.parametrize("method", ["standalone", "fedproto", "fedtgp", "pfedes", "dc-pfl", "fedgen", "fedl2g", "fml"])
def test_seeds_of_a_method_train_together_and_stay_what_they_are(
    tmp_path: Path, method: str, calls: list[list[int]]
) -> None:
    """With server training (fedtgp), several phases (pfedes), statistics (dc-pfl), draws (fedgen), a probe (fedl2g)."""
    runs = seeds(method)
    assert run_both(tmp_path, runs) == {}
    assert calls == [[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]] * 2  # one call per round for all three runs
    assert_same(tmp_path, runs)
    accuracies = [RunFolder.open(tmp_path / "joint" / name).rounds().loss_mean.tolist() for name in runs]
    assert accuracies[0] != accuracies[1] != accuracies[2]


@pytest.mark.parametrize(
    "settings",
    [
        {"models": [support.Normed]},
        {"participation": 0.5, "rounds": 3},
        {"start": "client"},
        {"evaluate": "after-download"},
        {"training": {"lr": 0.05, "augment": True, "momentum": 0.9, "weight_decay": 0.01, "clip": 0.5}},
        {"partition": "dirichlet", "alpha": 0.5},
    ],
    ids=lambda settings: "-".join(settings),
)
def test_uneven_cases_too(tmp_path: Path, settings: dict[str, Any], calls: list[list[int]]) -> None:
    """Batch norm and dropout; other participants in each run; every client's own start."""
    runs = seeds("fedproto", 2, **settings)
    assert run_both(tmp_path, runs) == {}
    assert len(calls) == settings.get("rounds", 2)
    assert_same(tmp_path, runs)


@pytest.mark.parametrize(
    "trainings",
    [
        [{"lr": 0.05}, {"lr": 0.2}, {"lr": 0.01}],
        [{"lr": 0.05}, {"lr": 0.05, "momentum": 0.9}, {"lr": 0.05, "momentum": 0.5}],
        [{"lr": 0.05}, {"lr": 0.05, "weight_decay": 0.1}, {"lr": 0.02, "weight_decay": 0.01}],
        [{"lr": 0.05}, {"lr": 0.05, "clip": 0.1}, {"lr": 0.05, "clip": 0.3}],
    ],
    ids=["lr", "momentum", "weight_decay", "clip"],
)
def test_numbers_of_the_training_may_differ(
    tmp_path: Path, trainings: list[dict[str, float]], calls: list[list[int]]
) -> None:
    runs = {f"run{i}": ("fedproto", {"training": own}) for i, own in enumerate(trainings)}
    assert run_both(tmp_path, runs) == {}
    assert len(calls) == 2
    assert_same(tmp_path, runs)


@pytest.mark.parametrize("method", ["protonorm", "fedl2g"])
def test_a_loss_or_a_probe_may_depend_on_the_learning_rate(tmp_path: Path, method: str, calls: list[list[int]]) -> None:
    runs = {f"run{i}": (method, {"training": {"lr": lr}, "rounds": 3}) for i, lr in enumerate((0.02, 0.1))}
    assert run_both(tmp_path, runs) == {}
    assert len(calls) == 3
    assert_same(tmp_path, runs)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("fedproto", [{"weight": 0.5}, {"weight": 5.0}]),
        ("pfedes", [{"weight": 0.1}, {"weight": 0.5, "proxy_lr": 0.2}, {"weight": 0.3}]),
        ("fedclassavg", [{"weight": 0.1, "temperature": 0.1}, {"weight": 1.0, "temperature": 0.5}]),
        ("fedgen", [{"label_weight": 1.0}, {"label_weight": 10.0}]),
        ("fedssa", [{"history": 0.2}, {"history": 0.9}]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_numbers_of_the_method_may_differ(
    tmp_path: Path, method: str, options: list[dict[str, float]], calls: list[list[int]]
) -> None:
    """In a loss, in a phase's learning rate, in what a client receives."""
    runs = {f"run{i}": ({"name": method, **own}, {"seed": i % 2, "rounds": 3}) for i, own in enumerate(options)}
    if method == "pfedes":
        runs["run0"][0]["proxy_lr"], runs["run2"][0]["proxy_lr"] = 0.01, 0.05
    assert run_both(tmp_path, runs) == {}
    assert len(calls) == 3
    assert_same(tmp_path, runs)


def test_a_run_that_diverges_fails_alone(tmp_path: Path) -> None:
    runs = seeds("fedproto", rounds=3)
    for name in ("seed0", "seed2"):
        start(tmp_path / "alone" / name, *runs[name])
    runs["seed1"][1]["training"] = {"lr": 1e9}
    found = run_joint(tmp_path, runs)
    assert list(found) == ["seed1"] and isinstance(found["seed1"], DivergedError)
    assert "of client" in str(found["seed1"]) and any(f"client {n} " in str(found["seed1"]) for n in range(4))
    assert_same(tmp_path, ["seed0", "seed2"])
    assert notes(tmp_path, "seed0") == notes(tmp_path, "seed2") == []


class Breaks(Watcher):
    """Raises an error after a round."""

    def on_round(self, round: int, row: Mapping[str, Any] | None) -> None:
        raise ValueError("no more")


class Stops(Watcher):
    """Asks its run to stop after a round."""

    def __init__(self, after: int) -> None:
        self.after = after

    def on_round(self, round: int, row: Mapping[str, Any] | None) -> None:
        self.stop_requested = round >= self.after


def test_the_others_continue_when_a_run_breaks_off(tmp_path: Path, calls: list[list[int]]) -> None:
    runs = seeds("fedproto", rounds=3)
    for name, run in runs.items():
        start(tmp_path / "alone" / name, *run)
    found = run_joint(tmp_path, runs, {"seed0": Breaks()})
    assert list(found) == ["seed0"] and str(found["seed0"]) == "no more"
    assert [len(clients) for clients in calls] == [12, 8, 8]
    assert_same(tmp_path, ["seed1", "seed2"])


class Quits(FedProto):
    """Ends Python in one run, as a script may do that is used as a method."""

    name = "quits"

    def upload(self, client: Trained) -> Message:
        if self.task.seed == 1 and client.round == 2:
            raise SystemExit("enough")
        return super().upload(client)


def test_a_run_whose_code_exits_fails_alone(tmp_path: Path) -> None:
    runs = seeds(Quits, rounds=2)
    for name in ("seed0", "seed2"):
        start(tmp_path / "alone" / name, *runs[name])
    found = run_joint(tmp_path, runs)
    assert list(found) == ["seed1"] and isinstance(found["seed1"], SystemExit)
    assert_same(tmp_path, ["seed0", "seed2"])


def test_stopped_runs_continue_together_from_their_own_rounds(tmp_path: Path, calls: list[list[int]]) -> None:
    """Stopped after rounds 1, 2 and 3 of 5: the first catches up alone, then with the second, then with both."""
    runs = seeds("fedproto", rounds=5, checkpoint_every=1)
    for name, run in runs.items():
        start(tmp_path / "alone" / name, *run)
    found = run_joint(tmp_path, runs, {name: Stops(after) for after, name in enumerate(runs, 1)})
    assert {type(error) for error in found.values()} == {Interrupted} and len(found) == 3
    calls.clear()
    assert run_joint(tmp_path, runs) == {}
    assert [len(clients) for clients in calls][-2:] == [12, 12]
    assert_same(tmp_path, runs)


def test_a_network_that_cannot_be_stacked_trains_by_the_loop_in_each_run(tmp_path: Path) -> None:
    class Drawing(support.Narrow):
        def forward(self, x: Tensor) -> Tensor:
            features = self.body(x)
            logits: Tensor = self.out(features + 0.01 * torch.rand_like(features))
            return logits

    runs = seeds("fedproto", 2, models=[Drawing, support.Wide])
    assert run_both(tmp_path, runs) == {}
    assert_same(tmp_path, runs)
    assert any("global generator" in note for note in notes(tmp_path, "seed1"))


def test_an_interrupted_group_ends_at_its_next_request(tmp_path: Path) -> None:
    """Ctrl-C in the main thread; no thread is left behind, and every run can be resumed."""
    group = together.Group()

    class Presses(Watcher):
        def on_round(self, round: int, row: Mapping[str, Any] | None) -> None:
            group._cancelled = True

    runs = seeds("fedproto", 2, rounds=3, checkpoint_every=1)
    for name, run in runs.items():
        start(tmp_path / "alone" / name, *run)
    found = group.run(
        {
            name: lambda name=name, run=run: start(tmp_path / "joint" / name, *run, Presses())
            for name, run in runs.items()
        }
    )
    assert {type(error) for error in found.values()} == {KeyboardInterrupt} and len(found) == 2
    assert run_joint(tmp_path, runs) == {}
    assert_same(tmp_path, runs)


def test_an_interruption_before_all_runs_have_begun_ends_those_that_wait(tmp_path: Path) -> None:
    """The first run waits for its clients, the second is being interrupted, the third has not begun."""
    (name, run), *_ = seeds("fedproto", 1).items()

    def interrupts() -> None:
        _thread.interrupt_main()
        time.sleep(0.5)

    never: list[str] = []
    works = {
        name: lambda: start(tmp_path / name, *run), "interrupts": interrupts, "never": lambda: never.append("begun")
    }  # fmt: skip
    with pytest.raises(KeyboardInterrupt):
        together.Group().run(works)
    assert not {thread.name for thread in threading.enumerate()} & works.keys()
    assert never == []


def test_an_interruption_ends_the_work_in_progress(tmp_path: Path) -> None:
    """A run is in the middle of long work and another waits: both end at once, and nobody waits for the work."""
    (name, run), *_ = seeds("fedproto", 1).items()
    works = {name: lambda: start(tmp_path / name, *run), "long": lambda: [time.sleep(0.01) for _ in range(3000)]}
    threading.Timer(3, _thread.interrupt_main).start()
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        together.Group().run(works)
    assert time.monotonic() - begin < 8
    assert not {thread.name for thread in threading.enumerate()} & works.keys()
