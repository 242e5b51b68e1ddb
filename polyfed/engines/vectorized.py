"""The default engine on a GPU: clients of one architecture train as one batched network.

A small network's step is limited by the launches of its kernels, not by arithmetic. Stacking the clients of one
architecture (a cohort) makes one launch serve all of them, and on CUDA a whole step is captured once as a graph and
replayed. The numbers are those of the plain loop to float tolerance.

What can't be stacked is trained by the plain loop and said so once: networks with batch norm (a padded batch would
change its statistics), with dropout (its masks come from one generator per client), or that `vmap` does not take.
"""

from __future__ import annotations

import gc
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from polyfed.engines import cohort as stacked
from polyfed.engines import local
from polyfed.engines.base import LocalEngine
from polyfed.engines.local import Evaluation
from polyfed.engines.population import Population, Workbench
from polyfed.message import Message, State
from polyfed.methods.base import Method, Phase, Reply, Trained
from polyfed.methods.network import ClientNetwork
from polyfed.methods.statistics import ClassStatistics, means_from_sums
from polyfed.models import SeededDropout

Result = TypeVar("Result")

LARGEST_COHORT = 256
KEPT_STEPS = 64
"""Captured steps that are kept for later rounds; the least recently used goes first."""


class VectorizedEngine(LocalEngine):
    """Clients of one architecture train as one batched network on one device."""

    name = "vectorized"

    def __init__(self, population: Population, *, memory_budget: int | None = None) -> None:
        super().__init__(population, memory_budget=memory_budget)
        self._bench = Workbench(self._empty_network)
        self._steps: OrderedDict[tuple[str, int, str], CapturedStep] = OrderedDict()
        self._stacks: dict[tuple[str, int], State] = {}
        self._one_by_one: dict[str, str] = {}
        self._checked: set[str] = set()
        self._limit = LARGEST_COHORT
        self._owners = Counter(architecture.name for architecture in population.architectures)
        self._longest: dict[str, int] = {}
        for data, architecture in zip(population.data, population.architectures, strict=True):
            self._longest[architecture.name] = max(self._longest.get(architecture.name, 0), len(data.train))
        self._pool = torch.cuda.graph_pool_handle() if population.device.type == "cuda" else None
        self._notes: list[str] = []

    def train(
        self, round: int, downloads: Mapping[int, Message], done: Callable[[int], None] = lambda client: None
    ) -> list[Reply]:
        replies: dict[int, Reply] = {}
        for clients in self._cohorts(downloads):
            for reply in self._train_cohort(clients, downloads, round):
                replies[reply.client] = reply
                done(reply.client)
        return [replies[client] for client in sorted(replies)]

    def evaluate(
        self, clients: Iterable[int], round: int, downloads: Mapping[int, Message] | None = None
    ) -> dict[int, Evaluation]:
        scores: dict[int, Evaluation] = {}
        for group in self._cohorts(clients):
            scores |= self._evaluate_cohort(group, round, downloads or {})
        return {client: scores[client] for client in sorted(scores)}

    # Cohorts ----------------------------------------------------------------------------------------------------------

    def _cohorts(self, clients: Iterable[int]) -> list[list[int]]:
        """The clients by architecture, in pieces that fit."""
        groups: dict[str, list[int]] = {}
        for client in sorted(clients):
            groups.setdefault(self._architecture(client), []).append(client)
        return [g[i : i + self._limit] for g in groups.values() for i in range(0, len(g), self._limit)]

    def _architecture(self, client: int) -> str:
        return self.population.architectures[client].name

    def _train_cohort(self, clients: list[int], downloads: Mapping[int, Message], round: int) -> list[Reply]:
        reason = self._reason_for_the_loop(clients[0])
        if reason is not None:
            replies = [self._train_one(self._bench, client, downloads[client], round) for client in clients]
            self._bench.release()
            return self._with_notes(replies)
        work = partial(self._train_stacked, downloads=downloads, round=round)
        return self._with_notes([reply for part in self._fitting(clients, work) for reply in part])

    def _train_stacked(self, clients: list[int], downloads: Mapping[int, Message], round: int) -> list[Reply]:
        people, method = self.population, self.population.method
        network = self._network(clients[0])
        state = self._stack(clients, round, downloads, keep=True)
        phases = method.phases()
        losses = [float("nan")] * len(clients)
        tracked: Sequence[ClassStatistics | None] = [None] * len(clients)
        found = False
        for phase in phases:
            means, vectors = self._train_phase(clients, network, state, phase, round)
            if "model" in phase.trains and not found:
                losses, found = means, True
            tracked = [old or new for new, old in zip(vectors, tracked, strict=True)]
        network.eval()
        own = {name: tensor[: len(clients)] for name, tensor in state.items()}
        with torch.no_grad():
            statistics = stacked.collect(people, clients, network, own)
            remarks: list[tuple[str, ...]] = [()] * len(clients)
            if type(method).inspect is not Method.inspect:
                remarks = stacked.remarks(people, clients, network, own)
        columns = {name: tensor.unbind() for name, tensor in own.items()}
        states = [{name: column[i].clone() for name, column in columns.items()} for i in range(len(clients))]
        replies = []
        for index, client in enumerate(clients):
            answer = Trained(
                people.counts[client], round, state=states[index], statistics=statistics[index], tracked=tracked[index]
            )
            message = method.upload(answer).snapshot()
            flops = self._client_flops(client).of_round(phases, people.data[client])
            replies.append(Reply(client, message, losses[index], flops, remarks[index]))
        # Only now, when nothing can run out of memory any more: a cohort that is tried again starts from old states.
        for client, trained in zip(clients, states, strict=True):
            beginner = not self.store.has(client)
            self.store.put(client, trained)
            if beginner:
                self._forget_first(client)
        return replies

    def _train_phase(
        self, clients: list[int], network: ClientNetwork, state: State, phase: Phase, round: int
    ) -> tuple[list[float], Sequence[ClassStatistics | None]]:
        people = self.population
        size = len(next(iter(state.values())))
        plan = stacked.new_plan(people, clients, self._width(clients[0]), size, phase, round)
        step = self._captured(clients[0], network, state, phase)
        step.run(plan)
        visited = (plan.rows >= 0).sum((0, 2)).tolist()
        totals = step.step.total.tolist()
        means = []
        for client, total, samples in zip(clients, totals, visited, strict=False):
            local.check_finite(torch.tensor(total), client, round, phase.name)
            means.append(total / samples if samples else float("nan"))
        if step.step.sums is None:
            return means, [None] * len(clients)
        sums = step.step.sums.cpu()
        counts = [self._visits(plan, index) for index in range(len(clients))]
        return means, [means_from_sums(sums[i], count) for i, count in enumerate(counts)]

    def _visits(self, plan: stacked.Plan, index: int) -> Tensor:
        """How often a client's classes were visited."""
        rows = plan.rows[:, index].flatten()
        labels = self.population.dataset.labels[rows[rows >= 0]]
        return torch.bincount(labels, minlength=self.population.task.classes).cpu()

    def _evaluate_cohort(
        self, clients: list[int], round: int, downloads: Mapping[int, Message]
    ) -> dict[int, Evaluation]:
        if self._reason_for_the_loop(clients[0]) is not None:
            scores = {c: self._evaluate_one(self._bench, c, downloads.get(c), round) for c in clients}
            self._bench.release()
            return scores
        work = partial(self._evaluate_stacked, downloads=downloads, round=round)
        return {client: score for part in self._fitting(clients, work) for client, score in part.items()}

    def _evaluate_stacked(
        self, clients: list[int], downloads: Mapping[int, Message], round: int
    ) -> dict[int, Evaluation]:
        state = self._stack(clients, round, downloads, keep=False)
        own = {name: tensor[: len(clients)] for name, tensor in state.items()}
        with torch.no_grad():
            return stacked.evaluate(self.population, clients, self._network(clients[0]).eval(), own)

    # Memory and shapes ------------------------------------------------------------------------------------------------

    def _stack(self, clients: list[int], round: int, downloads: Mapping[int, Message], *, keep: bool) -> State:
        """The clients' states after their downloads, one above the other, padded with copies of the first client.

        `keep`: in tensors that stay, because captured steps work on them.
        """
        states = [self.store.get(client) for client in clients]
        padded = states + states[:1] * (self._size(clients) - len(states))
        key = (self._architecture(clients[0]), len(padded))
        kept = self._stacks.get(key)
        if kept is None:
            state = {name: torch.stack([s[name] for s in padded]) for name in states[0]}
            if keep:
                self._stacks[key] = state
        else:
            state = kept
            for name, tensor in state.items():
                torch.stack([s[name] for s in padded], out=tensor)
        moved: dict[int, Message] = {}
        for index, client in enumerate(clients):
            if client not in downloads:
                continue
            message = downloads[client]
            message = moved.setdefault(id(message), local.on_device(message, self.population.device))
            mine = {name: tensor[index] for name, tensor in state.items()}
            local.receive(self.population, client, mine, message, round)
        return state

    def _size(self, clients: list[int]) -> int:
        """The size a cohort is padded to, so that few different shapes occur over many rounds."""
        count = len(clients)
        if self.population.device.type != "cuda" or count <= 4:
            return count
        if count == self._owners[self._architecture(clients[0])]:
            return count
        steps = (step for power in range(2, 20) for step in (1 << power, 3 << (power - 1)))
        return next(step for step in steps if step >= count)

    def _width(self, client: int) -> int:
        """Samples in a batch: no more than any client of the architecture has."""
        return min(self.population.training.batch_size, self._longest[self._architecture(client)])

    def _captured(self, client: int, network: ClientNetwork, state: State, phase: Phase) -> CapturedStep:
        key = (self._architecture(client), len(next(iter(state.values()))), phase.name)
        if key not in self._steps:
            self._steps[key] = CapturedStep(stacked.PhaseStep(self.population, network, phase, state), self._pool)
            while len(self._steps) > KEPT_STEPS:
                self._steps.popitem(last=False)
        self._steps.move_to_end(key)
        return self._steps[key]

    def _network(self, client: int) -> ClientNetwork:
        """The architecture's network, around which states are laid; phases set its modules' modes."""
        with self._building:
            return self._build(client)

    def _fitting(self, clients: list[int], work: Callable[[list[int]], Result]) -> list[Result]:
        """Do the work for all clients at once, or in smaller and smaller cohorts until they fit into memory."""
        try:
            return [work(clients)]
        except torch.OutOfMemoryError:
            pass  # memory can be given back only after the error has let go of its frames
        self._let_go()  # what other cohorts had left may have been in the way
        try:
            return [work(clients)]
        except torch.OutOfMemoryError:
            if len(clients) == 1:
                raise
        self._let_go()
        half = len(clients) // 2
        if half < self._limit:
            self._limit = half
            self._notes.append(f"{len(clients)} clients at once did not fit into memory; from now on {half} at most")
        return [result for part in (clients[:half], clients[half:]) for result in self._fitting(part, work)]

    def _let_go(self) -> None:
        """Give back all memory that is only kept to be faster next time."""
        self._steps.clear()
        self._stacks.clear()
        gc.collect()  # a failed capture may have left cycles that hold on to its memory
        if self._pool is not None:
            self._pool = torch.cuda.graph_pool_handle()
            torch.cuda.empty_cache()

    # What can't be stacked --------------------------------------------------------------------------------------------

    def _reason_for_the_loop(self, client: int) -> str | None:
        """Why clients of this architecture train one by one, or None."""
        name = self._architecture(client)
        if name not in self._checked:
            self._checked.add(name)
            reason = unstackable(self._network(client)) or self._try_vmap(client)
            if reason:
                self._one_by_one[name] = reason
                self._notes.append(f"clients with {name} train one after another: {reason}")
        return self._one_by_one.get(name)

    def _try_vmap(self, client: int) -> str | None:
        """Train, predict and collect with two copies of the client; what `vmap` or the network says if that fails."""
        people, network, twice = self.population, self._network(client), [client, client]
        state = {name: torch.stack([tensor, tensor]) for name, tensor in self.store.get(client).items()}
        try:
            for phase in people.method.phases():
                plan = stacked.new_plan(people, twice, self._width(client), 2, phase, 0)
                if len(plan.rows):
                    stacked.PhaseStep(people, network, phase, state)(plan.at(0))
            network.eval()
            with torch.no_grad():
                stacked.own_rules(people, client, network, state)
                stacked.collect(people, twice, network, state)
                stacked.remarks(people, twice, network, state)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, NotImplementedError, ValueError, TypeError, LookupError) as error:
            return " ".join(str(error).split())[:200]
        return None

    def _with_notes(self, replies: list[Reply]) -> list[Reply]:
        """Attach what the engine noticed to the first reply."""
        if self._notes and replies:
            first = replies[0]
            replies[0] = Reply(
                first.client, first.message, first.loss, first.flops, (*first.notes, *self._notes), first.failure
            )
            self._notes.clear()
        return replies


