"""Every method on a device that is not the CPU: nothing is left behind, and the numbers are the same."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import polyfed.assemble
import polyfed.message
from polyfed.engines import VectorizedEngine, new_engine
from polyfed.engines.base import Engine
from polyfed.engines.stacked.round import Afterwards
from polyfed.engines.together import Group
from polyfed.engines.together.group import current_group
from polyfed.engines.together.member import Member
from polyfed.methods import METHODS
from polyfed.population import Population
from tests import support
from tests.engines.pretended import OTHER, WAITS, OnGpu, Pretended

NOT_PRETENDED = {"fedl2g"}
"""Forward mode, which its probe uses, can't be pretended."""


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that computes does it on the other device."""
    monkeypatch.setattr(polyfed.assemble, "find_device", lambda name: OTHER)
    monkeypatch.setattr(METHODS["fedkd"], "uploads_in_threads", False)  # another thread would not pretend
    plain = polyfed.message.is_plain
    monkeypatch.setattr(polyfed.message, "is_plain", lambda x: plain(x.inner if isinstance(x, OnGpu) else x))
    queued = Afterwards.queued

    def without_waits(*given: Any) -> Afterwards:
        before = len(WAITS)
        after = queued(*given)
        assert WAITS[before:] == [], "a cohort that waits for its training keeps the others from theirs"
        return after

    monkeypatch.setattr(Afterwards, "queued", without_waits)


def own_engine(people: Population) -> Engine:
    """The engine of a run; in a group, one of its members."""
    return new_engine("vectorized", people)


def run(folder: Path, method: str, **settings: Any) -> pd.DataFrame:
    models = (support.Wide,) if method == "fedavg" else (support.Wide, support.Narrow)
    found, notes, made = support.run(folder, own_engine, method, models=models, clients=5, rounds=2, **settings)
    assert isinstance(made.engine, Member if current_group() else VectorizedEngine)
    assert not [note for note in notes if "one after another" in note or "together" in note]
    return found


def test_tensors_of_two_devices_do_not_meet() -> None:
    with Pretended():
        there, here = torch.ones(3, device=OTHER), torch.ones(3)
        assert isinstance(there + 1, OnGpu) and isinstance(here.to(OTHER) * there, OnGpu)
        assert type(there.cpu()) is torch.Tensor and (there.cpu() + here).tolist() == [2, 2, 2]
        WAITS.clear()
        assert bool(there[0] == 1) and there.to("cpu").tolist() == here.to(OTHER, non_blocking=True).tolist()
        here.to(OTHER)
        assert WAITS == ["a look at a value", "a move to the CPU", "tolist", "a move to the GPU"]
        for wrong in (lambda: there + here, lambda: here.add_(there), lambda: there[here.long()]):
            with pytest.raises(RuntimeError, match="same device"):
                wrong()


@pytest.mark.parametrize("method", sorted(METHODS.keys() - NOT_PRETENDED))
def test_nothing_stays_on_the_other_device(tmp_path: Path, method: str, request: pytest.FixtureRequest) -> None:
    settings: dict[str, Any] = {"lr": 0.01, "participation": 0.6, "training": {"momentum": 0.5, "augment": True}}
    expected = run(tmp_path / "cpu", method, **settings)
    request.getfixturevalue("elsewhere")
    with Pretended():
        actual = run(tmp_path / "elsewhere", method, **settings)
    pd.testing.assert_frame_equal(actual, expected, check_exact=False, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("method", ["fedproto", "dc-pfl"])
def test_runs_train_together_on_the_other_device(tmp_path: Path, method: str, request: pytest.FixtureRequest) -> None:
    settings: dict[str, Any] = {"lr": 0.01, "participation": 0.6, "eval_every": 2, "dataset": support.tiny_dataset()}
    expected = [run(tmp_path / f"cpu{seed}", method, seed=seed, **settings) for seed in range(3)]
    request.getfixturevalue("elsewhere")
    actual: dict[int, pd.DataFrame] = {}

    def work(seed: int) -> None:
        with Pretended():
            actual[seed] = run(tmp_path / f"elsewhere{seed}", method, seed=seed, **settings)

    assert Group().run({str(seed): partial(work, seed) for seed in range(3)}) == {}
    for seed, alone in enumerate(expected):
        pd.testing.assert_frame_equal(actual[seed], alone, check_exact=False, rtol=1e-3, atol=1e-3)
