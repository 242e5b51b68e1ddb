"""Gaussians of features, one per class: how covariances travel, are pooled over clients, and are sampled.

No full matrix is ever built here. A Gaussian is sampled from the rows of a factor L with Σ = Lᵀ L. A covariance of n
samples has rank n − 1 at most, so its factor is found in n − 1 steps from as many columns of its packed triangle; and
the factor of a pooled covariance is its clients' factors, scaled and stacked below each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from polyfed.compute import to_device, working_kernels

if TYPE_CHECKING:
    from polyfed.methods.base import Server

_LARGEST_BLOCK = {"cpu": 1 << 22, "cuda": 1 << 25}
"""Entries of packed matrices that are processed together: what a CPU's cache holds, or what keeps a GPU busy."""
_MOST_ASIDE = 1 << 26
"""Draws that are kept in memory together."""


class Gaussians(NamedTuple):
    """What clients know about their classes: one row for each class of each client."""

    labels: Tensor
    counts: Tensor
    means: Tensor
    triangles: Tensor
    """Covariances, packed; the only entry that may be on a GPU."""


def pack(matrices: Tensor) -> Tensor:
    """The upper triangles of symmetric matrices, row by row: [n, size, size] to [n, size (size + 1) / 2].

    >>> pack(torch.tensor([[[1.0, 2.0], [2.0, 3.0]]])).tolist()
    [[1.0, 2.0, 3.0]]
    """
    places = _upper(matrices.shape[1], matrices.device)
    return matrices.flatten(1).gather(1, places.expand(len(matrices), -1))


def diagonals(triangles: Tensor, size: int) -> Tensor:
    """The diagonals of packed matrices: [n, size]."""
    return triangles.index_select(1, _table(size, triangles.device).diagonal())


def possible(triangles: Tensor, size: int) -> bool:
    """Whether packed matrices are finite, and no covariance is larger than its variances allow: |Σ_ij| ≤ √(Σ_ii Σ_jj).

    Variances must not be negative. Rounding is allowed for, even where a variance is too small for a float.
    """
    return possible_each([triangles], size)[0]


def possible_each(triangles: Sequence[Tensor], size: int) -> list[bool]:
    """The same for each of several clients' matrices.

    Every look at a result waits for a GPU, so there is only one for all matrices on a device.
    """
    found: dict[int, bool] = {}
    for device in {each.device for each in triangles}:
        own = [place for place, each in enumerate(triangles) if each.device == device]
        rows = torch.cat([_possible_rows(some, size) for some in _blocks([triangles[place] for place in own])])
        parts = rows.cpu().split([len(triangles[place]) for place in own])
        found |= {place: bool(part.all()) for place, part in zip(own, parts, strict=True)}
    return [found[place] for place in range(len(triangles))]


