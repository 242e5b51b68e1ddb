"""FedAvg: the mean of all networks, for clients that have the same one (McMahan et al., AISTATS 2017)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from polyfed.message import Message, Schema
from polyfed.methods.base import Common, Method, Reply, Server, Trained
from polyfed.methods.tools import SAMPLES, module_state, part_of, same_shapes, weighted_mean


class FedAvg(Method):
    """Clients train the global network on their data; the server averages the results by numbers of samples."""

    name = "fedavg"
    title = "FedAvg"
    paper = "McMahan et al., AISTATS 2017"
    shares = "the whole network"
    requires: ClassVar[tuple[Common, ...]] = ("network",)
    module = "model"
    """The part of a client's network that travels."""

    def start(self, server: Server) -> None:
        server.state.update(part_of(module_state("model", self.task.new_model()), self.module))

    def download(self, server: Server, client: int, classes: Tensor | None) -> Message:
        return Message(dict(server.state))

    def upload(self, client: Trained) -> Message:
        return Message(part_of(client.state, self.module), client.sample_count)

    def schema(self) -> Schema:
        return Schema(same_shapes(part_of(module_state("model", self.task.new_model()), self.module)), SAMPLES)

    def aggregate(self, server: Server, replies: Sequence[Reply]) -> None:
        server.state.update(weighted_mean(replies))
