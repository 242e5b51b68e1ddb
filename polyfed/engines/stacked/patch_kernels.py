"""Kernels for a GPU: the patches of stacked images that lie under a filter, as columns of a matrix, and back.

PyTorch has both (`unfold`, `fold`), but starts a kernel for each image. Here clients, channels and places in the filter
come before samples and pixels, so that a product with the weights as they are gives images that lie the same way.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from polyfed.engines.stacked.convolutions import Windows
from polyfed.engines.stacked.kernels import BLOCK, in_reach


def unfold(x: Tensor, windows: Windows) -> Tensor:
    """Of images [clients, samples, channels, H, W], columns [clients, channels × filter, samples × pixels]."""
    x = in_reach(x)
    clients, samples, channels, height, width = x.shape
    size = windows.grid(height, width)
    rows, pixels = channels * windows.size[0] * windows.size[1], samples * size[0] * size[1]
    columns = x.new_empty(clients, rows, pixels)
    grid = (triton.cdiv(rows * pixels, BLOCK), clients)
    _unfold[grid](x, columns, rows * pixels, pixels, *x.stride(), height, width, *size, *windows.numbers(), BLOCK)
    return columns


def fold(columns: Tensor, windows: Windows, shape: tuple[int, int, int, int]) -> Tensor:
    """Images of that shape (samples, channels, H, W): sums of what the columns have for each pixel."""
    samples, channels, height, width = shape
    x = columns.new_empty(len(columns), channels, samples, height, width)
    size, count = windows.grid(height, width), samples * channels * height * width
    grid = (triton.cdiv(count, BLOCK), len(columns))
    _fold[grid](columns, x, count, samples, height, width, *size, *windows.numbers(), BLOCK)
    return x.transpose(1, 2)


@triton.jit(do_not_specialize=["count", "pixels"])
def _unfold(
    x, columns, count, pixels, xn, xb, xc, xh, xw, H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each value of the columns from its place in the images, or zero outside of them."""
    client = tl.program_id(1).to(tl.int64)
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place, pixel = number // pixels, number % pixels
    sample = pixel // (OH * OW)
    row = pixel // OW % OH * SH - PH + place // KW % KH * DH
    column = pixel % OW * SW - PW + place % KW * DW
    real = number < count
    there = real & (row >= 0) & (row < H) & (column >= 0) & (column < W)
    value = tl.load(x + client * xn + (sample * xb + place // (KH * KW) * xc + row * xh + column * xw), there, 0.0)
    tl.store(columns + client * count + number, value, real)


@triton.jit(do_not_specialize=["count", "samples"])
def _fold(
    columns, x, count, samples, H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """For each pixel the sum of all values that were taken from it."""
    client = tl.program_id(1).to(tl.int64)
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = number < count
    row, column = number // W % H + PH, number % W + PW
    sample, channel = number // (H * W) % samples, number // (H * W) // samples
    pixels = samples * OH * OW
    columns += client * (count // (samples * H * W)) * (KH * KW * pixels)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(KH):
        for j in tl.static_range(KW):
            down, right = row - i * DH, column - j * DW
            there = real & (down >= 0) & (down % SH == 0) & (down // SH < OH)
            there = there & (right >= 0) & (right % SW == 0) & (right // SW < OW)
            place = (channel * (KH * KW) + i * KW + j) * pixels + (sample * OH + down // SH) * OW + right // SW
            total += tl.load(columns + place, there, 0.0).to(tl.float32)
    tl.store(x + client * count + number, total.to(x.dtype.element_ty), real)