def _blocks(triangles: Sequence[Tensor]) -> Iterator[Tensor]:
    """All packed matrices on one device, in blocks of a good size."""
    width, device = triangles[0].shape[1], triangles[0].device
    at_once = max(1, _LARGEST_BLOCK.get(device.type, _LARGEST_BLOCK["cpu"]) // width)
    waiting: list[Tensor] = []
    rows = 0
    for some in (part for each in triangles for part in each.split(at_once)):
        if rows + len(some) > at_once:
            yield torch.cat(waiting)
            waiting, rows = [], 0
        waiting.append(some)
        rows += len(some)
    yield torch.cat(waiting)


def _possible_rows(triangles: Tensor, size: int) -> Tensor:
    """For each packed matrix, whether it may be a covariance."""
    deviations = diagonals(triangles, size).sqrt()
    slack = 1e-6 * deviations.amax(1, keepdim=True).square() + torch.finfo(triangles.dtype).tiny
    # Capped, so that nothing allows an infinite covariance; NaN is never smaller.
    most = _products(deviations).mul_(1.001).add_(slack).clamp_(max=torch.finfo(triangles.dtype).max)
    return (triangles.abs() <= most).all(1)


def _products(vectors: Tensor) -> Tensor:
    """The outer products of vectors with themselves, packed."""
    size = vectors.shape[1]
    if vectors.is_cuda:
        rows, columns = _triangle(size, vectors.device)
        return vectors.index_select(1, rows) * vectors.index_select(1, columns)
    return torch.cat([vectors[:, i : i + 1] * vectors[:, i:] for i in range(size)], 1)  # a lookup takes far longer


@lru_cache(maxsize=4)
def _triangle(size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    rows, columns = torch.triu_indices(size, size, device=device)
    return rows, columns


@lru_cache(maxsize=4)
def _upper(size: int, device: torch.device) -> Tensor:
    """Where the entries of a packed triangle are in the flat matrix."""
    rows, columns = _triangle(size, device)
    return rows * size + columns


@lru_cache(maxsize=4)
def _table(size: int, device: torch.device) -> Tensor:
    """Where the entries of a symmetric matrix are in its packed triangle: [size, size]."""
    row, column = torch.arange(size)[:, None], torch.arange(size)
    low, high = torch.minimum(row, column), torch.maximum(row, column)
    return (low * (2 * size - low - 1) // 2 + high).to(device)


def factors(triangles: Tensor, size: int, rank: int) -> Tensor:
    """Factors L [n, rank, size] with Lᵀ L = Σ of packed covariances that have at most that rank.

    A Cholesky decomposition with pivots, all matrices at once: each step picks the feature with the most variance
    left and explains all it can with it. Singular and zero covariances need no special care. What remains of one that
    is not positive semi-definite (because of rounding, for example) is dropped. No entry can be larger than its
    feature's standard deviation; that is enforced beyond rounding, because a hostile client's message might let entries
    grow without limit.

    On a GPU the factors are in 64 bits, because it may round those of a 32-bit product to 10 bits, and small pivots
    would make that large. One kernel does all steps there, if it can run.
    """
    dtype = torch.float64 if triangles.is_cuda else triangles.dtype
    found = torch.zeros(len(triangles), min(rank, size), size, dtype=dtype, device=triangles.device)
    floor = 10 * torch.finfo(dtype).eps  # of the largest variance; anything below is rounding
    kernels = _kernels() if triangles.is_cuda and len(triangles) else None
    if kernels is not None and size <= kernels.LARGEST:
        kernels.factor(triangles.contiguous(), found, floor)
    else:
        _factor(triangles, found, floor)
    return found


def _kernels() -> Any:
    """Our kernels for a GPU, or None if they can't run here."""
    return working_kernels("polyfed.methods.parts.gaussian_kernels", _trial)[0]


def _trial(kernels: Any, device: str) -> None:
    """The factor of one tiny covariance, to see whether the kernels work."""
    kernels.factor(torch.ones(1, 3, device=device), torch.zeros(1, 1, 2, dtype=torch.float64, device=device), 1e-15)


def _factor(triangles: Tensor, found: Tensor, floor: float) -> None:
    """The same by PyTorch's operations, one step after another; `found` must be zero."""
    dtype, size, table = found.dtype, found.shape[2], _table(found.shape[2], triangles.device)
    left = diagonals(triangles, size).double()
    smallest = floor * left.amax(1)
    most = (1.01 * left.clamp(min=0).sqrt() + 0.01 * left.amax(1, keepdim=True).clamp(min=0).sqrt()).to(dtype)
    least = -most
    for step in range(found.shape[1]):
        variance, pivot = left.max(1)
        column = triangles.gather(1, table.index_select(0, pivot)).to(dtype)
        done = found[:, :step]
        weights = done.gather(2, pivot[:, None, None].expand(-1, step, 1)).view(len(triangles), 1, step)
        column -= (weights @ done)[:, 0]
        usable = variance > smallest
        scale = torch.where(usable, torch.where(usable, variance, 1.0).rsqrt(), 0.0)
        found[:, step] = (column * scale[:, None]).clamp(least, most)
        left -= found[:, step].square()
        left.scatter_(1, pivot[:, None], 0.0)


def pool(sent: Gaussians, parts: Tensor, classes: int, *, paper_weights: bool = False) -> tuple[Tensor, Tensor]:
    """Means of the classes over all clients, and the rows that each client's class adds to its class's factor.

    `parts` are the factors of the clients' covariances [n, rank, size], the rows are [n, rank + 1, size]. The rows of a
    class, stacked, are a factor of the covariance of all its samples. Eqs. 10 and 11 of the DC-PFL
    paper, exact: the clients' covariances are multiplied by n_i − 1, where Eq. 11 prints n_i (`paper_weights`). One
    sample alone has covariance zero.
    """
    labels, weights, means = sent.labels, sent.counts.double(), sent.means.double()
    totals = torch.zeros(classes, dtype=torch.float64).index_add_(0, labels, weights)
    sums = torch.zeros(classes, means.shape[1], dtype=torch.float64).index_add_(0, labels, weights[:, None] * means)
    mean = sums / totals.clamp(min=1)[:, None]
    divisors = (totals[labels] - 1).clamp(min=1)
    within = ((weights if paper_weights else weights - 1) / divisors).sqrt()
    # The terms with means in Eq. 11 are, in their centred form, one more row for each client.
    between = (weights / divisors).sqrt()[:, None] * (means - mean[labels])
    within, between = (to_device(each.to(parts.dtype), parts.device) for each in (within, between))
    return mean, torch.cat([within[:, None, None] * parts, between[:, None]], 1)


@dataclass(frozen=True)
class Wanted:
    """How many normal draws there are to make for the vectors of each class."""

    amounts: tuple[int, ...]
    """By class, how many vectors."""
    holders: tuple[int, ...]
    """By class, how many clients sent it."""
    rank: int
    """The rank that no covariance of so many samples exceeds."""

    @classmethod
    def of(cls, labels: Tensor, counts: Tensor, amounts: Tensor, size: int) -> Wanted:
        """What vectors of that size need, so many of each class, where clients sent these labels and counts."""
        holders = torch.bincount(labels, minlength=len(amounts)).tolist()
        return cls(tuple(amounts.tolist()), tuple(holders), min(int(counts.max()) - 1, size))

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """By class, vectors and rows of the factor that they are made with."""
        return [(n, held * (self.rank + 1)) for n, held in zip(self.amounts, self.holders, strict=True)]

    @property
    def total(self) -> int:
        return sum(n * rows for n, rows in self.shapes)

    def parts(self, flat: Tensor) -> list[Tensor]:
        """By class, its part of all draws."""
        parts = flat.split([n * rows for n, rows in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]


class Noise:
    """The normal draws behind the vectors of each class, class after class, on the CPU.

    They are drawn when they are asked for, class by class, because there may be very many. That takes longer than the
    rest of a server's work on a GPU. So `aside`, and if they are not too many, another thread draws them from now on,
    into memory that a GPU reads directly; the numbers are the same.
    """

    def __init__(self, wanted: Wanted, generator: torch.Generator, *, aside: bool = False) -> None:
        self.wanted = wanted
        self._generator = generator
        self._aside: Future[Tensor] | None = None
        if aside and wanted.total <= _MOST_ASIDE:
            hand = ThreadPoolExecutor(1)
            self._aside = hand.submit(_drawn, wanted, generator)
            hand.shutdown(wait=False)

    def like(self, rows: Tensor) -> Iterator[Tensor]:
        """The draws of each class [amount, rows of its factor], once, where these rows are and of their type."""
        each: Iterable[Tensor]
        if self._aside is None:
            each = (torch.randn(shape, generator=self._generator) for shape in self.wanted.shapes)
        else:
            each = self.wanted.parts(to_device(self._aside.result(), rows.device))
        for own in each:
            # Moved in 32 bits: in one step with the move, the CPU would make it 64 first.
            yield to_device(own, rows.device).to(rows.dtype)


def _drawn(wanted: Wanted, generator: torch.Generator) -> Tensor:
    flat = torch.empty(wanted.total, pin_memory=torch.cuda.is_available())
    for part in wanted.parts(flat):
        part.normal_(generator=generator)
    return flat


class NoiseAhead:
    """Noise of one round after another; as soon as two in a row want the same, that of the next is drawn in advance.

    That is so where everybody takes part. It is then drawn while clients train.
    """

    def __init__(self) -> None:
        self._last: Wanted | None = None
        self._next: tuple[tuple[int, int, Wanted], Noise] | None = None

    def of(self, server: Server, wanted: Wanted, *, aside: bool) -> Noise:
        """The noise of this round."""
        key = (server.seed, server.round, wanted)
        ready = self._next[1] if self._next is not None and self._next[0] == key else None
        return ready or Noise(wanted, _generator(server), aside=aside)

    def draw_next(self, server: Server, wanted: Wanted) -> None:
        """Begin with the noise of the next round, if it is likely to be the same."""
        later = replace(server, round=server.round + 1)
        if wanted == self._last:
            self._next = (server.seed, later.round, wanted), Noise(wanted, _generator(later), aside=True)
        self._last = wanted


def _generator(server: Server) -> torch.Generator:
    return server.generator("virtual features")


def draw(sent: Gaussians, noise: Noise, *, paper_weights: bool = False) -> tuple[Tensor, Tensor]:
    """As many vectors from the pooled Gaussian of each class as there are draws, and their classes, on the CPU.

    The heavy work is done where the triangles are.
    """
    wanted = noise.wanted
    parts = factors(sent.triangles, sent.means.shape[1], wanted.rank)
    means, rows = pool(sent, parts, len(wanted.amounts), paper_weights=paper_weights)
    by_class = rows[to_device(sent.labels.argsort(stable=True), rows.device)]
    pairs = zip(noise.like(rows), by_class.split(wanted.holders), strict=True)
    vectors = torch.cat([own @ factor.flatten(0, 1) for own, factor in pairs])
    labels = torch.arange(len(wanted.amounts)).repeat_interleave(torch.tensor(wanted.amounts))
    return means.float()[labels] + vectors.float().cpu(), labels


def in_proportion(counts: Tensor, total: int) -> Tensor:
    """Whole numbers in proportion to the counts that sum to the total exactly, by largest remainder.

    >>> in_proportion(torch.tensor([1, 0, 1, 1]), 10).tolist()
    [4, 0, 3, 3]
    """
    quotas = counts * total
    whole = quotas // counts.sum()
    largest = (quotas % counts.sum()).argsort(descending=True, stable=True)
    whole[largest[: total - int(whole.sum())]] += 1
    return whole
