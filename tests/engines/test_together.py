"""Runs that train together give what each gives alone: records, states, draws, failures."""

from __future__ import annotations

import _thread
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

from polyfed import api
from polyfed.assemble import data_kept
from polyfed.engines import together
from polyfed.engines.together import joint
from polyfed.engines.together.fit import misfit, same
from polyfed.errors import DivergedError
from polyfed.message import Message, State
from polyfed.methods.base import Batch, ClientNetwork, Knowledge, Method
from polyfed.methods.parts.tools import cross_entropy
from polyfed.records import RunFolder
from polyfed.seeds import derive
from polyfed.server.federation import Interrupted, Watcher
from tests import support

SMALL: dict[str, Any] = {
    "clients": 4, "rounds": 2, "batch_size": 8, "classes_per_client": 2, "engine": "vectorized", "device": "cpu",
    "training": {"lr": 0.05}, "split": "8:1:1",
}  # fmt: skip
DATA = support.tiny_dataset()
MODELS = [support.Wide, support.Narrow]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The clients, numbered through, of every common training."""
    seen: list[list[int]] = []
    answers = joint.JointEngine.answers
    monkeypatch.setattr(
        joint.JointEngine,
        "answers",
        lambda self, round, downloads: (seen.append(sorted(downloads)), answers(self, round, downloads))[1],
    )
    return seen


def start(path: Path, method: Any, settings: Mapping[str, Any], watcher: Watcher | None = None) -> None:
    """Run one experiment on the tiny data, or continue it."""
    models = settings.get("models", MODELS)
    if (path / "config.yaml").exists():
        api.resume(path, data=DATA, models=models, watcher=watcher, progress=False)
        return
    values = {**SMALL, **settings, "data": DATA, "models": models}
    api.run(method, **values, out=path, watcher=watcher, progress=False)


def run_both(tmp_path: Path, runs: Mapping[str, tuple[Any, Mapping[str, Any]]]) -> dict[str, BaseException]:
    """Every run alone under alone/, and all of them together under joint/."""
    for name, (method, settings) in runs.items():
        start(tmp_path / "alone" / name, method, settings)
    return run_joint(tmp_path, runs)


def run_joint(
    tmp_path: Path, runs: Mapping[str, tuple[Any, Mapping[str, Any]]], watchers: Mapping[str, Watcher] | None = None
) -> dict[str, BaseException]:
    known = watchers or {}
    works = {
        name: lambda name=name, run=run: start(tmp_path / "joint" / name, *run, known.get(name))
        for name, run in runs.items()
    }
    with data_kept():
        return together.Group().run(works)


def assert_same(tmp_path: Path, names: Any) -> None:
    """The records and the clients' models of each run are those of the run alone."""
    for name in names:
        one, two = (RunFolder.open(tmp_path / where / name) for where in ("alone", "joint"))
        for table in ("rounds", "evaluations", "clients"):
            frames = [getattr(each, table)().drop(columns="seconds", errors="ignore") for each in (two, one)]
            pd.testing.assert_frame_equal(*frames, check_exact=False, rtol=1e-4, atol=1e-5)
        for client in range(4):
            expected, found = one.model_state(client), two.model_state(client)
            for key, tensor in expected.items():
                if key != "received.version":  # FedKD's hash of weights, which the last bit changes
                    torch.testing.assert_close(found[key], tensor, rtol=1e-3, atol=1e-4)


def notes(tmp_path: Path, name: str) -> list[str]:
    events = RunFolder.open(tmp_path / "joint" / name).events()
    return [event["note"] for event in events if event["event"] == "note"]


def seeds(method: Any, count: int = 3, **settings: Any) -> dict[str, tuple[Any, dict[str, Any]]]:
    return {f"seed{seed}": (method, {**settings, "seed": seed}) for seed in range(count)}


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


class Careful(Method):
    """Looks at its weight, which can't be done for several runs at once."""

    name, title, paper, sends = "careful", "Careful", "none", "nothing"

    class Config(Method.Config):
        weight: float = 1.0

    config: Config

    def loss(self, net: ClientNetwork, batch: Batch) -> Tensor:
        values = cross_entropy(net(batch.x), batch.y)
        return self.config.weight * values if self.config.weight > 0.5 else values


