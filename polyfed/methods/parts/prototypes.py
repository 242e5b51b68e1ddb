"""What methods with prototypes share: the client's side, which does not depend on how the server makes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from polyfed.message import Message, Schema, State
from polyfed.methods.base import Batch, ClientNetwork, Collect, Knowledge, Method, Server, SplitNetwork, Trained
from polyfed.methods.parts.tools import (
    ClassVectors,
    class_vectors_schema,
    cross_entropy,
    distance,
    known_vectors,
    store_all,
    store_vectors,
)


class Prototypes(ClassVectors):
    """The prototypes that a client received, and which classes are its own."""

    own: Tensor

    def __init__(self, classes: int, size: int) -> None:
        super().__init__(classes, size)
        self.register_buffer("own", torch.zeros(classes, dtype=torch.bool))


class PrototypeMethod(Method):
    """Clients send the mean feature of each of their classes and pull features towards the prototypes they receive.

    The server keeps its prototypes in `prototypes.vectors` and which of them exist in `prototypes.known`.
    """

    sends = "class prototypes (mean features)"
    reveals = (
        "Which classes a client holds, and the mean feature of each. The mean of a few samples is close to each of "
        "them."
    )
    requires = ("features",)
    collect = Collect()
    kept_fresh = ("prototypes",)

    def client_modules(self, model: SplitNetwork) -> dict[str, nn.Module]:
        return {"prototypes": Prototypes(self.task.classes, model.feature_size)}

    def receive(self, state: Mapping[str, Tensor], message: Message, client: Knowledge) -> State:
        own = {"prototypes.own": client.counts > 0}
        if not message.tensors:
            return own
        return own | store_vectors(state, "prototypes", message.tensors["prototypes"], message.metadata["labels"])

    def receive_all(
        self, states: Sequence[Mapping[str, Tensor]], messages: Sequence[Message], clients: Sequence[Knowledge]
    ) -> list[State] | None:
        own = torch.stack([client.counts for client in clients]) > 0
        changed: list[State] = [{"prototypes.own": each} for each in own]
        sent = [place for place, message in enumerate(messages) if message.tensors]
        if sent:
            vectors = [messages[place].tensors["prototypes"] for place in sent]
            labels = [messages[place].metadata["labels"] for place in sent]
            stored = store_all([states[place] for place in sent], "prototypes", vectors, labels)
            for place, entries in zip(sent, stored, strict=True):
                changed[place] |= entries
        return changed

    def loss(self, net: ClientNetwork, batch: Batch) -> Tensor:
        features = net.features(batch.x)
        return cross_entropy(net.head(features), batch.y) + self.pull(net, features, batch)

    def pull(self, net: ClientNetwork, features: Tensor, batch: Batch) -> Tensor:
        """The loss's second term, weighted, per sample; zero for a class without a global prototype."""
        raise TypeError(f"{type(self).__name__} must say how features are pulled towards prototypes.")

    def upload(self, client: Trained) -> Message:
        assert client.statistics is not None
        return Message({"prototypes": client.statistics.means}, {"labels": client.statistics.labels})

    def predict(self, net: ClientNetwork, x: Tensor) -> dict[str, Tensor]:
        features = net.features(x)
        classifier = net.head(features)
        closeness, known, own = self.closeness(net, features), net.prototypes.known, net.prototypes.own
        # Before the first prototypes arrive there is only the classifier.
        nearest = torch.where(known.any(), closeness, classifier)
        nearest_own = torch.where((known & own).any(), torch.where(own, closeness, -torch.inf), classifier)
        return {"prototypes": nearest, "classifier": classifier, "own-prototypes": nearest_own}

    def closeness(self, net: ClientNetwork, features: Tensor) -> Tensor:
        """Scores of features by the prototypes [batch, classes], the nearest highest; minus infinity where unknown."""
        scores: Tensor = net.prototypes.closeness(features)
        return scores

    def start(self, server: Server) -> None:
        empty = ClassVectors(self.task.classes, self.task.feature_size)
        server.state.update({f"prototypes.{name}": tensor for name, tensor in empty.state_dict().items()})

    def download(self, server: Server, client: int, classes: Tensor | None) -> Message:
        return known_vectors(server.state, "prototypes")

    def schema(self) -> Schema:
        return class_vectors_schema("prototypes", self.task.classes, self.task.feature_size)


class DistanceMethod(PrototypeMethod):
    """Features are pulled by their distance to the prototype, Euclidean or squared."""

    class Config(Method.Config):
        weight: float | None = Field(
            None, ge=0, description="weight of the distance to the prototype; none: 0.1 for euclidean, 10 for mse"
        )
        distance: Literal["euclidean", "mse"] = Field(
            "euclidean", description="distance between a feature and its prototype"
        )
        penalty: Literal["samples", "classes"] = Field(
            "samples",
            description="mean distance of a batch's features to their prototypes, or of its class means to theirs",
        )

    config: Config

    def pull(self, net: ClientNetwork, features: Tensor, batch: Batch) -> Tensor:
        config = self.config
        weight = config.weight if config.weight is not None else {"euclidean": 0.1, "mse": 10.0}[config.distance]
        away: Tensor = (
            net.prototypes.distance(features, batch.y, config.distance)
            if config.penalty == "samples"
            else distance_of_means(net.prototypes, features, batch, config.distance)
        )
        return weight * away


def distance_of_means(
    prototypes: ClassVectors, features: Tensor, batch: Batch, kind: Literal["euclidean", "mse"]
) -> Tensor:
    """The mean, over the classes in a batch, of the distance from a class's mean feature to its prototype.

    Eq. 4 and 11 of the FedTGP paper, with the batch in place of all samples of the client. The same for every sample.
    """
    members = batch.y[:, None] == torch.arange(len(prototypes.known), device=batch.y.device)
    if batch.mask is not None:
        members = members & batch.mask.bool()[:, None]
    counts = members.sum(0)
    means = (members.to(features.dtype).T @ features) / counts.clamp(min=1)[:, None]
    away = torch.where((counts > 0) & prototypes.known, distance(means, prototypes.vectors, kind), 0.0)
    return away.sum() / (counts > 0).sum().clamp(min=1)
