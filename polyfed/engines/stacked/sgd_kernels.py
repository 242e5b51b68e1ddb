"""Kernels for a GPU: a step of SGD for stacked clients, in one pass over the weights.

With clipping, decay and momentum, PyTorch's operations read and write every weight seven times. With small networks
that is a quarter of the time of training.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from polyfed.engines.stacked.sgd import Rates

BLOCK, CHUNK = 1024, 4096
"""Weights of an update at a time, and of a length."""


def squared_lengths(gradients: Sequence[Tensor]) -> Tensor:
    """For each client, the sum of the squares of all its gradients; they are contiguous, with clients first."""
    clients = len(gradients[0])
    sizes = [gradient[0].numel() for gradient in gradients]
    counts = [triton.cdiv(size, CHUNK) for size in sizes]
    # Parts are added up afterwards, in a fixed order, so that the same step gives the same numbers again.
    parts = torch.empty(clients, sum(counts), device=gradients[0].device)
    first = 0
    for gradient, size, count in zip(gradients, sizes, counts, strict=True):
        _squares[(count, clients)](gradient, parts, size, first, parts.shape[1], CHUNK)
        first += count
    return parts.sum(1)


def update(
    parameter: Tensor, gradient: Tensor, moment: Tensor | None, steps: Tensor, squares: Tensor | None, rates: Rates
) -> None:
    """As `sgd.update` for one parameter; all tensors are contiguous, with clients first.

    `squares`: the squared lengths of the gradients that are clipped together with this one.
    """
    clients, size = len(parameter), parameter[0].numel()
    clip = 0.0 if rates.clip is None else rates.clip
    each = [isinstance(number, Tensor) for number in (clip, rates.decay, rates.momentum)]
    _update[(triton.cdiv(size, BLOCK), clients)](
        parameter, gradient, parameter if moment is None else moment, steps, steps if squares is None else squares,
        clip, rates.decay, rates.momentum, size,
        squares is not None, each[1] or rates.decay != 0, moment is not None, *each, BLOCK,
    )  # fmt: skip


@triton.jit(do_not_specialize=["size", "first", "row"])
def _squares(gradients, parts, size, first, row, CHUNK: tl.constexpr):
    client = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    gradient = tl.load(gradients + client * size + place, place < size, 0.0)
    tl.store(parts + client * row + first + tl.program_id(0), tl.sum(gradient * gradient, 0))


@triton.jit(do_not_specialize=["clip", "decay", "momentum", "size"])
def _update(
    parameters, gradients, moments, steps, squares, clip, decay, momentum, size,
    CLIPS: tl.constexpr, DECAYS: tl.constexpr, MOVES: tl.constexpr,
    OWN_CLIP: tl.constexpr, OWN_DECAY: tl.constexpr, OWN_MOMENTUM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """OWN_…: a number for each client, otherwise one for all."""
    client = tl.program_id(1)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
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
