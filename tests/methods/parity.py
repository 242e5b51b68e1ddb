"""What every method must keep when clients train in another way: stacked, in threads, beside each other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from polyfed.engines import SequentialEngine, ThreadsEngine
from polyfed.engines.client.batches import AUGMENTATION, VIEWS, augmented
from polyfed.engines.client.round import set_modes
from polyfed.methods.base import Batch, Phase
from polyfed.methods.parts.network import ClientNetwork
from polyfed.population import Population
from tests import support

OPTIONS: dict[str, dict[str, Any]] = {
    "fd-all": {"name": "fd", "mean": "all"},
    "fedproto-classes": {"name": "fedproto", "penalty": "classes"},
    "fedtgp-classes": {"name": "fedtgp", "penalty": "classes", "send_untrained": True, "server_epochs": 5},
    "fedorgp-uploaded": {"name": "fedorgp", "broadcast": "uploaded", "server_epochs": 3},
    "protonorm-scale": {"name": "protonorm", "align": False, "scale": 5.0},
    "fedre-steps": {"name": "fedre", "server_batch_size": 1, "server_epochs": 2},
    "fedssa-head": {"name": "fedssa", "average": "head", "decay": "linear"},
    "pfedes-joint": {"name": "pfedes", "joint": True},
    "pfedes-rate": {"name": "pfedes", "proxy_lr": 0.01},
    "fedl2g-logits": {"name": "fedl2g", "guides": "logits"},
    "fedl2g-warmup": {"name": "fedl2g", "warmup": 1, "server_lr": 1.0},
    "fedapen-adapted": {"name": "fedapen", "mixing_lr": 0.1, "adapted_epochs": 3},
}
"""Methods with options that change what clients compute or what travels; every engine must agree on them too."""


class _Values(nn.Module):
    """A phase's loss of a client network as the forward of a module, so that its state can be replaced."""

    def __init__(self, net: ClientNetwork, phase: Phase) -> None:
        super().__init__()
        self.net = net
        self.phase = phase

    def forward(self, tensors: dict[str, Tensor]) -> Tensor:
        given = {name: tensors[name] for name in ("x", "y", "mask", "views") if name in tensors}
        drawn = {name.removeprefix("drawn."): t for name, t in tensors.items() if name.startswith("drawn.")}
        outcome = self.phase.loss(self.net, Batch(**given, drawn=drawn))
        return outcome[0] if isinstance(outcome, tuple) else outcome


def assert_vmap_agrees(population: Population, phase_index: int = 0, tolerance: float = 1e-5) -> None:
    """Two stacked clients, one with two padded samples, get the values and gradients that each gets alone."""
    phase = population.method.phases()[phase_index]
    sizes, width = (6, 4), 6
    clients = [_Values(_scrambled(population, phase, seed), phase) for seed in range(2)]
    alone = [_batch(population, phase, seed, size) for seed, size in enumerate(sizes)]
    padded = [_padded(batch, width) for batch in alone]
    stacked = {name: torch.stack([batch[name] for batch in padded]) for name in padded[0]}
    parameters, buffers = stack_module_state(clients)
    values = vmap(lambda state, batch: functional_call(clients[0], state, (batch,)))({**parameters, **buffers}, stacked)
    total = sum((values[index, :size].mean() for index, size in enumerate(sizes)), torch.zeros(()))
    trained = {name: tensor for name, tensor in parameters.items() if clients[0].get_parameter(name).requires_grad}
    gradients = dict(zip(trained, torch.autograd.grad(total, list(trained.values()), allow_unused=True), strict=True))
    for index, (client, batch, size) in enumerate(zip(clients, alone, sizes, strict=True)):
        expected = client(batch)
        torch.testing.assert_close(values[index, :size], expected, rtol=tolerance, atol=tolerance)
        expected.mean().backward()
        for name, gradient in gradients.items():
            own = client.get_parameter(name).grad
            if gradient is not None and own is not None:
                torch.testing.assert_close(gradient[index], own, rtol=tolerance, atol=tolerance)


def assert_engines_agree(tmp_path: Path, method: Any, **settings: Any) -> None:
    """Sequential and threads give the same rounds; threads with 1 and 3 workers give them bit by bit."""
    engines: dict[str, Callable[[Population], Any]] = {
        "sequential": SequentialEngine,
        "one": lambda population: ThreadsEngine(population, workers=1),
        "three": lambda population: ThreadsEngine(population, workers=3),
    }
    rounds = {}
    for name, engine in engines.items():
        run = support.federation(tmp_path / name, method, engine, **settings)
        run.run()
        run.engine.close()
        rounds[name] = run.folder.rounds().drop(columns="seconds")
    pd.testing.assert_frame_equal(rounds["one"], rounds["three"], check_exact=True)
    pd.testing.assert_frame_equal(rounds["sequential"], rounds["one"], check_exact=False, rtol=1e-5, atol=1e-5)


def assert_nothing_shared(tmp_path: Path, method: Any, **settings: Any) -> None:
    """After a round, two clients of one architecture share no storage, with each other or with the server."""
    run = support.federation(tmp_path / "storage", method, models=(support.Wide,), rounds=1, **settings)
    run.run()
    owners: dict[int, str] = {}
    states = {f"client {client}": run.engine.get_state(client) for client in range(run.config.clients)}
    states["server"] = {**run.server.state, **run.server.modules.state_dict()}
    for owner, state in states.items():
        for tensor in state.values():
            if tensor.numel():
                assert owners.setdefault(tensor.untyped_storage().data_ptr(), owner) == owner


def _scrambled(population: Population, phase: Phase, seed: int) -> ClientNetwork:
    """A client network in a state that says something: every float moved up a little, every flag drawn."""
    generator = torch.Generator().manual_seed(seed)
    net = population.new_network(0)
    with torch.no_grad():
        for tensor in (*net.parameters(), *net.buffers()):
            if tensor.is_floating_point():  # upwards, because variances must stay positive
                tensor += 0.2 * torch.rand(tensor.shape, generator=generator)
            elif tensor.dtype == torch.bool:
                tensor.copy_(torch.rand(tensor.shape, generator=generator) < 0.5)
    set_modes(net, phase)
    return net


def _batch(population: Population, phase: Phase, seed: int, size: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(population.dataset.labels), generator=generator)[:size]
    x, y = population.dataset.batch(chosen)
    drawn = phase.draw(generator, size) if phase.draw else {}
    batch = {"x": x, "y": y, **{f"drawn.{name}": tensor for name, tensor in drawn.items()}}
    if phase.views == 2:
        batch["views"] = random_views(x, generator)
    return batch


def random_views(x: Tensor, generator: torch.Generator) -> Tensor:
    """Two random augmentations of each image."""
    draws = {view: AUGMENTATION.draw(generator, len(x), tuple(x.shape[1:])) for view in VIEWS}
    views = augmented(x, draws)[1]
    assert views is not None
    return views


def _padded(batch: dict[str, Tensor], width: int) -> dict[str, Tensor]:
    """The batch with copies of its first sample at the end and a mask that tells them."""
    size = len(batch["y"])
    rows = torch.cat([torch.arange(size), torch.zeros(width - size, dtype=torch.int64)])
    return {**{name: tensor[rows] for name, tensor in batch.items()}, "mask": torch.arange(width) < size}
