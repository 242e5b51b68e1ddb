"""A small network that every client has beside its private one, and that travels whole and is averaged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor, nn

from polyfed.message import Message, Schema
from polyfed.methods.base import Method, Reply, Server, SplitNetwork, Trained
from polyfed.methods.tools import SAMPLES, module_state, part_of, plain_mean, same_shapes, weighted_mean


class SharedNetwork(Method):
    """Base of methods whose private networks learn through a homogeneous one, `net.shared`.

    Batch norm's running statistics travel with the weights and are averaged like them; its counters stay at home.
    """

    shares = "a small common network"
    weighted: ClassVar[bool] = False
    """The mean is weighted by the participants' numbers of samples; otherwise those stay at home."""

    def shared_network(self) -> SplitNetwork:
        """The network that travels, with its first weights."""
        return self.task.new_auxiliary()

    def client_modules(self, model: SplitNetwork) -> dict[str, nn.Module]:
        return {"shared": self.shared_network()}

    def upload(self, client: Trained) -> Message:
        return Message(part_of(client.state, "shared"), client.sample_count if self.weighted else {})

    def start(self, server: Server) -> None:
        server.state.update(module_state("shared", self.shared_network()))

    def download(self, server: Server, client: int, classes: Tensor | None) -> Message:
        return Message(part_of(server.state, "shared"))

    def schema(self) -> Schema:
        return Schema(same_shapes(module_state("shared", self.shared_network())), SAMPLES if self.weighted else {})

    def aggregate(self, server: Server, replies: Sequence[Reply]) -> None:
        server.state.update(weighted_mean(replies) if self.weighted else plain_mean(replies))