def test_a_decision_about_a_number_parts_the_runs_with_one_note(tmp_path: Path, calls: list[list[int]]) -> None:
    runs = {f"run{i}": ({"name": Careful, "weight": weight}, {}) for i, weight in enumerate((0.1, 2.0))}
    assert run_both(tmp_path, runs) == {}
    assert_same(tmp_path, runs)
    for name in runs:
        (note,) = (note for note in notes(tmp_path, name) if "together" in note)
        assert note.startswith("the runs do not train together: ")


class Seeded(Method):
    """Draws a factor from the run's seed inside its loss."""

    name, title, paper, sends = "seeded", "Seeded", "none", "nothing"

    def loss(self, net: ClientNetwork, batch: Batch) -> Tensor:
        return cross_entropy(net(batch.x), batch.y) * (1 + derive(self.task.seed, "factor") % 5)


def test_a_loss_that_depends_on_the_seed_parts_the_runs(tmp_path: Path) -> None:
    runs = seeds(Seeded, 2)
    assert run_both(tmp_path, runs) == {}
    assert_same(tmp_path, runs)
    assert any("draws with the seed" in note for note in notes(tmp_path, "seed0"))


class Remembers(Method):
    """Keeps the round in an attribute when a client receives its download, and weights its loss by it."""

    name, title, paper, sends = "remembers", "Remembers", "none", "nothing"

    def __init__(self, config: Any, task: Any, training: Any) -> None:
        super().__init__(config, task, training)
        self.now = 1

    def receive(self, state: Mapping[str, Tensor], message: Message, client: Knowledge) -> State:
        self.now = client.round
        return {}

    def loss(self, net: ClientNetwork, batch: Batch) -> Tensor:
        return cross_entropy(net(batch.x), batch.y) / self.now**3


class Server(Remembers):
    """Keeps a weight in a queue of its own, which the server changes."""

    name = "server"

    def __init__(self, config: Any, task: Any, training: Any) -> None:
        super().__init__(config, task, training)
        self.now = deque([1.0], maxlen=1)  # type: ignore[assignment]

    def receive(self, state: Mapping[str, Tensor], message: Message, client: Knowledge) -> State:
        return {}

    def aggregate(self, server: Any, replies: Any) -> None:
        self.now.append(2.0 + server.seed)  # type: ignore[attr-defined]

    def loss(self, net: ClientNetwork, batch: Batch) -> Tensor:
        return cross_entropy(net(batch.x), batch.y) / self.now[0]  # type: ignore[index]


