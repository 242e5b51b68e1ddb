"""Statistics of a client's samples per class: counts, means, covariances."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from polyfed.compute import all_to_device, to_device

_LARGEST_BLOCK = 1 << 27
"""Numbers in the covariances and vectors that are processed at once."""


@dataclass(frozen=True)
class ClassStatistics:
    """Means (and covariances) of vectors per class, for the classes that occur, in ascending order."""

    labels: Tensor
    """int64 [seen]"""
    counts: Tensor
    """int64 [seen]"""
    means: Tensor
    """float32 [seen, size]"""
    covariances: Tensor | None = None
    """float32 [seen, size, size], divided by n − 1; zero for a class with one sample"""


def class_means(vectors: Tensor, labels: Tensor, classes: int) -> ClassStatistics:
    """Exact mean of the vectors of each class, summed in float64.

    >>> class_means(torch.tensor([[1.0], [3.0], [5.0]]), torch.tensor([2, 2, 0]), 3).means.tolist()
    [[5.0], [2.0]]
    """
    sums = torch.zeros(classes, vectors.shape[1], dtype=torch.float64, device=vectors.device)
    sums.index_add_(0, labels, vectors.double())
    return means_from_sums(sums, torch.bincount(labels, minlength=classes))


def means_from_sums(sums: Tensor, counts: Tensor) -> ClassStatistics:
    """Class means from sums [classes, size] and counts [classes]; classes without samples are left out.

    Sums on a GPU with counts on the CPU give means on the GPU, and nobody waits for it.
    """
    seen = counts.nonzero().flatten()
    own, divisors = (to_device(each, sums.device) for each in (seen, counts[seen, None]))
    return ClassStatistics(seen, counts[seen], (sums[own] / divisors).float())


def class_covariances(vectors: Tensor, labels: Tensor, classes: int) -> ClassStatistics:
    """Means and unbiased covariances of the vectors of each class."""
    found = class_means(vectors, labels, classes)
    grouped = vectors[labels.argsort(stable=True)] - found.means.repeat_interleave(found.counts, 0)
    return replace(found, covariances=group_covariances(grouped, found.counts.cpu()))


def group_covariances(away: Tensor, counts: Tensor) -> Tensor:
    """Unbiased covariances [groups, size, size] of vectors, given as distances from their group's mean, by group.

    Groups of about the same size are multiplied at once. On a GPU this is done in 64 bits, because it may round the
    factors of a 32-bit product to 10 bits, and with a few sizes only: shorter groups are padded with zeros.
    """
    device, size = away.device, away.shape[1]
    widths = counts
    if away.is_cuda:
        away, widths = away.double(), 2 ** counts.double().log2().ceil().long()
    starts = counts.cumsum(0) - counts
    covariances = torch.empty(len(counts), size, size, device=device)
    for width in widths.unique().tolist():
        at_once = max(1, _LARGEST_BLOCK // (size * (size + width)))
        for groups in (widths == width).nonzero().flatten().split(at_once):
            places = torch.arange(width).expand(len(groups), -1)
            inside = (places < counts[groups, None])[..., None]
            rows = (starts[groups, None] + places).clamp(max=len(away) - 1)
            divisors = (counts[groups] - 1).clamp(min=1)[:, None, None]
            inside, rows, divisors, groups = all_to_device([inside, rows, divisors, groups], device)
            block = torch.where(inside, away[rows], 0.0)
            covariances[groups] = (block.mT @ block).div_(divisors).float()
    return covariances
