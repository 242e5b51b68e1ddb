"""The small convolutional networks of the papers.

Two 5x5 convolutions without padding, each with ReLU and 2x2 max-pooling, then linear layers with ReLU. The last
linear layer's output is the representation, so features are never negative. ReLU comes after pooling: values and
gradients are the same as before it, on a quarter of the numbers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

from polyfed.errors import InputError
from polyfed.models.shapes import image_shape


def convolutional(
    input_shape: Sequence[int], filters: tuple[int, int], widths: tuple[int, ...], name: str
) -> nn.Sequential:
    """An extractor with these numbers of filters and widths of linear layers; its last layer `match` does nothing."""
    channels, height, width = image_shape(input_shape, name)
    layers: dict[str, nn.Module] = {
        "conv1": nn.Conv2d(channels, filters[0], kernel_size=5),
        "pool1": nn.MaxPool2d(2),
        "relu1": nn.ReLU(inplace=True),
        "conv2": nn.Conv2d(filters[0], filters[1], kernel_size=5),
        "pool2": nn.MaxPool2d(2),
        "relu2": nn.ReLU(inplace=True),
        "flatten": nn.Flatten(),
    }
    size = filters[1] * _side_after(height, input_shape, name) * _side_after(width, input_shape, name)
    for number, wide in enumerate(widths, start=1):
        layers[f"fc{number}"] = nn.Linear(size, wide)
        layers[f"relu{number + 2}"] = nn.ReLU(inplace=True)
        size = wide
    layers["match"] = nn.Identity()
    return nn.Sequential(OrderedDict(layers))


def _side_after(side: int, input_shape: Sequence[int], name: str) -> int:
    """What two convolutions and two poolings leave of a side; flattening depends on it, so it is never assumed."""
    left = ((side - 4) // 2 - 4) // 2
    if left < 1:
        shape = tuple(input_shape)
        raise InputError(
            f"{name} needs images of at least 16x16 pixels, but they have the shape {shape}: enlarge them."
        )
    return left
