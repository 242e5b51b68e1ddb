"""Random changes of training images, drawn on the CPU and applied to a batch at once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from polyfed.errors import InputError


@dataclass(frozen=True)
class Augmentation:
    """Flip, erase and crop normalised images, in this order, as the released code of pFedES and FedSSA does.

    Drawing and applying are separate: draws come from a generator on the CPU, so they are the same on every engine, and
    applying them is one gather on the images' device without a decision in Python, so it runs under `vmap`.

    >>> augmentation = Augmentation(erase=False)
    >>> draws = augmentation.draw(torch.Generator().manual_seed(0), 8, (3, 32, 32))
    >>> augmentation.apply(torch.zeros(8, 3, 32, 32), draws).shape
    torch.Size([8, 3, 32, 32])
    """

    flip: bool = True
    """Mirror left and right, with probability ½."""
    erase: bool = True
    """Set a rectangle to zero, with probability ½: 4 % to 20 % of the area, height to width 1:2 to 2:1."""
    crop: bool = True
    """Shift by up to `padding` pixels in each direction; zeros move in."""
    padding: int = 4
    erase_area: tuple[float, float] = (0.04, 0.2)
    erase_ratio: tuple[float, float] = (0.5, 2.0)

    def draw(self, generator: torch.Generator, count: int, shape: tuple[int, ...]) -> dict[str, Tensor]:
        """Draws for `count` images of that shape (channels, height, width), each of them [count]."""
        return self.draws_of(self.numbers(generator, count), shape)

    def numbers(self, generator: torch.Generator, count: int) -> dict[str, Tensor]:
        """The random numbers behind the draws for `count` images, each of them [count] or [several, count]."""
        numbers: dict[str, Tensor] = {}
        if self.flip:
            numbers["flip"] = torch.rand(count, generator=generator)
        if self.erase:
            numbers["erase"] = torch.rand(5, count, generator=generator, dtype=torch.float64)
        if self.crop:
            numbers["crop"] = torch.randint(-self.padding, self.padding + 1, (2, count), generator=generator)
        return numbers

    def draws_of(self, numbers: Mapping[str, Tensor], shape: tuple[int, ...]) -> dict[str, Tensor]:
        """What these random numbers mean for images of that shape; those of several passes may be stacked."""
        if len(shape) != 3:
            raise InputError(
                f"samples of shape {tuple(shape)} cannot be augmented: only images (channels, height, width) can, so "
                f"switch augmentation off."
            )
        draws: dict[str, Tensor] = {}
        if self.flip:
            draws["flip"] = numbers["flip"] < 0.5
        if self.erase:
            draws |= self._rectangles(numbers["erase"], shape[1], shape[2])
        if self.crop:
            draws["crop_down"], draws["crop_right"] = numbers["crop"].unbind(-2)
        return draws

    def apply(self, images: Tensor, draws: Mapping[str, Tensor]) -> Tensor:
        """The images [count, channels, height, width] with their draws applied.

        Works backwards: for every pixel of the result it finds the pixel of the original, or finds that there is none.
        """
        count, channels, height, width = images.shape
        moved = {name: values.to(images.device).view(count, 1) for name, values in draws.items()}
        rows = torch.arange(height, device=images.device).expand(count, height)
        columns = torch.arange(width, device=images.device).expand(count, width)
        if self.crop:
            rows, columns = rows + moved["crop_down"], columns + moved["crop_right"]
        blank = _outside(rows, height).unsqueeze(2) | _outside(columns, width).unsqueeze(1)
        if self.erase:
            in_rows = (rows >= moved["erase_top"]) & (rows < moved["erase_top"] + moved["erase_height"])
            in_columns = (columns >= moved["erase_left"]) & (columns < moved["erase_left"] + moved["erase_width"])
            blank = blank | (in_rows.unsqueeze(2) & in_columns.unsqueeze(1))
        if self.flip:
            columns = torch.where(moved["flip"], width - 1 - columns, columns)
        # What lies outside is blank anyway; it only needs some valid index.
        sources = rows.clamp(0, height - 1).unsqueeze(2) * width + columns.clamp(0, width - 1).unsqueeze(1)
        sources = sources.view(count, 1, height * width).expand(count, channels, height * width)
        pixels = images.reshape(count, channels, height * width).gather(2, sources)
        return pixels.view(count, channels, height, width).masked_fill(blank.unsqueeze(1), 0.0)

    def _rectangles(self, numbers: Tensor, height: int, width: int) -> dict[str, Tensor]:
        """Rectangles to erase; one of height 0 erases nothing."""
        happens, area, ratio, top, left = numbers.unbind(-2)
        smallest, largest = self.erase_area
        area = (smallest + area * (largest - smallest)) * height * width
        flattest, steepest = (math.log(limit) for limit in self.erase_ratio)
        ratio = torch.exp(flattest + ratio * (steepest - flattest))
        heights = torch.sqrt(area * ratio).round().clamp(1, height)
        widths = torch.sqrt(area / ratio).round().clamp(1, width)
        return {
            "erase_top": (top * (height - heights + 1)).long(),
            "erase_left": (left * (width - widths + 1)).long(),
            "erase_height": torch.where(happens < 0.5, heights, 0.0).long(),
            "erase_width": widths.long(),
        }


def _outside(positions: Tensor, size: int) -> Tensor:
    """Which positions lie beyond the picture."""
    return (positions < 0) | (positions >= size)
