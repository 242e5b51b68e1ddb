"""Statistics of a client's samples per class: counts, means, covariances."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ClassStatistics:
    """Means (and covariances) of vectors per class, for the classes that occur, in rising order."""

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
    """Class means from sums [classes, size] and counts [classes]; classes without samples are left out."""
    seen = counts.nonzero().flatten()
    return ClassStatistics(seen, counts[seen], (sums[seen] / counts[seen, None]).float())


def class_covariances(vectors: Tensor, labels: Tensor, classes: int) -> ClassStatistics:
    """Means and unbiased covariances of the vectors of each class."""
    statistics = class_means(vectors, labels, classes)
    if vectors.is_cuda:  # which may round the factors of a 32-bit product to 10 bits
        vectors = vectors.double()
    seen, size = len(statistics.labels), vectors.shape[1]
    grouped = vectors[labels.argsort(stable=True)] - statistics.means.repeat_interleave(statistics.counts, 0)
    covariances = torch.empty(seen, size, size, dtype=vectors.dtype, device=vectors.device)
    for row, away in enumerate(grouped.split(statistics.counts.tolist())):
        covariances[row] = away.T @ away
    covariances /= (statistics.counts - 1).clamp(min=1)[:, None, None]
    return ClassStatistics(statistics.labels, statistics.counts, statistics.means, covariances.float())
