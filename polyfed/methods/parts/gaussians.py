"""Gaussians of features, one per class: how covariances travel, are pooled over clients, and are sampled.

No full matrix is ever built here. A Gaussian is sampled from the rows of a factor L with Σ = Lᵀ L. A covariance of n
samples has rank n − 1 at most, so its factor is found in n − 1 steps from as many columns of its packed triangle; and
the factor of a pooled covariance is its clients' factors, scaled and stacked below each other.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

_LARGEST_BLOCK = 1 << 22
"""Entries of packed matrices that are processed together."""


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
    rows, columns = torch.triu_indices(matrices.shape[1], matrices.shape[1], device=matrices.device)
    places = rows * matrices.shape[1] + columns
    return matrices.flatten(1).gather(1, places.expand(len(matrices), -1))


def diagonals(triangles: Tensor, size: int) -> Tensor:
    """The diagonals of packed matrices: [n, size]."""
    every = torch.arange(size, device=triangles.device)
    return triangles[:, _places(every, every, size)]


def possible(triangles: Tensor, size: int) -> bool:
    """Whether no covariance in packed matrices is larger than its two variances allow: |Σ_ij| ≤ √(Σ_ii Σ_jj).

    Variances must not be negative. Rounding is allowed for, even where a variance is too small for a float.
    """
    sound = [torch.ones((), dtype=torch.bool, device=triangles.device)]
    for some in triangles.split(max(1, _LARGEST_BLOCK // triangles.shape[1])):
        deviations = diagonals(some, size).sqrt()
        slack = 1e-6 * deviations.amax(1, keepdim=True).square() + torch.finfo(some.dtype).tiny
        sound.append((some.abs() <= _products(deviations).mul_(1.001).add_(slack)).all())
    return bool(torch.stack(sound).all())


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


def _places(row: Tensor, column: Tensor, size: int) -> Tensor:
    """Where entries of a symmetric matrix are in its packed triangle."""
    low, high = torch.minimum(row, column), torch.maximum(row, column)
    return low * (2 * size - low - 1) // 2 + high


def factors(triangles: Tensor, size: int, rank: int) -> Tensor:
    """Factors L [n, rank, size] with Lᵀ L = Σ of packed covariances that have at most that rank.

    A Cholesky decomposition with pivots, all matrices at once: each step picks the feature with the most variance
    left and explains all it can with it. Singular and zero covariances need no special care. What remains of one that
    is not positive semi-definite (because of rounding, for example) is dropped. No entry can be larger than its
    feature's standard deviation; that is enforced beyond rounding, because a hostile client's message might let entries
    grow without limit.
    """
    everyone = torch.arange(len(triangles), device=triangles.device)
    features = torch.arange(size, device=triangles.device)
    left = diagonals(triangles, size).double()
    smallest = 10 * torch.finfo(triangles.dtype).eps * left.amax(1)  # anything below this is rounding
    most = (1.01 * left.clamp(min=0).sqrt() + 0.01 * left.amax(1, keepdim=True).clamp(min=0).sqrt()).to(triangles)
    found = triangles.new_zeros(len(triangles), min(rank, size), size)
    for step in range(found.shape[1]):
        variance, pivot = left.max(1)
        column = triangles.gather(1, _places(features, pivot[:, None], size))
        done = found[:, :step]
        column -= (done[everyone, :, pivot][:, None] @ done)[:, 0]
        usable = variance > smallest
        scale = torch.where(usable, torch.where(usable, variance, 1.0).rsqrt(), 0.0)
        found[:, step] = (column * scale[:, None]).clamp(-most, most)
        left -= found[:, step].square()
        left[everyone, pivot] = 0.0
    return found


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
    return mean, torch.cat([within.to(parts)[:, None, None] * parts, between.to(parts)[:, None]], 1)


def draw(
    sent: Gaussians, amounts: Tensor, *, generator: torch.Generator, paper_weights: bool = False
) -> tuple[Tensor, Tensor]:
    """As many vectors from the pooled Gaussian of each class as `amounts` says, and their classes, on the CPU.

    The heavy work is done where the triangles are.
    """
    device = sent.triangles.device
    # A GPU may round the factors of a 32-bit product to 10 bits, and small pivots would make that large.
    triangles = sent.triangles.double() if sent.triangles.is_cuda else sent.triangles
    parts = factors(triangles, sent.means.shape[1], int(sent.counts.max()) - 1)
    means, rows = pool(sent, parts, len(amounts), paper_weights=paper_weights)
    by_class = rows[sent.labels.argsort(stable=True).to(device)]
    holders = torch.bincount(sent.labels, minlength=len(amounts)).tolist()
    vectors = []
    for amount, factor in zip(amounts.tolist(), by_class.split(holders), strict=True):
        noise = torch.randn(amount, len(factor) * rows.shape[1], generator=generator)
        vectors.append(noise.to(rows) @ factor.flatten(0, 1))
    labels = torch.arange(len(amounts)).repeat_interleave(amounts)
    return means.float()[labels] + torch.cat(vectors).float().cpu(), labels


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
