"""Kernels for a GPU: a step of SGD for stacked clients, in one pass over the weights.

With clipping, decay and momentum, PyTorch's operations read and write every weight seven times. With small networks
that is a quarter of the time of training. A launch serves several tensors, because most of a network's are small.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from polyfed.engines.stacked.sgd import Rates

BLOCK, CHUNK = 1024, 4096
"""Weights of an update at a time, and of a length."""
TENSORS = 10
"""Of a launch, at most."""


def squared_lengths(gradients: Sequence[Tensor]) -> Tensor:
    """For each client, the sum of the squares of all its gradients; they are contiguous, with clients first."""
    clients = len(gradients[0])
    # Parts are added up afterwards, in a fixed order, so that the same step gives the same numbers again.
    parts = torch.empty(clients, _blocks(gradients, CHUNK), device=gradients[0].device)
    first = 0
    for some in _launches(gradients):
        count = _blocks(some, CHUNK)
        _squares[(count, clients)](*_filled(some), *_sizes(some), parts, first, parts.shape[1], CHUNK)
        first += count
    return parts.sum(1)


def update(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    moments: Sequence[Tensor],
    steps: Tensor,
    squares: Tensor | None,
    rates: Rates,
) -> None:
    """As `sgd.update` for some parameters; all tensors are contiguous, with clients first; moments may be none.

    `squares`: the squared lengths of the gradients that are clipped together with these.
    """
    clip = 0.0 if rates.clip is None else rates.clip
    each = [isinstance(number, Tensor) for number in (clip, rates.decay, rates.momentum)]
    remembered = moments or parameters
    for own, slopes, others in zip(*map(_launches, (parameters, gradients, remembered)), strict=True):
        _update[(_blocks(own, BLOCK), len(own[0]))](
            *_filled(own), *_filled(slopes), *_filled(others), *_sizes(own),
            steps, steps if squares is None else squares, clip, rates.decay, rates.momentum,
            squares is not None, each[1] or rates.decay != 0, bool(moments), *each, BLOCK,
        )  # fmt: skip


def _launches(tensors: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
    return (tensors[first : first + TENSORS] for first in range(0, len(tensors), TENSORS))


def _filled(values: Sequence[Any]) -> list[Any]:
    """As many as a launch has; those at the end are not used."""
    return [*values, *[values[-1]] * (TENSORS - len(values))]


def _sizes(tensors: Sequence[Tensor]) -> list[int]:
    """Each client's part of the tensors of a launch."""
    return _filled([tensor[0].numel() for tensor in tensors])


def _blocks(tensors: Sequence[Tensor], block: int) -> int:
    """How many blocks have the values of one client in all these tensors; each tensor begins a new one."""
    blocks: int = sum(triton.cdiv(tensor[0].numel(), block) for tensor in tensors)
    return blocks


# A number after a name says which of a launch's tensors it belongs to: p are parameters, g gradients, m moments, and s
# how many values one client has.


@triton.jit
def _next(block, p, g, m, s, later_p, later_g, later_m, later_s, BLOCK: tl.constexpr):
    """A block's number and tensors, or the later ones if it lies after these."""
    blocks = tl.cdiv(s, BLOCK)
    after = block >= blocks
    p, g, m = tl.where(after, later_p, p), tl.where(after, later_g, g), tl.where(after, later_m, m)
    return tl.where(after, block - blocks, block), p, g, m, tl.where(after, later_s, s)


