"""Hosts as the driver of a cluster sees them: the clients of each, and what brings a new one to where it was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, TypeAlias

from polyfed.errors import LostError, clients_named
from polyfed.population import Population

COPIED_AFTER = 10
"""Rounds after which the states of a host's clients are copied, if that is not too dear."""
COPY_SHARE = 0.03
"""How much of the training time copies may take."""
MOST_KEPT = 1 << 28
"""The most bytes of downloads that are kept between two copies."""
CHUNK = 8
"""Clients whose states travel together."""

Call: TypeAlias = tuple[str, tuple[Any, ...]]
"""A method of a host with its arguments."""


@dataclass
class Actor:
    """A host as the driver sees it."""

    number: int
    clients: list[int]
    data: Any
    """Its clients with their samples, in the object store."""
    handle: Any = None
    node: str = ""
    process: int = 0
    copies: dict[int, Any] = field(default_factory=dict)
    """By client, the object that holds a copy of its state."""
    trained: list[tuple[int, Any, int]] = field(default_factory=list)
    """Since these copies: round, downloads in the object store, and their bytes."""
    worked: float = 0.0
    """Seconds that it has trained since."""
    stale: set[int] = field(default_factory=set)
    """Clients that have trained since then."""
    deaths: int = 0
    """How often in a row it has died."""

    def __str__(self) -> str:
        return f"host {self.number} ({clients_named(self.clients)})"

    def copy_is_due(self, seconds: float) -> bool:
        """Whether its clients' states should be copied, which last took so many seconds.

        What has been trained since the last copies is repeated if the host dies: some rounds, and more of them only as
        long as copies would take more than their share of the time.
        """
        if sum(size for _, _, size in self.trained) > MOST_KEPT:
            return True
        return len(self.trained) >= COPIED_AFTER and self.worked >= seconds / COPY_SHARE

    def copied(self, copies: dict[int, Any]) -> None:
        """There are copies of all states now."""
        self.copies |= copies
        self.stale.clear()
        self.trained.clear()
        self.worked = 0.0

    def history(self) -> list[Call]:
        """What brings a new host to where the last one was: copies of states, and the rounds since."""
        held: dict[Any, list[int]] = {}
        for client, copy in self.copies.items():
            held.setdefault(copy, []).append(client)
        restores: list[Call] = [("restore", (copy, clients)) for copy, clients in held.items()]
        return restores + [("train", (round, downloads, False)) for round, downloads, _ in self.trained]

    def lost(self) -> LostError:
        """The error if its machine is gone."""
        return LostError(f"the machine of {self} is gone, and its clients' states with it")


def slices(population: Population, hosts: int) -> list[list[int]]:
    """Neighbouring clients for each host, with about equal numbers of training samples, and at least one client."""
    clients = population.clients
    before = list(accumulate((len(population.data[client].train) for client in clients), initial=0))
    edges = [0]
    for host in range(1, hosts):
        fair = next(place for place, samples in enumerate(before) if samples * hosts >= host * before[-1])
        edges.append(min(max(fair, edges[-1] + 1), len(clients) - hosts + host))
    return [clients[start:stop] for start, stop in zip(edges, [*edges[1:], len(clients)], strict=True)]


def chunks(clients: Sequence[int]) -> list[Sequence[int]]:
    """Clients whose states travel together."""
    return [clients[start : start + CHUNK] for start in range(0, len(clients), CHUNK)]
