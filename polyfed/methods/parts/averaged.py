"""A part of every client's network that travels and is averaged: FedAvg's mechanism, in many methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import ClassVar

from torch import Tensor

from polyfed.message import Message, Schema, State
from polyfed.methods.base import Method, Reply, Server, Trained
from polyfed.methods.parts.tools import SAMPLES, part_of, plain_mean, same_shapes, weighted_mean


class Averaged(Method):
    """Base of methods in which clients upload one module and receive its mean.

    Batch norm's running statistics travel with the weights and are averaged like them; its counters do not travel.
    """

    module: ClassVar[str]
    """The part of a client's network that travels, such as `model.head` or `proxy`."""
    weighted: ClassVar[bool] = True
    """The mean is weighted by the participants' numbers of samples; otherwise those numbers are not sent."""

    def first_state(self) -> State:
        """What the clients receive in round one; uploads have the same names and shapes."""
        raise TypeError(f"{type(self).__name__} must say what its clients receive first.")

    @property
    def receivable(self) -> tuple[str, ...] | None:
        own = super().receivable
        return (self.module,) if own is None and type(self).receive is Method.receive else own

    def start(self, server: Server) -> None:
        server.state.update(self.first_state())

    def download(self, server: Server, client: int, classes: Tensor | None) -> Message:
        return Message(part_of(server.state, self.module))

    def upload(self, client: Trained) -> Message:
        return Message(self.sent(client.state), client.sample_count if self.weighted else {})

    def sent(self, state: Mapping[str, Tensor]) -> State:
        """The entries of a client's state that travel: those of the module, without what is frozen in it."""
        return {name: tensor for name, tensor in part_of(state, self.module).items() if name in self._travels}

    @cached_property
    def _travels(self) -> frozenset[str]:
        return frozenset(self.first_state())

    def schema(self) -> Schema:
        return Schema(same_shapes(self.first_state()), SAMPLES if self.weighted else {})

    def aggregate(self, server: Server, replies: Sequence[Reply]) -> None:
        server.state.update(weighted_mean(replies) if self.weighted else plain_mean(replies))
