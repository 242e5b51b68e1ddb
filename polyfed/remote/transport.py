"""How packets reach sites and answers come back. A transport knows neither methods nor training."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from polyfed.errors import BadMessage
from polyfed.message import Message

Kind: TypeAlias = Literal["join", "train", "evaluate"]


@dataclass(frozen=True)
class Packet:
    """A message and a few facts beside it, as plain values: the round, a loss, a count of operations."""

    facts: Mapping[str, Any] = field(default_factory=dict)
    message: Message | None = None

    def to_bytes(self) -> tuple[bytes, bytes]:
        """The facts as JSON and the message as safetensors; without a message, no bytes."""
        return json.dumps(self.facts).encode(), b"" if self.message is None else self.message.to_bytes()

    @staticmethod
    def from_bytes(facts: bytes, message: bytes) -> Packet:
        """What `to_bytes` gave; anything else raises `BadMessage`."""
        try:
            values = json.loads(facts)
        except ValueError as error:
            raise BadMessage(f"the facts beside a message can't be read ({error}).") from error
        if not isinstance(values, dict):
            raise BadMessage("the facts beside a message are not names with values.")
        return Packet(values, Message.from_bytes(message) if message else None)


class Transport(ABC):
    """Two questions: who is there, and what do they answer?"""

    @abstractmethod
    def nodes(self) -> Collection[str]:
        """The members that can be reached now."""

    @abstractmethod
    def ask(
        self,
        kind: Kind,
        packets: Mapping[str, Packet],
        timeout: float,
        done: Callable[[str], None] = lambda node: None,
    ) -> dict[str, Packet]:
        """Send each of these members its packet and collect the answers that arrive in time.

        `done` is called as each one answers. Members that do not answer are missing from the result.
        """


class InMemoryTransport(Transport):
    """Sites in this process. Everything passes through bytes, as on a real wire, and is recorded on request."""

    def __init__(self, sites: Mapping[str, Callable[[Kind, Packet], Packet]], *, record: bool = False) -> None:
        self.sites = dict(sites)
        """What each member answers; one that is removed can't be reached."""
        self.record: list[tuple[Kind, str, bytes, bytes]] | None = [] if record else None
        """What went over the wire: kind, member, facts and message, requests and answers in order."""

    def nodes(self) -> Collection[str]:
        return list(self.sites)

    def ask(
        self,
        kind: Kind,
        packets: Mapping[str, Packet],
        timeout: float,
        done: Callable[[str], None] = lambda node: None,
    ) -> dict[str, Packet]:
        answers = {}
        for node, packet in packets.items():
            if node in self.sites:
                answers[node] = self._over(kind, node, self.sites[node](kind, self._over(kind, node, packet)))
                done(node)
        return answers

    def _over(self, kind: Kind, node: str, packet: Packet) -> Packet:
        content = packet.to_bytes()
        if self.record is not None:
            self.record.append((kind, node, *content))
        return Packet.from_bytes(*content)
