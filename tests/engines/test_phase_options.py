"""Every option of a phase does something, and the same in the plain loop and for stacked clients.

A new field of `Phase` fails here until it has a case.
"""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import polyfed
from polyfed.engines import SequentialEngine, VectorizedEngine
from polyfed.errors import InputError
from polyfed.message import Message, State
from polyfed.methods.base import Batch, ClientNetwork, Phase, Trained
from polyfed.methods.parts.tools import cross_entropy
from tests import support


def plain(net: ClientNetwork, batch: Batch) -> Tensor:
    return cross_entropy(net(batch.x), batch.y)


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
    tracked: dict[int, Any]

    def phases(self) -> list[Phase]:
        return [replace(Phase("model", ("model",), plain, self.training.epochs), **self.changes)]

    def upload(self, client: Trained) -> Message:
        if client.tracked is not None:
            self.tracked[int(client.classes[0])] = client.tracked
        return Message()


def trained(tmp_path: Path, engine: Any, changes: dict[str, Any]) -> tuple[list[State], dict[int, Any]]:
    """All clients' states after two rounds, and what was tracked."""
    seen: dict[int, Any] = {}
    method = type("Varied", (Varied,), {"changes": changes, "tracked": seen})
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


def test_only_what_trains_can_be_unclipped() -> None:
    with pytest.raises(InputError, match="'proxy' unclipped, but trains model, model.head: name one of these"):
        Phase("model", ("model", "model.head"), plain, 1, unclipped=("proxy",))
