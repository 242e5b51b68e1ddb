"""Kernels for a GPU: a step of SGD on trained prototypes that shall stay apart, forward, backward and update.

A step computes little, so its time is that of starting kernels, and their number is what counts: six with the network,
two without. With few classes there is no product of matrices that a tensor core would speed up (`separation.py` leaves
many to PyTorch's products); everything here is in the tensors' precision.

Weights are changed where they lie. A block of them, and of what they are multiplied with, belongs to one program, which
reads it before it writes it; no other program of the same kernel reads it.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class Tiles(NamedTuple):
    """How the work is cut: rows of weights forward, columns backward, classes at a time, by how many warps."""

    rows: int = 4
    columns: int = 4
    classes: int = 4
    warps: int = 8


TILES = Tiles()
LARGEST = 2048
"""Features in a prototype, at most: a program holds all of them at once."""
MOST_CLASSES = 1024
SAMPLES, WIDTH = 16, 64
"""Client prototypes and features that a program of `gradient` looks at together."""
ENTRIES = 16_384
"""Entries of prototypes that a program of `distances` looks at together."""


def linear(x: Tensor, weight: Tensor, bias: Tensor, y: Tensor, *, relu: bool) -> None:
    """y becomes a layer's output for x [classes, features], with a square weight."""
    classes, size = x.shape
    grid = (triton.cdiv(size, TILES.rows), triton.cdiv(classes, TILES.classes))
    _linear[grid](
        x, weight, bias, y, classes, size, relu, TILES.classes, TILES.rows, triton.next_power_of_2(size),
        num_warps=TILES.warps,
    )  # fmt: skip


def linear_step(gradient: Tensor, x: Tensor, weight: Tensor, bias: Tensor, into: Tensor, lr: float) -> None:
    """Change a layer by the gradient of its output for x.

    `into` becomes the gradient of what a ReLU turned into x. If it is x itself, x is a parameter and changed too.
    """
    classes, size = x.shape
    _linear_step[(triton.cdiv(size, TILES.columns),)](
        gradient, x, weight, bias, into, lr, classes, size, into is not x, TILES.classes,
        triton.next_power_of_2(size), TILES.columns, num_warps=TILES.warps,
    )  # fmt: skip


