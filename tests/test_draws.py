"""What a client visits, in which order and how changed: seen from inside a loss and a network, in whole runs.

Every image of the data is one number all over, so that a loss can tell which sample it sees; every client owns one
class, so that labels tell whose it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn

import polyfed
from polyfed.methods.base import Batch, ClientNetwork, Phase
from polyfed.methods.parts.tools import cross_entropy
from polyfed.seeds import derive
from tests import support

CLIENTS, ROUNDS, EPOCHS, SAMPLES = 3, 3, 2, 24
ENGINES = ("sequential", "threads", "vectorized")
SETTINGS: dict[str, Any] = {
    "models": support.Wide, "clients": CLIENTS, "classes_per_client": 1, "rounds": ROUNDS, "engine": "sequential",
    "device": "cpu",
}  # fmt: skip
TRAINING: dict[str, Any] = {"batch_size": 8, "lr": 0.01, "epochs": EPOCHS}


def numbered() -> polyfed.Dataset:
    """Image number i has the value i + 1 in all its pixels; what comes in from outside is 0."""
    labels = torch.arange(CLIENTS).repeat_interleave(SAMPLES * 10 // 8)
    images = torch.arange(1.0, len(labels) + 1)[:, None, None, None].expand(-1, 1, 6, 6).contiguous()
    return polyfed.Dataset("numbered", images, labels, CLIENTS)


class Spy(polyfed.Method):
    """Trains in two phases, each on its half of the samples, and remembers every batch that it sees."""

    name, title, paper, sends = "spy", "Spy", "none", "nothing"
    parts: ClassVar[tuple[tuple[float, float], ...]] = ((0.0, 0.5), (0.5, 1.0))
    augment: ClassVar[bool] = True
    seen: ClassVar[list[tuple[str, Batch]]] = []

    def phases(self) -> list[Phase]:
        names = [f"phase{number}" for number in range(len(self.parts))]
        return [
            Phase(name, ("model",), self._loss_of(name), EPOCHS, part=part, augment=self.augment)
            for name, part in zip(names, self.parts, strict=True)
        ]

    def _loss_of(self, phase: str) -> Any:
        def loss(net: ClientNetwork, batch: Batch) -> Tensor:
            self.seen.append((phase, batch))
            return cross_entropy(net(batch.x / 100), batch.y)

        return loss


class Whole(Spy):
    """One phase on all samples."""

    name = "whole-spy"
    parts = ((0.0, 1.0),)


class AsTheyAre(Whole):
    """One phase that wants images as they are."""

    name = "spy-on-originals"
    augment = False


@pytest.fixture(autouse=True)
def _nothing_seen() -> Iterator[None]:
    Spy.seen.clear()
    Masked.masks.clear()
    yield
    Spy.seen.clear()
    Masked.masks.clear()


def generator(seed: int, *address: str | int) -> torch.Generator:
    return torch.Generator().manual_seed(derive(seed, *address))


def orders(method: type[Spy], **settings: Any) -> dict[tuple[str, int, int, int], list[int]]:
    """By phase, client, round and epoch, the samples in the order of visits, as places among the client's own."""
    Spy.seen.clear()
    result = polyfed.run(method, data=numbered(), **{**SETTINGS, "training": TRAINING, **settings})
    visited: dict[tuple[str, int], list[int]] = {}
    # Before a client trains, its network is tried on two samples, and on tensors without content.
    real = [(phase, batch) for phase, batch in Spy.seen if not batch.x.is_meta and len(batch.y) > 2]
    for phase, batch in real:
        assert len(batch.y.unique()) == 1
        visited.setdefault((phase, int(batch.y[0])), []).extend(batch.x[:, 0, 0, 0].long().tolist())
    found = {}
    for (phase, client), samples in visited.items():
        places = {sample: place for place, sample in enumerate(sorted(trained_on(visited, client)))}
        length = len(samples) // (ROUNDS * EPOCHS)
        for turn in range(ROUNDS * EPOCHS):
            part = samples[turn * length : (turn + 1) * length]
            found[phase, client, 1 + turn // EPOCHS, turn % EPOCHS] = [places[sample] for sample in part]
    assert result.clients.train_samples.tolist() == [SAMPLES] * CLIENTS
    return found


def trained_on(visited: dict[tuple[str, int], list[int]], client: int) -> set[int]:
    return {sample for (_, owner), samples in visited.items() if owner == client for sample in samples}


@pytest.mark.parametrize("engine", ["sequential", "threads"])
def test_every_client_round_and_epoch_has_an_order_of_its_own(engine: str) -> None:
    found = orders(Whole, engine=engine)
    assert len(found) == CLIENTS * ROUNDS * EPOCHS
    assert all(sorted(order) == list(range(SAMPLES)) for order in found.values()), "each sample once in an epoch"
    for one, other in combinations(found, 2):
        assert found[one] != found[other], f"{one} and {other} visit their samples in the same order"


def test_parts_of_the_samples_are_shuffled_once_for_all_rounds_and_differ_between_clients() -> None:
    found = orders(Spy)
    halves: dict[tuple[str, int], set[tuple[int, ...]]] = {}
    for (phase, client, _, _), order in found.items():
        halves.setdefault((phase, client), set()).add(tuple(sorted(order)))
    assert all(len(half) == 1 for half in halves.values()), "a part is the same in every round"
    first = [next(iter(halves["phase0", client])) for client in range(CLIENTS)]
    second = [next(iter(halves["phase1", client])) for client in range(CLIENTS)]
    for one, other in zip(first, second, strict=True):
        assert sorted((*one, *other)) == list(range(SAMPLES)), "neighbouring parts are all samples together"
        assert max(one) > min(other), "not the first samples of the client, but some drawn from all"
    assert len(set(first)) == CLIENTS
    assert len({tuple(order) for order in found.values()}) == len(found), "the phases' batches have orders of their own"


def test_a_phase_can_refuse_augmentation() -> None:
    settings = {**SETTINGS, "rounds": 1, "training": TRAINING | {"augment": True}}
    for method, original in ((Whole, False), (AsTheyAre, True)):
        Spy.seen.clear()
        polyfed.run(method, data=numbered(), **settings)
        images = torch.cat([batch.x for _, batch in Spy.seen if not batch.x.is_meta and len(batch.y) > 2])
        changed = (images != images.flatten(1).amax(1)[:, None, None, None]).flatten(1).any(1)
        assert bool(changed.any()) is not original


class Unaugmented(polyfed.Method):
    """The default method, whose phase wants images as they are."""

    name, title, paper, sends = "unaugmented", "Unaugmented", "none", "nothing"

    def phases(self) -> list[Phase]:
        return [Phase("model", ("model",), self.loss, self.training.epochs, augment=False)]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_phase_without_augmentation_trains_as_if_nothing_were_augmented(engine: str) -> None:
    def rounds(method: str | type[polyfed.Method], augment: bool) -> pd.DataFrame:
        settings = SETTINGS | {"engine": engine, "rounds": 2, "training": {"batch_size": 8, "augment": augment}}
        result = polyfed.run(method, data=support.tiny_dataset(classes=CLIENTS), **settings)
        return result.rounds.drop(columns="seconds")

    expected = rounds("standalone", False)
    assert rounds(Unaugmented, True).equals(expected)
    assert not rounds("standalone", True).equals(expected)


class Masked(nn.Module):
    """A network that remembers which values its dropout layer keeps in training."""

    masks: ClassVar[list[tuple[bool, ...]]] = []

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.flatten = nn.Flatten()
        self.drop = nn.Dropout(0.5)
        self.out = nn.Linear(int(torch.tensor(input_shape).prod()), classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.flatten(x)
        kept = self.drop(torch.ones_like(x))
        if self.training and not x.is_meta and len(x) > 2:
            self.masks.append(tuple((kept > 0).flatten().tolist()))
        logits: Tensor = self.out(x * kept)
        return logits


@pytest.mark.parametrize("engine", ("sequential", "threads"))  # tests/engines/test_dropout.py has those of cohorts
def test_dropout_masks_differ_between_clients_rounds_and_batches(engine: str) -> None:
    settings = SETTINGS | {"engine": engine, "models": Masked, "training": TRAINING}
    polyfed.run("standalone", data=numbered(), **settings)
    assert len(Masked.masks) == CLIENTS * ROUNDS * EPOCHS * SAMPLES // 8
    assert len(set(Masked.masks)) == len(Masked.masks)


def test_two_runs_of_a_seed_draw_alike_and_two_seeds_do_not() -> None:
    one, again, other = (orders(Whole, seed=seed) for seed in (3, 3, 4))
    assert one == again
    assert all(one[key] != other[key] for key in one)


# What is drawn at a documented address is what a user of that address would draw himself ------------------------------


def test_batches_and_parts_are_drawn_at_their_addresses() -> None:
    found = orders(Spy, seed=3)
    owners = list(dict.fromkeys(client for _, client, _, _ in found))  # in the order of client numbers
    for (phase, owner, round, epoch), order in found.items():
        client = owners.index(owner)
        shuffled = torch.randperm(SAMPLES, generator=generator(3, "parts", 0, client))
        half = shuffled[: SAMPLES // 2] if phase == "phase0" else shuffled[SAMPLES // 2 :]
        batches = generator(3, f"batches/{phase}", round, client)
        permutations = [torch.randperm(SAMPLES // 2, generator=batches) for _ in range(EPOCHS)]
        assert order == half[permutations[epoch]].tolist()


def test_dropout_masks_are_drawn_at_their_addresses() -> None:
    polyfed.run("standalone", data=numbered(), **SETTINGS | {"models": Masked, "training": TRAINING, "seed": 3})
    batches = EPOCHS * SAMPLES // 8
    for turn in range(CLIENTS * ROUNDS):
        masks = generator(3, "dropout", 1 + turn // CLIENTS, turn % CLIENTS)
        for batch in range(batches):
            kept = torch.rand(8, 36, generator=masks) >= 0.5
            assert Masked.masks[turn * batches + batch] == tuple(kept.flatten().tolist())


class Still(polyfed.Method):
    """Nothing moves: the loss does not depend on the network."""

    name, title, paper, sends = "still", "Still", "none", "nothing"

    def loss(self, net: ClientNetwork, batch: Batch) -> Tensor:
        return 0 * net(batch.x).sum(1)


@pytest.mark.parametrize("start", ["architecture", "client"])
def test_first_weights_are_drawn_at_their_addresses(start: str) -> None:
    result = polyfed.run(Still, data=numbered(), **SETTINGS | {"start": start, "rounds": 1, "seed": 3})
    x = torch.randn(4, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    for client in range(CLIENTS):
        with torch.random.fork_rng():
            torch.manual_seed(derive(3, "initial", "Wide", client if start == "client" else "shared"))
            network = support.Wide((1, 6, 6), CLIENTS)
        assert torch.equal(result.model(client)(x), network(x))


class Chosen(polyfed.Watcher):
    """Remembers who trained in which round."""

    def __init__(self) -> None:
        self.clients: dict[int, list[int]] = {}

    def on_client(self, round: int, client: int) -> None:
        self.clients.setdefault(round, []).append(client)


def test_participants_are_drawn_at_their_addresses() -> None:
    chosen = Chosen()
    settings = SETTINGS | {"clients": 10, "participation": 0.3, "rounds": 4, "seed": 3}
    polyfed.run(Still, data=numbered(), watcher=chosen, **settings)
    for round, clients in chosen.clients.items():
        drawn = np.random.default_rng(derive(3, "participants", round)).choice(10, 3, replace=False)
        assert clients == sorted(drawn.tolist())
    assert sorted(chosen.clients) == [1, 2, 3, 4]
