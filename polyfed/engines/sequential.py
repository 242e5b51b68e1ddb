"""The reference engine: clients train one after another, each with all compute threads or all of the GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from polyfed.engines.base import LocalEngine
from polyfed.engines.client.workbench import Workbench
from polyfed.evaluation import Evaluation
from polyfed.message import Message
from polyfed.methods.base import Reply
from polyfed.population import Population


class SequentialEngine(LocalEngine):
    """One client after another in this process; every other engine must agree with it."""

    name = "sequential"

    def __init__(self, population: Population, *, memory_budget: int | None = None) -> None:
        super().__init__(population, memory_budget=memory_budget)
        self._bench = Workbench(self._empty_network)

    def train(
        self,
        round: int,
        downloads: Mapping[int, Message],
        done: Callable[[int], None] = lambda client: None,
        *,
        score: bool = False,
    ) -> list[Reply]:
        replies = []
        for client in sorted(downloads):
            replies.append(self._train_one(self._bench, client, downloads[client], round))
            done(client)
        self._bench.release()
        return replies

    def evaluate(
        self, clients: Iterable[int], round: int, downloads: Mapping[int, Message] | None = None
    ) -> dict[int, Evaluation]:
        received = downloads or {}
        scores = {c: self._evaluate_one(self._bench, c, received.get(c), round) for c in sorted(clients)}
        self._bench.release()
        return scores