@triton.jit
def _found(
    block, p0, p1, p2, p3, p4, p5, p6, p7, p8, p9, g0, g1, g2, g3, g4, g5, g6, g7, g8, g9,
    m0, m1, m2, m3, m4, m5, m6, m7, m8, m9, s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, BLOCK: tl.constexpr,
):  # fmt: skip
    """The number of a block in its own tensors, these, and their size."""
    block, p, g, m, s = _next(block, p0, g0, m0, s0, p1, g1, m1, s1, BLOCK)
    block, p, g, m, s = _next(block, p, g, m, s, p2, g2, m2, s2, BLOCK)
    block, p, g, m, s = _next(block, p, g, m, s, p3, g3, m3, s3, BLOCK)
    block, p, g, m, s = _next(block, p, g, m, s, p4, g4, m4, s4, BLOCK)
    block, p, g, m, s = _next(block, p, g, m, s, p5, g5, m5, s5, BLOCK)
    block, p, g, m, s = _next(block, p, g, m, s, p6, g6, m6, s6, BLOCK)
    block, p, g, m, s = _next(block, p, g, m, s, p7, g7, m7, s7, BLOCK)
    block, p, g, m, s = _next(block, p, g, m, s, p8, g8, m8, s8, BLOCK)
    return _next(block, p, g, m, s, p9, g9, m9, s9, BLOCK)


_VARYING = [f"{name}{number}" for name in "pgms" for number in range(TENSORS)]


@triton.jit(do_not_specialize=[*_VARYING[TENSORS : 2 * TENSORS], *_VARYING[3 * TENSORS :], "first", "row"])
def _squares(
    g0, g1, g2, g3, g4, g5, g6, g7, g8, g9, s0, s1, s2, s3, s4, s5, s6, s7, s8, s9,
    parts, first, row, CHUNK: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(1).to(tl.int64)
    block, _, gradients, _, size = _found(
        tl.program_id(0), g0, g1, g2, g3, g4, g5, g6, g7, g8, g9, g0, g1, g2, g3, g4, g5, g6, g7, g8, g9,
        g0, g1, g2, g3, g4, g5, g6, g7, g8, g9, s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, CHUNK,
    )  # fmt: skip
    place = block * CHUNK + tl.arange(0, CHUNK)
    gradient = tl.load(gradients + client * size + place, place < size, 0.0)
    tl.store(parts + client * row + first + tl.program_id(0), tl.sum(gradient * gradient, 0))


@triton.jit(do_not_specialize=[*_VARYING, "clip", "decay", "momentum"])
def _update(
    p0, p1, p2, p3, p4, p5, p6, p7, p8, p9, g0, g1, g2, g3, g4, g5, g6, g7, g8, g9,
    m0, m1, m2, m3, m4, m5, m6, m7, m8, m9, s0, s1, s2, s3, s4, s5, s6, s7, s8, s9,
    steps, squares, clip, decay, momentum,
    CLIPS: tl.constexpr, DECAYS: tl.constexpr, MOVES: tl.constexpr,
    OWN_CLIP: tl.constexpr, OWN_DECAY: tl.constexpr, OWN_MOMENTUM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """OWN_…: a number for each client, otherwise one for all."""
    client = tl.program_id(1)
    block, parameters, gradients, moments, size = _found(
        tl.program_id(0), p0, p1, p2, p3, p4, p5, p6, p7, p8, p9, g0, g1, g2, g3, g4, g5, g6, g7, g8, g9,
        m0, m1, m2, m3, m4, m5, m6, m7, m8, m9, s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, BLOCK,
    )  # fmt: skip
    place = block * BLOCK + tl.arange(0, BLOCK)
    real = place < size
    place += client.to(tl.int64) * size
    weight = tl.load(parameters + place, real)
    direction = tl.load(gradients + place, real)
    if CLIPS:
        if OWN_CLIP:
            clip = tl.load(clip + client)
        factor = clip / (tl.sqrt(tl.load(squares + client)) + 1e-6)
        direction *= tl.minimum(factor, 1.0, propagate_nan=tl.PropagateNan.ALL)
    if DECAYS:
        if OWN_DECAY:
            decay = tl.load(decay + client)
        direction += decay * weight
    if MOVES:
        if OWN_MOMENTUM:
            momentum = tl.load(momentum + client)
        direction += momentum * tl.load(moments + place, real)
        tl.store(moments + place, direction, real)
    tl.store(parameters + place, weight + tl.load(steps + client) * direction, real)
