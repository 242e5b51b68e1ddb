"""The proxy extractor of pFedES: a small network from images to images that clients share instead of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from torch import Tensor, nn

from polyfed.errors import InputError, unknown_name
from polyfed.models.shapes import image_shape

Activation = Literal["relu", "none", "tanh"]

_ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "none": nn.Identity, "tanh": nn.Tanh}


class ProxyExtractor(nn.Module):
    """Two 3x3 convolutions that turn an image into an enhanced image of the same shape.

    The released code of pFedES ends with ReLU, so enhanced images are not negative although normalised images are;
    `activation` offers the alternatives. With 8 filters it has 443 parameters on 3 channels and 153 on 1.
    """

    def __init__(self, input_shape: Sequence[int], filters: int = 8, activation: Activation = "relu") -> None:
        super().__init__()
        channels, _, _ = image_shape(input_shape, "the proxy extractor")
        if filters < 1:
            raise InputError(f"the proxy extractor needs at least 1 filter, not {filters}.")
        if activation not in _ACTIVATIONS:
            raise unknown_name("activation", activation, get_args(Activation))
        self.conv1 = nn.Conv2d(channels, filters, kernel_size=3, padding="same")
        self.relu = nn.ReLU()
        self.conv2 = nn.Conv2d(filters, channels, kernel_size=3, padding="same")
        self.activation = _ACTIVATIONS[activation]()

    def forward(self, x: Tensor) -> Tensor:
        enhanced: Tensor = self.activation(self.conv2(self.relu(self.conv1(x))))
        return enhanced
