"""Kernels for a GPU: batch norm of stacked clients by their real samples, in one pass of a program per channel.

Samples are [clients, batch, channels, …]; it does not matter in which order the first three lie in memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from polyfed.engines.stacked.kernels import in_reach

LARGEST_BLOCK = 4096
"""Values at a time; most channels have no more, and are read from memory once."""


def normalise(x: Tensor, mask: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """As `norms.normalise`."""
    x = _dense(x)
    y = torch.empty_like(x)
    mean, variance = (torch.empty(len(x), x.shape[2], device=x.device) for _ in range(2))
    block, warps = _block(x)
    _normalise[(x.shape[2], len(x))](
        x, _bytes(mask), weight.contiguous(), bias.contiguous(), y, mean, variance, x.shape[1], eps,
        *x.stride()[:3], *y.stride()[:3], _pixels(x), block, num_warps=warps,
    )  # fmt: skip
    return y, mean, variance


def gradients(
    gradient: Tensor, x: Tensor, mask: Tensor, weight: Tensor, mean: Tensor, variance: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """As `norms.gradients`."""
    x, gradient = _dense(x), _dense(gradient)
    of_x = torch.empty_like(x)
    of_weight, of_bias = torch.empty_like(mean), torch.empty_like(mean)
    block, warps = _block(x)
    _gradients[(x.shape[2], len(x))](
        gradient, x, _bytes(mask), weight.contiguous(), mean.contiguous(), variance.contiguous(),
        of_x, of_weight, of_bias, x.shape[1], eps,
        *gradient.stride()[:3], *x.stride()[:3], *of_x.stride()[:3], _pixels(x), block, num_warps=warps,
    )  # fmt: skip
    return of_x, of_weight, of_bias


def _dense(x: Tensor) -> Tensor:
    """Samples without gaps, the pixels of each channel one after another."""
    strides = sorted(zip(x.stride(), x.shape, strict=True))
    reached = 1
    for stride, size in strides:
        if size > 1 and stride != reached:
            return x.contiguous()
        reached *= size
    return in_reach(x) if x.dim() == 3 or x[0, 0, 0].is_contiguous() else x.contiguous()


def _bytes(mask: Tensor) -> Tensor:
    return mask.contiguous().view(torch.uint8)


def _pixels(x: Tensor) -> int:
    return x[0, 0, 0].numel()


def _block(x: Tensor) -> tuple[int, int]:
    """Values at a time, and by how many warps."""
    block = min(LARGEST_BLOCK, triton.next_power_of_2(x.shape[1] * _pixels(x)))
    return block, max(1, min(16, block // 256))


@triton.jit
def _values(x, n, samples, xb, PIXELS: tl.constexpr):
    """The n-th values of one channel; zero after the last."""
    return tl.load(x + (n // PIXELS * xb + n % PIXELS), n < samples * PIXELS, 0.0).to(tl.float32)


@triton.jit
def _real(mask, n, samples, PIXELS: tl.constexpr):
    """Whether they belong to real samples: 1 or 0."""
    return tl.load(mask + n // PIXELS, n < samples * PIXELS, 0).to(tl.float32)


@triton.jit(do_not_specialize=["samples", "eps"])
def _normalise(
    x, mask, weight, bias, y, means, variances, samples, eps, xn, xb, xc, yn, yb, yc,
    PIXELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Mean, then variance around it, then the result, for one channel of one client."""
    channel, client = tl.program_id(0), tl.program_id(1).to(tl.int64)
    own = client * tl.num_programs(0) + channel
    x += client * xn + channel * xc
    y += client * yn + channel * yc
    mask += client * samples
    lanes, count = tl.arange(0, BLOCK), samples * PIXELS
    total, seen = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for first in range(0, count, BLOCK):
        real = _real(mask, first + lanes, samples, PIXELS)
        seen += real
        total += tl.where(real > 0, _values(x, first + lanes, samples, xb, PIXELS), 0.0)
    seen_values = tl.sum(seen, 0)
    mean = tl.sum(total, 0) / seen_values
    squares = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, count, BLOCK):
        off = _values(x, first + lanes, samples, xb, PIXELS) - mean
        squares += tl.where(_real(mask, first + lanes, samples, PIXELS) > 0, off * off, 0.0)
    variance = tl.sum(squares, 0) / seen_values
    tl.store(means + own, mean)
    tl.store(variances + own, variance)
    scale = tl.load(weight + own) / tl.sqrt(variance + eps)
    shift = tl.load(bias + own)
    for first in range(0, count, BLOCK):
        n = first + lanes
        normed = (_values(x, n, samples, xb, PIXELS) - mean) * scale + shift
        tl.store(y + (n // PIXELS * yb + n % PIXELS), normed.to(y.dtype.element_ty), n < count)


@triton.jit(do_not_specialize=["samples", "eps"])
def _gradients(
    g, x, mask, weight, means, variances, of_x, of_weight, of_bias, samples, eps,
    gn, gb, gc, xn, xb, xc, yn, yb, yc, PIXELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradients of weight and bias, then that of the samples, for one channel of one client."""
    channel, client = tl.program_id(0), tl.program_id(1).to(tl.int64)
    own = client * tl.num_programs(0) + channel
    g += client * gn + channel * gc
    x += client * xn + channel * xc
    of_x += client * yn + channel * yc
    mask += client * samples
    lanes, count = tl.arange(0, BLOCK), samples * PIXELS
    mean, rate = tl.load(means + own), 1 / tl.sqrt(tl.load(variances + own) + eps)
    biases, weights = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    seen = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, count, BLOCK):
        gradient = _values(g, first + lanes, samples, gb, PIXELS)
        biases += gradient
        weights += gradient * ((_values(x, first + lanes, samples, xb, PIXELS) - mean) * rate)
        seen += _real(mask, first + lanes, samples, PIXELS)
    of_bias_own, of_weight_own, share = tl.sum(biases, 0), tl.sum(weights, 0), 1 / tl.sum(seen, 0)
    tl.store(of_bias + own, of_bias_own)
    tl.store(of_weight + own, of_weight_own)
    scale = tl.load(weight + own) * rate
    for first in range(0, count, BLOCK):
        n = first + lanes
        normed = (_values(x, n, samples, xb, PIXELS) - mean) * rate
        through = share * _real(mask, n, samples, PIXELS) * (of_bias_own + normed * of_weight_own)
        gradient = (_values(g, n, samples, gb, PIXELS) - through) * scale
        tl.store(of_x + (n // PIXELS * yb + n % PIXELS), gradient.to(of_x.dtype.element_ty), n < count)
