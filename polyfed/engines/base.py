"""What an engine is: it owns the clients' personal states, trains clients and evaluates them."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, ClassVar, Protocol, Self

import torch

from polyfed.compute import compute_threads, message_budget, physical_memory
from polyfed.config import RaySettings
from polyfed.engines.client import round as local
from polyfed.engines.client.flops import ClientFlops, measured_flops
from polyfed.engines.client.store import ClientStore
from polyfed.engines.client.workbench import Workbench, hollow, state_of
from polyfed.evaluation import Evaluation, Score
from polyfed.message import Message, State
from polyfed.methods.base import Reply
from polyfed.methods.parts.network import ClientNetwork
from polyfed.population import Population
from polyfed.profile import Profile
from polyfed.records.states import States, misfit
from polyfed.seeds import watched


@dataclass(frozen=True)
class EngineSettings:
    """What a user may set of an engine; each uses what concerns it."""

    workers: int | None = None
    """Threads of the threads engine; None: one per core."""
    memory_budget: int | None = None
    """Bytes of client states kept in memory; None: the engine decides."""
    tf32: bool = True
    ray: RaySettings = field(default_factory=RaySettings)


class Listener(Protocol):
    """Who an engine tells what happens before a round."""

    @property
    def stop_requested(self) -> bool:
        """Whether the user wants the run to stop: then do not wait any longer."""

    def tell(self, note: str) -> None:
        """Show a note now, and keep it."""

    def on_members(self, present: Mapping[int, str], absent: Mapping[int, str]) -> None:
        """Who is there and who is not, by client number."""


class Engine(ABC):
    """Trains and evaluates clients wherever they live. The federation sees messages and counts, never a model."""

    name: ClassVar[str]
    notes: list[str]
    """What the federation should record about the engine itself; it removes them after every round."""
    device: torch.device = torch.device("cpu")
    """Where the server does its heavy work too: the clients' device if they are in this process."""
    remarks: Sequence[str] = ()
    """Remarks on the clients' data before the first round."""
    about: Mapping[str, Any] = MappingProxyType({})
    """What the run's summary says about the clients' data."""
    patient: bool = False
    """Whether a run continues after a round with too few replies: clients elsewhere may come back."""

    @classmethod
    def create(cls, population: Population, settings: EngineSettings) -> Self:
        """The engine for these clients. One that has use for settings overrides this."""
        return cls(population)  # type: ignore[call-arg]

    @abstractmethod
    def train(
        self,
        round: int,
        downloads: Mapping[int, Message],
        done: Callable[[int], None] = lambda client: None,
        *,
        score: bool = False,
    ) -> list[Reply]:
        """Each of these clients receives its download, trains and answers; replies in the order of client numbers.

        `done` is called as each client finishes. A client that can't answer gives a reply with its `failure`. With
        `score` a reply may carry the client's `evaluation`, where that saves a message.
        """

    def expect(self, round: int, clients: Iterable[int]) -> None:
        """Called before the training of a round: who will probably train in the next one, which is that `round`.

        An engine may prepare what does not depend on how this round ends. Others may train after all, or nobody.
        """
        return

    @abstractmethod
    def evaluate(
        self, clients: Iterable[int], round: int, downloads: Mapping[int, Message] | None = None
    ) -> Mapping[int, Score]:
        """Score these clients; with `downloads`, as if each had just received its own, without keeping it.

        Clients that can't be asked are missing from the answer.
        """

    @property
    @abstractmethod
    def profiles(self) -> Mapping[int, Profile]:
        """What is known about each client that has joined; in a simulation, all of them from the start."""

    def gather(self, round: int, needed: int, listener: Listener, failed: int = 0) -> None:
        """Called before each round: wait until at least that many clients can be asked, or a stop is requested.

        `failed` is how many rounds in a row had too few replies.
        """
        return

    def remembered(self) -> Mapping[str, Any]:
        """What a checkpoint keeps of the engine itself, as plain values."""
        return {}

    def recall(self, values: Mapping[str, Any]) -> None:
        """Continue with what `remembered` gave."""
        return

    @abstractmethod
    def available(self) -> Collection[int]:
        """The clients that can be asked now; in a simulation, all of them."""

    @property
    def states(self) -> States | None:
        """The clients' states, to be kept in checkpoints; None where clients keep their own."""
        return None

    @abstractmethod
    def restore(self, round: int, states: Mapping[int, State]) -> None:
        """Continue after that round with these states from a checkpoint."""

    @abstractmethod
    def close(self) -> None:
        """Release workers and files."""


