"""What can't be stacked is found out before it trains, goes through the plain loop, and is said once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch

from polyfed.engines import SequentialEngine, VectorizedEngine
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
        return super().forward(x) * (2 if self.training else 1)


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
