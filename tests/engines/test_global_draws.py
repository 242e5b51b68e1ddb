"""Networks that draw from global generators: the same seed gives the same numbers, on every engine."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from polyfed.engines import SequentialEngine, ThreadsEngine, VectorizedEngine
from polyfed.server.federation import Federation, Interrupted, Watcher
from tests import support


class Functional(support.Wide):
    """Dropout as a function."""

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(functional.dropout(self.body(x), 0.3, self.training))
        return logits


class Always(support.Wide):
    """Dropout that forgets to ask whether the network trains, so that it acts in every prediction too."""

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(functional.dropout(self.body(x), 0.3))
        return logits


class Recurrent(nn.Module):
    """Rows of an image as a sequence; dropout between the layers."""

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.rows = nn.LSTM(input_shape[2], support.FEATURES, num_layers=2, dropout=0.3, batch_first=True)
        self.out = nn.Linear(support.FEATURES, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(self.rows(x[:, 0])[0][:, -1])
        return logits


class OtherLibraries(support.Wide):
    """Noise from Python and numpy."""

    def forward(self, x: Tensor) -> Tensor:
        noise = random.random() + np.random.rand()
        logits: Tensor = self.out(self.body(x) * (1 + noise * self.training))
        return logits


DRAWING = [Functional, Always, Recurrent, OtherLibraries]


def scatter() -> None:
    """Put the global generators into a state that nobody expects; a failure shows the seed that it follows from."""
    np.random.seed(random.getrandbits(32))
    torch.manual_seed(random.getrandbits(32))


def finished(tmp_path: Path, engine: Any, **settings: Any) -> Federation:
    """A run that begins with global generators in no particular state."""
    scatter()
    run = support.federation(tmp_path, "fedproto", engine, **{"clients": 5, "classes_per_client": 1, **settings})
    run.run()
    run.engine.close()
    return run


def assert_same(one: Federation, other: Federation) -> None:
    assert one.folder.rounds().drop(columns="seconds").equals(other.folder.rounds().drop(columns="seconds"))
    for client in range(one.config.clients):
        other_state = other.engine.get_state(client)
        assert all(torch.equal(tensor, other_state[name]) for name, tensor in one.engine.get_state(client).items())


def notes(run: Federation) -> list[str]:
    return [event["note"] for event in run.folder.events() if event["event"] == "note"]


@pytest.mark.parametrize("network", DRAWING)
def test_a_run_repeats_on_every_engine(tmp_path: Path, network: type[nn.Module]) -> None:
    """Tests have one compute thread, so that engines agree bit by bit where they take the same steps."""
    engines = (SequentialEngine, SequentialEngine, partial(ThreadsEngine, workers=3), VectorizedEngine)
    first, *others = (
        finished(tmp_path / str(number), engine, models=(network,)) for number, engine in enumerate(engines)
    )
    assert first.engine.population.draws == {network.__name__}
    assert notes(first) == []
    words = f"clients with {network.__name__} train one after another: it draws from a global generator"
    for run in others:
        assert_same(first, run)
    assert all(words in notes(run)[0] for run in others[1:])


def test_others_train_beside_them_as_ever(tmp_path: Path) -> None:
    """The number of workers changes no bit, although only some clients wait for each other."""
    models = (Functional, support.Wide, support.Normed)
    one, three = (finished(tmp_path / str(n), partial(ThreadsEngine, workers=n), models=models) for n in (1, 3))
    assert_same(one, three)


def test_another_seed_draws_others(tmp_path: Path) -> None:
    """The weights are the same, being given, and so are the batches, being whole: only dropout differs."""
    network = Functional((1, 6, 6), 4)
    settings = {"models": (network,), "batch_size": 1000, "partition": "pathological", "classes_per_client": 4}
    runs = [
        finished(tmp_path / str(seed), SequentialEngine, seed=seed, rounds=1, clients=1, split="10:0:0", **settings)
        for seed in (0, 1)
    ]
    assert runs[0].folder.rounds().loss_mean[0] != pytest.approx(runs[1].folder.rounds().loss_mean[0], rel=1e-6)


class StopAfterOne(Watcher):
    stop_requested = True


def test_a_resumed_run_draws_what_it_would_have_drawn(tmp_path: Path) -> None:
    whole = finished(tmp_path / "whole", SequentialEngine, models=(Always,), rounds=3)
    run = support.federation(tmp_path, "fedproto", models=(Always,), rounds=3, clients=5, classes_per_client=1)
    run.watcher = StopAfterOne()
    with pytest.raises(Interrupted):
        run.run()
    scatter()
    again = Federation(run.config, run.method, SequentialEngine(run.engine.population), run.folder)
    saved = run.folder.checkpoints.restore()
    assert saved is not None
    again.restore(saved)
    again.run()
    assert_same(whole, again)


def test_the_callers_generators_are_left_alone(tmp_path: Path) -> None:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    expected = float(torch.rand(())), random.random(), np.random.rand()
    run = support.federation(tmp_path, "standalone", models=(OtherLibraries, Functional), rounds=1)
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    run.run()
    assert (float(torch.rand(())), random.random(), np.random.rand()) == expected


@pytest.mark.parametrize("network", [support.Normed, support.Wide])
def test_polyfeds_own_dropout_draws_nothing_global(network: type[nn.Module]) -> None:
    assert support.population("pfedes", models=(network,)).draws == frozenset()