def distances(
    prototypes: Tensor, vectors: Tensor, labels: Tensor, rows: Tensor, margin: Tensor, pulls: Tensor, losses: Tensor
) -> None:
    """The losses of the vectors in these rows, and how strongly each pulls each prototype: [rows, classes].

    A prototype's gradient of the mean loss is the sum over vectors of pull × (prototype − vector).
    """
    classes, size = prototypes.shape
    block = triton.next_power_of_2(classes)
    width = min(triton.next_power_of_2(size), max(16, ENTRIES // block))
    _distances[(len(rows),)](
        prototypes, vectors, labels, rows, margin, pulls, losses, len(rows), classes, size, block, width, num_warps=8
    )


def gradient(
    prototypes: Tensor, vectors: Tensor, rows: Tensor, pulls: Tensor, into: Tensor, lr: float | None = None
) -> None:
    """The prototypes' gradient; with a learning rate, `into` becomes the prototypes after a step."""
    classes, size = prototypes.shape
    grid = (triton.cdiv(size, WIDTH), triton.cdiv(classes, TILES.classes))
    _gradient[grid](
        prototypes, vectors, rows, pulls, into, lr or 0.0, len(rows), classes, size, lr is not None,
        SAMPLES, TILES.classes, WIDTH, num_warps=TILES.warps,
    )  # fmt: skip


# Constants are written in capitals: C classes, K features, B… the size of a block.


@triton.jit
def _linear(
    x, w, bias, y, C: tl.constexpr, K: tl.constexpr, RELU: tl.constexpr,
    BC: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    n, k = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BK)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    weight = tl.load(w + n[:, None] * K + k[None, :], (n < K)[:, None] & (k < K)[None, :], 0.0)
    value = tl.load(x + c[:, None] * K + k[None, :], (c < C)[:, None] & (k < K)[None, :], 0.0)
    total = tl.sum(value[:, None, :] * weight[None, :, :], 2) + tl.load(bias + n, n < K, 0.0)[None, :]
    if RELU:
        total = tl.where(total < 0.0, 0.0, total)  # what is not a number stays so
    tl.store(y + c[:, None] * K + n[None, :], total, (c < C)[:, None] & (n < K)[None, :])


@triton.jit
def _linear_step(
    g, x, w, bias, into, lr, C: tl.constexpr, K: tl.constexpr, RELU: tl.constexpr,
    BC: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Some columns of the weights: the gradient of what they are multiplied with, and then their own step."""
    k, n = tl.program_id(0) * BK + tl.arange(0, BK), tl.arange(0, BN)
    here, inside = k < K, (n < K)[:, None] & (k < K)[None, :]
    weight = tl.load(w + n[:, None] * K + k[None, :], inside, 0.0)
    change = tl.zeros((BN, BK), weight.dtype)
    shift = tl.zeros((BK,), weight.dtype)
    for first in range(0, C, BC):
        c = first + tl.arange(0, BC)
        place, real = c[:, None] * K + k[None, :], (c < C)[:, None] & here[None, :]
        value = tl.load(x + place, real, 0.0)
        slope = tl.load(g + c[:, None] * K + n[None, :], (c < C)[:, None] & (n < K)[None, :], 0.0)
        through = tl.sum(slope[:, :, None] * weight[None, :, :], 1)
        change += tl.sum(slope[:, :, None] * value[:, None, :], 0)
        shift += tl.sum(tl.load(g + place, real, 0.0), 0)
        if RELU:
            tl.store(into + place, tl.where(value > 0.0, through, 0.0), real)
        else:
            tl.debug_barrier()  # all threads have read x, which `into` is
            tl.store(into + place, value - lr * through, real)
    tl.store(w + n[:, None] * K + k[None, :], weight - lr * change, inside)
    tl.store(bias + k, tl.load(bias + k, here, 0.0) - lr * shift, here)


@triton.jit(do_not_specialize=["samples"])
def _distances(
    p, vectors, labels, rows, margin, pulls, losses, samples, C: tl.constexpr, K: tl.constexpr,
    BC: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """A client prototype's distances from all prototypes, softmax and cross entropy."""
    b = tl.program_id(0)
    row = tl.load(rows + b)
    c = tl.arange(0, BC)
    own = c == tl.load(labels + row)
    squares = tl.zeros((BC,), p.dtype.element_ty)
    for first in range(0, K, BK):
        k = first + tl.arange(0, BK)
        value = tl.load(p + c[:, None] * K + k[None, :], (c < C)[:, None] & (k < K)[None, :], 0.0)
        apart = value - tl.load(vectors + row * K + k, k < K, 0.0)[None, :]
        squares += tl.sum(apart * apart, 1)
    distance = tl.sqrt(squares)
    logits = tl.where(c < C, -distance - tl.where(own, tl.load(margin), 0.0), float("-inf"))
    top = tl.max(logits, 0)
    powers = tl.exp(logits - top)
    total = tl.sum(powers, 0)
    tl.store(losses + b, tl.log(total) + top - tl.sum(tl.where(own, logits, 0.0), 0))
    # A longer distance makes the logit smaller; the loss grows by what softmax has too much.
    slope = (tl.where(own, 1.0, 0.0) - powers / total) / samples
    tl.store(pulls + b * C + c, tl.where(distance == 0.0, 0.0, slope / distance), c < C)


@triton.jit(do_not_specialize=["samples"])
def _gradient(
    p, vectors, rows, pulls, into, lr, samples, C: tl.constexpr, K: tl.constexpr, STEP: tl.constexpr,
    BB: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Never by the expanded sum, which would lose small distances."""
    k, c = tl.program_id(0) * BK + tl.arange(0, BK), tl.program_id(1) * BC + tl.arange(0, BC)
    place, real = c[:, None] * K + k[None, :], (c < C)[:, None] & (k < K)[None, :]
    own = tl.load(p + place, real, 0.0)
    total = tl.zeros((BC, BK), own.dtype)
    for first in range(0, samples, BB):
        b = first + tl.arange(0, BB)
        row = tl.load(rows + b, b < samples, 0)
        value = tl.load(vectors + row[:, None] * K + k[None, :], (b < samples)[:, None] & (k < K)[None, :], 0.0)
        pull = tl.load(pulls + b[:, None] * C + c[None, :], (b < samples)[:, None] & (c < C)[None, :], 0.0)
        total += tl.sum(pull[:, :, None] * (own[None, :, :] - value[:, None, :]), 0)
    if STEP:
        total = own - lr * total
    tl.store(into + place, total, real)
