"""FedProto: clients share the mean feature of each of their classes (Tan et al., AAAI 2022)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from polyfed.message import Message, Schema, State
from polyfed.methods.base import Batch, ClientNetwork, Collect, Knowledge, Method, Reply, Server, SplitNetwork, Trained
from polyfed.methods.tools import (
    ClassVectors,
    class_vectors_schema,
    cross_entropy,
    known_vectors,
    mean_by_class,
    store_vectors,
)


class FedProto(Method):
    """Features are pulled towards the federation's mean feature (prototype) of the sample's class."""

    name = "fedproto"
    title = "FedProto"
    paper = "Tan et al., AAAI 2022"
    shares = "class prototypes (mean features)"
    requires = ("features",)
    collect = Collect()

    class Config(Method.Config):
        weight: float | None = Field(
            None, ge=0, description="weight of the distance to the prototype; none: 0.1 for euclidean, 10 for mse"
        )
        distance: Literal["euclidean", "mse"] = Field("euclidean", description="distance of a feature to its prototype")
        mean: Literal["plain", "samples"] = Field(
            "plain", description="the global prototype weights its holders equally or by their samples of the class"
        )

    config: Config

    def client_modules(self, model: SplitNetwork) -> dict[str, nn.Module]:
        return {"prototypes": ClassVectors(self.task.classes, model.feature_size)}

    def receive(self, state: Mapping[str, Tensor], message: Message, client: Knowledge) -> State:
        if not message.tensors:
            return {}
        return store_vectors(state, "prototypes", message.tensors["prototypes"], message.metadata["labels"])

    def loss(self, net: ClientNetwork, batch: Batch) -> Tensor:
        config = self.config
        weight = config.weight if config.weight is not None else {"euclidean": 0.1, "mse": 10.0}[config.distance]
        features = net.features(batch.x)
        # A class without a global prototype has no second term.
        away: Tensor = net.prototypes.distance(features, batch.y, config.distance)
        return cross_entropy(net.head(features), batch.y) + weight * away

    def upload(self, client: Trained) -> Message:
        assert client.statistics is not None
        own = client.statistics
        counts = {"counts": own.counts} if self.config.mean == "samples" else {}
        return Message({"prototypes": own.means}, {"labels": own.labels, **counts})

    def predict(self, net: ClientNetwork, x: Tensor) -> dict[str, Tensor]:
        features = net.features(x)
        classifier = net.head(features)
        # Before the first prototypes arrive there is only the classifier.
        nearest = torch.where(net.prototypes.known.any(), net.prototypes.closeness(features), classifier)
        return {"prototypes": nearest, "classifier": classifier}

    def start(self, server: Server) -> None:
        empty = ClassVectors(self.task.classes, self.task.feature_size)
        server.state.update({f"prototypes.{name}": tensor for name, tensor in empty.state_dict().items()})

    def download(self, server: Server, client: int, classes: Tensor | None) -> Message:
        return known_vectors(server.state, "prototypes")

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
