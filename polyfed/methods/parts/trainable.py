"""Global prototypes that the server trains on the clients' prototypes, instead of averaging them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from polyfed.methods.base import Server, Task
from polyfed.methods.parts.tools import store_vectors
from polyfed.server.training import FusedSteps, check_finite, train_on_vectors

PrototypeLoss = Callable[..., Tensor]
"""From (global prototypes, client prototypes, their classes), and what is given by name, to one value for each."""


class TrainablePrototypes(nn.Module):
    """A trainable vector per class and a network that turns it into the class's prototype; both stay on the server."""

    def __init__(self, classes: int, size: int, *, network: bool = True) -> None:
        super().__init__()
        self.vectors = nn.Parameter(torch.randn(classes, size))
        layers = [nn.Linear(size, size), nn.ReLU(), nn.Linear(size, size)] if network else []
        self.network = nn.Sequential(*layers)

    def forward(self) -> Tensor:
        prototypes: Tensor = self.network(self.vectors)
        return prototypes


class ServerTraining(Protocol):
    """The options of a method whose server trains prototypes."""

    @property
    def broadcast(self) -> Literal["all", "uploaded"]: ...
    @property
    def server_epochs(self) -> int: ...
    @property
    def server_lr(self) -> float: ...
    @property
    def server_batch_size(self) -> int: ...


def add_trainable(server: Server, task: Task, *, network: bool = True) -> None:
    """Give the server trainable prototypes, initialised in the same way for every caller."""
    server.modules["prototypes"] = task.seeded_module(
        lambda: TrainablePrototypes(task.classes, task.feature_size, network=network), "trainable prototypes"
    )


def train_prototypes(
    server: Server,
    task: Task,
    config: ServerTraining,
    vectors: Tensor,
    labels: Tensor,
    loss_of: PrototypeLoss,
    fused: FusedSteps | None = None,
    given: Mapping[str, Tensor] | None = None,
) -> None:
    """Train the server's prototypes on a round's client prototypes and keep those that will be sent.

    `fused` may make steps on the same loss for a GPU. Both are the same in every round; tensors that are not are
    `given` to them by name.
    """
    prototypes = server.modules["prototypes"].to(server.device)

    def loss(module: nn.Module, chosen: Tensor, classes: Tensor, **further: Tensor) -> Tensor:
        return loss_of(module(), chosen, classes, **further)

    train_on_vectors(
        prototypes,
        vectors.to(server.device),
        labels.to(server.device),
        loss=loss,
        epochs=config.server_epochs,
        batch_size=config.server_batch_size,
        lr=config.server_lr,
        generator=server.generator("prototypes"),
        work=6 * task.classes * task.feature_size**2,
        fused=fused,
        given={name: tensor.to(server.device) for name, tensor in (given or {}).items()},
        kept=server.kept,
        notes=server.notes,
    )
    check_finite(prototypes, "prototypes", server.round, config.server_lr, [vectors])
    # A class that nobody has uploaded has a prototype too, pushed away from all others.
    sent = torch.arange(task.classes)
    if config.broadcast == "uploaded":
        sent = torch.cat([labels, server.state["prototypes.known"].nonzero().flatten()]).unique()
    with torch.no_grad():
        trained = prototypes().cpu()[sent]
    server.state.update(store_vectors(server.state, "prototypes", trained, sent))
