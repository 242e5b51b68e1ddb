"""Kernels for a GPU: convolution and max-pooling of stacked images, each client's with its own weights.

cuDNN has only slow kernels for what `vmap` turns such convolutions into: one with a group of few channels per client.
Here a client's convolution is a product of matrices, the patches that lie under the filter times the weights; patches
are read from the images where they are and never written anywhere. The gradient of the weights is such a product too,
and the gradient of the images is a convolution with the filters turned around.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from polyfed.engines.stacked.convolutions import Pair, Windows


class Tiles(NamedTuple):
    """How a product is cut: rows (pixels, or groups of them) and depth at a time, by how many warps and stages."""

    rows: int
    depth: int
    warps: int
    stages: int


# The fastest on an H200 of those that were tried, for filters of 5 × 5 on 3 and 16 channels.
CONVOLVE = Tiles(128, 32, 4, 1)
WEIGHT_GRADIENT = Tiles(64, 128, 4, 1)
PROGRAMS = 528
"""About how many parts the weights' gradients of all clients are cut into: four for each multiprocessor of an H200."""
COLUMNS = 64
"""Of the product that is a convolution, at most: few channels leave room for groups of four pixels, more for two."""
FEW_CHANNELS = 4
"""Up to this many, it is faster if neighbouring threads read the places of one field than neighbouring pixels."""
BLOCK = 1024
"""Pixels of a pooling at a time."""


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, padding: Pair, *, turned: bool = False) -> Tensor:
    """Images [clients, samples, in, H, W] with weights [clients, out, in, …] and bias [clients, out], stride 1.

    `turned`: with the filters turned around, from weights [clients, in, out, …].
    """
    x, weight = in_reach(x), weight.contiguous()
    clients, samples, channels, height, width = x.shape
    out, kernel = weight.shape[2 if turned else 1], weight.shape[3:]
    down, across = (n + 2 * p - k + 1 for n, p, k in zip((height, width), padding, kernel, strict=True))
    y = x.new_empty(clients, samples, out, down, across)
    group = (2 if 4 * out <= COLUMNS else 1, 2 if 2 * out <= COLUMNS else 1)
    groups = samples * triton.cdiv(down, group[0]) * triton.cdiv(across, group[1])
    few = clients * groups < PROGRAMS // 3 * CONVOLVE.rows  # use smaller blocks, so that no multiprocessor is idle
    rows = CONVOLVE.rows // 2 if few else CONVOLVE.rows
    _convolve[(triton.cdiv(groups, rows), clients)](
        x, weight, weight if bias is None else bias.contiguous(), y, samples, *x.stride(),
        channels, out, *kernel, *padding, height, width, bias is not None, turned, precision(),
        channels > FEW_CHANNELS, *group, rows, CONVOLVE.depth, power(out * group[0] * group[1]),
        num_warps=CONVOLVE.warps, num_stages=CONVOLVE.stages,
    )  # fmt: skip
    return y


