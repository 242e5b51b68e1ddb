"""Torchvision's networks with new weights, for images of any number of channels.

Nothing is downloaded. Each builder gives the complete network with its own last layer, which the catalogue replaces.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from polyfed.errors import InputError
from polyfed.models.shapes import image_shape

# The last layer is thrown away, so it is made as small as possible.
_OUTPUTS = 1


def resnet(input_shape: Sequence[int], layers: int, name: str) -> nn.Module:
    """ResNet with 18, 34, 50, 101 or 152 layers and the ImageNet stem."""
    channels, _, _ = image_shape(input_shape, name)
    network: nn.Module = getattr(_torchvision(), f"resnet{layers}")(weights=None, num_classes=_OUTPUTS)
    _set_channels(network, "conv1", channels, _kaiming)
    return network


def googlenet(input_shape: Sequence[int], name: str) -> nn.Module:
    """GoogLeNet without its auxiliary classifiers."""
    channels, height, width = image_shape(input_shape, name)
    if min(height, width) < 15:
        shape = tuple(input_shape)
        raise InputError(
            f"{name} needs images of at least 15x15 pixels, but they have the shape {shape}: enlarge them."
        )
    network: nn.Module = _torchvision().googlenet(
        weights=None, aux_logits=False, init_weights=True, num_classes=_OUTPUTS
    )
    _set_channels(network, "conv1.conv", channels, lambda weight: nn.init.trunc_normal_(weight, std=0.01))
    return network


def mobilenet_v2(input_shape: Sequence[int], name: str) -> nn.Module:
    """MobileNet v2, with its dropout before the last layer."""
    channels, _, _ = image_shape(input_shape, name)
    network: nn.Module = _torchvision().mobilenet_v2(weights=None, num_classes=_OUTPUTS)
    _set_channels(network, "features.0.0", channels, _kaiming)
    return network


def vision_transformer(input_shape: Sequence[int], patch: int, name: str) -> nn.Module:
    """ViT-B with patches of this many pixels."""
    channels, height, width = image_shape(input_shape, name)
    if height != width or height % patch:
        shape = tuple(input_shape)
        raise InputError(f"{name} needs square images with sides of {patch}, {2 * patch}, … pixels, not {shape}.")
    build = getattr(_torchvision(), f"vit_b_{patch}")
    network: nn.Module = build(weights=None, image_size=height, num_classes=_OUTPUTS)
    deviation = math.sqrt(1 / (channels * patch * patch))
    _set_channels(network, "conv_proj", channels, lambda weight: nn.init.trunc_normal_(weight, std=deviation))
    return network


def _torchvision() -> Any:
    import torchvision.models  # takes a second, and most runs do without

    return torchvision.models


def _kaiming(weight: Tensor) -> Tensor:
    return nn.init.kaiming_normal_(weight, mode="fan_out", nonlinearity="relu")


def _set_channels(network: nn.Module, path: str, channels: int, initialise: Callable[[Tensor], Tensor]) -> None:
    """Let the first convolution take this many channels, with the initial weights that torchvision would draw."""
    old = network.get_submodule(path)
    assert isinstance(old, nn.Conv2d)
    if old.in_channels == channels:
        return
    new = nn.Conv2d(
        channels,
        old.out_channels,
        kernel_size=(old.kernel_size[0], old.kernel_size[1]),
        stride=(old.stride[0], old.stride[1]),
        padding=old.padding if isinstance(old.padding, str) else (old.padding[0], old.padding[1]),
        bias=old.bias is not None,
    )
    initialise(new.weight)
    if new.bias is not None:
        nn.init.zeros_(new.bias)
    network.set_submodule(path, new)
