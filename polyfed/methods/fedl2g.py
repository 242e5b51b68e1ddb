"""FedL2G: the server learns vectors that guide local training (Zhang et al., arXiv 2410.06490)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.func import grad, jvp

from polyfed.errors import InputError
from polyfed.message import Message, Schema, State
from polyfed.methods.base import (
    Applied,
    Batch,
    ClientNetwork,
    Common,
    Method,
    Phase,
    Probe,
    Reply,
    Server,
    SplitNetwork,
    Task,
    Trained,
    Training,
)
from polyfed.methods.parts.tools import class_vectors_schema, cross_entropy, distance, mean_by_class

QUIZ = 0.1
"""The share of the training samples that only ask whether the guides help."""
LONGEST_WARMUP = 50
SERVER_LR = {"features": 100.0, "logits": 0.1}


class Guides(nn.Module):
    """One guiding vector per class, as the client received them."""

    vectors: Tensor

    def __init__(self, classes: int, size: int) -> None:
        super().__init__()
        self.register_buffer("vectors", torch.zeros(classes, size))


class FedL2G(Method):
    """Features (or logits) are pulled towards a vector of the sample's class, which the server learns.

    A client tells the server how the vectors should move so that a step of training with them lowers its cross entropy
    on other samples, the quiz, on which it never trains.
    """

    name = "fedl2g"
    title = "FedL2G"
    paper = "Zhang et al., arXiv 2410.06490"
    sends = "gradients of guiding vectors per class"
    reveals = (
        "Which classes are among a few of the client's samples, and for each of them one vector that mixes these "
        "samples with others of the client: little about a single sample, unless it is alone in its class."
    )
    requires: tuple[Common, ...] = ("features",)
    receives = ("guides",)
    depends_on_rounds = True
    grid = {"guides": ("features", "logits"), "server_lr": (0.01, 0.1, 1.0, 10.0, 100.0)}

    class Config(Method.Config):
        guides: Literal["features", "logits"] = Field(
            "features", description="what the vectors guide: the features (FedL2G-f) or the logits (FedL2G-l)"
        )
        server_lr: float | None = Field(
            None, gt=0, description="learning rate of the vectors; none: 100 for features, 0.1 for logits"
        )
        server_clip: float = Field(100.0, gt=0, description="largest norm of the gradient of all vectors together")
        warmup: int | None = Field(
            None,
            ge=0,
            description="first rounds, in which only the vectors learn; none: 50, or a quarter of the rounds if less",
        )

    config: Config

    def __init__(self, config: Config, task: Task, training: Training) -> None:
        super().__init__(config, task, training)
        if config.warmup is not None and config.warmup >= task.rounds:
            raise InputError(
                f"fedl2g trains no network in its first method.warmup = {config.warmup} rounds, and the run has only "
                f"{task.rounds}: set method.warmup to less, or to none for a quarter of the rounds."
            )
        self.requires = self.needs(self.config)
        self.depends_on_rounds = config.warmup is None
        self.probe = Probe(self.gradients, study=(QUIZ, 1.0), quiz=(0.0, QUIZ), batch=training.batch_size)

    @classmethod
    def needs(cls, config: Method.Config) -> tuple[Common, ...]:
        return cls.requires if getattr(config, "guides", "features") == "features" else ()

    def misses(self, samples: int) -> str:
        assert self.probe is not None
        return "" if any(self.probe.sizes(samples)) else "too few training samples for a quiz, so nothing is sent"

    @property
    def size(self) -> int:
        """The length of a guiding vector."""
        return self.task.feature_size if self.config.guides == "features" else self.task.classes

    @property
    def warmup(self) -> int:
        """The number of rounds in which only the guiding vectors learn."""
        least = min(LONGEST_WARMUP, self.task.rounds // 4)
        return least if self.config.warmup is None else self.config.warmup

    # The client's side -----------------------------------------------------------------------------------------------

    def client_modules(self, model: SplitNetwork) -> dict[str, nn.Module]:
        return {"guides": Guides(self.task.classes, self.size)}

    def phases(self) -> list[Phase]:
        return [
            Phase(
                "model", trains=("model",), loss=self.loss, epochs=self.training.epochs, part=(QUIZ, 1.0),
                first_round=self.warmup + 1,
            )
        ]  # fmt: skip

    def loss(self, net: ClientNetwork, batch: Batch) -> Tensor:
        features = net.features(batch.x)
        logits = net.head(features)
        guided = features if self.config.guides == "features" else logits
        return cross_entropy(logits, batch.y) + distance(guided, net.guides.vectors[batch.y], "mse")

    def gradients(self, net: ClientNetwork, parameters: State, study: Batch, quiz: Batch) -> State:
        """The gradient of the quiz's cross entropy after one step on the study batch, for each guiding vector.

        The vectors enter the step only through the squared distance, whose gradient is linear in them. So their
        gradient is a derivative of what is guided along one direction, and needs no second derivatives.
        """
        step = grad(lambda own: mean(Applied(net, self.loss).on(own)(study), study))(parameters)
        moved = {name: tensor - self.training.lr * step[name] for name, tensor in parameters.items()}
        direction = grad(lambda own: mean(Applied(net, quiz_loss).on(own)(quiz), quiz))(moved)
        guided = Applied(net, type(net).features if self.config.guides == "features" else type(net).__call__)
        change = jvp(lambda own: guided.on(own)(study.x), (parameters,), (direction,))[1]
        # In 64 bits, because a GPU may round the factors of a 32-bit product.
        belongs = nn.functional.one_hot(study.y, self.task.classes).double() * share(study)[:, None]
        gradients = 2 * self.training.lr / self.size * (belongs.mT @ change.double())
        return {"gradients": gradients.float(), "seen": (belongs > 0).any(0)}

    def upload(self, client: Trained) -> Message:
        if client.probed is None:  # too few samples for a quiz
            nothing = torch.zeros(0, self.size)
            return Message({"gradients": nothing}, {"labels": torch.zeros(0, dtype=torch.int64)})
        labels = client.probed["seen"].nonzero().flatten()
        return Message({"gradients": client.probed["gradients"][labels]}, {"labels": labels})

    # The server's side -----------------------------------------------------------------------------------------------

    def start(self, server: Server) -> None:
        server.state["guides.vectors"] = torch.randn(
            self.task.classes, self.size, generator=server.generator("guiding vectors")
        )

    def download(self, server: Server, client: int, classes: Tensor | None) -> Message:
        return Message(server.state)

    def schema(self) -> Schema:
        return class_vectors_schema("gradients", self.task.classes, self.size)

    def aggregate(self, server: Server, replies: Sequence[Reply]) -> None:
        gradients = torch.cat([reply.message.tensors["gradients"] for reply in replies])
        labels = torch.cat([reply.message.metadata["labels"] for reply in replies])
        means, seen = mean_by_class(gradients, labels, torch.ones(len(labels)), self.task.classes)
        factor = min(1.0, self.config.server_clip / max(float(means.norm()), 1e-12))
        vectors = server.state["guides.vectors"].clone()
        vectors[seen] -= (self.config.server_lr or SERVER_LR[self.config.guides]) * factor * means
        server.state["guides.vectors"] = vectors


def quiz_loss(net: ClientNetwork, batch: Batch) -> Tensor:
    """Cross entropy alone."""
    return cross_entropy(net(batch.x), batch.y)


def share(batch: Batch) -> Tensor:
    """Each sample's share of a batch: equal for all real ones, 0 for padding."""
    real = torch.ones_like(batch.y, dtype=torch.bool) if batch.mask is None else batch.mask
    return real / real.sum().clamp(min=1)


def mean(values: Tensor, batch: Batch) -> Tensor:
    """The mean over a batch's real samples."""
    return (values * share(batch)).sum()
