"""The default engine on a GPU: clients of one architecture train as one batched network.

A small network's step is limited by the launches of its kernels, not by arithmetic. Stacking the clients of one
architecture (a cohort) makes one launch serve all of them, and on CUDA a complete step is captured once as a graph and
replayed, cohorts of different architectures side by side. The numbers are those of the plain loop to float tolerance.

Batch norm looks at all samples of a batch; that of a cohort knows which of them are padding (stacked/norms.py). Where
it can't know, each client is its own cohort. What can't be stacked or captured at all is trained by the plain loop:
networks that draw from global generators, with unusual norms, or that `vmap` can't handle. stacked/trial.py finds out
which; both are noted once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from functools import cache, partial
from typing import TypeVar

import torch

from polyfed.compute import beside
from polyfed.engines import stacked
from polyfed.engines.client import round as local
from polyfed.engines.client.phases import phases_in
from polyfed.engines.client.probing import probe_sizes
from polyfed.engines.client.workbench import Workbench
from polyfed.engines.cohorts import CohortEngine
from polyfed.engines.stacked.plan import Plan
from polyfed.engines.stacked.round import Afterwards, CohortRound, upload_threads, uploads
from polyfed.evaluation import Evaluation
from polyfed.message import Message, State
from polyfed.methods.base import Phase, Reply, Trained
from polyfed.population import Population

Result = TypeVar("Result")

LARGEST_COHORT = 256
STEPS_IN_A_TURN = 8
"""Steps of a cohort that are queued before it is another's turn."""


