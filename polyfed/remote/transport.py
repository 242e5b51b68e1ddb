"""How packets reach sites and answers come back. A transport knows neither methods nor training."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from time import sleep
from typing import Any, Literal, TypeAlias

from polyfed.errors import BadMessage, RunError
from polyfed.message import Message

Kind: TypeAlias = Literal["join", "train", "evaluate", "finish"]
LARGEST_FACTS = 1_000_000
"""Bytes that the facts beside a message may have; the terms of many members are the longest."""

MOST_IDLE = 1000
"""How often one may wait in vain for sites of this process, before it is clear that nothing will happen."""


@dataclass(frozen=True)
class Packet:
    """A message and a few facts beside it, as plain values: the round, a loss, a profile."""

    facts: Mapping[str, Any] = field(default_factory=dict)
    message: Message | None = None

    @property
    def failed(self) -> bool:
        """Whether it says that its sender could not do what it was asked."""
        return bool(self.facts.get("failure"))

    def to_bytes(self) -> tuple[bytes, bytes]:
        """The facts as JSON and the message as safetensors; without a message, no bytes."""
        return json.dumps(self.facts).encode(), b"" if self.message is None else self.message.to_bytes()

    @staticmethod
    def from_bytes(facts: bytes, message: bytes, largest: int | None = None) -> Packet:
        """What `to_bytes` gave; anything else raises `BadMessage`.

        `largest` is how many bytes the message may have; sizes are compared before anything is parsed.
        """
        for what, found, most in (("facts", facts, LARGEST_FACTS), ("message", message, largest)):
            if most is not None and len(found) > most:
                raise BadMessage(f"its {what} of {len(found)} bytes can have at most {most}.")
        try:
            values = json.loads(facts)
        except (ValueError, RecursionError) as error:
            raise BadMessage(f"the facts beside a message can't be read ({error}).") from error
        if not isinstance(values, dict):
            raise BadMessage("the facts beside a message are not names with values.")
        return Packet(values, Message.from_bytes(message) if message else None)

    @staticmethod
    def received(facts: bytes, message: bytes, largest: int | None = None) -> Packet:
        """The same for a site's answer: one that can't be read becomes a failure that says why."""
        try:
            return Packet.from_bytes(facts, message, largest)
        except BadMessage as error:
            return Packet({"failure": str(error)})


@dataclass(frozen=True)
class Patience:
    """How long to wait for answers, in seconds."""

    timeout: float
    enough: int | None = None
    """Answers, failures not counted, after which the rest has only the grace left; None: wait for all."""
    grace: float = 0.0

    def deadline(self, begin: float, valid: Sequence[float]) -> float:
        """When waiting ends that began then, if valid answers came at these times, in their order.

        >>> Patience(60, enough=2, grace=5).deadline(100, [103, 110]), Patience(60, 2, 5).deadline(100, [103])
        (115, 160)
        """
        end = begin + self.timeout
        if self.enough is None or len(valid) < self.enough:
            return end
        return min(end, valid[self.enough - 1] + self.grace)


class Transport(ABC):
    """Two questions: who is there, and what do they answer?"""

    largest_reply: int | None = None
    """Bytes that an answer's message may have, set by the engine; a larger one must not be parsed."""

    @abstractmethod
    def nodes(self) -> Collection[str]:
        """The members that can be asked now.

        A member that owes an answer is not among them, so that it can catch up, until the answer has come or the
        timeout of that question has passed: it may have lost the question.
        """

    @abstractmethod
    def ask(
        self,
        kind: Kind,
        packets: Mapping[str, Packet],
        patience: Patience,
        done: Callable[[str], None] = lambda node: None,
    ) -> dict[str, Packet]:
        """Send each of these members its packet and collect the answers that arrive in time.

        `done` is called as each one answers. Members that do not answer are missing from the result; what
        they answer later is dropped and never mistaken for the answer to another question.
        """

    def present(self) -> Collection[str]:
        """The members that are connected, those that owe an answer too."""
        return self.nodes()

    def connection(self, node: str) -> Hashable:
        """Something that changes when a member connects anew, where the transport notices."""
        return None

    def wait(self, seconds: float) -> None:
        """Let time pass, because members are missing."""
        sleep(seconds)


@dataclass(frozen=True)
class Debt:
    """An answer that is still to come."""

    comes: float
    forgiven: float
    """When its sender may be asked again all the same."""


class InMemoryTransport(Transport):
    """Sites in this process. Everything passes through bytes, as on a real wire, and is recorded on request.

    Time is a number that moves on when somebody waits: nothing here sleeps.
    """

    def __init__(
        self,
        sites: Mapping[str, Callable[[Kind, Packet], Packet]],
        *,
        record: bool = False,
        seconds: Callable[[str, Kind, Packet], float] = lambda node, kind, packet: 0.0,
    ) -> None:
        self.sites = dict(sites)
        """What each member answers; one that is removed can't be reached."""
        self.record: list[tuple[Kind, str, bytes, bytes]] | None = [] if record else None
        """What went over the wire: kind, member, facts and message, requests and answers in order."""
        self.now = 0.0
        """The time, in seconds."""
        self._seconds = seconds
        """How long a member takes for an answer."""
        self._owed: dict[str, Debt] = {}
        self.connections: Counter[str] = Counter()
        """How often each member has connected anew; a test adds to it."""
        self._idle = 0
        self._planned: list[tuple[float, Callable[[], object]]] = []

    def at(self, time: float, action: Callable[[], object]) -> None:
        """Plan what happens at a time: a site comes, or goes."""
        self._planned = sorted([*self._planned, (time, action)], key=lambda one: one[0])

    def present(self) -> Collection[str]:
        return list(self.sites)

    def connection(self, node: str) -> Hashable:
        return self.connections[node]

    def wait(self, seconds: float) -> None:
        self._idle = 0 if self._planned or self._owed else self._idle + 1
        if self._idle > MOST_IDLE:
            raise RunError("nobody else will come: no site is planned to, and none owes an answer.")
        self._pass_to(self.now + seconds)

    def _pass_to(self, time: float) -> None:
        self.now = time
        while self._planned and self._planned[0][0] <= time:
            self._planned.pop(0)[1]()

    def nodes(self) -> Collection[str]:
        self._owed = {node: debt for node, debt in self._owed.items() if self.now < min(debt.comes, debt.forgiven)}
        return [node for node in self.sites if node not in self._owed]

    def ask(
        self,
        kind: Kind,
        packets: Mapping[str, Packet],
        patience: Patience,
        done: Callable[[str], None] = lambda node: None,
    ) -> dict[str, Packet]:
        self._idle = 0
        begin, coming = self.now, []
        for node, packet in packets.items():
            if node in self.sites:
                asked = Packet.from_bytes(*self._over(kind, node, packet))
                answer = Packet.received(*self._over(kind, node, self.sites[node](kind, asked)), self.largest_reply)
                coming.append((begin + self._seconds(node, kind, packet), node, answer))
        answers: dict[str, Packet] = {}
        valid: list[float] = []
        for comes, node, answer in sorted(coming, key=lambda one: one[0]):
            end = patience.deadline(begin, valid)
            self._pass_to(min(comes, end))
            if comes > end:
                self._owed[node] = Debt(comes, begin + patience.timeout)
                continue
            answers[node] = answer
            valid += [] if answer.failed else [comes]
            done(node)
        return answers

    def _over(self, kind: Kind, node: str, packet: Packet) -> tuple[bytes, bytes]:
        content = packet.to_bytes()
        if self.record is not None:
            self.record.append((kind, node, *content))
        return content
