"""One host of a cluster: a local engine over some of the clients, in its own process.

Plain arrays with their types and shapes travel to and from it, which a cluster's object store shares between
processes without a copy. Nothing here knows the cluster.
"""

from __future__ import annotations

import os
import time
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from polyfed.compute import set_precision
from polyfed.engines.base import LocalEngine, default_memory_budget
from polyfed.engines.sequential import SequentialEngine
from polyfed.engines.threads import ThreadsEngine
from polyfed.engines.vectorized import VectorizedEngine
from polyfed.errors import InputError
from polyfed.evaluation import Score
from polyfed.message import Message, State, is_plain
from polyfed.methods.base import Reply
from polyfed.population import Population


@dataclass(frozen=True)
class PackedTensor:
    """A tensor's bytes."""

    data: np.ndarray[Any, np.dtype[np.uint8]]
    dtype: torch.dtype
    shape: tuple[int, ...]


Packed: TypeAlias = dict[str, PackedTensor | Tensor]
"""Named tensors, packed; anything but a plain tensor stays as it is, for the server to refuse."""


@dataclass(frozen=True)
class PackedMessage:
    """A message, packed."""

    tensors: Packed
    metadata: Packed


class Packer:
    """Packs tensors; one that occurs in several messages is packed and sent once."""

    def __init__(self) -> None:
        self.bytes = 0
        """How many bytes have been packed."""
        self._known: dict[Hashable, tuple[Tensor, PackedTensor]] = {}

    def tensors(self, tensors: Mapping[str, Tensor]) -> Packed:
        """Named tensors, packed."""
        return {name: self._tensor(tensor) if is_plain(tensor) else tensor for name, tensor in tensors.items()}

    def message(self, message: Message) -> PackedMessage:
        """A message, packed."""
        return PackedMessage(self.tensors(message.tensors), self.tensors(message.metadata))

    def _tensor(self, tensor: Tensor) -> PackedTensor:
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if key not in self._known:
            plain = tensor.detach().cpu().contiguous()
            packed = PackedTensor(_bytes(plain), tensor.dtype, tuple(tensor.shape))
            self.bytes += packed.data.nbytes
            self._known[key] = tensor, packed  # the tensor too, so that no other tensor gets its address
        return self._known[key][1]


def unpacked(tensors: Packed) -> State:
    """What was packed, in new memory."""
    return {name: _unpacked(one) if isinstance(one, PackedTensor) else one for name, one in tensors.items()}


def unpacked_message(message: PackedMessage) -> Message:
    """A message that was packed."""
    return Message(unpacked(message.tensors), unpacked(message.metadata))


def _unpacked(packed: PackedTensor) -> Tensor:
    tensor = torch.empty(packed.shape, dtype=packed.dtype)  # torch's alignment, on which the order of sums may depend
    _bytes(tensor)[:] = packed.data
    return tensor


def _bytes(tensor: Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return tensor.reshape(-1).view(torch.uint8).numpy()


@dataclass(frozen=True)
class HostTraits:
    """How to make a host."""

    gpu: bool = False
    threads: int = 1
    """Clients that train side by side; on a CPU."""
    tf32: bool = True
    memory_budget: int | None = None
    """Bytes for the states of this host's clients; None: its part of the machine's budget."""
    neighbours: int = 1
    """Hosts on one machine, this one included."""


@dataclass(frozen=True)
class Answers:
    """What a host answers after training."""

    replies: list[tuple[Reply, PackedMessage]]
    """Replies without their messages, and the messages."""
    notes: list[str] = field(default_factory=list)
    bytes: int = 0
    seconds: float = 0.0
    """Seconds of training and scoring, without packing and sending."""


class Host:
    """Runs in its own process: a local engine over some of a federation's clients."""

    def __init__(self, population: Population, traits: HostTraits) -> None:
        if traits.gpu and not torch.cuda.is_available():
            raise InputError(
                "the Ray cluster counts a GPU that PyTorch does not find in a host's process: start Ray there with as "
                "many GPUs as there are, or use CPUs (--set ray.gpus=0)."
            )
        device = torch.device("cuda" if traits.gpu else "cpu")  # the cluster shows a process only its own GPU
        set_precision(device, tf32=traits.tf32)
        torch.set_num_threads(1)
        self._engine = _engine(replace(population, device=device), traits)

    def place(self) -> tuple[str, int]:
        """The machine that this host is on, by the name that the cluster gave it, and its process there."""
        import ray

        return str(ray.get_runtime_context().get_node_id()), os.getpid()

    def train(self, round: int, downloads: Mapping[int, PackedMessage], score: bool) -> Answers:
        """Train these clients, and score them if asked to."""
        received = {client: unpacked_message(message) for client, message in downloads.items()}
        begin = time.perf_counter()
        people = self._engine.population
        if len(received) == len(people.data) and round < people.task.rounds:  # so probably the same train next
            self._engine.expect(round + 1, received)
        replies = self._engine.train(round, received)
        if score:
            scores = self._engine.evaluate(received, round)
            replies = [replace(reply, evaluation=scores[reply.client]) for reply in replies]
        seconds = time.perf_counter() - begin
        packer, notes = Packer(), list(self._engine.notes)
        self._engine.notes.clear()
        sent = [(replace(reply, message=Message()), packer.message(reply.message)) for reply in replies]
        return Answers(sent, notes, packer.bytes, seconds)

    def evaluate(
        self, clients: Sequence[int], round: int, downloads: Mapping[int, PackedMessage]
    ) -> Mapping[int, Score]:
        """Score these clients, as if they had received these downloads."""
        received = {client: unpacked_message(message) for client, message in downloads.items()}
        return self._engine.evaluate(clients, round, received)

    def states(self, clients: Iterable[int]) -> tuple[dict[int, Packed], bool]:
        """The states of these clients, and a sign that they exist: the caller may leave the states where they are."""
        return {client: Packer().tensors(self._engine.get_state(client)) for client in clients}, True

    def restore(self, states: Mapping[int, Packed], clients: Iterable[int]) -> None:
        """Restore the states of these clients."""
        self._engine.restore(0, {client: unpacked(states[client]) for client in clients})


def _engine(population: Population, traits: HostTraits) -> LocalEngine:
    budget = traits.memory_budget
    if budget is None:
        budget = default_memory_budget(population.device) // (1 if traits.gpu else traits.neighbours)
    if traits.gpu:
        return VectorizedEngine(population, memory_budget=budget)
    if traits.threads > 1:
        return ThreadsEngine(population, workers=traits.threads, memory_budget=budget)
    return SequentialEngine(population, memory_budget=budget)
