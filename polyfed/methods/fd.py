"""FD, federated distillation: clients share the mean logits of each of their classes (Jeong et al., 2018)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from polyfed.message import Message, Schema, State
from polyfed.methods.base import Batch, ClientNetwork, Knowledge, Method, Phase, Reply, Server, SplitNetwork, Trained
from polyfed.methods.parts.statistics import means_from_sums
from polyfed.methods.parts.tools import ClassVectors, class_vectors_schema, cross_entropy, store_vectors

NOBODY, SEVERAL = -1, -2
"""In the list of who has sent a class, where that is not one client's number."""


class FD(Method):
    """Logits are pulled towards the federation's mean logits of the sample's class."""

    name = "fd"
    title = "FD (FedDistill)"
    paper = "Jeong et al., NeurIPS workshop 2018"
    sends = "mean logits per class"
    reveals = (
        "Which classes a client holds, and how its network scores each of them on average: little about a single "
        "sample."
    )
    receives = ("targets",)
    grid = {"weight": (0.01, 0.1, 1.0, 10.0)}

    class Config(Method.Config):
        weight: float = Field(1.0, ge=0, description="weight of the difference from the mean logits")
        loss: Literal["mse", "soft-ce"] = Field(
            "mse",
            description="mean squared difference from the mean logits, or cross entropy with their softmax as target",
        )
        mean: Literal["all", "leave-one-out"] = Field(
            "leave-one-out",
            description="a client receives the mean over all who sent the class, or over the others only",
        )

    config: Config

    def client_modules(self, model: SplitNetwork) -> dict[str, nn.Module]:
        return {"targets": ClassVectors(self.task.classes, self.task.classes)}

    def receive(self, state: Mapping[str, Tensor], message: Message, client: Knowledge) -> State:
        # Logits of a class that nobody sent last time are out of date: begin with none.
        empty = {name: torch.zeros_like(state[name]) for name in ("targets.vectors", "targets.known")}
        if not message.tensors:
            return empty
        return store_vectors(empty, "targets", message.tensors["logits"], message.metadata["labels"])

    def phases(self) -> list[Phase]:
        # The logits are gathered while the client trains, over all epochs, as in the paper: no pass of their own.
        loss = self.tracked_loss
        return [Phase("model", trains=("model",), loss=loss, epochs=self.training.epochs)]

    def tracked_loss(self, net: ClientNetwork, batch: Batch) -> tuple[Tensor, Tensor]:
        """The loss and the logits, per sample."""
        logits = net(batch.x)
        targets: ClassVectors = net.targets
        if self.config.loss == "mse":
            away = targets.distance(logits, batch.y, "mse")
        else:
            # The softmax of an unknown row is uniform, so this is finite and `where` takes it out.
            wanted = targets.vectors[batch.y].softmax(1)
            away = torch.where(targets.known[batch.y], -(wanted * logits.log_softmax(1)).sum(1), 0.0)
        return cross_entropy(logits, batch.y) + self.config.weight * away, logits

    def upload(self, client: Trained) -> Message:
        own = client.tracked
        if own is None:  # no batch was fit to train on
            nothing = torch.zeros(0, self.task.classes)
            return Message({"logits": nothing}, {"labels": torch.zeros(0, dtype=torch.int64)})
        return Message({"logits": own.means}, {"labels": own.labels})

    def start(self, server: Server) -> None:
        server.state["owners"] = torch.full((self.task.classes,), NOBODY)
        self._keep_round(server, [])

    def download(self, server: Server, client: int, classes: Tensor | None) -> Message:
        state = server.state
        sums, holders = state["sums"].clone(), state["holders"].clone()
        if self.config.mean == "leave-one-out":
            own = state["senders"] == client
            sums.index_add_(0, state["labels"][own], -state["logits"][own].double())
            holders[state["labels"][own]] -= 1
        # A class of one holder is left out of what that holder receives: nobody else knows it.
        means = means_from_sums(sums, holders)
        return Message({"logits": means.means}, {"labels": means.labels}) if len(means.labels) else Message()

    def schema(self) -> Schema:
        return class_vectors_schema("logits", self.task.classes, self.task.classes)

    def aggregate(self, server: Server, replies: Sequence[Reply]) -> None:
        self._keep_round(server, replies)
        owners = server.state["owners"].clone()
        for reply in replies:
            labels = reply.message.metadata["labels"]
            first = (owners[labels] == NOBODY) | (owners[labels] == reply.client)
            owners[labels] = torch.where(first, reply.client, SEVERAL)
        server.state["owners"] = owners
        # Said early, and again when it is certain: with few participants a second owner may come later.
        if server.round in (1, self.task.rounds) and not bool((owners == SEVERAL).any()):
            server.notes.append(
                "no class has been sent by two clients so far: with one owner per class nobody learns from anybody "
                "else, and FD trains every client alone"
            )

    def _keep_round(self, server: Server, replies: Sequence[Reply]) -> None:
        # Built from this round's replies alone: logits grow in training, so those of earlier rounds would hold it back.
        count = self.task.classes
        logits = torch.cat([torch.zeros(0, count), *(reply.message.tensors["logits"] for reply in replies)])
        labels = torch.cat([torch.zeros(0, dtype=torch.int64), *(r.message.metadata["labels"] for r in replies)])
        sums = torch.zeros(count, count, dtype=torch.float64).index_add_(0, labels, logits.double())
        server.state.update(sums=sums, holders=torch.bincount(labels, minlength=count))
        if self.config.mean == "leave-one-out":
            senders = [torch.full_like(r.message.metadata["labels"], r.client) for r in replies]
            server.state.update(logits=logits, labels=labels, senders=torch.cat([labels[:0], *senders]))
