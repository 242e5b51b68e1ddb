"""Passes over the samples of many clients at once without training: statistics, scores, remarks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from polyfed.compute import to_device
from polyfed.confusion import Counts
from polyfed.engines.client.probing import ask, probe_samples
from polyfed.engines.client.round import silent, smaller_batches
from polyfed.engines.stacked.numbers import numbers_of, on
from polyfed.engines.stacked.replays import CohortReplays
from polyfed.engines.stacked.step import StackedApplied, for_each
from polyfed.engines.stacked.tables import Table, padded_rows
from polyfed.evaluation import PARTS, Evaluation, Part
from polyfed.message import State
from polyfed.methods.base import Batch
from polyfed.methods.parts.network import Applied, ClientNetwork
from polyfed.methods.parts.statistics import ClassStatistics, group_covariances
from polyfed.metrics import auc, margins
from polyfed.population import Population

EVALUATION_SAMPLES, EVALUATION_VALUES = 8192, 8192 * 3 * 32 * 32
"""Most samples of all clients together in one step of an evaluation, and most values of these samples."""
CAPTURED_SHARE = 8
"""A captured pass has one of so many parts of these samples, because its memory is not freed afterwards."""
USUAL_MEMORY = 40 * 2**30
"""Of a GPU; one with more gets more samples at once."""


@cache
def roominess(device: torch.device) -> float:
    """How many times as much memory as usual a device has, where it is a GPU with more."""
    if device.type != "cuda":
        return 1.0
    return max(1.0, torch.cuda.get_device_properties(device).total_memory / USUAL_MEMORY)


def in_chunks(
    population: Population,
    network: ClientNetwork,
    state: State,
    rows: Tensor,
    function: Callable[..., object],
    say: Callable[[str], None] = silent,
    graphs: CohortReplays | None = None,
    purpose: Hashable = None,
) -> list[tuple[Tensor, object]]:
    """A function of (network, images) for all clients over all their samples; pairs of rows and results.

    Samples that do not fit into memory at once are processed in halves, with a remark. With `graphs` the pass is
    captured where it can be; functions of equal purposes compute the same.
    """
    dataset, method = population.dataset, population.method
    applied = cache(lambda: StackedApplied(network, function))

    def work(state: State, chunk: Tensor) -> object:
        x, _ = dataset.batch(chunk.clamp(min=0).flatten(), chunk.device)
        return for_each(lambda own, a: on(applied(), method, own)(a), state, x.unflatten(0, chunk.shape))

    samples = min(EVALUATION_SAMPLES, EVALUATION_VALUES // dataset.images[0].numel())
    samples = int(samples * roominess(rows.device))
    if graphs is not None:
        found = graphs.over(purpose, work, rows, numbers_of(state), max(1, samples // CAPTURED_SHARE))
        if found is not None:
            return found
    width = max(1, samples // max(1, len(rows)))
    results, start = [], 0
    while start < rows.shape[1]:
        chunk = rows[:, start : start + width]
        try:
            results.append((chunk, work(state, chunk)))
            start += chunk.shape[1]
            continue
        except torch.OutOfMemoryError:
            if width == 1:
                raise
        width = -(-width // 2)  # out here, the error no longer holds on to the memory of what failed
        say(smaller_batches(width * len(rows)))
    return results


@dataclass(frozen=True, eq=False)
class Collected:
    """Class statistics of a cohort, as they are queued on a GPU; only `of_clients` waits for them."""

    found: ClassStatistics
    """Of all clients' classes, those of one client after those of another; their covariances are not in here."""
    seen: list[int]
    """How many classes each client has."""
    covariances: Sequence[Tensor | None]

    def of_clients(self) -> list[ClassStatistics]:
        """The statistics of each client."""
        parts = (self.found.labels, self.found.counts, self.found.means.cpu())
        labels, counts, means = (part.split(self.seen) for part in parts)
        return [ClassStatistics(*own) for own in zip(labels, counts, means, self.covariances, strict=True)]


def collect(
    population: Population,
    clients: Sequence[int],
    network: ClientNetwork,
    state: State,
    say: Callable[[str], None] = silent,
    graphs: CohortReplays | None = None,
    table: Table | None = None,
) -> Collected | None:
    """Queue the method's class statistics of all clients' training samples, if it wants any."""
    wanted = population.method.collect
    if wanted is None:
        return None
    table = table or Table(population, clients)
    parts = in_chunks(population, network, state, table.trained, wanted.of, say, graphs, wanted.of)
    vectors = joined([part for _, part in parts if isinstance(part, Tensor)]).flatten(0, 1)
    classes, groups = population.task.classes, len(clients) * population.task.classes
    sums = torch.zeros(groups + 1, vectors.shape[-1], dtype=torch.float64, device=vectors.device)  # and of padding
    sums.index_add_(0, table.groups, vectors.double())
    (held, counts), (own, divisors) = table.holdings, table.divisors
    means = (sums[own] / divisors).float()
    covariances: Sequence[Tensor | None] = [None] * len(clients)
    if wanted.covariance:
        order, places = table.ordered
        away = vectors[order] - means[places]
        covariances = group_covariances(away, counts).split(table.seen)
    own_counts = counts.clone()  # the table stays, whatever a method does to these
    return Collected(ClassStatistics(held % classes, own_counts, means), table.seen, covariances)


def joined(pieces: Sequence[Tensor]) -> Tensor:
    """Results of all clients for some of their samples, and then for others, as one table; of one piece, that one."""
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces), 1)


