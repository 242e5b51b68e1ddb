"""Every option of a phase does something, and the same in the plain loop and for stacked clients.

A new field of `Phase` fails here until it has a case.
"""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor

import polyfed
from polyfed.engines import SequentialEngine, VectorizedEngine
from polyfed.engines.together.fit import misfit
from polyfed.errors import InputError
from polyfed.message import Message, State
from polyfed.methods.base import Batch, ClientNetwork, Phase, Trained
from polyfed.methods.parts.tools import cross_entropy
from tests import support


def plain(net: ClientNetwork, batch: Batch) -> Tensor:
    return cross_entropy(net(batch.x), batch.y)


def halved(net: ClientNetwork, batch: Batch) -> Tensor:
    return plain(net, batch) / 2


def tracked(net: ClientNetwork, batch: Batch) -> tuple[Tensor, Tensor]:
    return plain(net, batch), net.features(batch.x)


def noisy(net: ClientNetwork, batch: Batch) -> Tensor:
    return plain(net, batch) * batch.drawn["weight"]


def contrasted(net: ClientNetwork, batch: Batch) -> Tensor:
    assert batch.views is not None
    first, second = batch.views.unbind(1)
    return plain(net, batch) + (net.features(first) - net.features(second)).square().mean(1)


def weights(generator: torch.Generator, samples: int) -> State:
    return {"weight": torch.rand(samples, generator=generator)}


CASES: dict[str, dict[str, Any]] = {
    "name": {"name": "another"},
    "trains": {"trains": ("model.head",)},
    "loss": {"loss": tracked},
    "epochs": {"epochs": 3},
    "lr": {"lr": 0.01},
    "views": {"views": 2, "loss": contrasted},
    "draw": {"draw": weights, "loss": noisy},
    "bounds": {"bounds": {"model.head.bias": (-0.01, 0.01)}},
    "unclipped": {"unclipped": ("model",)},
    "part": {"part": (0.25, 0.75)},
    "augment": {"augment": False},
    "first_round": {"first_round": 2},
}


class Varied(polyfed.Method):
    """One phase with the options of a case; what it tracks leaves the client."""

    name, title, paper = "varied", "Varied", "none"
    shares = sends = "what its phase tracked"
    changes: dict[str, Any]
    later: dict[str, Any] = {}
    """What is different from the second round on."""
    tracked: dict[int, Any]

    def phases(self) -> list[Phase]:
        return [replace(Phase("model", ("model",), plain, self.training.epochs), **self.changes)]

    def phases_in(self, round: int) -> list[Phase]:
        changed = self.later if round > 1 else {}
        return [replace(phase, **changed) for phase in super().phases_in(round)]

    def upload(self, client: Trained) -> Message:
        if client.tracked is not None:
            self.tracked[int(client.classes[0])] = client.tracked
        return Message()


def trained(
    tmp_path: Path, engine: Any, changes: dict[str, Any], later: dict[str, Any] | None = None
) -> tuple[list[State], dict[int, Any]]:
    """All clients' states after two rounds, and what was tracked."""
    seen: dict[int, Any] = {}
    method = type("Varied", (Varied,), {"changes": changes, "later": later or {}, "tracked": seen})
    run = support.federation(
        tmp_path / engine.__name__,
        method,
        engine,
        classes_per_client=1,
        training={"augment": True, "epochs": 2, "clip": 0.5},
    )
    run.run()
    notes = [event["note"] for event in run.folder.events() if event["event"] == "note"]
    assert not [note for note in notes if "one after another" in note]
    return [dict(run.engine.get_state(client)) for client in range(4)], seen


def test_every_option_has_a_case() -> None:
    assert CASES.keys() == {field.name for field in fields(Phase)}


@pytest.mark.parametrize("option", CASES)
def test_an_option_acts_and_engines_agree_on_it(tmp_path: Path, option: str) -> None:
    expected, tracked_alone = trained(tmp_path, SequentialEngine, CASES[option])
    actual, tracked_stacked = trained(tmp_path, VectorizedEngine, CASES[option])
    for stacked, alone in zip(actual, expected, strict=True):
        for name, tensor in alone.items():
            torch.testing.assert_close(stacked[name], tensor, rtol=1e-4, atol=1e-5)
    if option == "loss":
        assert len(tracked_alone) == len(tracked_stacked) == 4
        for label, statistics in tracked_alone.items():
            assert torch.equal(tracked_stacked[label].labels, statistics.labels)
            assert torch.equal(tracked_stacked[label].counts, statistics.counts)
            torch.testing.assert_close(tracked_stacked[label].means, statistics.means, rtol=1e-4, atol=1e-5)
    else:
        usual, _ = trained(tmp_path / "usual", SequentialEngine, {})
        same = all(
            torch.equal(one[name], other[name]) for one, other in zip(usual, expected, strict=True) for name in one
        )
        assert not same, f"{option} changed nothing"


@pytest.mark.parametrize("option", ["loss", "epochs", "lr", "bounds", "unclipped", "part", "augment"])
def test_what_changes_between_rounds_changes_on_every_engine(tmp_path: Path, option: str) -> None:
    later = {"loss": halved} if option == "loss" else CASES[option]
    usual, _ = trained(tmp_path / "usual", SequentialEngine, {})
    engines = SequentialEngine, VectorizedEngine
    (expected, _), (actual, _) = (trained(tmp_path, each, {}, later) for each in engines)
    pairs = zip(usual, expected, strict=True)
    assert any(not torch.equal(one[name], other[name]) for one, other in pairs for name in one)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    alone, stacked = (pd.read_csv(tmp_path / each.__name__ / "run" / "rounds.csv") for each in engines)
    assert alone["flops"].tolist() == stacked["flops"].tolist()
    assert alone["loss_mean"].tolist() == pytest.approx(stacked["loss_mean"].tolist(), rel=1e-4)


@pytest.mark.parametrize("later", [{"name": "another"}, {"trains": ("model.head",)}, {"views": 2}, {"draw": weights}])
def test_what_may_not_change_between_rounds_is_refused_before_the_run(tmp_path: Path, later: dict[str, Any]) -> None:
    words = f"in round 2 varied has another {next(iter(later))}|'another', which is none of its phases"
    with pytest.raises(InputError, match=words):
        trained(tmp_path, SequentialEngine, {}, later)


def test_only_what_trains_can_be_unclipped() -> None:
    with pytest.raises(InputError, match="'proxy' unclipped, but trains model, model.head: name one of these"):
        Phase("model", ("model", "model.head"), plain, 1, unclipped=("proxy",))


def test_runs_whose_phases_may_change_do_not_train_together() -> None:
    method, data = type("Varied", (Varied,), {"changes": {}, "tracked": {}}), support.tiny_dataset()
    one, two = (support.population(method, data=data, seed=seed) for seed in (0, 1))
    assert misfit(one, two) == "its phases may change from round to round"
