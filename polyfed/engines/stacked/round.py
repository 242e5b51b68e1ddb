"""One round of a cohort: its training has been queued, and this is what comes out of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from polyfed.compute import available_cores, compute_threads, to_device
from polyfed.engines.client import round as local
from polyfed.engines.stacked import passes
from polyfed.engines.stacked.captured import Stream
from polyfed.engines.stacked.passes import Collected
from polyfed.engines.stacked.replays import CohortReplays
from polyfed.engines.stacked.step import PhaseStep, Stack
from polyfed.engines.stacked.tables import Table
from polyfed.message import Message, State, largest, snapshots
from polyfed.methods.base import Method, Phase, Trained
from polyfed.methods.parts.network import ClientNetwork
from polyfed.methods.parts.statistics import ClassStatistics, means_from_sums
from polyfed.population import Population


@dataclass(frozen=True, eq=False)
class Afterwards:
    """What is asked of the clients' networks after their training, as it is queued."""

    collected: Collected | None
    probed: list[State | None]
    inspected: dict[str, Tensor]

    @classmethod
    def queued(
        cls,
        population: Population,
        clients: list[int],
        network: ClientNetwork,
        state: State,
        round: int,
        say: Callable[[str], None],
        graphs: CohortReplays | None = None,
        table: Table | None = None,
    ) -> Afterwards:
        """Ask everything that the method wants to know."""
        with torch.no_grad():
            collected = passes.collect(population, clients, network, state, say, graphs, table)
            inspects = type(population.method).inspect is not Method.inspect
            inspected = passes.inspect(population, clients, network, state, table) if inspects else {}
            return cls(collected, passes.probe(population, clients, network, state, round), inspected)


@contextmanager
def upload_threads(method: Method) -> Iterator[Executor | None]:
    """Threads for the uploads of all cohorts, if the method says that several may be made at once."""
    if not method.uploads_in_threads:
        yield None
        return
    threads = ThreadPoolExecutor(available_cores(), thread_name_prefix="polyfed-upload")
    try:
        with compute_threads(1):
            yield threads
    finally:
        threads.shutdown(cancel_futures=True)  # some are left only if there was an error


def uploads(
    population: Population,
    clients: Sequence[int],
    answers: Sequence[Trained],
    stream: Stream,
    threads: Executor | None = None,
) -> Iterator[Message]:
    """What leaves the clients of a cohort: begun at once in the threads, if there are any, or else one by one."""
    homes = [population.home(client) for client in clients]
    if threads is not None:

        def made(home: tuple[Population, int], answer: Trained) -> Message:
            with stream.entered(), torch.no_grad():  # a thread of its own is in no stream and in no such block
                return local.upload(*home, answer)

        return threads.map(made, homes, answers)
    if population.method.heavy or population.device.type == "cpu":
        return (local.upload(*home, answer) for home, answer in zip(homes, answers, strict=True))
    made_by_all = (local.new_upload(*home, answer) for home, answer in zip(homes, answers, strict=True))
    # Copied at once, because a method may use its tensors again for the next client; moved to the CPU together.
    return iter(snapshots([message.snapshot({*message.tensors, *message.metadata}) for message in made_by_all]))