class LocalEngine(Engine):
    """The common part of engines whose clients live in this process, each trained by `engines.client`."""

    def __init__(self, population: Population, *, memory_budget: int | None = None) -> None:
        self.population = population.on_device()
        self.notes = []
        self.remarks = population.notes
        self.about = {"test_set": population.test_set}
        self._first: dict[str, State] = {}
        self._networks: dict[str, ClientNetwork] = {}
        self._beginners = Counter(architecture.name for architecture in population.architectures.values())
        self._flops: dict[str, ClientFlops] = {}
        self._building = threading.Lock()
        self.device = population.device
        self._message_budget = message_budget(population.device)
        self._heavy_round, self._heavy_bytes = 0, 0
        budget = default_memory_budget(population.device) if memory_budget is None else memory_budget
        self.store = ClientStore(self._first_state, budget, str(population.device), self.notes.append)

    @classmethod
    def create(cls, population: Population, settings: EngineSettings) -> Self:
        return cls(population, memory_budget=settings.memory_budget)

    @cached_property
    def profiles(self) -> Mapping[int, Profile]:
        return {client: self.population.profile(client) for client in self.population.clients}

    def available(self) -> Collection[int]:
        return self.population.clients

    @property
    def states(self) -> States:
        return self

    def restore(self, round: int, states: Mapping[int, State]) -> None:
        expected: dict[str, dict[str, torch.Size]] = {}
        for client, state in states.items():
            known = client in self.population.data
            name = self.population.architectures[client].name if known else ""
            if known and name not in expected:
                expected[name] = _shapes(state_of(self.population.new_network(client)))
            if not known or _shapes(state) != expected[name]:
                raise misfit(f"client {client}")
            self.set_state(client, state)
        self.mark_saved()

    def changed_clients(self) -> set[int]:
        return set(self.store.changed)

    def mark_saved(self) -> None:
        self.store.changed.clear()

    def get_state(self, client: int) -> State:
        return self.store.get(client)

    def set_state(self, client: int, state: State) -> None:
        """Restore a state."""
        own = {name: tensor.to(self.population.device, copy=True) for name, tensor in state.items()}
        self.store.put(client, own)

    def close(self) -> None:
        self.store.close()

    def _train_one(self, bench: Workbench, client: int, message: Message, round: int) -> Reply:
        beginner = not self.store.has(client)
        state = self.store.take(client)
        local.receive(self.population, client, state, message, round)
        network = bench.network(client, self.population.architectures[client].name, state)
        with local.explained(self.population, [client], f"round {round}"):
            reply = local.train(self.population, client, network, round, self._client_flops(client))
        reply = replace(reply, message=self._within_budget(reply.message, round))
        for name, buffer in network.named_buffers():  # one that the network replaced instead of changing it in place
            if buffer is not state[name]:
                state[name].copy_(buffer.detach())
        self.store.put(client, state)
        if beginner:
            self._forget_first(client)
        return reply

    def _evaluate_one(self, bench: Workbench, client: int, message: Message | None, round: int) -> Evaluation:
        state = self.store.get(client)
        if message is not None:
            state = {name: tensor.clone() for name, tensor in state.items()}
            local.receive(self.population, client, state, message, round)
        network = bench.network(client, self.population.architectures[client].name, state)
        people, when = self.population, f"the evaluation of round {round}"
        with local.explained(people, [client], when), people.global_draws("evaluation", round, client):
            return local.evaluate(people, client, network, self._note)

    def _note(self, words: str) -> None:
        """A remark on how the engine works, once in a round."""
        if words not in self.notes:
            self.notes.append(words)

    def _within_budget(self, message: Message, round: int) -> Message:
        """An upload, with its heavy tensors on the CPU where a round's would fill too much of the GPU's memory.

        As many stay there as fit into the budget, because the server works on them there.
        """
        names = [name for name in self.population.method.heavy if name in message.tensors]
        if not names or self._message_budget is None:
            return message
        if round != self._heavy_round:
            self._heavy_round, self._heavy_bytes = round, 0
        size = sum(message.tensors[name].nbytes for name in names)
        if self._heavy_bytes + size <= self._message_budget:
            self._heavy_bytes += size
            return message
        self._note("the messages of a round would fill too much of the GPU's memory; some wait in the machine's own")
        moved = {name: message.tensors[name].cpu() for name in names}
        return replace(message, tensors={**message.tensors, **moved})

    def first_state(self, client: int) -> State:
        """A copy of the client's initial weights."""
        return {name: tensor.clone() for name, tensor in self._first_state(client).items()}

    def _first_state(self, client: int) -> State:
        if self.population.own_start:
            return state_of(self.population.new_network(client))
        with self._building:
            self._build(client)
            return self._first[self.population.architectures[client].name]

    def _empty_network(self, client: int) -> ClientNetwork:
        """A network of the client's architecture for a worker, without memory of its own."""
        with self._building:
            return deepcopy(self._build(client))

    def _build(self, client: int) -> ClientNetwork:
        """Build each architecture once: its initial weights for new clients, and the empty network around them."""
        name = self.population.architectures[client].name
        if name not in self._networks or (self._beginners[name] > 0 and name not in self._first):
            network = self.population.new_network(client)
            self._first[name] = state_of(network)
            self._networks[name] = hollow(network)
        return self._networks[name]

    def _forget_first(self, client: int) -> None:
        """Drop an architecture's initial weights when all its clients have their own."""
        name = self.population.architectures[client].name
        with self._building:
            self._beginners[name] -= 1
            if self._beginners[name] == 0:
                self._first.pop(name, None)

    def _measure(self, client: int) -> ClientFlops:
        # A network may draw from a global generator, which must not change for the caller; and two samples are too
        # little work for several threads.
        with watched(), compute_threads(1):
            return measured_flops(partial(self.population.new_network, client), self.population.method)

    def _client_flops(self, client: int) -> ClientFlops:
        name = self.population.architectures[client].name
        with self._building:
            if name not in self._flops:
                self._flops[name] = self._measure(client)
            return self._flops[name]


def _shapes(state: State) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in state.items()}


def default_memory_budget(device: torch.device) -> int:
    """Half of the memory of the machine, or a third of the GPU's, where training needs the rest."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1] // 3
    return physical_memory() // 2
