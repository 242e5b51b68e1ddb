"""The catalogue of networks by name (`RECIPES`) and of their groups (`GROUPS`), and how each network is built."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

from torch import Tensor, nn

from polyfed.errors import InputError, unknown_name
from polyfed.models.layers import Match, build_head, match_layer, seed_dropout
from polyfed.models.split import SplitNetwork


def image_shape(input_shape: Sequence[int], name: str) -> tuple[int, int, int]:
    """Channels, height and width, or an error where the shape is not that of an image."""
    if len(input_shape) != 3 or min(input_shape) < 1:
        shape = tuple(input_shape)
        raise InputError(f"{name} needs images of shape (channels, height, width), not {shape}.")
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


@dataclass(frozen=True)
class Recipe:
    """How to build one network.

    `build(input_shape, name=…)` gives it without its head; `last` names the layer after which `features` features come
    out, and which is replaced by one that matches them to the number of features wanted.
    """

    title: str
    features: int
    build: Callable[..., nn.Module]
    last: str = "match"
    head: str = "linear"


def _five_cnns() -> dict[str, Recipe]:
    sizes = {1: (32, 2000), 2: (16, 2000), 3: (32, 1000), 4: (32, 800), 5: (32, 500)}
    return {
        f"cnn{number}": Recipe(
            f"CNN-{number} of pFedES and FedSSA: convolutions of 16 and {filters}, linear layers of {width} and 500",
            500,
            partial(convolutional, filters=(16, filters), widths=(width, 500)),
        )
        for number, (filters, width) in sizes.items()
    }


def _resnets() -> dict[str, Recipe]:
    short = {
        f"resnet{2 + 2 * stages}": Recipe(
            f"ResNet with one basic block in each of {stages} stage{'s' if stages > 1 else ''}",
            64 * 2 ** (stages - 1),
            partial(short_resnet, stages=stages),
        )
        for stages in (1, 2, 3, 4)
    }
    sizes = {18: 512, 34: 512, 50: 2048, 101: 2048, 152: 2048}
    usual = {
        f"resnet{layers}": Recipe(f"ResNet-{layers} of torchvision", size, partial(resnet, layers=layers), last="fc")
        for layers, size in sizes.items()
    }
    return short | usual


def _transformers() -> dict[str, Recipe]:
    return {
        f"vit_b_{patch}": Recipe(
            f"vision transformer ViT-B of torchvision, patches of {patch}x{patch}",
            768,
            partial(vision_transformer, patch=patch),
            last="heads",
            head="tanh768",
        )
        for patch in (16, 32)
    }


RECIPES: dict[str, Recipe] = {
    **_five_cnns(),
    "cnn": Recipe(
        "4-layer CNN of FedTGP: convolutions of 32 and 64, a linear layer of 512",
        512,
        partial(convolutional, filters=(32, 64), widths=(512,)),
    ),
    **_resnets(),
    "googlenet": Recipe("GoogLeNet of torchvision without auxiliary classifiers", 1024, googlenet, last="fc"),
    "mobilenet_v2": Recipe("MobileNet v2 of torchvision", 1280, mobilenet_v2, last="classifier.1"),
    **_transformers(),
}

NETWORKS: dict[str, str] = {name: recipe.title for name, recipe in RECIPES.items()}


@dataclass(frozen=True)
class FromCatalogue:
    """Builds a network of the catalogue, with its own head or with another."""

    network: str
    head: str | None = None

    def __call__(
        self, name: str, input_shape: tuple[int, ...], classes: int, features: int | None, match: Match
    ) -> SplitNetwork:
        if self.network not in RECIPES:
            raise unknown_name("network", self.network, RECIPES)
        recipe = RECIPES[self.network]
        extractor = recipe.build(input_shape, name=name)
        extractor.set_submodule(recipe.last, match_layer(recipe.features, features, match))
        size = recipe.features if features is None else features
        head = self.head or recipe.head
        split = SplitNetwork(seed_dropout(extractor), build_head(head, size, classes), size)
        if head == "linear" and size == recipe.features:  # the head is what torchvision has in the place of `last`
            split.head_name = "head" if recipe.last == "match" else recipe.last
        return split


_CNNS = ["cnn1", "cnn2", "cnn3", "cnn4", "cnn5"]
_LARGE_RESNETS = ["resnet18", "resnet34", "resnet50", "resnet101", "resnet152"]
_EIGHT = ["cnn", "googlenet", "mobilenet_v2", *_LARGE_RESNETS]
_HEADS = ["", "+mlp512", "+mlp256", "+mlp128"]

# Client i gets member i modulo the size of the group.
GROUPS: dict[str, list[str]] = {
    "papers": _CNNS,
    "htfe2": ["cnn", "resnet18"],
    "htfe3": ["resnet10", "resnet18", "resnet34"],
    "htfe4": ["cnn", "googlenet", "mobilenet_v2", "resnet18"],
    "htfe5": ["googlenet", "mobilenet_v2", "resnet18", "resnet34", "resnet50"],
    "htfe8": _EIGHT,
    "htfe9": ["resnet4", "resnet6", "resnet8", "resnet10", *_LARGE_RESNETS],
    "res34-htc4": [f"resnet34{head}" for head in _HEADS],
    # The head of client i is i modulo 4 here while the extractor is i modulo 8, so eight members cover both.
    "htfe8-htc4": [f"{network}{head}" for network, head in zip(_EIGHT, _HEADS * 2, strict=True)],
    "htm10": [*_EIGHT, "vit_b_16", "vit_b_32"],
}

GROUP_TITLES: dict[str, str] = {
    "papers": "the five CNNs of pFedES, FedSSA, FedGH and DC-PFL",
    "htfe2": "2 different extractors (FedTGP)",
    "htfe3": "3 different extractors (FedTGP)",
    "htfe4": "4 different extractors (FedTGP)",
    "htfe5": "5 different extractors (later work on FedTGP's setting)",
    "htfe8": "8 different extractors (FedTGP)",
    "htfe9": "9 different extractors, all ResNets (FedTGP)",
    "res34-htc4": "ResNet-34 with 4 different heads (FedTGP)",
    "htfe8-htc4": "8 different extractors with 4 different heads (FedTGP)",
    "htm10": "10 different networks, 2 of them transformers (later work on FedTGP's setting)",
}

AUXILIARIES: dict[str, str] = {
    "papers": "cnn5",
    **dict.fromkeys(("htfe2", "htfe4", "htfe8", "res34-htc4", "htfe8-htc4", "htm10"), "cnn"),
    "htfe3": "resnet10",
    "htfe5": "googlenet",
    "htfe9": "resnet4",
}
"""The small common network of mutual-learning methods in each group."""

# The networks of these groups differ in their number of features; FedTGP pools all of them to 512.
_POOLED_FEATURES = 512


def default_features(models: object) -> int | None:
    """The number of features that a group of the papers prescribes; None leaves every network its own.

    >>> default_features("htfe8"), default_features("papers"), default_features("cnn1,htfe2")
    (512, None, 512)
    """
    return next((_POOLED_FEATURES for group in _named_groups(models) if group != "papers"), None)


def default_auxiliary(models: object) -> str | None:
    """The auxiliary network of the first group that is named; None if there is no group.

    >>> default_auxiliary("htfe9"), default_auxiliary("cnn1, papers"), default_auxiliary("cnn1,cnn2")
    ('resnet4', 'cnn5', None)
    """
    return next((AUXILIARIES[group] for group in _named_groups(models)), None)


def _named_groups(models: object) -> list[str]:
    """The groups among what describes networks, in order."""
    if isinstance(models, str):
        return [name for part in models.split(",") if (name := part.strip().lower()) in GROUPS]
    if isinstance(models, Sequence):
        return [name for part in models for name in _named_groups(part)]
    return []


Activation = Literal["relu", "none", "tanh"]

_ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "none": nn.Identity, "tanh": nn.Tanh}


class ProxyExtractor(nn.Module):
    """What pFedES shares instead of clients' own networks: two 3x3 convolutions from an image to an enhanced image.

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
