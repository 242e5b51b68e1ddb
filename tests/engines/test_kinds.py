"""Signals, token ids and tables go through every engine, with the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

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
