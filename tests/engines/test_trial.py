"""What can't be stacked is found out before it trains, goes through the plain loop, and is said once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from polyfed.engines import SequentialEngine, VectorizedEngine
from polyfed.methods.base import Batch, ClientNetwork, Method
from polyfed.methods.parts.tools import cross_entropy
from polyfed.population import Population
from tests import support
from tests.support import run


class Branching(support.Wide):
    """Its forward decides on the data, which can't be stacked."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if bool(x.sum() > -1e9) else super().forward(-x)


def test_a_network_that_vmap_does_not_take_goes_through_the_loop(tmp_path: Path) -> None:
    expected, _, _ = run(tmp_path, SequentialEngine, "standalone", models=(Branching,))
    actual, notes, _ = run(tmp_path, VectorizedEngine, "standalone", models=(Branching,))
    pd.testing.assert_frame_equal(actual, expected, check_exact=False, rtol=1e-4, atol=1e-5)
    assert sum("Branching train one after another" in note for note in notes) == 1


def test_samples_are_tried_where_they_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the engine has a copy of the samples; those of the experiment stay on the CPU."""

    def leave_empty(people: Population) -> Population:
        moved, meta = replace(people, dataset=replace(people.dataset)), torch.device("meta")
        for name in ("images", "labels"):
            object.__setattr__(people.dataset, name, getattr(people.dataset, name).to(meta))
        return moved

    monkeypatch.setattr(Population, "on_device", leave_empty)
    _, notes, _ = run(tmp_path, VectorizedEngine, "fedproto", models=(support.Wide,))
    assert not [note for note in notes if "one after another" in note]


class TrainsDoubled(support.Wide):
    """Behaves differently in training, as dropout of one's own would."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * (2 if self.training else 1))


class LooksWhenEvaluated(support.Wide):
    """Its forward decides on the data, but only in evaluation."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training and float(x.sum()) < -1e9:
            return super().forward(-x)
        return super().forward(x)


@pytest.mark.parametrize("network", [TrainsDoubled, LooksWhenEvaluated])
def test_awkward_networks_give_the_plain_loop_s_numbers(tmp_path: Path, network: type[torch.nn.Module]) -> None:
    expected, _, _ = run(tmp_path, SequentialEngine, "fedproto", models=(network,), rounds=3)
    actual, _, _ = run(tmp_path, VectorizedEngine, "fedproto", models=(network,), rounds=3)
    pd.testing.assert_frame_equal(actual, expected, check_exact=False, rtol=1e-4, atol=1e-5)


class Replacing(support.Wide):
    """Puts a new tensor where a buffer was."""

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__(input_shape, classes)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen = 0.9 * self.seen + 1
        return super().forward(x)


def test_a_network_that_replaces_a_buffer_goes_through_the_loop(tmp_path: Path) -> None:
    expected, _, plain = run(tmp_path, SequentialEngine, "standalone", models=(Replacing,))
    actual, notes, looped = run(tmp_path, VectorizedEngine, "standalone", models=(Replacing,))
    pd.testing.assert_frame_equal(actual, expected)
    assert sum("one after another: it replaces a buffer" in note for note in notes) == 1
    states = [federation.engine.get_state(0) for federation in (plain, looped)]
    (name,) = (name for name in states[0] if name.endswith("seen"))
    steps = expected["round"].max() * -(-len(plain.engine.population.data[0].train) // plain.config.training.batch_size)
    for state in states:
        assert float(state[name]) == pytest.approx(10 * (1 - 0.9**steps))  # of all rounds, not only the last


UNEVEN = {"partition": "dirichlet", "alpha": 0.3, "min_samples": 3}
"""Clients with other numbers of batches, and last batches of other lengths."""


class Counting(support.Wide):
    """Counts its training batches in a buffer."""

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__(input_shape, classes)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen.add_(1)
        return super().forward(x)


def test_a_client_that_has_finished_changes_no_buffer(tmp_path: Path) -> None:
    _, _, plain = run(tmp_path, SequentialEngine, "standalone", models=(Counting,), **UNEVEN)
    _, notes, stacked = run(tmp_path, VectorizedEngine, "standalone", models=(Counting,), **UNEVEN)
    expected, found = (
        [each.engine.get_state(client)["model.extractor.seen"].tolist() for client in range(4)]
        for each in (plain, stacked)
    )
    assert found == expected
    assert len({seen for seen, _ in expected}) > 1 and not notes


class Centred(support.Wide):
    """Subtracts the batch's mean."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = self.body(x)
        logits: torch.Tensor = self.out(features - features.mean(0))
        return logits


class Averaging(Counting):
    """Keeps a running mean of its logits, which changes no gradient yet."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.out(self.body(x))
        if self.training:
            self.seen.mul_(0.9).add_(logits.detach().mean(0)[:2])
        return logits


class Alike(Method):
    """Pulls the features of a batch together, and forgets that some may be padding."""

    name, title, paper, sends = "alike", "Alike", "none", "nothing"

    def loss(self, net: ClientNetwork, batch: Batch) -> torch.Tensor:
        features = net.features(batch.x)
        spread = (features - features.mean(0)).square().sum(1)
        return cross_entropy(net.head(features), batch.y) + 0.1 * spread


@pytest.mark.parametrize(
    ("method", "network"), [("standalone", Centred), ("standalone", Averaging), (Alike, support.Wide)]
)
def test_where_samples_depend_on_each_other_nothing_is_padded(tmp_path: Path, method: Any, network: Any) -> None:
    expected, _, plain = run(tmp_path, SequentialEngine, method, models=(network,), **UNEVEN)
    actual, notes, looped = run(tmp_path, VectorizedEngine, method, models=(network,), **UNEVEN)
    pd.testing.assert_frame_equal(actual, expected)
    for name, tensor in plain.engine.get_state(0).items():
        assert torch.equal(looped.engine.get_state(0)[name], tensor)
    assert sum("train one after another: what it learns from a sample depends on" in note for note in notes) == 1
