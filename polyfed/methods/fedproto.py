"""FedProto: clients share the mean feature of each of their classes (Tan et al., AAAI 2022)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field

from polyfed.message import Message, Schema
from polyfed.methods.base import Reply, Server, Trained
from polyfed.methods.parts.prototypes import DistanceMethod
from polyfed.methods.parts.tools import class_vectors_schema, mean_by_class, store_vectors


class FedProto(DistanceMethod):
    """Features are pulled towards the federation's mean feature (prototype) of the sample's class."""

    name = "fedproto"
    title = "FedProto"
    paper = "Tan et al., AAAI 2022"
    grid = {"weight": (0.01, 0.1, 1.0)}

    class Config(DistanceMethod.Config):
        mean: Literal["plain", "samples"] = Field(
            "plain",
            description="global prototypes weight a class's holders equally, or by their samples of the class",
        )

    config: Config

    def upload(self, client: Trained) -> Message:
        message = super().upload(client)
        if self.config.mean == "plain":
            return message
        assert client.statistics is not None
        return Message(message.tensors, {**message.metadata, "counts": client.statistics.counts})

    def schema(self) -> Schema:
        counts = self.config.mean == "samples"
        return class_vectors_schema("prototypes", self.task.classes, self.task.feature_size, counts=counts)

    def aggregate(self, server: Server, replies: Sequence[Reply]) -> None:
        # Eq. 6 of the paper divides twice; a mean over the holders is what it means and what its code does. A class
        # that no participant of this round holds keeps its last prototype.
        vectors = torch.cat([reply.message.tensors["prototypes"] for reply in replies])
        labels = torch.cat([reply.message.metadata["labels"] for reply in replies])
        weights = torch.ones(len(labels))
        if self.config.mean == "samples":
            weights = torch.cat([reply.message.metadata["counts"] for reply in replies])
        means, seen = mean_by_class(vectors, labels, weights, self.task.classes)
        server.state.update(store_vectors(server.state, "prototypes", means, seen))