def weight_gradient(x: Tensor, gradient: Tensor, kernel: Pair, padding: Pair) -> tuple[Tensor, Tensor]:
    """The gradients of weights and bias, from that of the result."""
    x, gradient = in_reach(x), gradient.contiguous()
    clients, samples, channels, height, width = x.shape
    out, pixels = gradient.shape[2], samples * gradient[0, 0, 0].numel()
    depth = channels * kernel[0] * kernel[1]
    block = min(WEIGHT_GRADIENT.depth, power(depth))
    columns, blocks = triton.cdiv(depth, block), triton.cdiv(pixels, WEIGHT_GRADIENT.rows)
    steps = triton.cdiv(blocks, max(1, PROGRAMS // (clients * columns)))
    parts = triton.cdiv(blocks, steps)
    # Parts are added up afterwards, in a fixed order, so that the same step gives the same numbers again.
    count = clients * out * depth
    both = torch.empty(parts, count + clients * out, device=x.device)
    _weight_gradient[(columns, clients, parts)](
        x, gradient, both, samples, clients, steps, *x.stride(),
        channels, out, *kernel, *padding, height, width, precision(),
        WEIGHT_GRADIENT.rows, block, power(out), num_warps=WEIGHT_GRADIENT.warps, num_stages=WEIGHT_GRADIENT.stages,
    )  # fmt: skip
    total = both.sum(0).to(x.dtype)
    return total[:count].view(clients, out, channels, *kernel), total[count:].view(clients, out)


def pool(x: Tensor, windows: Windows) -> tuple[Tensor, Tensor]:
    """The largest values in the windows of images [..., H, W], and where they were."""
    if _swapped(x):
        y, places = pool(x.transpose(1, 2), windows)
        return y.transpose(1, 2), places.transpose(1, 2)
    x = x.contiguous()
    height, width = x.shape[-2:]
    size = windows.grid(height, width)
    y = x.new_empty(*x.shape[:-2], *size)
    places = torch.empty_like(y, dtype=torch.uint8)
    grid = (triton.cdiv(y.numel(), BLOCK),)
    if _in_pairs(windows, size, (height, width)):
        _pool_pairs[grid](x, y, places, y.numel(), size[1], windows.size[0], BLOCK)
        return y, places
    _pool[grid](x, y, places, y.numel(), height, width, *size, *windows.numbers(), BLOCK)
    return y, places


def unpool(gradient: Tensor, places: Tensor, windows: Windows, shape: Pair) -> Tensor:
    """The gradient of images of that shape, from that of their largest values."""
    if _swapped(places):
        return unpool(gradient.transpose(1, 2), places.transpose(1, 2), windows, shape).transpose(1, 2)
    gradient, places = gradient.contiguous(), places.contiguous()
    x = gradient.new_empty(*gradient.shape[:-2], *shape)
    size = (gradient.shape[-2], gradient.shape[-1])
    if _in_pairs(windows, size, shape):
        grid = (triton.cdiv(gradient.numel(), BLOCK),)
        _unpool_pairs[grid](gradient, places, x, gradient.numel(), size[1], windows.size[0], BLOCK)
        return x
    grid = (triton.cdiv(x.numel(), BLOCK),)
    _unpool[grid](gradient, places, x, x.numel(), *shape, *size, *windows.numbers(), BLOCK)
    return x


def _in_pairs(windows: Windows, size: Pair, shape: Pair) -> bool:
    """Whether the windows cover images of that shape without overlap, two pixels side by side in each row."""
    covered = tuple(n * k for n, k in zip(size, windows.size, strict=True)) == shape
    return covered and windows == Windows((windows.size[0], 2), (windows.size[0], 2), (0, 0), (1, 1))


def _swapped(x: Tensor) -> bool:
    """Whether the channels of stacked images lie before the samples, as products of matrices leave them."""
    return x.dim() == 5 and not x.is_contiguous() and x.transpose(1, 2).is_contiguous()


def precision() -> str:
    return "tf32" if torch.backends.cudnn.allow_tf32 else "ieee"


def power(number: int) -> int:
    """The next power of two; a product of matrices has at least 16."""
    found: int = max(16, triton.next_power_of_2(number))
    return found


def in_reach(x: Tensor) -> Tensor:
    """Images, where one client's can be indexed with 32 bits."""
    extent = sum((size - 1) * stride for size, stride in zip(x.shape[1:], x.stride()[1:], strict=True))
    return x if extent < 2**31 else x.contiguous()


# Constants are written in capitals: in and out channels, K for the filter (or window), P for padding, S for stride,
# D for dilation, G for a group of pixels, F for its field, each with H or W; OH and OW are the size of the result, B…
# the size of a block.


@triton.jit
def _patches(
    corner, top, left, channel, i, j, xc, xh, xw, there, CHECKED: tl.constexpr, H: tl.constexpr, W: tl.constexpr
):
    """What lies in this channel, i rows below and j columns right of the corners; zero outside of the image."""
    if CHECKED:
        row, column = top + i, left + j
        there = there & (row >= 0) & (row < H) & (column >= 0) & (column < W)
    return tl.load(corner + (channel * xc + i * xh + j * xw), there, 0.0)


@triton.jit
def _spread(
    w, o, down, right, channel, i, j,
    TURNED: tl.constexpr, OUT: tl.constexpr, IN: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
):  # fmt: skip
    """What filter o, moved by these rows and columns, has at place (i, j); zero outside the filter."""
    i, j = i - down, j - right
    known = (o < OUT) & (channel < IN) & (i >= 0) & (i < KH) & (j >= 0) & (j < KW)
    if TURNED:
        place = channel * (OUT * KH * KW) + o * (KH * KW) + (KH - 1 - i) * KW + (KW - 1 - j)
    else:
        place = o * (IN * KH * KW) + channel * (KH * KW) + i * KW + j
    return tl.load(w + place, known, 0.0)


@triton.jit
def _convolve(
    x, w, bias, y, samples, xn, xb, xc, xh, xw,
    IN: tl.constexpr, OUT: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    H: tl.constexpr, W: tl.constexpr, BIAS: tl.constexpr, TURNED: tl.constexpr,
    PRECISION: tl.constexpr, ALONG_PIXELS: tl.constexpr,
    GH: tl.constexpr, GW: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Patches [groups, IN × FH × FW] times weights [IN × FH × FW, OUT × GH × GW], for a block of groups.

    A group is GH × GW neighbouring pixels of the result. One field of FH × FW serves them all, because what lies under
    the filter is mostly the same: there is less to read, at the price of some products with zero (through which
    a value that is not finite reaches its neighbours).
    """
    OH: tl.constexpr = H + 2 * PH - KH + 1
    OW: tl.constexpr = W + 2 * PW - KW + 1
    ROWS: tl.constexpr = (OH + GH - 1) // GH
    ROW: tl.constexpr = (OW + GW - 1) // GW
    FH: tl.constexpr = KH + GH - 1
    FW: tl.constexpr = KW + GW - 1
    CUT: tl.constexpr = ROWS * GH > OH or ROW * GW > OW
    CHECKED: tl.constexpr = CUT or PH > 0 or PW > 0
    client = tl.program_id(1).to(tl.int64)
    m, n = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BN)[None, :]
    real = m < samples * (ROWS * ROW)
    sample, group = m // (ROWS * ROW), m % (ROWS * ROW)
    row, column = group // ROW * GH, group % ROW * GW
    # `n % GW` would tell Triton that results lie in pairs; it would write them as pairs, in twice the time.
    o, down, right = n // (GH * GW), n % (GH * GW) // GW, n % (GH * GW) % GW
    top, left = row - PH, column - PW
    corner = x + client * xn + (sample * xb + top * xh + left * xw)
    w += client * (OUT * IN * KH * KW)
    total = tl.zeros((BM, BN), tl.float32)
    if BIAS:
        total += tl.load(bias + client * OUT + o, o < OUT, 0.0).to(tl.float32)
    for first in range(0, IN * FH * FW, BK):
        k = first + tl.arange(0, BK)
        c, i, j = k // (FH * FW), k % (FH * FW) // FW, k % FW
        if ALONG_PIXELS:  # threads of a warp read along the last axis, here neighbouring pixels of one channel
            patch = tl.trans(
                _patches(
                    corner[None, :], top[None, :], left[None, :], c[:, None], i[:, None], j[:, None], xc, xh, xw,
                    real[None, :] & (c < IN)[:, None], CHECKED, H, W,
                )
            )  # fmt: skip
        else:
            patch = _patches(
                corner[:, None], top[:, None], left[:, None], c[None, :], i[None, :], j[None, :], xc, xh, xw,
                real[:, None] & (c < IN)[None, :], CHECKED, H, W,
            )  # fmt: skip
        weight = _spread(w, o, down, right, c[:, None], i[:, None], j[:, None], TURNED, OUT, IN, KH, KW)
        total = tl.dot(patch, weight, total, input_precision=PRECISION)
    sample, row, column = sample[:, None], row[:, None], column[:, None]
    real = real[:, None] & (o < OUT)
    if CUT:
        real = real & (row + down < OH) & (column + right < OW)
    place = sample * (OUT * OH * OW) + row * OW + column + (o * (OH * OW) + down * OW + right)
    tl.store(y + client * samples * (OUT * OH * OW) + place, total.to(y.dtype.element_ty), real)


@triton.jit(do_not_specialize=["samples", "clients", "steps"])
def _weight_gradient(
    x, g, both, samples, clients, steps, xn, xb, xc, xh, xw,
    IN: tl.constexpr, OUT: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    H: tl.constexpr, W: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """Gradients [OUT, pixels] times patches [pixels, IN × KH × KW] for a part of the pixels, and sums of gradients.

    A part has all clients' weights and then all their biases.
    """
    OH: tl.constexpr = H + 2 * PH - KH + 1
    OW: tl.constexpr = W + 2 * PW - KW + 1
    DEPTH: tl.constexpr = IN * KH * KW
    CHECKED: tl.constexpr = PH > 0 or PW > 0
    client, part = tl.program_id(1).to(tl.int64), tl.program_id(2)
    g += client * samples * OUT * OH * OW
    k, o = tl.program_id(0) * BK + tl.arange(0, BK), tl.arange(0, BO)
    c, i, j = (k // (KH * KW))[None, :], (k % (KH * KW) // KW)[None, :], (k % KW)[None, :]
    weights = tl.zeros((BO, BK), tl.float32)
    biases = tl.zeros((BO, BM), tl.float32)
    for step in range(part * steps, part * steps + steps):
        m = step * BM + tl.arange(0, BM)
        real = m < samples * OH * OW
        sample, pixel = m // (OH * OW), m % (OH * OW)
        top, left = pixel // OW - PH, pixel % OW - PW
        place = (sample * (OUT * OH * OW) + pixel)[None, :] + (o * (OH * OW))[:, None]
        gradient = tl.load(g + place, real[None, :] & (o < OUT)[:, None], 0.0)
        corner = x + client * xn + (sample * xb + top * xh + left * xw)
        patch = _patches(
            corner[:, None], top[:, None], left[:, None], c, i, j, xc, xh, xw,
            real[:, None] & (c < IN), CHECKED, H, W,
        )  # fmt: skip
        weights = tl.dot(gradient, patch, weights, input_precision=PRECISION)
        biases += gradient.to(tl.float32)
    both += part * (clients * OUT * (DEPTH + 1))
    filters = client * OUT + o
    tl.store(both + (filters[:, None] * DEPTH + k[None, :]), weights, (o < OUT)[:, None] & (k < DEPTH)[None, :])
    if tl.program_id(0) == 0:
        tl.store(both + clients * OUT * DEPTH + filters, tl.sum(biases, 1), o < OUT)


@triton.jit(do_not_specialize=["count"])
def _pool(
    x, y, places, count, H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The largest value in each window, the first of equal ones, and its place there."""
    number = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = number < count
    plane, pixel = number // (OH * OW), (number % (OH * OW)).to(tl.int32)
    best = tl.full((BLOCK,), float("-inf"), x.dtype.element_ty)
    place = tl.zeros((BLOCK,), tl.int32)
    for i in tl.static_range(KH):
        for j in tl.static_range(KW):
            row, column = pixel // OW * SH - PH + i * DH, pixel % OW * SW - PW + j * DW
            there = real & (row >= 0) & (row < H) & (column >= 0) & (column < W)
            value = tl.load(x + plane * (H * W) + (row * W + column), there, float("-inf"))
            better = (value > best) | (value != value)  # NaN wins, as in PyTorch
            best, place = tl.where(better, value, best), tl.where(better, i * KW + j, place)
    tl.store(y + number, best, real)
    tl.store(places + number, place.to(tl.uint8), real)


@triton.jit(do_not_specialize=["count"])
def _unpool(
    g, places, x, count, H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """For each pixel the sum of the gradients of the windows in which it was the largest."""
    number = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = number < count
    plane, pixel = number // (H * W) * (OH * OW), (number % (H * W)).to(tl.int32)
    row, column = pixel // W + PH, pixel % W + PW
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(KH):
        for j in tl.static_range(KW):
            down, right = row - i * DH, column - j * DW
            inside = real & (down >= 0) & (down % SH == 0) & (down // SH < OH)
            inside = inside & (right >= 0) & (right % SW == 0) & (right // SW < OW)
            where = down // SH * OW + right // SW
            chosen = tl.load(places + plane + where, inside, 255).to(tl.int32) == i * KW + j
            total += tl.load(g + plane + where, inside & chosen, 0.0).to(tl.float32)
    tl.store(x + number, total.to(x.dtype.element_ty), real)


@triton.jit
def _pairs(x, first, OW: tl.constexpr, KH: tl.constexpr, BLOCK: tl.constexpr):
    """Where a block of windows, from the first on, has the upper rows of its pixels: [BLOCK, 2].

    A row of windows, wherever it is, begins KH rows of pixels after the one before.
    """
    number = (first % OW).to(tl.int32) + tl.arange(0, BLOCK)
    place = number // OW * (KH * 2 * OW) + number % OW * 2
    return x + first // OW * (KH * 2 * OW) + (place[:, None] + tl.arange(0, 2)[None, :])


@triton.jit(do_not_specialize=["count"])
def _pool_pairs(x, y, places, count, OW: tl.constexpr, KH: tl.constexpr, BLOCK: tl.constexpr):
    """As `_pool` for windows that cover the images without overlap and are two pixels wide."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    number = tl.arange(0, BLOCK)
    real = number < count - first
    x = _pairs(x, first, OW, KH, BLOCK)
    best = tl.full((BLOCK,), float("-inf"), x.dtype.element_ty)
    place = tl.zeros((BLOCK,), tl.int32)
    for i in tl.static_range(KH):
        left, right = tl.split(tl.load(x + i * 2 * OW, real[:, None], float("-inf")))
        better = (left > best) | (left != left)
        best, place = tl.where(better, left, best), tl.where(better, 2 * i, place)
        better = (right > best) | (right != right)
        best, place = tl.where(better, right, best), tl.where(better, 2 * i + 1, place)
    tl.store(y + first + number, best, real)
    tl.store(places + first + number, place.to(tl.uint8), real)


@triton.jit(do_not_specialize=["count"])
def _unpool_pairs(g, places, x, count, OW: tl.constexpr, KH: tl.constexpr, BLOCK: tl.constexpr):
    """As `_unpool` for such windows: each gives its pixels their gradients."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    number = tl.arange(0, BLOCK)
    real = number < count - first
    gradient, place = tl.load(g + first + number, real), tl.load(places + first + number, real)
    x = _pairs(x, first, OW, KH, BLOCK)
    for i in tl.static_range(KH):
        left, right = (place == 2 * i), (place == 2 * i + 1)
        pixels = tl.join(tl.where(left, gradient, 0.0), tl.where(right, gradient, 0.0))
        tl.store(x + i * 2 * OW, pixels, real[:, None])
