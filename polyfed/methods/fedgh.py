"""FedGH: the server trains a global head on the clients' class means (Yi et al., ACM MM 2023)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic import Field
from torch import Tensor

from polyfed.message import Message, Schema
from polyfed.methods.base import Collect, Method, Reply, Server, Trained
from polyfed.methods.parts.tools import class_vectors_schema, module_state
from polyfed.server.training import check_finite, train_on_vectors


class FedGH(Method):
    """Clients send the mean feature of each of their classes; a head trained on all of them replaces every client's."""

    name = "fedgh"
    title = "FedGH"
    paper = "Yi et al., ACM MM 2023"
    sends = "class prototypes (mean features)"
    reveals = (
        "Which classes a client holds, and the mean feature of each. The mean of a few samples is close to each of "
        "them."
    )
    requires = ("features", "head")
    collect = Collect()
    receives = ("model.head",)
    grid = {"server_lr": (1e-3, 1e-2, 1e-1), "server_epochs": (1, 10)}

    class Config(Method.Config):
        server_lr: float = Field(0.01, gt=0, description="learning rate of the head on the server")
        server_epochs: int = Field(1, ge=1, description="passes over a round's class means on the server")
        server_batch_size: int = Field(1, ge=1, description="class means per step on the server")

    config: Config

    def upload(self, client: Trained) -> Message:
        assert client.statistics is not None
        return Message({"prototypes": client.statistics.means}, {"labels": client.statistics.labels})

    def start(self, server: Server) -> None:
        # In evaluation mode throughout: class means are no batch of samples for dropout or batch norm.
        server.modules["head"] = self.task.new_head().eval()

    def download(self, server: Server, client: int, classes: Tensor | None) -> Message:
        return Message(module_state("model.head", server.modules["head"]))

    def schema(self) -> Schema:
        return class_vectors_schema("prototypes", self.task.classes, self.task.feature_size)

    def aggregate(self, server: Server, replies: Sequence[Reply]) -> None:
        vectors = torch.cat([reply.message.tensors["prototypes"] for reply in replies])
        labels = torch.cat([reply.message.metadata["labels"] for reply in replies])
        if len(labels) == 0:
            return
        head = server.modules["head"]
        train_on_vectors(
            head,
            vectors,
            labels,
            epochs=self.config.server_epochs,
            batch_size=self.config.server_batch_size,
            lr=self.config.server_lr,
            generator=server.generator("header"),  # an address: another name would change the numbers of runs
        )
        check_finite(head, "head", server.round, self.config.server_lr, [vectors])
