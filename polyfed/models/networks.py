"""The catalogue of networks by name: a line about each, and how its two parts are built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import nn

from polyfed.errors import unknown_name
from polyfed.models.cnn import convolutional
from polyfed.models.dropout import seed_dropout
from polyfed.models.features import Match, match_layer
from polyfed.models.heads import build_head
from polyfed.models.resnet import short_resnet
from polyfed.models.split import SplitNetwork
from polyfed.models.torchvision_networks import googlenet, mobilenet_v2, resnet, vision_transformer


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
        head = build_head(self.head or recipe.head, size, classes)
        return SplitNetwork(seed_dropout(extractor), head, size)
