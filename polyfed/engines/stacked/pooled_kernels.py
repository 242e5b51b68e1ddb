"""Kernels for a GPU: a convolution, max-pooling in windows of 2 × 2, and ReLU if wanted, as one layer.

All four results of a window come from one field of pixels, one pixel larger than the filter each way. So the layer is
a convolution of stride 2 with filters of that size, each of which holds the original one in one of four places, and
the largest of every four results is kept. What lies between convolution and pooling, four times as large as the result
and read and written again and again by separate layers, never reaches memory.

Pixels lie in memory with their channels side by side, [clients, samples, H, W, channels]: a row of a field is then one
piece, which threads read sixteen bytes at a time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from polyfed.engines.stacked.convolutions import Pair
from polyfed.engines.stacked.kernels import Tiles, power, precision

# The fastest on an H200 of those that were tried, for filters of 5 × 5: 3 channels to 16, and 16 to 32.
FEW_VALUES = 128
"""In a field, up to which it is read in smaller pieces."""
WIDE = 64
"""From this many filters on, products are cut into smaller pieces, because the results fill the registers."""
MOST_AHEAD = 2048
"""Weights in a tile of the images' gradient up to which the next ones are read ahead: four such tiles at once."""
PROGRAMS, FEWEST = 264, 3
"""About how many programs compute the weights' gradients of all clients, two for each multiprocessor of an H200; and
how many those of a client at least, because a few more programs than multiprocessors leave most of these idle."""
BLOCK = 1024
"""Weights that are moved at a time."""
SUMS, PARTS = 64, 16
"""Weights whose gradients are added up at a time, and how many parts of them."""


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, relu: bool) -> tuple[Tensor, Tensor]:
    """The largest results in windows of 2 × 2, and where they were: 0 to 3, and 4 where ReLU has set them to zero.

    Images are [clients, samples, H, W, in], weights [clients, out, in, …], results [clients, samples, …, out].
    """
    layer = Layer.of(x, weight)
    x = x.contiguous()
    tiles = _for_results(layer)
    fields = _moved(weight, layer, _in_fields, (4 * layer.filters, layer.depth))
    y = x.new_empty(len(x), layer.samples, *layer.windows, layer.out)
    places = torch.empty_like(y, dtype=torch.uint8)
    _convolve[(triton.cdiv(layer.samples * layer.windows[0] * layer.windows[1], tiles.rows), len(x))](
        x, fields, fields if bias is None else bias.contiguous(), y, places, layer.samples, *layer.numbers(),
        bias is not None, relu, precision(), tiles.rows, tiles.depth, layer.filters,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return y, places


def image_gradient(gradient: Tensor, places: Tensor, weight: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The gradient of one client's images of that shape, [samples, H, W, in], and all others', from the results'."""
    x = gradient.new_empty(len(gradient), *shape)
    layer = Layer.of(x, weight)
    tiles, wide = _for_images(layer), power(4 * layer.channels)
    turned = _moved(weight, layer, _in_steps, (wide, layer.steps[0] * layer.steps[1] * 4 * layer.filters))
    count = layer.samples * triton.cdiv(layer.height, 2) * triton.cdiv(layer.width, 2)
    _image_gradient[(triton.cdiv(count, tiles.rows), len(x))](
        gradient.contiguous(), places.contiguous(), turned, x, layer.samples, *layer.numbers(), *layer.steps,
        precision(), tiles.rows, layer.filters, wide, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return x


def weight_gradient(x: Tensor, gradient: Tensor, places: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The gradients of weights, of one client's shape, and of biases, from that of the results."""
    of_weight, of_bias = x.new_empty(len(x), *shape), x.new_empty(len(x), shape[0])
    layer = Layer.of(x, of_weight)
    tiles = _for_weights(layer)
    columns = triton.cdiv(layer.depth, tiles.depth)
    blocks = triton.cdiv(layer.samples * layer.windows[0] * layer.windows[1], tiles.rows)
    steps = triton.cdiv(blocks, max(FEWEST, PROGRAMS // (len(x) * columns)))
    parts = triton.cdiv(blocks, steps)
    # Parts are added up afterwards, in a fixed order, so that the same step gives the same numbers again.
    some = torch.empty(parts, len(x), 4 * layer.filters * layer.depth + layer.filters, device=x.device)
    _weight_gradient[(columns, len(x), parts)](
        x.contiguous(), gradient.contiguous(), places.contiguous(), some, layer.samples, len(x), steps,
        *layer.numbers(), precision(), tiles.rows, tiles.depth, layer.filters,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    _add_up[(triton.cdiv(of_weight[0].numel() + layer.out, SUMS), len(x))](
        some, of_weight, of_bias, parts, len(x), *layer.numbers()[2:], layer.filters, SUMS, PARTS
    )
    return of_weight, of_bias


class Layer(NamedTuple):
    """What the kernels need to know of a layer."""

    samples: int
    height: int
    width: int
    channels: int
    out: int
    kernel: Pair

    @classmethod
    def of(cls, x: Tensor, weight: Tensor) -> Layer:
        """Of images [clients, samples, H, W, in] and weights [clients, out, in, …]."""
        _, samples, height, width, channels = x.shape
        return cls(samples, height, width, channels, weight.shape[1], (weight.shape[3], weight.shape[4]))

    @property
    def windows(self) -> Pair:
        return (self.height - self.kernel[0] + 1) // 2, (self.width - self.kernel[1] + 1) // 2

    @property
    def depth(self) -> int:
        """Values in a field."""
        return (self.kernel[0] + 1) * (self.kernel[1] + 1) * self.channels

    @property
    def steps(self) -> Pair:
        """How many windows a pair of rows, or of columns, takes part in."""
        return self.kernel[0] // 2 + 1, self.kernel[1] // 2 + 1

    @property
    def filters(self) -> int:
        return power(self.out)

    def numbers(self) -> tuple[int, ...]:
        return self.height, self.width, self.channels, self.out, *self.kernel


def _for_results(layer: Layer) -> Tiles:
    return Tiles(64, 32 if layer.depth <= FEW_VALUES or layer.filters >= WIDE else 64, 4, 2)


def _for_images(layer: Layer) -> Tiles:
    """With many channels, tiles that are read ahead would not fit into a multiprocessor's shared memory."""
    ahead = power(4 * layer.channels) * layer.filters <= MOST_AHEAD
    return Tiles(128, 0, 4, 2) if ahead else Tiles(64, 0, 4, 1)


def _for_weights(layer: Layer) -> Tiles:
    return Tiles(64, 128, 4, 1) if layer.filters == 16 else Tiles(16, 64 if layer.filters >= WIDE else 128, 4, 3)


def _moved(weight: Tensor, layer: Layer, kernel: triton.JITFunction, size: Pair) -> Tensor:
    """The weights in an order in which a kernel reads them, with zeros where a filter does not reach."""
    moved = weight.new_empty(len(weight), *size)
    kernel[(triton.cdiv(size[0] * size[1], BLOCK), len(weight))](
        weight.contiguous(), moved, *layer.numbers()[2:], *layer.steps, layer.filters, size[0] * size[1], BLOCK
    )
    return moved


# Constants are written in capitals: C for the channels of images, OUT for those of the result and BO for the next power
# of two, KH and KW for the filter, SH and SW for the windows that a pair of rows, or of columns, takes part in, B… for
# the size of a block. The results of a window are numbered from its upper left (0) to its lower right (3).


@triton.jit
def _weight_at(weight, o, c, i, j, C: tl.constexpr, OUT: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr):
    """A filter's weights; zero outside of it."""
    known = (o < OUT) & (c < C) & (i >= 0) & (i < KH) & (j >= 0) & (j < KW)
    return tl.load(weight + (((o * C + c) * KH + i) * KW + j), known, 0.0)


@triton.jit
def _in_fields(
    weight, moved, C: tl.constexpr, OUT: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    SH: tl.constexpr, SW: tl.constexpr, BO: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Weights as [filter, place in the window, row, column, channel] of a field."""
    client = tl.program_id(1).to(tl.int64)
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    DEPTH: tl.constexpr = (KH + 1) * (KW + 1) * C
    n, k = number // DEPTH, number % DEPTH
    o, down, right = n // 4, n % 4 // 2, n % 2
    i, j, c = k // ((KW + 1) * C) - down, k // C % (KW + 1) - right, k % C
    value = _weight_at(weight + client * (OUT * C * KH * KW), o, c, i, j, C, OUT, KH, KW)
    tl.store(moved + client * SIZE + number, value, number < SIZE)


@triton.jit
def _in_steps(
    weight, moved, C: tl.constexpr, OUT: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    SH: tl.constexpr, SW: tl.constexpr, BO: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Weights as [row and column in a pair, channel, steps to a window, place in the window, filter]."""
    client = tl.program_id(1).to(tl.int64)
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    DEPTH: tl.constexpr = SH * SW * 4 * BO
    n, k = number // DEPTH, number % DEPTH
    o, place, step = k % BO, k // BO % 4, k // (4 * BO)
    i = 2 * (step // SW) + n // (2 * C) - place // 2
    j = 2 * (step % SW) + n // C % 2 - place % 2
    c = tl.where(n < 4 * C, n % C, C)  # there are more columns than channels only to make a power of two
    value = _weight_at(weight + client * (OUT * C * KH * KW), o, c, i, j, C, OUT, KH, KW)
    tl.store(moved + client * SIZE + number, value, number < SIZE)


@triton.jit
def _corners(
    m, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
):  # fmt: skip
    """Where the fields of windows begin."""
    PH: tl.constexpr = (H - KH + 1) // 2
    PW: tl.constexpr = (W - KW + 1) // 2
    return m // (PH * PW) * (H * W * C) + m % (PH * PW) // PW * (2 * W * C) + m % PW * (2 * C)


@triton.jit
def _along(k, W: tl.constexpr, C: tl.constexpr, KW: tl.constexpr):
    """How far from its corner a field's values lie."""
    return k // ((KW + 1) * C) * (W * C) + k % ((KW + 1) * C)


@triton.jit(do_not_specialize=["samples"])
def _convolve(
    x, field, bias, y, places, samples,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, OUT: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    BIAS: tl.constexpr, RELU: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """Fields [windows, depth] times weights [depth, 4 × filters], and the largest of four."""
    DEPTH: tl.constexpr = (KH + 1) * (KW + 1) * C
    PIXELS: tl.constexpr = ((H - KH + 1) // 2) * ((W - KW + 1) // 2)
    client = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    real = m < samples * PIXELS
    x += client * samples * (H * W * C)
    corner = _corners(m, H, W, C, KH, KW)
    field += client * (4 * BO * DEPTH)
    n = tl.arange(0, 4 * BO)
    total = tl.zeros((BM, 4 * BO), tl.float32)
    for first in range(0, DEPTH, BK):
        k = first + tl.arange(0, BK)
        there = real[:, None]
        known = n[:, None] < 4 * BO
        if DEPTH % BK != 0:
            there = there & (k < DEPTH)[None, :]
            known = known & (k < DEPTH)[None, :]
        patch = tl.load(x + (corner[:, None] + _along(k, W, C, KW)[None, :]), there, 0.0)
        weights = tl.load(field + (n[:, None] * DEPTH + k[None, :]), known, 0.0)
        total = tl.dot(patch, tl.trans(weights), total, input_precision=PRECISION)
    left, right = tl.split(tl.reshape(total, (BM, BO, 2, 2)))
    zeroth, second = tl.split(left)
    first, third = tl.split(right)
    best, place = zeroth, tl.zeros((BM, BO), tl.int32)
    better = (first > best) | (first != first)  # NaN wins, as in PyTorch
    best, place = tl.where(better, first, best), tl.where(better, 1, place)
    better = (second > best) | (second != second)
    best, place = tl.where(better, second, best), tl.where(better, 2, place)
    better = (third > best) | (third != third)
    best, place = tl.where(better, third, best), tl.where(better, 3, place)
    o = tl.arange(0, BO)[None, :]
    if BIAS:
        best += tl.load(bias + client * OUT + o, o < OUT, 0.0).to(tl.float32)
    if RELU:
        dead = best <= 0
        best, place = tl.where(dead, 0.0, best), tl.where(dead, 4, place)
    where = client * samples * (PIXELS * OUT) + (m[:, None] * OUT + o)
    tl.store(y + where, best.to(y.dtype.element_ty), real[:, None] & (o < OUT))
    tl.store(places + where, place.to(tl.uint8), real[:, None] & (o < OUT))


@triton.jit(do_not_specialize=["samples"])
def _image_gradient(
    g, places, turned, x, samples,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, OUT: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    SH: tl.constexpr, SW: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BO: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """For pairs of rows and columns: gradients of all windows that they take part in, times weights."""
    PH: tl.constexpr = (H - KH + 1) // 2
    PW: tl.constexpr = (W - KW + 1) // 2
    DOWN: tl.constexpr = (H + 1) // 2
    ACROSS: tl.constexpr = (W + 1) // 2
    DEPTH: tl.constexpr = SH * SW * 4 * BO
    client = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    real = m < samples * (DOWN * ACROSS)
    sample, row, column = m // (DOWN * ACROSS), m % (DOWN * ACROSS) // ACROSS, m % ACROSS
    g += client * samples * (PH * PW * OUT)
    places += client * samples * (PH * PW * OUT)
    turned += client * (BN * DEPTH)
    n, o = tl.arange(0, BN), tl.arange(0, BO)
    total = tl.zeros((BM, BN), tl.float32)
    for step in range(SH * SW):
        down, across = row - step // SW, column - step % SW
        there = real & (down >= 0) & (down < PH) & (across >= 0) & (across < PW)
        where = ((sample * PH + down) * PW + across)[:, None] * OUT + o[None, :]
        there = there[:, None] & (o < OUT)[None, :]
        gradient = tl.load(g + where, there, 0.0)
        place = tl.load(places + where, there, 4).to(tl.int32)
        for number in tl.static_range(4):
            some = tl.where(place == number, gradient, 0.0)
            weights = tl.load(turned + (n[:, None] * DEPTH + (step * 4 + number) * BO + o[None, :]))
            total = tl.dot(some, tl.trans(weights), total, input_precision=PRECISION)
    row, column = 2 * row[:, None] + (n // (2 * C))[None, :], 2 * column[:, None] + (n // C % 2)[None, :]
    where = (sample[:, None] * H + row) * (W * C) + column * C + (n % C)[None, :]
    there = real[:, None] & (row < H) & (column < W) & (n < 4 * C)[None, :]
    tl.store(x + client * samples * (H * W * C) + where, total.to(x.dtype.element_ty), there)


@triton.jit(do_not_specialize=["samples", "clients", "steps"])
def _weight_gradient(
    x, g, places, parts, samples, clients, steps,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, OUT: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """Gradients [filters, windows], for each place in a window, times fields [windows, depth]; a part of the windows.

    A part has, for each client, what belongs to a field's values, as [place, filter, depth], and the biases.
    """
    DEPTH: tl.constexpr = (KH + 1) * (KW + 1) * C
    PIXELS: tl.constexpr = ((H - KH + 1) // 2) * ((W - KW + 1) // 2)
    client, part = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    x += client * samples * (H * W * C)
    g += client * samples * (PIXELS * OUT)
    places += client * samples * (PIXELS * OUT)
    k, o = tl.program_id(0) * BK + tl.arange(0, BK), tl.arange(0, BO)
    along = _along(k, W, C, KW)
    zeroth = tl.zeros((BO, BK), tl.float32)
    first, second, third = zeroth, zeroth, zeroth
    biases = tl.zeros((BO, BM), tl.float32)
    for step in range(part.to(tl.int32) * steps, part.to(tl.int32) * steps + steps):
        m = step * BM + tl.arange(0, BM)
        real = m < samples * PIXELS
        there = real[:, None]
        if DEPTH % BK != 0:
            there = there & (k < DEPTH)[None, :]
        patch = tl.load(x + (_corners(m, H, W, C, KH, KW)[:, None] + along[None, :]), there, 0.0)
        where = m[None, :] * OUT + o[:, None]
        there = real[None, :] & (o < OUT)[:, None]
        gradient = tl.load(g + where, there, 0.0)
        place = tl.load(places + where, there, 4).to(tl.int32)
        zeroth = tl.dot(tl.where(place == 0, gradient, 0.0), patch, zeroth, input_precision=PRECISION)
        first = tl.dot(tl.where(place == 1, gradient, 0.0), patch, first, input_precision=PRECISION)
        second = tl.dot(tl.where(place == 2, gradient, 0.0), patch, second, input_precision=PRECISION)
        third = tl.dot(tl.where(place == 3, gradient, 0.0), patch, third, input_precision=PRECISION)
        biases += tl.where(place < 4, gradient, 0.0).to(tl.float32)
    parts += (part * clients + client) * (4 * BO * DEPTH + BO)
    where = o[:, None] * DEPTH + k[None, :]
    known = k[None, :] < DEPTH
    tl.store(parts + where, zeroth, known)
    tl.store(parts + (BO * DEPTH) + where, first, known)
    tl.store(parts + (2 * BO * DEPTH) + where, second, known)
    tl.store(parts + (3 * BO * DEPTH) + where, third, known)
    if tl.program_id(0) == 0:
        tl.store(parts + (4 * BO * DEPTH) + o, tl.sum(biases, 1))


@triton.jit(do_not_specialize=["parts", "clients"])
def _add_up(
    some, of_weight, of_bias, parts, clients,
    C: tl.constexpr, OUT: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, BO: tl.constexpr,
    SUMS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """A weight's gradient is the sum over all parts, and over the four places at which its filter lies in a field."""
    DEPTH: tl.constexpr = (KH + 1) * (KW + 1) * C
    WEIGHTS: tl.constexpr = OUT * C * KH * KW
    client = tl.program_id(1).to(tl.int64)
    number = tl.program_id(0) * SUMS + tl.arange(0, SUMS)
    # Neighbouring threads read neighbouring channels, so that is the order; weights have another.
    o, i, j, c = number // (C * KH * KW), number // (C * KW) % KH, number // C % KW, number % C
    is_weight, is_bias = number < WEIGHTS, (number >= WEIGHTS) & (number < WEIGHTS + OUT)
    total = tl.zeros((PARTS, SUMS), tl.float32)
    for first in range(0, parts, PARTS):
        part = first + tl.arange(0, PARTS)
        own = (some + (part * clients + client) * (4 * BO * DEPTH + BO))[:, None]
        real = (part < parts)[:, None]
        for corner in tl.static_range(4):
            row, column = i + corner // 2, j + corner % 2
            where = (corner * BO + o) * DEPTH + (row * (KW + 1) + column) * C + c
            total += tl.load(own + where[None, :], real & is_weight[None, :], 0.0)
        total += tl.load(own + (4 * BO * DEPTH + number - WEIGHTS)[None, :], real & is_bias[None, :], 0.0)
    sums = tl.sum(total, 0)
    place = ((o * C + c) * KH + i) * KW + j
    tl.store(of_weight + client * WEIGHTS + place, sums.to(of_weight.dtype.element_ty), is_weight)
    tl.store(of_bias + client * OUT + (number - WEIGHTS), sums.to(of_bias.dtype.element_ty), is_bias)
