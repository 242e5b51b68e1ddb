"""Runs that can't train together part, with a note, and still give what each gives alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from polyfed.engines.stacked.chains import join_layers
from polyfed.engines.together import joint
from polyfed.engines.together.fit import alike, misfit
from polyfed.message import Message, State
from polyfed.methods import FedProto
from polyfed.methods.base import Batch, ClientNetwork, Collect, Knowledge, Method
from polyfed.methods.parts.tools import cross_entropy
from polyfed.sameness import same
from polyfed.seeds import derive
from polyfed.server.unsaved import is_unsaved
from tests import support
from tests.engines.groups import DATA, assert_same, notes, run_both, run_joint, seeds


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

    def fails(self: joint.JointEngine, work: Any, round: int, threads: Any) -> Any:
        if round == 2 and self._architecture(work.clients[0]) == "Narrow" and failures[0] < times:
            failures[0] += 1
            raise RuntimeError("out of order")
        return finish(self, work, round, threads)

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
            "the runs do not train together: the method changes 'now', which it keeps outside of the clients' states",
            is_unsaved("now"),
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
    for name in runs:
        assert [note for note in notes(tmp_path, name) if "together" in note] == [
            f"the runs do not train together: {words}"
        ]


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


class Times(torch.nn.Module):
    """Multiplies by a number that is neither a parameter nor a buffer."""

    def __init__(self, by: Any) -> None:
        super().__init__()
        self.by = by

    def forward(self, x: Tensor) -> Tensor:
        return x * self.by[0]


class Held(Careful):
    """Keeps its weight inside of a function or a module."""

    name = "held"
    hold: Any = staticmethod(lambda weight: lambda values: values * weight)

    def __init__(self, config: Any, task: Any, training: Any) -> None:
        super().__init__(config, task, training)
        self.weighted = type(self).hold(config.weight)

    def loss(self, net: ClientNetwork, batch: Batch) -> Tensor:
        values: Tensor = self.weighted(cross_entropy(net(batch.x), batch.y))
        return values


class HeldInPartial(Held):
    name, hold = "held-in-partial", staticmethod(lambda weight: partial(torch.mul, torch.tensor(weight)))


class HeldInModule(Held):
    name, hold = "held-in-module", staticmethod(lambda weight: Times([weight]))


class Itself(Held):
    """A function that finds the weight in the method's settings, as any loss does."""

    name = "itself"

    def __init__(self, config: Any, task: Any, training: Any) -> None:
        super().__init__(config, task, training)
        self.weighted = lambda values: values * self.config.weight


class Scaled(FedProto):
    """Prototypes of scaled features, made with the scale outside of the loss."""

    name = "scaled"

    class Config(FedProto.Config):
        weight: float | None = None
        scale: float = 1.0

    config: Config

    @property
    def collect(self) -> Collect:  # type: ignore[override]
        scale = self.config.scale
        return Collect(of=lambda net, x: scale * net.features(x))


@pytest.mark.parametrize(
    ("method", "option", "kept"),
    [
        (Held, "weight", "weighted"),
        (HeldInPartial, "weight", "weighted"),
        (HeldInModule, "weight", "weighted"),
        (Scaled, "scale", "collect"),
        (Itself, "weight", None),
    ],
)
def test_a_number_that_a_method_has_put_into_something_is_found(method: Any, option: str, kept: str | None) -> None:
    """The common losses would have that of the first run for all."""
    one, two = (support.population({"name": method, option: number}, data=DATA) for number in (0.1, 2.0))
    assert misfit(one, two) == (kept and f"its method keeps another {kept}")
    assert misfit(one, one) is None


class Drawn(support.Narrow):
    """Draws a factor when it is built, and keeps it where its state does not have it."""

    keep: Any = staticmethod(lambda factor: [float(factor)])

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__(input_shape, classes)
        self.kept = type(self).keep(torch.rand(()))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(self.body(x) * self.kept[0])
        return logits


class DrawnTensor(Drawn):
    keep = staticmethod(lambda factor: factor[None])


class Listing(Drawn):
    """Lists how often it is trained."""

    keep = staticmethod(lambda factor: [1.0])

    def forward(self, x: Tensor) -> Tensor:
        self.kept[0] += 0.1 * self.training
        return super().forward(x)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Drawn, "their networks Drawn differ in more than their weights"),
        (DrawnTensor, "their networks DrawnTensor differ in more than their weights"),
        (Listing, "the network Listing changes attributes of its own"),
    ],
)
def test_what_a_network_keeps_outside_of_its_state_is_never_mixed(tmp_path: Path, model: Any, words: str) -> None:
    runs = seeds("standalone", 2, models=[model], rounds=1)
    assert run_both(tmp_path, runs) == {}
    assert_same(tmp_path, runs)
    assert notes(tmp_path, "seed0") == notes(tmp_path, "seed1") == [f"the runs do not train together: {words}"]


class Recurrent(torch.nn.Module):
    """With a hook, a parametrised layer and a recurrent one: nothing here depends on the run."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.rows = torch.nn.LSTM(6, 6, batch_first=True)
        self.out = torch.nn.Linear(6, classes)
        self.rows.register_forward_hook(lambda layer, given, found: found)
        torch.nn.utils.parametrizations.weight_norm(self.out)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(self.rows(x[:, 0])[0][:, -1])
        return logits


def test_networks_that_differ_in_their_states_alone_are_alike() -> None:
    assert alike(Recurrent(4), Recurrent(4)) and not alike(Recurrent(4), Recurrent(5))


def test_a_network_whose_layers_are_joined_is_like_one_whose_layers_are_not() -> None:
    """But not like one with a function of the user's own instead."""
    own, other, replaced = (torch.nn.Sequential(torch.nn.Linear(1, 1)) for _ in range(3))
    replaced.__dict__["forward"] = lambda x: x
    join_layers(own)
    join_layers(replaced)
    assert alike(own, other) and not alike(own, replaced)
    assert replaced(torch.ones(1, 1)).tolist() == [[1.0]]


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
