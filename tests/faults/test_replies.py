"""Thousands of spoiled replies: each is refused or harmless; none ends a run, and none takes the federation over.

A minority of the clients is hostile. Their mutants come through the server's door with honest replies, what is let in
is fused, and honest clients receive, predict with and train on what comes of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from polyfed.engines.client import round as local
from polyfed.errors import DivergedError
from polyfed.message import Message, State
from polyfed.methods import METHODS
from polyfed.methods.base import Reply, Server
from polyfed.methods.fedkd import FedKD
from polyfed.methods.parts.averaged import Averaged
from polyfed.population import Population
from polyfed.server.federation import Federation
from polyfed.server.replies import SMALL, UNUSUAL, Sizes
from tests import support
from tests.faults.mutants import mutant

SHORT, LONG = 12, 440
"""Mutants of each federation below, of which there are more than twenty."""
BOUND = 100.0
HOSTILE = 4

FEDERATIONS: dict[str, dict[str, Any]] = {
    **{name: {"method": name} for name in METHODS},
    "fedtgp": {"method": {"name": "fedtgp", "server_epochs": 3}},
    "fedgen": {"method": {"name": "fedgen", "server_steps": 3, "hidden": 16}},
    "fedavg": {"method": "fedavg", "models": (support.Wide,)},
    "fedavg with batch norm": {"method": "fedavg", "models": (support.Normed,)},
    "fml with batch norm": {"method": "fml", "models": (support.Normed,)},
    "fedkd with batch norm": {"method": "fedkd", "models": (support.Normed,)},
    "fedproto by samples": {"method": {"name": "fedproto", "mean": "samples"}},
    "fedssa with whole heads": {"method": {"name": "fedssa", "full_header": True}},
    "fd leave-one-out": {"method": {"name": "fd", "mean": "leave-one-out", "loss": "soft-ce"}},
    "dc-pfl as printed": {"method": {"name": "dc-pfl", "paper_eq11": True, "clip_virtual": True}},
}


@dataclass
class Scene:
    """A federation after its first round, in the middle of its second: all replies are there, nothing is fused."""

    run: Federation
    replies: list[Reply]
    without: dict[frozenset[int], Server]
    """What the server would be if these clients had not answered."""

    @property
    def people(self) -> Population:
        return self.run.engine.population

    def server(self) -> Server:
        return deepcopy(self.run.server)

    def fused_without(self, hostile: Sequence[int]) -> Server:
        key = frozenset(hostile)
        if key not in self.without:
            server = self.server()
            self.people.method.aggregate(server, [reply for reply in self.replies if reply.client not in key])
            self.without[key] = server
        return self.without[key]


@pytest.fixture(params=FEDERATIONS)
def scene(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Scene]:
    settings = {"clients": 5, "rounds": 3, "classes_per_client": 3, **FEDERATIONS[request.param]}
    run = support.federation(tmp_path, **settings)
    run.round(1)
    run.server.round = 2
    replies = run.engine.train(2, {client: run.download(client) for client in range(5)})
    yield Scene(run, replies, {})
    run.engine.close()


def test_mutants_are_refused_or_harmless(scene: Scene) -> None:
    attack(scene, SHORT, seed=1)


@pytest.mark.long
@pytest.mark.parametrize("seed", [2])
def test_very_many_mutants_are_refused_or_harmless(scene: Scene, seed: int) -> None:
    attack(scene, LONG, seed)


def attack(scene: Scene, count: int, seed: int) -> None:
    for number in range(count):
        random = Random(f"{seed}/{number}")
        hostile = [HOSTILE] if random.random() < 0.7 else sorted(random.sample(range(5), 2))
        most = scene.run.door.most_samples
        spoiled = {client: mutant(scene.replies[client], random, most) for client in hostile}
        how = {client: kind for client, (_, kind) in spoiled.items()}
        replies = [spoiled[reply.client][0] if reply.client in spoiled else reply for reply in scene.replies]
        try:
            assert_harmless(scene, replies, hostile, random.randrange(5))
        except BaseException as error:
            raise AssertionError(f"mutant {number} of seed {seed}, clients {how}: {error!r}") from error


def assert_harmless(scene: Scene, replies: list[Reply], hostile: Sequence[int], victim: int) -> None:
    method, door, server = scene.people.method, scene.run.door, scene.server()
    for reply in replies:  # a reply costs what it costs, whatever it is
        assert reply.message.floats >= 0
        if 0 <= reply.message.nbytes < 10**9:  # one value repeated may be larger than memory when it is copied
            reply.message.snapshot(method.heavy)
    sizes = Sizes.from_dict(scene.run.progress.sizes.to_dict())
    sound, refused = door.admit(2, replies, sizes)
    assert all(client in hostile for client in refused)
    unusual = {client: ratio for _, client, ratio in sizes.unusual}
    assert all(ratio <= BOUND for ratio in unusual.values())
    try:
        with door.naming_causes(sizes):
            method.aggregate(server, sound)
            state = {**server.state, **server.modules.state_dict()}
            assert_finite(state)
            assert_near(scene, server, hostile)
            assert_share(scene, server, [reply for reply in sound if reply.client in hostile], hostile)
            receive_and_train(scene, server, victim)
    except DivergedError as error:  # which a reply just within the bound may cause; then its sender is named
        assert unusual and max(unusual.values()) > UNUSUAL
        assert any(f"the reply of client {client} in round 2 was" in str(error) for client in unusual)


def assert_finite(state: State) -> None:
    for name, tensor in state.items():
        assert bool(torch.isfinite(tensor).all()), f"{name} is not finite"


def assert_near(scene: Scene, server: Server, hostile: Sequence[int]) -> None:
    """Nothing that the server sends is further from what it would send than twice what honest clients may be apart."""
    alone = scene.fused_without(hostile)
    honest = [reply for reply in scene.replies if reply.client not in hostile]
    values = [t for reply in honest for t in scene.people.method.sized(reply.message).values()]
    values += [t for t in alone.modules.state_dict().values() if t.is_floating_point()]
    values += [t for t in alone.state.values() if t.is_floating_point()]
    usual = max([SMALL, *(float(value.abs().max()) for value in values if value.numel())])
    for client in range(5):
        one, other = (download(scene, s, client) for s in (server, alone))
        for name in one.tensors.keys() & other.tensors.keys():
            if one.tensors[name].shape == other.tensors[name].shape:
                apart = (one.tensors[name] - other.tensors[name]).abs()
                assert float(apart.max() if apart.numel() else 0) <= 2 * BOUND * usual, f"{name} was captured"


def assert_share(scene: Scene, server: Server, let_in: Sequence[Reply], hostile: Sequence[int]) -> None:
    """Hostile clients move a mean no further than their share of it, if each has as many samples as a client can."""
    method = scene.people.method
    if not let_in or not isinstance(method, Averaged) or isinstance(method, FedKD):  # FedKD's mean is compressed
        return
    most = scene.run.door.most_samples if method.weighted else 1
    claimed = len(let_in) * most
    honest = [len(scene.people.data[c].train) if method.weighted else 1 for c in range(5) if c not in hostile]
    share = claimed / (claimed + sum(honest))
    for name, without in scene.fused_without(hostile).state.items():
        furthest = torch.stack([(reply.message.tensors[name] - without).abs() for reply in let_in]).amax(0)
        moved = (server.state[name] - without).abs()
        assert bool((moved <= share * furthest * 1.001 + 1e-5).all()), f"the mean of {name} was captured"


def download(scene: Scene, server: Server, client: int) -> Message:
    classes = scene.people.knowledge(client, 3).classes
    method = scene.people.method
    return method.download(server, client, classes if method.announces_classes else None)


def receive_and_train(scene: Scene, server: Server, client: int) -> None:
    people = scene.people
    network = people.new_network(client)
    state = {name: tensor.clone() for name, tensor in scene.run.engine.get_state(client).items()}
    server.round = 3
    local.receive(people, client, state, download(scene, server, client), 3)
    network.load_state_dict(state, strict=False)
    x, _ = people.dataset.batch(people.data[client].test[:4], people.device)
    with torch.no_grad():
        for rule, scores in people.method.predict(network.eval(), x).items():
            assert not bool(scores.isnan().any()), f"predictions by {rule} are not numbers"
    for phase in people.method.phases():
        local.train_phase(people, client, network, phase, 3)
