"""FedTGP: the server trains the global prototypes to stay apart (Zhang et al., AAAI 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from polyfed.errors import InputError
from polyfed.methods.base import Reply, Server
from polyfed.methods.parts.prototypes import PrototypeMethod
from polyfed.methods.parts.tools import mean_by_class, store_vectors
from polyfed.server.training import check_finite, train_on_vectors


class TrainablePrototypes(nn.Module):
    """A trainable vector per class and a network that turns it into the class's prototype; both stay on the server."""

    def __init__(self, classes: int, size: int, *, network: bool) -> None:
        super().__init__()
        self.vectors = nn.Parameter(torch.randn(classes, size))
        layers = [nn.Linear(size, size), nn.ReLU(), nn.Linear(size, size)] if network else []
        self.network = nn.Sequential(*layers)

    def forward(self) -> Tensor:
        prototypes: Tensor = self.network(self.vectors)
        return prototypes


class FedTGP(PrototypeMethod):
    """Like FedProto, but global prototypes are learned: near their class's client prototypes, far from all others."""

    name = "fedtgp"
    title = "FedTGP"
    paper = "Zhang et al., AAAI 2024"
    grid = {"weight": (0.01, 0.1, 1.0), "threshold": (1.0, 10.0, 100.0, 1000.0), "server_epochs": (1, 10, 100)}

    class Config(PrototypeMethod.Config):
        margin: Literal["max-pair", "max-min", "fixed", "none"] = Field(
            "max-pair",
            description="margin between classes: the largest distance between two class centres, the largest distance "
            "from a class centre to its nearest neighbour, the threshold itself, or none",
        )
        threshold: float = Field(100.0, gt=0, description="largest margin; the margin itself if that is fixed")
        network: bool = Field(
            True, description="a two-layer network turns trained vectors into prototypes; false: the vectors are used"
        )
        broadcast: Literal["all", "uploaded"] = Field(
            "all", description="send prototypes of all classes, or only of those that some client has uploaded so far"
        )
        send_untrained: bool = Field(
            False, description="send prototypes in round 1 too, before they are trained, as Algorithm 1 of the paper"
        )
        server_epochs: int = Field(100, ge=1, description="passes over a round's client prototypes on the server")
        server_lr: float = Field(0.01, gt=0, description="learning rate of the prototypes on the server")
        server_batch_size: int = Field(10, ge=1, description="client prototypes per step on the server")

        @model_validator(mode="after")
        def _sends_what_it_has(self) -> Self:
            if self.send_untrained and self.broadcast == "uploaded":
                raise InputError(
                    "fedtgp's send_untrained sends prototypes of all classes before any was uploaded, but broadcast is "
                    "'uploaded': leave out one of the two."
                )
            return self

    config: Config

    def start(self, server: Server) -> None:
        super().start(server)
        size, classes = self.task.feature_size, self.task.classes
        server.modules["prototypes"] = self.task.seeded_module(
            lambda: TrainablePrototypes(classes, size, network=self.config.network), "trainable prototypes"
        )
        if self.config.send_untrained:
            with torch.no_grad():
                first = server.modules["prototypes"]().clone()
            server.state.update(store_vectors(server.state, "prototypes", first, torch.arange(classes)))

    def aggregate(self, server: Server, replies: Sequence[Reply]) -> None:
        vectors = torch.cat([reply.message.tensors["prototypes"] for reply in replies])
        labels = torch.cat([reply.message.metadata["labels"] for reply in replies])
        if len(labels) == 0:
            return
        prototypes = server.modules["prototypes"].to(server.device)
        margin = self.margin(vectors, labels).to(server.device)

        def loss(module: nn.Module, chosen: Tensor, classes: Tensor) -> Tensor:
            return contrastive_loss(module(), chosen, classes, margin)

        config = self.config
        train_on_vectors(
            prototypes,
            vectors.to(server.device),
            labels.to(server.device),
            loss=loss,
            epochs=config.server_epochs,
            batch_size=config.server_batch_size,
            lr=config.server_lr,
            generator=server.generator("prototypes"),
            work=6 * self.task.classes * self.task.feature_size**2,
        )
        check_finite(prototypes, "prototypes", server.round, config.server_lr, [vectors])
        # A class that nobody has uploaded has a prototype too, pushed away from all others.
        sent = torch.arange(self.task.classes)
        if config.broadcast == "uploaded":
            sent = torch.cat([labels, server.state["prototypes.known"].nonzero().flatten()]).unique()
        with torch.no_grad():
            trained = prototypes().cpu()[sent]
        server.state.update(store_vectors(server.state, "prototypes", trained, sent))

    def margin(self, vectors: Tensor, labels: Tensor) -> Tensor:
        """δ(t), how much farther other classes' client prototypes must be: Eq. 9 of the paper."""
        threshold = torch.tensor(self.config.threshold)
        if self.config.margin == "fixed":
            return threshold
        if self.config.margin == "none":
            return torch.zeros_like(threshold)
        centres, _ = mean_by_class(vectors, labels, torch.ones_like(labels), self.task.classes)
        if len(centres) == 1:  # no pair of classes to measure
            return threshold
        apart = _distances(centres, centres)
        if self.config.margin == "max-min":
            apart = (apart + torch.diag(torch.full_like(apart[0], torch.inf))).amin(1)
        return torch.minimum(apart.max(), threshold)


def contrastive_loss(prototypes: Tensor, vectors: Tensor, labels: Tensor, margin: Tensor) -> Tensor:
    """Per client prototype, how far it is from being nearest to its class's global prototype by the margin.

    Eq. 10 of the paper: cross entropy over all classes of minus the distances, the own distance made longer.
    """
    own = nn.functional.one_hot(labels, len(prototypes))
    logits = -_distances(vectors, prototypes) - margin * own
    return nn.functional.cross_entropy(logits, labels, reduction="none")


def _distances(a: Tensor, b: Tensor) -> Tensor:
    # Never by the expanded square, which loses small distances and can go below zero; the gradient at zero is zero.
    return torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist")
