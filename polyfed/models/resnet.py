"""ResNets shorter than the usual ones: the ImageNet stem and one basic block in each of the first 1 to 4 stages."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

from polyfed.models.shapes import image_shape


def short_resnet(input_shape: Sequence[int], stages: int, name: str) -> nn.Sequential:
    """An extractor of 2 + 2 · stages layers; its last layer `match` does nothing."""
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