def probe(
    population: Population, clients: Sequence[int], network: ClientNetwork, state: State, round: int
) -> list[State | None]:
    """What the method's probe finds for each client; None for those with too few samples."""
    wanted = population.method.probe
    if wanted is None:
        return [None] * len(clients)
    samples = [probe_samples(population, client, round) for client in clients]
    if not any(len(study) for study, _ in samples):
        return [None] * len(clients)
    # Not with our own kernels, which have no rule for forward mode.
    applied = Applied(network, lambda net, *parts: ask(wanted, net, Batch(*parts[:3]), Batch(*parts[3:])))
    given = []
    for rows in (to_device(padded_rows(own), population.device) for own in zip(*samples, strict=True)):
        x, y = population.dataset.batch(rows.clamp(min=0).flatten(), population.device)
        given += [x.unflatten(0, rows.shape), y.view_as(rows), rows >= 0]
    found = for_each(lambda own, *parts: on(applied, population.method, own)(*parts), state, *given)
    return [
        {name: tensor[i] for name, tensor in found.items()} if len(study) else None
        for i, (study, _) in enumerate(samples)
    ]


@dataclass(frozen=True, eq=False)
class Predicted:
    """What is predicted for the samples of a cohort, as it is queued on a GPU; only `evaluations` waits for it."""

    clients: Sequence[int]
    rules: list[str]
    widths: list[int]
    """Columns of each part."""
    tables: Tensor
    """True classes, −1 for padding; what each rule predicts; with two classes also each rule's margins, as bits."""

    def evaluations(self) -> dict[int, Evaluation]:
        """Count what is predicted as what, of every client's test and validation samples."""
        counts: dict[Part, dict[str, Counts]] = {}
        aucs: dict[Part, dict[str, list[float | None]]] = {}
        count = len(self.rules)
        for part, tables in zip(PARTS, self.tables.cpu().split(self.widths, 2), strict=True):
            true, *found = tables.numpy()
            counts[part] = {rule: Counts.of(true, own) for rule, own in zip(self.rules, found, strict=False)}
            margins = {rule: own.view(np.float64) for rule, own in zip(self.rules, found[count:], strict=False)}
            aucs[part] = {rule: [auc(*pair) for pair in zip(true, own, strict=True)] for rule, own in margins.items()}
        found = Evaluation.of(counts["test"], counts["validation"], aucs if len(self.tables) > 1 + count else None)
        return dict(zip(self.clients, found, strict=True))


def predict(
    population: Population,
    clients: Sequence[int],
    network: ClientNetwork,
    state: State,
    say: Callable[[str], None] = silent,
    graphs: CohortReplays | None = None,
    table: Table | None = None,
) -> Predicted:
    """Queue the predictions of all clients' test and validation samples, in one pass over both."""
    table, two = table or Table(population, clients), population.task.classes == 2
    rows = table.tested

    def decide(net: ClientNetwork, x: Tensor) -> dict[str, tuple[Tensor, ...]]:
        found = population.method.predict(net, x)
        return {rule: (own.argmax(-1), *([margins(own).double()] if two else [])) for rule, own in found.items()}

    columns: dict[str, list[Tensor]] = {}
    preferred: dict[str, list[Tensor]] = {}
    for _, decided in in_chunks(population, network, state, rows, decide, say, graphs, population.method.predict):
        assert isinstance(decided, dict)
        for rule, (chosen, *margin) in decided.items():
            columns.setdefault(rule, []).append(chosen)
            for values in margin:
                preferred.setdefault(rule, []).append(values.view(torch.int64))
    if not columns:  # nobody has samples of either part
        rules = own_rules(population, clients[:1], network, state)
        columns, preferred = ({rule: [rows] for rule in rules if known} for known in (True, two))
    found = [joined(own) for own in (*columns.values(), *preferred.values())]
    # One table, so that it comes from a GPU in one transfer.
    return Predicted(clients, list(columns), table.widths, torch.stack([table.true, *found]))


def own_rules(population: Population, clients: Sequence[int], network: ClientNetwork, state: State) -> list[str]:
    """The names of the method's rules of prediction, from one training sample of each client."""
    rows = to_device(torch.stack([population.data[client].train[:1] for client in clients]), population.device)
    first = {name: tensor[: len(clients)] for name, tensor in state.items()}
    ((_, scores),) = in_chunks(population, network, first, rows, population.method.predict)
    assert isinstance(scores, dict)
    return list(scores)


def inspect(
    population: Population, clients: Sequence[int], network: ClientNetwork, state: State, table: Table | None = None
) -> dict[str, Tensor]:
    """Queue the method's remarks on all clients: which apply to each, from one batch of its samples."""
    rows = (table or Table(population, clients)).some
    x, y = population.dataset.batch(rows.flatten(), population.device)
    applied = StackedApplied(network, lambda net, a, b: population.method.inspect(net, Batch(a, b)))
    given = x.unflatten(0, rows.shape), y.view_as(rows)
    found = for_each(lambda own, a, b: on(applied, population.method, own)(a, b), state, *given)
    assert isinstance(found, dict)
    return found


def remarks(found: dict[str, Tensor], count: int) -> list[tuple[str, ...]]:
    """The remarks on each of so many clients, from what `inspect` found."""
    truth = torch.stack(list(found.values()), 1).tolist() if found else [()] * count
    return [tuple(remark for remark, applies in zip(found, own, strict=True) if applies) for own in truth]