@pytest.mark.parametrize("times", [1, 4])
def test_what_has_worked_is_tried_again(
    tmp_path: Path, times: int, calls: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU that fails in the second round, after one of two architectures has answered: once, or for good."""
    failures, finish = [0], joint.JointEngine._finish

    def fails(self: joint.JointEngine, work: Any, round: int) -> Any:
        if round == 2 and self._architecture(work.clients[0]) == "Narrow" and failures[0] < times:
            failures[0] += 1
            raise RuntimeError("out of order")
        return finish(self, work, round)

    monkeypatch.setattr(joint.JointEngine, "_finish", fails)
    runs = seeds("fedproto", 2, rounds=3)
    assert run_both(tmp_path, runs) == {}
    assert_same(tmp_path, runs)
    again = "training together failed and is tried again: out of order"
    parted = ["the runs do not train together: out of order"] if times > 1 else []
    assert notes(tmp_path, "seed0") == notes(tmp_path, "seed1") == [again, *parted]
    assert [len(clients) for clients in calls] == [8, 8, 4, *([] if parted else [8])]  # those without an answer


@pytest.mark.parametrize("method", [Remembers, Server])
@pytest.mark.parametrize("rates", [(0.05, 0.05), (0.05, 0.1)], ids=["seeds", "numbers"])
def test_what_a_method_keeps_for_itself_is_never_mixed(
    tmp_path: Path, method: Any, rates: tuple[float, ...], calls: list[list[int]]
) -> None:
    """The common losses would not see the attribute of either run: from the round that changes it, the runs part."""
    runs = {f"run{i}": (method, {"seed": i, "rounds": 3, "training": {"lr": lr}}) for i, lr in enumerate(rates)}
    assert run_both(tmp_path, runs) == {}
    assert calls  # until then they trained together
    assert_same(tmp_path, runs)
    for name in runs:
        assert notes(tmp_path, name) == [
            "the runs do not train together: the method changes 'now', which it keeps outside of the clients' states"
        ]


class Counts(Method):
    """Counts the calls of its loss, and weights the loss by that."""

    name, title, paper, sends = "counts", "Counts", "none", "nothing"

    def __init__(self, config: Any, task: Any, training: Any) -> None:
        super().__init__(config, task, training)
        self.calls = 0

    def loss(self, net: ClientNetwork, batch: Batch) -> Tensor:
        self.calls += 1
        return cross_entropy(net(batch.x), batch.y) * self.calls


class Counting(support.Narrow):
    """A network that counts how often it is trained."""

    used = 0

    def forward(self, x: Tensor) -> Tensor:
        self.used += self.training
        logits: Tensor = self.out(self.body(x) * (1 + 0.1 * self.used))
        return logits


@pytest.mark.parametrize(
    ("method", "models", "words"),
    [
        (Counts, [support.Narrow], "the method changes 'calls', which it keeps outside of the clients' states"),
        ("standalone", [Counting], "the network Counting changes attributes of its own"),
    ],
)
def test_runs_part_before_the_first_step_of_a_loss_or_network_that_counts(
    tmp_path: Path, method: Any, models: list[Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[Any] = []
    monkeypatch.setattr(joint.JointEngine, "_train_phase", lambda *given: trained.append(given))
    runs = seeds(method, 2, models=models)
    assert run_joint(tmp_path, runs) == {}
    assert trained == []
    assert notes(tmp_path, "seed0") == notes(tmp_path, "seed1") == [f"the runs do not train together: {words}"]


class Copied(Careful):
    """Keeps a number where nobody sees it change."""

    name = "copied"

    def __init__(self, config: Any, task: Any, training: Any) -> None:
        super().__init__(config, task, training)
        self.copy = config.weight

    def loss(self, net: ClientNetwork, batch: Batch) -> Tensor:
        return self.copy * cross_entropy(net(batch.x), batch.y)


def test_what_can_not_train_together_says_why(tmp_path: Path) -> None:
    first = support.population("fedproto", data=DATA)
    reasons = [
        misfit(first, support.population("standalone", data=DATA)),
        misfit(first, support.population("fedproto", data=support.tiny_dataset())),
        misfit(first, support.population("fedproto", data=DATA, batch_size=4)),
        misfit(first, support.population({"name": "fedproto", "mean": "samples"}, data=DATA)),
        misfit(  # the bounds of its weights depend on it
            support.population({"name": "pfedafm", "weight_lr": 0.1}, data=DATA),
            support.population({"name": "pfedafm", "weight_lr": 0.2}, data=DATA),
        ),
        misfit(
            support.population({"name": Copied, "weight": 1.0}, data=DATA),
            support.population({"name": Copied, "weight": 2.0}, data=DATA),
        ),
    ]
    assert reasons == [
        "its method is standalone, not fedproto",
        "its samples are not the same tensors in memory (those of a table are scaled for each run)",
        "training.batch_size is 4, not 8",
        "method.mean is samples, not plain",
        "its phases are others",
        "its method keeps another copy",
    ]
    assert misfit(first, support.population({"name": "fedproto", "weight": None}, data=DATA, seed=3, lr=1)) is None
    runs = {"one": ("fedproto", {}), "other": ("fedproto", {"training": {"lr": 0.05, "epochs": 2}})}
    assert run_both(tmp_path, runs) == {}
    assert_same(tmp_path, runs)
    assert notes(tmp_path, "one") == []
    assert notes(tmp_path, "other") == ["this run does not train together with the others: training.epochs is 2, not 1"]


def test_values_are_compared_by_what_they_hold() -> None:
    assert same({"a": [torch.ones(2), {1}]}, {"a": [torch.ones(2), {1}]})
    assert not same({"a": torch.ones(2)}, {"a": torch.zeros(2)})
    assert not same((1, 2), (1, 3)) and not same(1, 1.0) and not same({"a": 1}, {"b": 1})
    assert not same(torch.nn.Linear(1, 1), torch.nn.Linear(1, 2))


def test_objects_are_compared_by_their_attributes() -> None:
    def holder(value: Any) -> Any:
        found = SimpleNamespace(value=value)
        found.itself = found
        return found

    assert same(holder(1), holder(1)) and not same(holder(1), holder(2))
    assert same(np.ones(2), np.ones(2)) and not same(np.ones(2), np.zeros(2))
    assert not same(deque([1]), deque([2]))


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
