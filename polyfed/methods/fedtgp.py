"""FedTGP: the server trains the global prototypes to stay apart (Zhang et al., AAAI 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from polyfed.errors import InputError
from polyfed.methods.base import Reply, Server
from polyfed.methods.parts.prototypes import DistanceMethod
from polyfed.methods.parts.separation import separating_steps
from polyfed.methods.parts.tools import mean_by_class, store_vectors
from polyfed.methods.parts.trainable import add_trainable, train_prototypes


class FedTGP(DistanceMethod):
    """Like FedProto, but global prototypes are learned: near their class's client prototypes, far from all others."""

    name = "fedtgp"
    title = "FedTGP"
    paper = "Zhang et al., AAAI 2024"
    grid = {"weight": (0.01, 0.1, 1.0), "threshold": (1.0, 10.0, 100.0, 1000.0), "server_epochs": (1, 10, 100)}

    class Config(DistanceMethod.Config):
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
        add_trainable(server, self.task, network=self.config.network)
        if self.config.send_untrained:
            with torch.no_grad():
                first = server.modules["prototypes"]().clone()
            server.state.update(store_vectors(server.state, "prototypes", first, torch.arange(self.task.classes)))

    def aggregate(self, server: Server, replies: Sequence[Reply]) -> None:
        vectors = torch.cat([reply.message.tensors["prototypes"] for reply in replies])
        labels = torch.cat([reply.message.metadata["labels"] for reply in replies])
        if len(labels) == 0:
            return
        given = {"margin": self.margin(vectors, labels)}
        fused = partial(separating_steps, notes=server.notes)
        train_prototypes(server, self.task, self.config, vectors, labels, contrastive_loss, fused, given)

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