class VectorizedEngine(CohortEngine):
    """Clients of one architecture train as one batched network on one device."""

    name = "vectorized"

    def __init__(self, population: Population, *, memory_budget: int | None = None) -> None:
        super().__init__(population, memory_budget=memory_budget)
        self._bench = Workbench(self._empty_network)
        self._limit = LARGEST_COHORT

    def expect(self, round: int, clients: Iterable[int]) -> None:
        self._drawer.expect(round, clients)

    def train(
        self,
        round: int,
        downloads: Mapping[int, Message],
        done: Callable[[int], None] = lambda client: None,
        *,
        score: bool = False,
    ) -> list[Reply]:
        replies: dict[int, Reply] = {}
        for answers in self.answers(round, downloads):
            for reply in answers:
                replies[reply.client] = reply
                done(reply.client)
        return [replies[client] for client in sorted(replies)]

    def answers(self, round: int, downloads: Mapping[int, Message]) -> Iterator[list[Reply]]:
        """The replies, cohort by cohort; a client's new state is kept when its reply is given, and not before."""
        for clients in self._cohorts(downloads, stackable=False):
            for client in clients:
                yield [self._train_one(self._bench, client, downloads[client], round)]
            self._bench.release()
        # Cohorts of one architecture use the same memory, so they train one after another; all others side by side.
        waiting: dict[str, deque[list[int]]] = {}
        for clients in self._cohorts(downloads, stackable=True):
            waiting.setdefault(self._architecture(clients[0]), deque()).append(clients)
        with beside(self.population.device):
            while waiting:
                wave = [waiting[name].popleft() for name in list(waiting)[: None if self._apart else 1]]
                yield from self._train_side_by_side(wave, downloads, round)
                waiting = {name: cohorts for name, cohorts in waiting.items() if cohorts}

    def evaluate(
        self, clients: Iterable[int], round: int, downloads: Mapping[int, Message] | None = None
    ) -> dict[int, Evaluation]:
        clients, received = list(clients), downloads or {}
        scores: dict[int, Evaluation] = {}
        for group in self._cohorts(clients, stackable=False):
            scores |= {client: self._evaluate_one(self._bench, client, received.get(client), round) for client in group}
            self._bench.release()
        scores |= self._evaluate_side_by_side(self._cohorts(clients, stackable=True), received, round)
        return {client: scores[client] for client in sorted(scores)}

    def close(self) -> None:
        try:
            self._drawer.clear()
            self._let_go()
        finally:
            super().close()

    # Cohorts ----------------------------------------------------------------------------------------------------------

    def _cohorts(self, clients: Iterable[int], *, stackable: bool) -> list[list[int]]:
        """The clients that can be stacked, or all others, by architecture, in pieces that fit."""
        groups: dict[str, list[int]] = {}
        stacks: set[str] = set()
        for client in sorted(clients):
            name = self._architecture(client)
            if name not in stacks and self._reason_for_the_loop(client) is None:
                stacks.add(name)
            if (name in stacks) == stackable:
                groups.setdefault(name, []).append(client)
        most = {name: 1 if self._trial.of(group[0]).single else self._limit for name, group in groups.items()}
        return [g[i : i + most[name]] for name, g in groups.items() for i in range(0, len(g), most[name])]

    def _longest_first(self, clients: list[int]) -> list[int]:
        """The order of clients in a stack: those that have finished a phase come last."""
        return sorted(clients, key=lambda client: -len(self.population.data[client].train))

    def _reason_for_the_loop(self, client: int) -> str | None:
        """Why the plain loop trains clients of this architecture, or None."""
        return self._trial.of(client).reason

    def _train_side_by_side(
        self, cohorts: list[list[int]], downloads: Mapping[int, Message], round: int
    ) -> Iterator[list[Reply]]:
        """Queue the work of all cohorts, each on its stream, before waiting for the first."""
        self._drop_old_steps()
        queued, too_large = self._queue_in_turn(cohorts, downloads, round)
        with upload_threads(self.population.method) as threads:
            finishing: deque[tuple[list[int], Callable[[], list[Reply]]]] = deque()
            while queued or finishing:
                # Where uploads take threads, those of all cohorts are begun before the first is waited for.
                begin = bool(queued) and (threads is not None or not finishing)
                clients = queued[0].clients if begin else finishing[0][0]
                try:
                    with local.explained(self.population, clients, f"round {round}"):
                        if begin:
                            finishing.append((clients, self._finish(queued.popleft(), round, threads)))
                            continue
                        answers = finishing.popleft()[1]()
                    yield answers
                except torch.OutOfMemoryError:
                    too_large.append(clients)
        if too_large and len(cohorts) > 1 and self._apart:
            self._apart = False
            self.notes.append(
                "not all architectures fit into memory side by side; from now on they train one after another"
            )
        for clients in too_large:
            again = partial(self._train_stacked, downloads=downloads, round=round)
            yield from self._alone(clients, again)

    def _queue_in_turn(
        self, cohorts: list[list[int]], downloads: Mapping[int, Message], round: int
    ) -> tuple[deque[CohortRound], list[list[int]]]:
        """Queue the work of all cohorts, some steps of each at a time; also the cohorts that do not fit into memory.

        A GPU takes in only so many steps before queueing waits for it: those of one cohort would keep the others' out.
        """
        begun = {place: self._begin(clients, downloads, round) for place, clients in enumerate(cohorts)}
        queued: dict[int, CohortRound] = {}
        too_large: list[list[int]] = []
        while begun:
            for place in list(begun):
                clients = cohorts[place]
                try:
                    explained = local.explained(self.population, clients, f"round {round}")
                    with explained, self._stream(clients[0]).entered():
                        result = _turn(begun[place])
                except torch.OutOfMemoryError:
                    too_large.append(clients)
                else:
                    if result is None:
                        continue
                    queued[place] = result
                del begun[place]
            self._drawer.draw_ahead(round)  # now that this round's batches are drawn
        return deque(queued[place] for place in sorted(queued)), too_large

    def _train_stacked(self, clients: list[int], downloads: Mapping[int, Message], round: int) -> list[Reply]:
        work = self._begin(clients, downloads, round)
        with self._stream(clients[0]).entered():
            while (queued := _turn(work)) is None:
                pass
        with upload_threads(self.population.method) as threads:
            return self._finish(queued, round, threads)()

    def _begin(
        self, clients: list[int], downloads: Mapping[int, Message], round: int
    ) -> Generator[None, None, CohortRound]:
        """Queue all that a cohort trains in this round, step by step and without waiting for it, on its stream."""
        clients = self._longest_first(clients)
        phases = phases_in(self.population.method, round)
        stack = self._stack(clients, round, downloads, keep=True)
        # All plans before the first phase: moving one to a GPU waits for everything queued before.
        plans = [plan.on(self.population.device) for plan in self._drawer.plans(clients, round)]
        # One generator for all phases of a client; made only if there is dropout.
        drops = cache(lambda: [self.population.device_generator("dropout", round, client) for client in clients])
        steps = []
        for phase, plan in zip(phases, plans, strict=True):
            steps.append((yield from self._train_phase(clients, stack.state, phase, plan, drops)))
        network, own = self._quiet_network(clients[0]), self._own(clients, stack)
        graphs = self._graphs(clients[0], stack)
        table = self._tables.of(clients)
        after = Afterwards.queued(self.population, clients, network, own, round, self._note, graphs, table)
        return CohortRound(clients, stack, phases, steps, [plan.left_out for plan in plans], after, table)

    def _train_phase(
        self, clients: list[int], state: State, phase: Phase, plan: Plan, drops: Callable[[], list[torch.Generator]]
    ) -> Generator[None, None, stacked.PhaseStep]:
        captured = self._captured(clients[0], state, phase)
        padded = clients + clients[:1] * (len(captured.step.total) - len(clients))
        for name, values in self.population.numbers(padded).items():
            captured.step.numbers[name].copy_(values)
        yield from captured.queued(plan, drops)
        return captured.step

    def _finish(self, work: CohortRound, round: int, threads: Executor | None) -> Callable[[], list[Reply]]:
        """Wait for the clients' training and begin their uploads; what it returns gives their replies."""
        people, clients = self.population, work.clients
        stream, flops = self._stream(clients[0]), self._client_flops(clients[0])
        with stream.entered(), torch.no_grad():
            visited = work.visited(people)
            parts = work.stack.parts[: len(clients)]
            gathered = zip(parts, work.statistics(), work.tracked(visited), work.after.probed, strict=True)
            answers = [
                Trained(people.counts[client], round, *own) for client, own in zip(clients, gathered, strict=True)
            ]
            spent = [
                flops.of_round(seen, len(people.data[client].train), probe_sizes(people, client))
                for client, seen in zip(clients, work.seen(visited), strict=True)
            ]
            notes = work.notes()
            totals, norm = work.results()  # waits for the GPU, so as late as it can be
            losses = work.losses(totals, visited, round)
            work.check_weights(norm, round)
            local.check_statistics(answers, clients, round)
            made = uploads(people, clients, answers, stream, threads)

        def replies() -> list[Reply]:
            """What the clients answer; only then is their new state kept."""
            with stream.entered(), torch.no_grad():
                messages = [self._within_budget(message, round) for message in made]
                found = [Reply(*one) for one in zip(clients, messages, losses, spent, notes, strict=True)]
                # Last: a cohort that has run out of memory is tried again from its old states.
                self._keep(clients, parts)
                self._held[self._architecture(clients[0]), len(work.stack.parts)] = self._versions(clients)
            stream.join()
            return found

        return replies

    def _keep(self, clients: list[int], states: list[State]) -> None:
        """Copy the clients' states from their stack to the store."""
        beginners = [client for client in clients if not self.store.has(client)]
        rooms = [self.store.room(client, state) for client, state in zip(clients, states, strict=True)]
        stacked.copy_states(rooms, states)
        for client, room in zip(clients, rooms, strict=True):
            self.store.put(client, room)
        for client in beginners:
            self._forget_first(client)

    def _evaluate_side_by_side(
        self, cohorts: list[list[int]], downloads: Mapping[int, Message], round: int
    ) -> dict[int, Evaluation]:
        """Queue the predictions of all cohorts, each on its stream, before waiting for the first."""
        queued: list[stacked.Predicted] = []
        too_large: list[list[int]] = []
        for clients in cohorts:
            try:
                queued.append(self._predict(clients, downloads, round))
            except torch.OutOfMemoryError:
                too_large.append(clients)
        scores = dict(pair for work in queued for pair in self._evaluations(work, round).items())
        queued.clear()
        for clients in too_large:
            again = partial(self._evaluate_stacked, downloads=downloads, round=round)
            for part in self._alone(clients, again):
                scores |= part
        return scores

    def _evaluate_stacked(
        self, clients: list[int], downloads: Mapping[int, Message], round: int
    ) -> dict[int, Evaluation]:
        return self._evaluations(self._predict(clients, downloads, round), round)

    def _predict(self, clients: list[int], downloads: Mapping[int, Message], round: int) -> stacked.Predicted:
        """Queue a cohort's predictions, without waiting for them."""
        clients = self._longest_first(clients)  # as they have trained, so that they are still where they were
        with self._stream(clients[0]).entered(), torch.no_grad():
            stack = self._stack(clients, round, downloads, keep=False)
            own, graphs = self._own(clients, stack), self._graphs(clients[0], stack)
            with local.explained(self.population, clients, f"the evaluation of round {round}"):
                network = self._quiet_network(clients[0])
                table = self._tables.of(clients)
                return stacked.predict(self.population, clients, network, own, self._note, graphs, table)

    def _evaluations(self, work: stacked.Predicted, round: int) -> dict[int, Evaluation]:
        """Wait for a cohort's predictions, and count them."""
        stream = self._stream(work.clients[0])
        with stream.entered(), local.explained(self.population, work.clients, f"the evaluation of round {round}"):
            scores = work.evaluations()
        stream.join()
        return scores

    # Memory -----------------------------------------------------------------------------------------------------------

    def _fitting(self, clients: list[int], work: Callable[[list[int]], Result]) -> Iterator[Result]:
        """Do the work for all clients at once, or in smaller and smaller cohorts until they fit into memory."""
        try:
            yield work(clients)
            return
        except torch.OutOfMemoryError:
            pass  # memory can be freed only after the error has released its frames
        yield from self._alone(clients, work)

    def _alone(self, clients: list[int], work: Callable[[list[int]], Result]) -> Iterator[Result]:
        """The same after freeing what other cohorts left in memory."""
        self._let_go()
        try:
            yield work(clients)
            return
        except torch.OutOfMemoryError:
            if len(clients) == 1:
                raise
        self._let_go()
        half = len(clients) // 2
        if half < self._limit:
            self._limit = half
            self.notes.append(
                f"{len(clients)} clients at once did not fit into memory; from now on at most {half} train together"
            )
        for part in (clients[:half], clients[half:]):
            yield from self._fitting(part, work)


def _turn(work: Generator[None, None, Result]) -> Result | None:
    """Let work continue for some steps; its result, if that was its end."""
    try:
        for _ in range(STEPS_IN_A_TURN):
            next(work)
    except StopIteration as end:
        result: Result = end.value
        return result
    return None