@dataclass(frozen=True, eq=False)
class CohortRound:
    """Clients whose training is queued; the lists have one entry per phase."""

    clients: list[int]
    stack: Stack
    phases: Sequence[Phase]
    steps: list[PhaseStep]
    """They hold the results."""
    left_out: list[list[Tensor]]
    """The samples of each client that are not visited."""
    after: Afterwards
    table: Table

    def notes(self) -> list[tuple[str, ...]]:
        """For each client, remarks on its samples that are not visited, and the method's own."""
        pairs = list(zip(self.phases, self.left_out, strict=True))
        unseen = [[local.left_out(phase) for phase, own in pairs if len(own[i])] for i in range(len(self.clients))]
        remarks = passes.remarks(self.after.inspected, len(self.clients))
        return [(*words, *own) for words, own in zip(unseen, remarks, strict=True)]

    def statistics(self) -> Sequence[ClassStatistics | None]:
        """Each client's class statistics, if the method wants any."""
        collected = self.after.collected
        return [None] * len(self.clients) if collected is None else collected.of_clients()

    def visited(self, population: Population) -> list[Tensor]:
        """How often samples of each class are visited: [clients, classes]."""
        counts = []
        for phase, left_out in zip(self.phases, self.left_out, strict=True):
            visits = self.table.visits(phase)
            if any(map(len, left_out)):
                missed = [torch.bincount(population.labels[own], minlength=visits.shape[1]) for own in left_out]
                visits = visits - torch.stack(missed)
            counts.append(visits)
        return counts

    def seen(self, visited: Sequence[Tensor]) -> list[dict[str, int]]:
        """How many samples each client visits in each phase."""
        totals = {phase.name: counts.sum(1).tolist() for phase, counts in zip(self.phases, visited, strict=True)}
        return [{name: counts[i] for name, counts in totals.items()} for i in range(len(self.clients))]

    def tracked(self, visited: Sequence[Tensor]) -> list[ClassStatistics | None]:
        """Each client's class means of the vectors that the first tracking phase kept."""
        tracked: list[ClassStatistics | None] = [None] * len(self.clients)
        for step, counts in zip(self.steps, visited, strict=True):
            of_clients = () if step.sums is None else step.sums.cpu()
            for i, (sums, seen) in enumerate(zip(of_clients, counts, strict=False)):
                if seen.sum():
                    tracked[i] = tracked[i] or means_from_sums(sums, seen)
        return tracked

    def results(self) -> tuple[list[list[float]], float]:
        """For each phase, the sum of each client's losses; and the norm of everything trained.

        It waits for the GPU, once for all of them.
        """
        size, device = len(self.clients), next(iter(self.stack.state.values())).device
        totals = [step.total[:size] for step in self.steps]
        *found, norm = torch.cat([*totals, to_device(self._norm(), device)[None]]).tolist()
        return [found[start : start + size] for start in range(0, len(found), size)], norm

    def _norm(self) -> Tensor:
        """In few kernels; it is not finite if training has diverged."""
        return get_total_norm([tensor for phase in self.phases for tensor in self._trained(phase).values()])

    def check_weights(self, norm: float, round: int) -> None:
        """Raise if the norm of everything trained is not finite; only then is the client and phase looked for.

        None is found if only the norm is too large for a float.
        """
        if math.isfinite(norm):
            return
        for i, client in enumerate(self.clients):
            for phase in self.phases:
                if not bool(largest(tensor[i] for tensor in self._trained(phase).values()).isfinite()):
                    raise local.diverged("weights", client, round, phase.name)

    def _trained(self, phase: Phase) -> State:
        """What a phase may have changed; what a later phase also changes counts for the later one."""
        later = self.phases[self.phases.index(phase) + 1 :]
        return {
            name: tensor[: len(self.clients)]
            for name, tensor in self.stack.state.items()
            if local.is_trained(name, tensor, phase) and not any(local.is_trained(name, tensor, p) for p in later)
        }

    def losses(self, totals: Sequence[Sequence[float]], visited: Sequence[Tensor], round: int) -> list[float]:
        """Each client's mean loss in the first phase that trains its model, from the sums of its losses."""
        losses = []
        for phase, sums, counts in zip(self.phases, totals, visited, strict=True):
            samples = counts.sum(1).tolist()
            for client, total, seen in zip(self.clients, sums, samples, strict=True):
                local.check_loss(total, seen, client, round, phase.name)
            if "model" in phase.trains:
                losses.append([t / n if n else float("nan") for t, n in zip(sums, samples, strict=True)])
        return losses[0] if losses else [float("nan")] * len(self.clients)
