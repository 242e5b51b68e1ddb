"""FedORGP: the server trains global prototypes to be orthogonal (Guo et al., arXiv 2502.16119)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from polyfed.message import Message
from polyfed.methods.base import Batch, ClientNetwork, Method, Reply, Server
from polyfed.methods.parts.prototypes import PrototypeMethod
from polyfed.methods.parts.tools import cosine, unit_vectors
from polyfed.methods.parts.trainable import add_trainable, train_prototypes


class FedORGP(PrototypeMethod):
    """Only directions count: features turn to their class's prototype, and the server turns prototypes apart."""

    name = "fedorgp"
    title = "FedORGP"
    paper = "Guo et al., arXiv 2502.16119"
    grid = {"weight": (1.0, 10.0, 100.0), "similarity": (1.0, 10.0, 100.0), "orthogonality": (1.0, 10.0, 100.0)}

    class Config(Method.Config):
        weight: float | None = Field(
            None,
            ge=0,
            description="weight of 1 − cosine of a feature and its prototype; none: (1 − momentum) / learning rate, "
            "the paper's 100 at its 0 and 0.01",
        )
        similarity: float = Field(
            1.0, ge=0, description="weight on the server of 1 − cosine of a client's prototype and its class's"
        )
        orthogonality: float = Field(
            10.0, ge=0, description="weight on the server of the mean |cosine| to the other classes' prototypes"
        )
        broadcast: Literal["all", "uploaded"] = Field(
            "all", description="send prototypes of all classes, or only of those that some client has uploaded so far"
        )
        server_epochs: int = Field(1, ge=1, description="passes over a round's client prototypes on the server")
        server_lr: float = Field(0.01, gt=0, description="learning rate of the prototypes on the server")
        server_batch_size: int = Field(32, ge=1, description="client prototypes per step on the server")

    config: Config

    def pull(self, net: ClientNetwork, features: Tensor, batch: Batch) -> Tensor:
        # Eq. 8 of the paper; its code says what the regulariser is.
        away = 1 - cosine(features, net.prototypes.vectors[batch.y])
        # The paper's weight diverges in larger steps than its own: what matters is their product.
        weight = self.config.weight if self.config.weight is not None else 1 / self.training.reach
        return weight * torch.where(net.prototypes.known[batch.y], away, 0.0)

    def closeness(self, net: ClientNetwork, features: Tensor) -> Tensor:
        scores: Tensor = net.prototypes.closeness(features, directions=True)
        return scores

    def predict(self, net: ClientNetwork, x: Tensor) -> dict[str, Tensor]:
        rules = super().predict(net, x)
        return {"classifier": rules["classifier"], **rules}  # the method's own rule comes first

    def sized(self, message: Message) -> Mapping[str, Tensor]:
        # A step across a feature's direction makes it longer, so features grow fast at first. The server uses
        # directions alone: there is nothing unusual about values of this size.
        return {"prototypes": message.tensors["prototypes"].abs().clamp(min=10.0)}

    def start(self, server: Server) -> None:
        super().start(server)
        add_trainable(server, self.task)

    def aggregate(self, server: Server, replies: Sequence[Reply]) -> None:
        vectors = torch.cat([reply.message.tensors["prototypes"] for reply in replies])
        labels = torch.cat([reply.message.metadata["labels"] for reply in replies])
        if len(labels) == 0:
            return
        config = self.config
        loss = partial(orthogonality_loss, similarity=config.similarity, orthogonality=config.orthogonality)
        train_prototypes(server, self.task, config, vectors, labels, loss)


def orthogonality_loss(
    prototypes: Tensor, vectors: Tensor, labels: Tensor, similarity: float, orthogonality: float
) -> Tensor:
    """Per client prototype: turned from its class's global prototype, and not at right angles to the others.

    Eqs. 3 to 5 of the paper. A single class has no others, so only the first term is left.
    """
    cosines = unit_vectors(vectors) @ unit_vectors(prototypes).T
    own = cosines.gather(1, labels[:, None])[:, 0]
    others = torch.ones_like(cosines).scatter(1, labels[:, None], 0.0)
    crossed = (cosines.abs() * others).sum(1) / max(1, len(prototypes) - 1)
    return similarity * (1 - own) + orthogonality * crossed
