"""Networks for images: the papers' own and torchvision's, without their heads."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

from torch import Tensor, nn

from polyfed.errors import InputError, unknown_name
from polyfed.shapes import TokenShape


def image_shape(input_shape: Sequence[int], name: str, *, network: bool = True) -> tuple[int, int, int]:
    """Channels, height and width, or an error where the shape is not that of an image.

    `network`: whether other networks would be a remedy.
    """
    if len(input_shape) != 3 or min(input_shape) < 1:
        shape = tuple(input_shape)
        tokens = isinstance(input_shape, TokenShape)
        what = f"token ids of shape {shape}" if tokens else f"{shape}"
        kinds = {1: "text4 for token ids" if tokens else "tabular4 for tables", 2: "signal4 for signals"}
        other = f" (networks for other data: --models {kinds[len(shape)]})" if network and len(shape) in kinds else ""
        raise InputError(f"{name} needs images of shape (channels, height, width), not {what}{other}.")
    channels, height, width = input_shape
    return channels, height, width


def convolutional(
    input_shape: Sequence[int], filters: tuple[int, int], widths: tuple[int, ...], name: str
) -> nn.Sequential:
    """The small CNN of the papers with these numbers of filters and widths of linear layers, without its head.

    Two 5x5 convolutions without padding, each with ReLU and 2x2 max-pooling, then linear layers with ReLU. The last
    linear layer's output is the representation, so features are never negative; `match` after it does nothing.
    """
    channels, height, width = image_shape(input_shape, name)
    layers: dict[str, nn.Module] = {
        # ReLU after pooling: values and gradients are the same as before it, on a quarter of the numbers.
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


def short_resnet(input_shape: Sequence[int], stages: int, name: str) -> nn.Sequential:
    """A ResNet shorter than the usual ones, of 2 + 2 · stages layers, without its head.

    The ImageNet stem and one basic block in each of the first 1 to 4 stages; the last layer `match` does nothing.
    """
    channels, _, _ = image_shape(input_shape, name)
    layers: dict[str, nn.Module] = {
        "conv1": nn.Conv2d(channels, 64, kernel_size=7, stride=2, padding=3, bias=False),
        "bn1": nn.BatchNorm2d(64),
        "relu": nn.ReLU(inplace=True),
        "maxpool": nn.MaxPool2d(kernel_size=3, stride=2, padding=1),
    }
    width = 64
    for stage in range(stages):
        layers[f"layer{stage + 1}"] = _block(width, 64 * 2**stage)
        width = 64 * 2**stage
    layers |= {"avgpool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten(), "match": nn.Identity()}
    network = nn.Sequential(OrderedDict(layers))
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return network


def _block(before: int, after: int) -> nn.Module:
    """A basic block; where it widens, it halves the image and its shortcut does the same."""
    from torchvision.models.resnet import BasicBlock  # takes a second, and most runs do without

    shortcut = None
    stride = 1
    if before != after:
        stride = 2
        shortcut = nn.Sequential(
            nn.Conv2d(before, after, kernel_size=1, stride=stride, bias=False), nn.BatchNorm2d(after)
        )
    block: nn.Module = BasicBlock(before, after, stride, shortcut)
    return block


# The builders of torchvision's networks give complete ones with new weights; nothing is downloaded. A recipe replaces
# the last layer, so that is made as small as possible.
_OUTPUTS = 1


def resnet(input_shape: Sequence[int], layers: int, name: str) -> nn.Module:
    """Torchvision's ResNet with 18, 34, 50, 101 or 152 layers and the ImageNet stem, for any number of channels."""
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
    """Make the first convolution accept this many channels, with the initial weights that torchvision would draw."""
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


Activation = Literal["relu", "none", "tanh"]

_ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "none": nn.Identity, "tanh": nn.Tanh}


class ProxyExtractor(nn.Module):
    """What pFedES shares instead of clients' own networks: two 3x3 convolutions from an image to an enhanced image.

    The released code of pFedES ends with ReLU, so enhanced images are not negative although normalised images are;
    `activation` offers the alternatives. With 8 filters it has 443 parameters on 3 channels and 153 on 1.
    """

    def __init__(self, input_shape: Sequence[int], filters: int = 8, activation: Activation = "relu") -> None:
        super().__init__()
        channels, _, _ = image_shape(input_shape, "the proxy extractor", network=False)
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