def unstackable(network: nn.Module) -> str | None:
    """What in a network keeps it from being stacked."""
    for module in network.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            return "it has batch norm, whose statistics a padded batch would change"
        if isinstance(module, SeededDropout) and module.p > 0:
            return "it has dropout, whose draws belong to one client"
    return None


@dataclass
class CapturedStep:
    """A cohort's step, on CUDA captured as a graph that is replayed for every batch."""

    step: stacked.PhaseStep
    pool: Any
    """Memory for what a step computes on the way; one for all graphs, because only one runs at a time."""
    _inputs: State | None = None
    _graph: torch.cuda.CUDAGraph | None = None

    def run(self, plan: stacked.Plan) -> None:
        """All steps of a plan, from a fresh optimiser state."""
        self.step.reset()
        begin = 0
        if plan.rows.is_cuda and self._graph is None and len(plan.rows) > 1:
            begin = self._capture(plan)
        for number in range(begin, len(plan.rows)):
            if self._graph is None or self._inputs is None:
                self.step(plan.at(number))
                continue
            for name, tensor in plan.at(number).items():
                self._inputs[name].copy_(tensor)
            self._graph.replay()

    def _capture(self, plan: stacked.Plan) -> int:
        """Take the first step outside a graph, as a warm-up that counts, then capture; how many steps were taken."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.step(plan.at(0))
        torch.cuda.current_stream().wait_stream(side)
        self._inputs = {name: tensor.clone() for name, tensor in plan.at(0).items()}
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            self.step(self._inputs)
        self._graph = graph
        return 1
