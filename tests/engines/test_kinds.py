"""Signals, token ids and tables go through every engine, with the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from polyfed.engines import SequentialEngine, ThreadsEngine, VectorizedEngine
from polyfed.models import GROUPS
from tests import support
from tests.kinds import KINDS


def finished(folder: Path, engine: Any, group: str, method: str = "fedproto", **settings: Any) -> Any:
    run = support.federation(
        folder / engine.__name__, method, engine, models=[group], dataset=KINDS[group](), clients=8, **settings
    )
    run.run()
    run.engine.close()
    return run


@pytest.mark.parametrize("group", KINDS)
def test_all_engines_agree_on_every_network_of_a_group(tmp_path: Path, group: str) -> None:
    """Eight clients, two of each network; all of them are stacked, so vectorized has no note."""
    runs = [finished(tmp_path, engine, group) for engine in (SequentialEngine, ThreadsEngine, VectorizedEngine)]
    reference = runs[0].folder.rounds()
    assert (reference.replies == 8).all()
    assert runs[2].engine.notes == []
    for run in runs[1:]:
        rounds = run.folder.rounds()
        np.testing.assert_allclose(rounds.loss_mean, reference.loss_mean, rtol=1e-4)
        assert (rounds.flops == reference.flops).all()
        for client in range(8):
            for name, tensor in runs[0].engine.get_state(client).items():
                torch.testing.assert_close(run.engine.get_state(client)[name], tensor, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("group", KINDS)
def test_every_network_of_a_group_learns(tmp_path: Path, group: str) -> None:
    run = finished(
        tmp_path, VectorizedEngine, group, "standalone", rounds=6, epochs=4, lr=0.2, classes_per_client=2, split="4:1"
    )
    scores = run.engine.evaluate(range(8), 6)
    assert min(score.accuracy() for score in scores.values()) >= 0.6
    assert len(GROUPS[group]) == 4


@pytest.mark.parametrize("method", ["fedavg", "fml", "fedgen", "fedtgp"])
def test_methods_of_other_families_train_on_token_ids(tmp_path: Path, method: str) -> None:
    models = "text_cnn" if method == "fedavg" else "text4"
    run = support.federation(tmp_path, method, models=[models], dataset=KINDS["text4"](), clients=4)
    run.run()
    assert (run.folder.rounds().replies == 4).all()


class Named(nn.Module):
    """Returns a dictionary, with a convolution as its classifier."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.body = nn.Conv2d(1, 6, 3)
        self.classifier, self.end = nn.Conv2d(6, classes, 1), nn.ReLU()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        answers = self.end(self.classifier(self.body(x).relu()))
        return {"features": x, "logits": answers.mean((2, 3))}


class Twin(nn.Module):
    """Its head shares a weight with its extractor, and is followed by an activation."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.narrow, self.widen, self.out = nn.Linear(36, classes), nn.Linear(classes, 36), nn.Linear(36, classes)
        self.out.weight = self.narrow.weight
        self.end = nn.Tanh()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.widen(self.narrow(x.flatten(1)).relu()).relu()
        return self.end(self.out(features)), features


@pytest.mark.parametrize("network", [Named, Twin])
def test_all_engines_agree_on_networks_that_end_in_other_ways(tmp_path: Path, network: type[nn.Module]) -> None:
    runs = []
    for engine in (SequentialEngine, ThreadsEngine, VectorizedEngine):
        run = support.federation(tmp_path / engine.__name__, "fedavg", engine, models=[network])
        run.run()
        run.engine.close()
        runs.append(run)
    assert runs[2].engine.notes == []
    assert any(network.__name__ in remark for remark in runs[0].engine.remarks)
    for run in runs[1:]:
        np.testing.assert_allclose(run.folder.rounds().loss_mean, runs[0].folder.rounds().loss_mean, rtol=1e-4)
