"""A kernel for a GPU: the images of a batch, normalised and augmented.

PyTorch's operations are about thirty small kernels, which take longer to start than to run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from polyfed.message import State

BLOCK = 1024
"""Values of an image at a time."""


def look_up(pixels: Tensor, rows: Tensor, scale: Tensor, shift: Tensor, draws: State) -> Tensor:
    """Those of the images [all, channels, H, W] with these numbers, as `Augmentation.apply` changes them."""
    channels, height, width = pixels.shape[1:]
    x = torch.empty(len(rows), channels, height, width, device=pixels.device)

    def drawn(name: str) -> Tensor:
        return draws[name].contiguous() if name in draws else rows

    _look_up[(len(rows), triton.cdiv(x[0].numel(), BLOCK))](
        pixels, rows, scale, shift, x, drawn("flip"), drawn("crop_down"), drawn("crop_right"), drawn("erase_top"),
        drawn("erase_left"), drawn("erase_height"), drawn("erase_width"),
        "flip" in draws, "crop_down" in draws, "erase_top" in draws, channels, height, width, BLOCK,
    )  # fmt: skip
    return x


@triton.jit
def _look_up(
    pixels, rows, scale, shift, x, flip, crop_down, crop_right, erase_top, erase_left, erase_height, erase_width,
    FLIPS: tl.constexpr, CROPS: tl.constexpr, ERASES: tl.constexpr,
    CHANNELS: tl.constexpr, H: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Works backwards: finds for every value of the result the pixel it comes from, or that it is blank."""
    sample = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = place < CHANNELS * H * W
    channel, row, column = place // (H * W), place % (H * W) // W, place % W
    shown = real
    if CROPS:
        row += tl.load(crop_down + sample).to(tl.int32)
        column += tl.load(crop_right + sample).to(tl.int32)
        shown = shown & (row >= 0) & (row < H) & (column >= 0) & (column < W)
    if ERASES:
        top, left = tl.load(erase_top + sample), tl.load(erase_left + sample)
        bottom, right = top + tl.load(erase_height + sample), left + tl.load(erase_width + sample)
        shown = shown & ((row < top) | (row >= bottom) | (column < left) | (column >= right))
    if FLIPS:
        column = tl.where(tl.load(flip + sample) != 0, W - 1 - column, column)
    source = tl.load(rows + sample) * (CHANNELS * H * W) + channel * (H * W) + row * W + column
    pixel = tl.load(pixels + source, shown, 0).to(tl.float32)
    value = tl.load(shift + channel, real) + pixel * tl.load(scale + channel, real)
    tl.store(x + sample * (CHANNELS * H * W) + place, tl.where(shown, value, 0.0), real)
