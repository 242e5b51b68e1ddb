"""The default engine on a CPU: one client per worker thread, with one compute thread each.

The networks of this field are too small for one step to keep several cores busy; several clients at once do. PyTorch
releases Python's lock while it computes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Self, TypeVar

from polyfed.compute import available_cores, compute_threads, return_memory, reuse_memory
from polyfed.engines.base import EngineSettings, LocalEngine
from polyfed.engines.client.workbench import Workbench
from polyfed.evaluation import Evaluation
from polyfed.message import Message
from polyfed.methods.base import Reply
from polyfed.population import Population

Result = TypeVar("Result")


class ThreadsEngine(LocalEngine):
    """Clients train side by side; the numbers do not depend on how many workers there are."""

    name = "threads"

    def __init__(self, population: Population, *, workers: int | None = None, memory_budget: int | None = None) -> None:
        super().__init__(population, memory_budget=memory_budget)
        self._pool = ThreadPoolExecutor(workers or available_cores(), thread_name_prefix="polyfed-client")
        self._own = threading.local()
        reuse_memory()
        self.notes += [
            f"clients with {name} train one after another: it draws from a global generator, which is seeded for each"
            for name in sorted(population.draws)
        ]

    @classmethod
    def create(cls, population: Population, settings: EngineSettings) -> Self:
        return cls(population, workers=settings.workers, memory_budget=settings.memory_budget)

    def train(
        self,
        round: int,
        downloads: Mapping[int, Message],
        done: Callable[[int], None] = lambda client: None,
        *,
        score: bool = False,
    ) -> list[Reply]:
        def work(client: int) -> Reply:
            return self._train_one(self._bench(), client, downloads[client], round)

        for client in downloads:  # before any worker starts: the counter's hooks would see all threads' modules
            self._client_flops(client)
        replies = self._each(downloads, work, done, self._load)
        return [replies[client] for client in sorted(replies)]

    def evaluate(
        self, clients: Iterable[int], round: int, downloads: Mapping[int, Message] | None = None
    ) -> dict[int, Evaluation]:
        received = downloads or {}
        return self._each(clients, lambda c: self._evaluate_one(self._bench(), c, received.get(c), round))

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        super().close()

    def _bench(self) -> Workbench:
        if not hasattr(self._own, "bench"):
            self._own.bench = Workbench(self._empty_network)
        bench: Workbench = self._own.bench
        return bench

    def _samples(self, client: int) -> float:
        return len(self.population.data[client].train)

    def _load(self, client: int) -> float:
        """How much work a client has in a round, in any unit."""
        return self._samples(client) * sum(self._client_flops(client).phases.values())

    def _each(
        self,
        clients: Iterable[int],
        work: Callable[[int], Result],
        done: Callable[[int], None] = lambda client: None,
        load: Callable[[int], float] | None = None,
    ) -> dict[int, Result]:
        def on_worker(client: int) -> Result:
            try:
                return work(client)
            finally:
                self._bench().release()

        # Clients with the most work come first, so that no slow one is left for the end; those of one architecture
        # train side by side, so that its initial weights can be freed early.
        names, amount = self.population.architectures, load or self._samples
        order = sorted(clients, key=lambda c: (-amount(c), names[c].name, c))
        results: dict[int, Result] = {}
        with compute_threads(1):
            futures = {self._pool.submit(on_worker, client): client for client in order}
            try:
                for future in as_completed(futures):
                    results[futures[future]] = future.result()
                    done(futures[future])
            finally:
                for future in futures:
                    future.cancel()
        return_memory()  # once: after every client, it would add a fifth to the time of short ones
        return results
