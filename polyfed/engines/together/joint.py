"""One vectorized engine over the clients of several runs.

The clients of all runs are numbered consecutively. Whatever belongs to one client (its state, its draws, what it
receives and uploads) comes from its own run, under its number there, so that each run has the results it has alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor

from polyfed.engines.client.flops import ClientFlops
from polyfed.engines.client.store import ClientStore
from polyfed.engines.client.workbench import Workbench
from polyfed.engines.stacked import Stack
from polyfed.engines.together.fit import alike, differing_numbers
from polyfed.engines.vectorized import VectorizedEngine
from polyfed.evaluation import Evaluation
from polyfed.message import Message, State
from polyfed.methods.base import Knowledge, Method, Phase, Reply
from polyfed.methods.parts.network import ClientNetwork
from polyfed.population import Population
from polyfed.sameness import differs_in

if TYPE_CHECKING:
    from polyfed.engines.together.member import Member

KEPT_NUMBERS = 64
"""How many selections of clients have their `values` kept on the device."""


class CannotStack(Exception):
    """The runs can't train together, although each of them can train stacked; the message says why."""


class NoSeed:
    """Stands for the seed of a method that computes for several runs. There is none; drawing with it is an error."""

    def __str__(self) -> NoReturn:
        raise CannotStack("the method draws with the seed of its run outside of the clients' states")


def common_method(own: Method) -> Method:
    """The method object that computes the stacked losses of several runs."""
    method = type(own)(own.config, own.task, own.training)
    method.task = replace(own.task, seed=NoSeed())  # type: ignore[arg-type]
    return method


@dataclass(frozen=True, repr=False)
class JoinedPopulation(Population):
    """The clients of several runs, under common numbers."""

    homes: Mapping[int, tuple[Population, int]] = field(default_factory=dict)
    """By common number, the client's own run and its number there."""
    values: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    """Numbers that differ between runs, by name and client."""
    _placed: dict[tuple[int, ...], State] = field(default_factory=dict, init=False)

    def home(self, client: int) -> tuple[Population, int]:
        return self.homes[client]

    def reader(self, client: int) -> Method:
        return self._readers[id(self.homes[client][0])]

    @cached_property
    def _readers(self) -> dict[int, Method]:
        """By run, the method of the first one with the same settings."""
        runs = {id(people): people.method for people, _ in self.homes.values()}
        return {
            run: next(m for m in runs.values() if (m.config, m.training) == (own.config, own.training))
            for run, own in runs.items()
        }

    def numbers(self, clients: Sequence[int]) -> State:
        key = tuple(clients)
        if self.values and key not in self._placed:  # kept, because moving values to a GPU waits for it
            if len(self._placed) >= KEPT_NUMBERS:
                self._placed.clear()
            self._placed[key] = {
                name: torch.tensor([own[client] for client in clients], device=self.device, dtype=torch.float32)
                for name, own in self.values.items()
            }
        return dict(self._placed.get(key, {}))

    def phase(self, client: int, phase: Phase) -> Phase:
        people, _ = self.homes[client]
        return next(own for own in people.method.phases() if own.name == phase.name) if phase.draw else phase

    @cached_property
    def counts(self) -> dict[int, Tensor]:
        return {client: people.counts[own] for client, (people, own) in self.homes.items()}

    def knowledge(self, client: int, round: int) -> Knowledge:
        people, own = self.homes[client]
        return people.knowledge(own, round)

    def new_network(self, client: int) -> ClientNetwork:
        people, own = self.homes[client]
        return people.new_network(own)

    def generator(self, purpose: str, round: int, client: int) -> torch.Generator:
        people, own = self.homes[client]
        return people.generator(purpose, round, own)

    def device_generator(self, purpose: str, round: int, client: int) -> torch.Generator:
        people, own = self.homes[client]
        return people.device_generator(purpose, round, own)


