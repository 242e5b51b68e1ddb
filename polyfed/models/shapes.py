"""What shape the images of a task have."""

from __future__ import annotations

from collections.abc import Sequence

from polyfed.errors import InputError


def image_shape(input_shape: Sequence[int], name: str) -> tuple[int, int, int]:
    """Channels, height and width, or an error where the shape is not that of an image."""
    if len(input_shape) != 3 or min(input_shape) < 1:
        shape = tuple(input_shape)
        raise InputError(f"{name} needs images of shape (channels, height, width), not {shape}.")
    channels, height, width = input_shape
    return channels, height, width
