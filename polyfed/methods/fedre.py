"""FedRE: the server trains a global head on one random mixture of class means per client (Yao et al., CVPR 2026)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic import Field
from torch import Tensor, nn

from polyfed.errors import BadMessage
from polyfed.message import Floats, Labels, Message, Schema
from polyfed.methods.base import Method, Reply, Server, Trained
from polyfed.methods.fedgh import FedGH
from polyfed.server.training import check_finite, train_on_vectors


class FedRE(FedGH):
    """Like FedGH, but a client mixes its class means into one vector, and the vector's label is the same mixture."""

    name = "fedre"
    title = "FedRE"
    paper = "Yao et al., CVPR 2026"
    sends = "one random mixture of class prototypes, and its weights"
    reveals = (
        "Which classes a client holds, and one mixture of their mean features with its weights, new in every round. "
        "While features hardly change, as many rounds as there are classes are enough to calculate the means. A client "
        "with one class sends its mean."
    )
    grid = {"server_lr": (1e-3, 1e-2, 1e-1), "server_epochs": (1, 10)}

    class Config(Method.Config):
        server_lr: float = Field(0.01, gt=0, description="learning rate of the head on the server")
        server_epochs: int = Field(1, ge=1, description="passes over a round's mixtures on the server")
        server_batch_size: int = Field(32, ge=1, description="mixtures per step on the server")

    config: Config  # type: ignore[assignment]  # the same options as FedGH's, with other defaults

    def upload(self, client: Trained) -> Message:
        assert client.statistics is not None and client.generator is not None
        means, labels = client.statistics.means, client.statistics.labels
        # One number for each class of the task, so that all engines draw the same; 1 − u is never zero.
        drawn = (1 - torch.rand(self.task.classes, generator=client.generator)).to(means.device)[labels]
        weights = drawn / drawn.sum()
        return Message({"mixture": (weights[:, None] * means).sum(0), "weights": weights}, {"labels": labels})

    def schema(self) -> Schema:
        tensors = {"mixture": Floats((self.task.feature_size,)), "weights": Floats(("seen",))}
        return Schema(tensors, {"labels": Labels(self.task.classes)})

    def check(self, message: Message) -> None:
        super().check(message)
        weights = message.tensors["weights"]
        if bool((weights < 0).any()):
            raise BadMessage("'weights' holds a negative weight.")
        if len(weights) and abs(float(weights.sum()) - 1) > 1e-4:
            raise BadMessage(f"'weights' sum to {float(weights.sum()):g}, not 1.")

    def aggregate(self, server: Server, replies: Sequence[Reply]) -> None:
        mixed = [reply.message for reply in replies if len(reply.message.metadata["labels"])]
        if not mixed:
            return
        mixtures = torch.stack([message.tensors["mixture"] for message in mixed])
        targets = torch.zeros(len(mixed), self.task.classes)
        for row, message in zip(targets, mixed, strict=True):
            row[message.metadata["labels"]] = message.tensors["weights"]
        head, config = server.modules["head"], self.config
        train_on_vectors(
            head,
            mixtures,
            targets,
            loss=mixture_loss,
            epochs=config.server_epochs,
            batch_size=config.server_batch_size,
            lr=config.server_lr,
            generator=server.generator("header"),
        )
        check_finite(head, "head", server.round, config.server_lr, [mixtures])


def mixture_loss(head: nn.Module, mixtures: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of the head's output with mixed labels, times the number of mixtures.

    The released code adds up the losses of a batch; here a step uses their mean.
    """
    values: Tensor = -(targets * nn.functional.log_softmax(head(mixtures), dim=1)).sum(1)
    return values * len(values)
