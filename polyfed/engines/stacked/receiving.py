"""Downloads of many clients at once: read together where the method can, written into their states by few kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from polyfed.compute import all_to_device
from polyfed.engines.client import round as local
from polyfed.engines.stacked.copies import copy_all
from polyfed.message import Message, State
from polyfed.methods.base import Method
from polyfed.population import Population


def receive_all(
    population: Population,
    clients: Sequence[int],
    states: Sequence[State],
    downloads: Mapping[int, Message],
    round: int,
) -> None:
    """Write the downloads of those clients that have one into their states, in place."""
    receivers = [(client, state) for client, state in zip(clients, states, strict=True) if client in downloads]
    arrived = local.on_device([downloads[client] for client, _ in receivers], population.device)
    changed = _changes(population, receivers, arrived, round)
    pairs = [(state[n], t) for (_, state), own in zip(receivers, changed, strict=True) for n, t in own.items()]
    moved = all_to_device([tensor for _, tensor in pairs], population.device)
    copy_all([target for target, _ in pairs], moved)


def _changes(
    population: Population, receivers: Sequence[tuple[int, State]], messages: Sequence[Message], round: int
) -> list[State]:
    """For each of these clients, the entries of its state that its download changes."""
    groups: dict[int, list[int]] = {}
    for place, (client, _) in enumerate(receivers):
        groups.setdefault(id(population.reader(client)), []).append(place)
    found: dict[int, State] = {}
    for places in groups.values():
        reader = population.reader(receivers[places[0]][0])
        states = [receivers[place][1] for place in places]
        known = [population.knowledge(receivers[place][0], round) for place in places]
        given = states, [messages[place] for place in places], known
        changed = reader.receive_all(*given) if _reads_all(reader) else None
        if changed is not None:
            checked = (local.checked_changes(reader, *pair) for pair in zip(states, changed, strict=True))
            found |= zip(places, checked, strict=True)
    for place, (client, state) in enumerate(receivers):
        if place not in found:
            people, own = population.home(client)
            found[place] = local.changes(people, own, state, messages[place], round)
    return [found[place] for place in range(len(receivers))]


def _reads_all(method: Method) -> bool:
    """Whether `receive_all` says what `receive` does; a subclass may have its own `receive` alone."""
    classes = type(method).__mro__
    one, many = (next(i for i, c in enumerate(classes) if name in vars(c)) for name in ("receive", "receive_all"))
    return many <= one
