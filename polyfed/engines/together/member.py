"""The engine of one run of a group, and what it asks of the group."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from polyfed.engines.vectorized import VectorizedEngine
from polyfed.evaluation import Evaluation
from polyfed.message import Message, State
from polyfed.methods.base import Reply
from polyfed.methods.parts.network import ClientNetwork
from polyfed.population import Population

if TYPE_CHECKING:
    from polyfed.engines.together.group import Group


@dataclass(eq=False)
class Request:
    """What a run asks of its clients, and later the answer or the error."""

    member: Member
    position: tuple[int, int]
    """How far its run is: a round, and in it 0 for the training, then the evaluations that follow."""
    kind: str
    round: int
    clients: list[int]
    downloads: Mapping[int, Message] | None
    done: Callable[[int], None] = lambda client: None
    answer: Any = None
    error: BaseException | None = None
    ready: threading.Event = field(default_factory=threading.Event)

    @property
    def likeness(self) -> tuple[object, ...]:
        """Requests for which this is the same can be answered together."""
        return self.kind, self.round, self.downloads is None

    def answer_alone(self) -> None:
        """Let the run's own engine answer."""
        try:
            self.answer = self.member.alone(self, self.clients)
        except BaseException as error:
            self.error = error


class Member(VectorizedEngine):
    """The engine of one run of a group. It has the run's clients and their states, and asks the group to train them."""

    def __init__(self, group: Group, run: str, population: Population, memory_budget: int) -> None:
        super().__init__(population, memory_budget=memory_budget)
        self.run = run
        self._group = group
        self._trained, self._evaluated = 0, 0
        """The last round that was trained, and the number of evaluations since."""
        self._expected: tuple[int, list[int]] = (0, [])
        """A round, and who will probably train in it."""

    def expect(self, round: int, clients: Iterable[int]) -> None:
        self._expected = round, list(clients)
        super().expect(*self._expected)  # should it train alone

    def expected_in(self, round: int) -> list[int]:
        """Who will probably train in that round, as far as it is known."""
        known, clients = self._expected
        return clients if known == round else []

    def train(
        self,
        round: int,
        downloads: Mapping[int, Message],
        done: Callable[[int], None] = lambda client: None,
        *,
        score: bool = False,
    ) -> list[Reply]:
        request = Request(self, (round, 0), "train", round, sorted(downloads), downloads, done)
        replies: list[Reply] = self._group.ask(request)
        self._trained, self._evaluated = round, 0
        return replies

    def evaluate(
        self, clients: Iterable[int], round: int, downloads: Mapping[int, Message] | None = None
    ) -> dict[int, Evaluation]:
        self._evaluated += 1
        position = self._trained, self._evaluated
        scores: dict[int, Evaluation] = self._group.ask(
            Request(self, position, "evaluate", round, sorted(clients), downloads)
        )
        return scores

    def alone(self, request: Request, clients: Iterable[int]) -> Any:
        """Train or evaluate these clients of the request in cohorts of this run only."""
        if request.kind == "evaluate":
            return super().evaluate(clients, request.round, request.downloads)
        assert request.downloads is not None
        return super().train(request.round, {c: request.downloads[c] for c in clients}, request.done)

    def restore(self, round: int, states: Mapping[int, State]) -> None:
        super().restore(round, states)
        self._trained, self._evaluated = round, 0

    def network(self, client: int) -> ClientNetwork:
        """The network of a client's architecture, without weights."""
        return self._network(client)

    def release(self) -> None:
        """Free memory that is only kept to be faster next time."""
        self._drawer.clear()
        self._let_go()