class JointStore(ClientStore):
    """The states of all runs' clients, each in its own run's store."""

    def __init__(self, places: Mapping[int, tuple[Member, int]]) -> None:
        super().__init__(lambda client: {}, 0)
        self._places = places

    def get(self, client: int) -> State:
        member, own = self._places[client]
        return member.store.get(own)

    def room(self, client: int, like: State) -> State:
        member, own = self._places[client]
        return member.store.room(own, like)

    def put(self, client: int, state: State) -> None:
        member, own = self._places[client]
        member.store.put(own, state)

    def version(self, client: int) -> int:
        member, own = self._places[client]
        return member.store.version(own)

    def has(self, client: int) -> bool:
        member, own = self._places[client]
        return member.store.has(own)


class JointEngine(VectorizedEngine):
    """Trains clients of several runs in the same cohorts."""

    def __init__(self, members: Sequence[Member]) -> None:
        stride = 1 + max(client for member in members for client in member.population.data)
        self.numbers = {
            (member, client): run * stride + client
            for run, member in enumerate(members)
            for client in member.population.clients
        }
        self.places = {number: place for place, number in self.numbers.items()}
        super().__init__(_joined(self.places, list(members)), memory_budget=0)
        self.notes.clear()  # each run has said the same
        self.store = JointStore(self.places)
        self._beginners.clear()  # whose initial states are those of their runs
        self._untried = self._common_networks()
        """Copies of networks that have not been tried yet, by name."""

    def _common_networks(self) -> dict[str, ClientNetwork]:
        """Copies of the networks, by name; raises if they differ between runs in anything but their states."""
        examples = {(member, member.population.architectures[client].name): client for member, client in self.numbers}
        found: dict[str, ClientNetwork] = {}
        for (member, name), client in examples.items():
            network = member.network(client)
            if name not in found:
                found[name] = deepcopy(network)
            elif not alike(network, found[name]):
                raise CannotStack(f"their networks {name} differ in more than their weights")
        return found

    def _forget_first(self, client: int) -> None:
        member, own = self.places[client]
        member._forget_first(own)

    def _client_flops(self, client: int) -> ClientFlops:
        member, own = self.places[client]
        return member._client_flops(own)

    def _reason_for_the_loop(self, client: int) -> str | None:
        reason, name = super()._reason_for_the_loop(client), self._architecture(client)
        untried = self._untried.pop(name, None)
        if untried is not None and not alike(self._network(client), untried):
            raise CannotStack(f"the network {name} changes attributes of its own")
        if reason is None:
            return None
        member, own = self.places[client]
        if member._reason_for_the_loop(own) is None:
            raise CannotStack(reason)
        self.notes.clear()  # the run has just said the same
        return reason

    def _stack(self, clients: list[int], round: int, downloads: Mapping[int, Message], *, keep: bool) -> Stack:
        stack = super()._stack(clients, round, downloads, keep=keep)
        for method in {id(people.method): people.method for people, _ in map(self.population.home, clients)}.values():
            # Whatever sets an attribute sets it in its own run, where the common losses would not find it.
            if (name := differs_in(method, self.population.method)) is not None:
                raise CannotStack(f"the method changes '{name}', which it keeps outside of the clients' states")
        return stack

    def _train_one(self, bench: Workbench, client: int, message: Message, round: int) -> Reply:
        member, own = self.places[client]
        reply = member._train_one(member._bench, own, message, round)
        member._bench.release()
        return replace(reply, client=client)

    def _evaluate_one(self, bench: Workbench, client: int, message: Message | None, round: int) -> Evaluation:
        member, own = self.places[client]
        found = member._evaluate_one(member._bench, own, message, round)
        member._bench.release()
        return found


def _joined(places: Mapping[int, tuple[Member, int]], members: Sequence[Member]) -> JoinedPopulation:
    first = members[0].population
    homes = {number: (member.population, client) for number, (member, client) in places.items()}
    differing = differing_numbers([member.population for member in members])
    of_run = {name: dict(zip(members, own, strict=True)) for name, own in differing.items()}
    return JoinedPopulation(
        first.dataset,
        {number: people.data[client] for number, (people, client) in homes.items()},
        {number: people.architectures[client] for number, (people, client) in homes.items()},
        common_method(first.method),
        first.seed,
        first.device,
        draws=first.draws,
        homes=homes,
        values={name: {number: own[member] for number, (member, _) in places.items()} for name, own in of_run.items()},
    )
