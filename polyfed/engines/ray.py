"""The engine for a cluster, or for all GPUs of a machine: hosts are Ray actors, each with some of the clients.

A host that dies is revived. The states of its clients come from copies in Ray's object store; what they have trained
since is repeated from the downloads, which are kept until the next copy. All draws follow from the seed, so the
result is the same. Copies are on the host's machine: if that is gone, only a checkpoint helps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from itertools import zip_longest
from typing import Any, Self

from polyfed.config import RaySettings
from polyfed.engines.base import Engine, EngineSettings
from polyfed.engines.client.workbench import state_of
from polyfed.engines.hosts import (
    Answers,
    Host,
    HostTraits,
    Packed,
    PackedMessage,
    Packer,
    unpacked,
    unpacked_message,
)
from polyfed.engines.ray_actors import Actor, Call, chunks, slices
from polyfed.engines.ray_session import RaySession
from polyfed.errors import InputError, RunError, first_line
from polyfed.evaluation import Score
from polyfed.message import Message, State
from polyfed.methods.base import Reply
from polyfed.population import Population
from polyfed.profile import Profile
from polyfed.records.states import States, misfit

MOST_DEATHS = 3
START_SECONDS = 300.0


class RayEngine(Engine):
    """Clients train in processes of a Ray cluster. On CPUs the numbers are those of `sequential`, bit by bit."""

    name = "ray"
    population: Population
    sent: int
    received: int
    """Bytes of the tensors that went to hosts and came back, without states."""
    busy: float = 0.0
    """Seconds that the slowest host worked in the last round."""
    copying: float = 0.0
    """Seconds that copies of states have taken."""
    _copy_seconds: float = 0.0
    """Those of the last ones."""
    _session: RaySession
    _ray: Any

    def __init__(
        self,
        population: Population,
        *,
        settings: RaySettings | None = None,
        tf32: bool = True,
        memory_budget: int | None = None,
    ) -> None:
        settings = settings or RaySettings()
        if population.device.index is not None:
            raise InputError(
                f"device is {population.device}, but the ray engine gives every host its own GPU: use "
                "--device cuda, and CUDA_VISIBLE_DEVICES to choose among the GPUs."
            )
        self.population = population
        self.remarks = population.notes
        self.about = {"test_set": population.test_set}
        self.sent = self.received = 0
        self._changed: set[int] = set()
        self._first: dict[str, State] = {}
        self._read: tuple[Any, Mapping[int, Packed]] | None = None
        self._actors: list[Actor] = []
        self._session = RaySession(settings)
        self._ray = self._session.ray
        self.notes = list(self._session.notes)
        try:
            self._start(settings, tf32=tf32, memory_budget=memory_budget)
        except BaseException:
            self.close()
            raise

    @classmethod
    def create(cls, population: Population, settings: EngineSettings) -> Self:
        return cls(population, settings=settings.ray, tf32=settings.tf32, memory_budget=settings.memory_budget)

    # What the federation asks -----------------------------------------------------------------------------------------

    @cached_property
    def profiles(self) -> Mapping[int, Profile]:
        return {client: self.population.profile(client) for client in self.population.clients}

    def available(self) -> Collection[int]:
        return self.population.clients

    def train(
        self,
        round: int,
        downloads: Mapping[int, Message],
        done: Callable[[int], None] = lambda client: None,
        *,
        score: bool = False,
    ) -> list[Reply]:
        sent = {actor.number: self._stored(messages) for actor, messages in self._divided(downloads)}
        calls: dict[int, Call] = {number: ("train", (round, ref, score)) for number, (ref, _) in sent.items()}
        replies: dict[int, Reply] = {}
        self.busy = 0.0

        def keep(actor: Actor, answers: Answers) -> None:
            actor.deaths = 0
            actor.trained.append((round, *sent[actor.number]))
            actor.worked += answers.seconds
            self.notes += answers.notes
            self.received += answers.bytes
            self.busy = max(self.busy, answers.seconds)
            for reply, message in answers.replies:
                replies[reply.client] = _with_message(reply, message)
                actor.stale.add(reply.client)
                self._changed.add(reply.client)
                done(reply.client)

        self._ask(calls, keep)
        self._copy(actor for actor in self._actors if actor.copy_is_due(self._copy_seconds))
        return [replies[client] for client in sorted(replies)]

    def evaluate(
        self, clients: Iterable[int], round: int, downloads: Mapping[int, Message] | None = None
    ) -> dict[int, Score]:
        wanted = dict.fromkeys(sorted(clients))
        received = downloads or {}
        calls: dict[int, Call] = {}
        for actor, own in self._divided(wanted):
            packed = self._packed({client: received[client] for client in own if client in received})
            calls[actor.number] = ("evaluate", (list(own), round, packed))
        scores: dict[int, Score] = {}
        self._ask(calls, lambda actor, found: scores.update(found))
        return {client: scores[client] for client in wanted}

    @property
    def states(self) -> States:
        return self

    def changed_clients(self) -> set[int]:
        return set(self._changed)

    def mark_saved(self) -> None:
        self._changed.clear()

    def get_state(self, client: int) -> State:
        actor = self._actor_of(client)
        if client in actor.stale:  # a caller that asks for one asks for the others next
            self._copy(self._actors)
        if client not in actor.copies:
            return self._first_state(client)
        copy = actor.copies[client]
        if self._read is None or self._read[0] != copy:
            try:
                self._read = copy, self._ray.get(copy)
            except self._ray.exceptions.ObjectLostError as error:
                raise actor.lost() from error
        return unpacked(self._read[1][client])

    def restore(self, round: int, states: Mapping[int, State]) -> None:
        if not set(states) <= set(self.population.clients):
            raise misfit(f"client {min(set(states) - set(self.population.clients))}")
        for actor, own in self._divided(dict.fromkeys(states)):
            for chunk in chunks(list(own)):
                kept = self._ray.put({client: Packer().tensors(states[client]) for client in chunk})
                self._ask({actor.number: ("restore", (kept, chunk))})
                actor.copies |= dict.fromkeys(chunk, kept)
        self.mark_saved()

    def close(self) -> None:
        self._read = None
        if self._ray.is_initialized():
            for actor in self._actors:
                self._kill(actor)
        self._actors.clear()
        self._session.close()

    # Hosts ------------------------------------------------------------------------------------------------------------

    def _start(self, settings: RaySettings, *, tf32: bool, memory_budget: int | None) -> None:
        gpu = self.population.device.type == "cuda" if settings.gpus is None else settings.gpus > 0
        hosts, cpus = self._session.plan(settings, len(self.population.clients), gpu=gpu)
        neighbours = -(-hosts // len(self._session.nodes))
        budget = None if memory_budget is None else memory_budget // (1 if gpu else neighbours)
        self._traits = HostTraits(gpu, cpus, tf32, budget, neighbours)
        self._host = self._ray.remote(Host).options(
            num_cpus=cpus, num_gpus=int(gpu), max_restarts=0, scheduling_strategy="SPREAD"
        )
        for clients in slices(self.population, hosts):
            self._actors.append(Actor(len(self._actors), clients, self._put(self.population.slice(clients))))
        for actor in self._actors:
            self._launch(actor)
        for actor in self._actors:
            self._await(actor)

    def _put(self, population: Population) -> Any:
        try:
            return self._ray.put(population)
        except (TypeError, AttributeError, ValueError, RuntimeError) as error:
            raise InputError(
                f"the networks, the method or the data can't be sent to other processes ({first_line(error)}): leave "
                "open files, locks and the like out of them, or use another engine (--engine threads)."
            ) from error

    def _launch(self, actor: Actor) -> None:
        actor.handle = self._host.remote(actor.data, self._traits)

    def _await(self, actor: Actor) -> None:
        """Wait until a host has started."""
        exceptions, place = self._ray.exceptions, actor.handle.place.remote()
        try:
            actor.node, actor.process = self._ray.get(place, timeout=START_SECONDS)
        except exceptions.GetTimeoutError as error:
            raise RunError(
                f"{actor} did not start within {START_SECONDS:.0f} s: the Ray cluster has no room for it, or is in "
                "use; `ray status` shows which."
            ) from error
        except exceptions.RayTaskError as error:
            raise error.cause from error
        except exceptions.RayActorError as error:
            cause = getattr(error, "cause", None) or error
            words = [line.strip() for line in str(cause).splitlines() if line.strip()]
            kind, _, said = words[-1].partition(": ") if words else ("", "", "")
            if kind.startswith("polyfed.errors."):
                raise RunError(f"{actor} could not start: {said}") from error
            raise RunError(
                f"{actor} could not start: {words[-1] if words else type(error).__name__}; polyfed and your own "
                "modules must be importable on every machine of the cluster."
            ) from error

    def _kill(self, actor: Actor) -> None:
        if actor.handle is not None:
            with suppress(ValueError, self._ray.exceptions.RayError):
                self._ray.kill(actor.handle)

    def _actor_of(self, client: int) -> Actor:
        return next(actor for actor in self._actors if actor.clients[0] <= client <= actor.clients[-1])

    def _divided(self, values: Mapping[int, Any]) -> list[tuple[Actor, dict[int, Any]]]:
        """What clients get, host by host; hosts without such clients are left out."""
        parts = [(actor, {c: values[c] for c in actor.clients if c in values}) for actor in self._actors]
        return [(actor, own) for actor, own in parts if own]

    # Asking -----------------------------------------------------------------------------------------------------------

    def _ask(
        self, calls: Mapping[int, Call], answered: Callable[[Actor, Any], None] = lambda actor, answer: None
    ) -> None:
        """Ask hosts at the same time; one that dies is revived and asked again.

        If several fail, the error is that of the first clients, as it would be if they trained one after another.
        """
        exceptions = self._ray.exceptions
        waiting = {self._submit(self._actors[number], call): number for number, call in calls.items()}
        failures: dict[int, Any] = {}
        while waiting:
            (ready,), _ = self._ray.wait(list(waiting), num_returns=1)
            actor = self._actors[waiting.pop(ready)]
            try:
                answer = self._ray.get(ready)
            except exceptions.RayTaskError as error:
                failures[actor.number] = error
            except (exceptions.RayActorError, exceptions.ObjectLostError) as error:
                self._revive(actor, error)
                waiting[self._submit(actor, calls[actor.number])] = actor.number
            else:
                answered(actor, answer)
        if failures:
            first = failures[min(failures)]
            raise first.cause from first

    def _submit(self, actor: Actor, call: Call) -> Any:
        name, arguments = call
        return getattr(actor.handle, name).remote(*arguments)

    def _revive(self, actor: Actor, error: Exception) -> None:
        """Start the host again and bring it to where it was."""
        exceptions = self._ray.exceptions
        while True:
            actor.deaths += 1
            if not self._session.is_there(actor.node):
                raise actor.lost() from error
            if actor.deaths > MOST_DEATHS:
                raise RunError(
                    f"{actor} has died {actor.deaths} times in a row; if memory is short, use fewer hosts on a machine "
                    "(--set ray.hosts=1). Ray's logs, in /tmp/ray/session_latest/logs, say more."
                ) from error
            self._kill(actor)
            self._launch(actor)
            try:
                self._await(actor)
                self._ray.get([self._submit(actor, call) for call in actor.history()])
            except exceptions.RayActorError as again:
                error = again
            except (exceptions.RayTaskError, exceptions.ObjectLostError) as lost:
                if isinstance(lost, exceptions.ObjectLostError) or isinstance(lost.cause, exceptions.ObjectLostError):
                    raise actor.lost() from lost
                raise
            else:
                self.notes.append(f"{actor} died and was revived; what it had trained since its last copy was repeated")
                return

    def _copy(self, actors: Iterable[Actor]) -> None:
        """Copy all states that have changed since the last copies."""
        begin = time.perf_counter()
        chosen = [actor for actor in actors if actor.stale]
        copies: dict[int, dict[int, Any]] = {actor.number: {} for actor in chosen}
        waves = zip_longest(*(chunks(sorted(actor.stale)) for actor in chosen))
        for wave in waves:
            asked = {actor.number: chunk for actor, chunk in zip(chosen, wave, strict=True) if chunk}
            self._copy_wave(asked, copies)
        for actor in chosen:  # only now: a host that dies earlier is restored from its former copies
            actor.copied(copies[actor.number])
        if chosen:
            self._copy_seconds = time.perf_counter() - begin
            self.copying += self._copy_seconds

    def _copy_wave(self, asked: Mapping[int, Sequence[int]], copies: Mapping[int, dict[int, Any]]) -> None:
        exceptions = self._ray.exceptions
        for number, (states, written) in {n: self._copied(n, chunk) for n, chunk in asked.items()}.items():
            while True:
                try:
                    self._ray.get(written)
                    break
                except (exceptions.RayActorError, exceptions.ObjectLostError) as error:
                    self._revive(self._actors[number], error)
                    states, written = self._copied(number, asked[number])
            copies[number].update(dict.fromkeys(asked[number], states))

    def _copied(self, number: int, clients: Sequence[int]) -> tuple[Any, Any]:
        """States that stay where they are, and a sign that they exist."""
        found = self._actors[number].handle.states.options(num_returns=2).remote(clients)
        return found[0], found[1]

    # Messages and states ----------------------------------------------------------------------------------------------

    def _packed(self, messages: Mapping[int, Message]) -> dict[int, PackedMessage]:
        packer = Packer()
        packed = {client: packer.message(message) for client, message in messages.items()}
        self.sent += packer.bytes
        return packed

    def _stored(self, messages: Mapping[int, Message]) -> tuple[Any, int]:
        """Downloads in the object store, and how many bytes they are."""
        before = self.sent
        return self._ray.put(self._packed(messages)), self.sent - before

    def _first_state(self, client: int) -> State:
        """A client's initial weights."""
        name = self.population.architectures[client].name
        if self.population.own_start or name not in self._first:
            self._first = {name: state_of(self.population.new_network(client))}
        return self._first[name]


def _with_message(reply: Reply, message: PackedMessage) -> Reply:
    return replace(reply, message=unpacked_message(message))
