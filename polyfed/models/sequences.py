"""Networks for signals and tables, without their heads."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

from polyfed.errors import InputError
from polyfed.shapes import TokenShape

POOLED = 4
"""Positions along a signal that are left before the linear layer, so that it sees where something happens."""


def signal_shape(input_shape: Sequence[int], stages: int, name: str) -> tuple[int, int]:
    """Channels and length, or an error where the shape is not that of a signal, or the signal is too short."""
    shape, shortest = tuple(input_shape), 2**stages
    if isinstance(input_shape, TokenShape):
        raise InputError(f"{name} needs signals of shape (channels, length), not token ids: use --models text4.")
    if len(shape) != 2 or min(shape) < 1:
        raise InputError(
            f"{name} needs signals of shape (channels, length), not {shape}: for a single channel, x[:, None]."
        )
    channels, length = shape
    if channels > length:
        raise InputError(
            f"{name} needs signals of shape (channels, length), but {shape} has more channels than time steps: if the "
            "channels are last, give them first, x.transpose(0, 2, 1)."
        )
    if length < shortest:
        raise InputError(f"{name} needs signals of at least {shortest} time steps, not {length}: use longer windows.")
    return channels, length


def signal_cnn(
    input_shape: Sequence[int], filters: tuple[int, ...], kernel: int, features: int, name: str
) -> nn.Sequential:
    """A 1-D CNN: convolutions with ReLU, each followed by max-pooling in pairs, then a linear layer with ReLU.

    Its last layer `match` does nothing.
    """
    before, _ = signal_shape(input_shape, len(filters), name)
    layers: dict[str, nn.Module] = {}
    for number, after in enumerate(filters, start=1):
        layers[f"conv{number}"] = nn.Conv1d(before, after, kernel, padding=kernel // 2)
        layers[f"pool{number}"] = nn.MaxPool1d(2)
        layers[f"relu{number}"] = nn.ReLU()
        before = after
    layers |= {
        "average": nn.AdaptiveAvgPool1d(POOLED),
        "flatten": nn.Flatten(),
        "fc": nn.Linear(before * POOLED, features),
        "relu": nn.ReLU(),
        "match": nn.Identity(),
    }
    return nn.Sequential(OrderedDict(layers))


def tabular_mlp(input_shape: Sequence[int], widths: tuple[int, ...], name: str) -> nn.Sequential:
    """Linear layers of these widths with ReLU, on all values of a sample; the last layer `match` does nothing."""
    if isinstance(input_shape, TokenShape):
        raise InputError(f"{name} needs numbers, not token ids: use --models text4.")
    size = math.prod(input_shape)
    layers: dict[str, nn.Module] = {"flatten": nn.Flatten()}
    for number, width in enumerate(widths, start=1):
        layers[f"fc{number}"] = nn.Linear(size, width)
        layers[f"relu{number}"] = nn.ReLU()
        size = width
    return nn.Sequential(OrderedDict(layers | {"match": nn.Identity()}))
