"""A kernel for a GPU: factors of covariances, all steps of a matrix in one program.

A factor's rows depend on each other, and each is little work. Launched one operation after another, a GPU is mostly
waiting; here a program keeps what is left of its matrix's variances in registers and goes on as soon as a row is done.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

LARGEST = 4096
"""Features, at most: a program holds a row of all of them at once."""
ENTRIES, WARPS = 8192, 16
"""Entries of earlier rows that a program looks at together, and the warps that do."""


def factor(triangles: Tensor, found: Tensor, floor: float) -> None:
    """Factors of packed covariances [n, size (size + 1) / 2] become the first rows of `found` [n, rank, size].

    `found` must be zero: rows are left out from the first whose pivot is not above `floor` times the largest variance.
    """
    count, rank, size = found.shape
    block = triton.next_power_of_2(size)
    _factor[(count,)](
        triangles, found, floor, rank, triangles.shape[1], size, max(1, ENTRIES // block), block, num_warps=WARPS
    )


# Constants are written in capitals: T entries of a triangle, K features, B… the size of a block.


@triton.jit(do_not_specialize=["rank"])
def _factor(triangles, found, floor, rank, T: tl.constexpr, K: tl.constexpr, BJ: tl.constexpr, BK: tl.constexpr):
    matrix = tl.program_id(0).to(tl.int64)
    triangles += matrix * T
    found += matrix * rank * K
    k = tl.arange(0, BK)
    here = k < K
    left = tl.load(triangles + k * (2 * K - k - 1) // 2 + k, here, 0.0).to(tl.float64)
    left = tl.where(here, left, float("-inf"))
    variance = tl.max(left, 0)
    smallest = floor * variance
    most = 1.01 * tl.sqrt(tl.maximum(left, 0.0)) + 0.01 * tl.sqrt(tl.maximum(variance, 0.0))
    step = 0
    while (step < rank) & (variance > smallest):
        pivot = tl.argmax(left, 0)
        low, high = tl.minimum(k, pivot), tl.maximum(k, pivot)
        row = tl.load(triangles + low * (2 * K - low - 1) // 2 + high, here, 0.0).to(tl.float64)
        for first in range(0, step, BJ):
            j = first + tl.arange(0, BJ)
            done = tl.load(found + j[:, None] * K + k[None, :], (j < step)[:, None] & here[None, :], 0.0)
            weights = tl.load(found + j * K + pivot, j < step, 0.0)
            row -= tl.sum(weights[:, None] * done, 0)
        row /= tl.sqrt(variance)
        row = tl.minimum(tl.maximum(row, -most), most)
        tl.store(found + step * K + k, row, here)
        tl.debug_barrier()  # other threads read this row in the next step
        left = tl.where(k == pivot, 0.0, left - row * row)
        left = tl.where(here, left, float("-inf"))
        variance = tl.max(left, 0)
        step += 1
