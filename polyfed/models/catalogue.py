"""The catalogue of networks by name (`RECIPES`) and of their groups (`GROUPS`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from torch import nn

from polyfed.errors import unknown_name
from polyfed.models.layers import Match, build_head, match_layer, seed_dropout
from polyfed.models.networks import convolutional, googlenet, mobilenet_v2, resnet, short_resnet, vision_transformer
from polyfed.models.sequences import signal_cnn, tabular_mlp
from polyfed.models.split import SplitNetwork
from polyfed.models.text import TextCNN, TextGRU, TextLSTM, TextTransformer
from polyfed.shapes import TokenShape


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


def _signals() -> dict[str, Recipe]:
    sizes = {1: ((64, 128, 128), 7), 2: ((32, 64, 128), 5), 3: ((32, 64), 7), 4: ((16, 32), 5)}
    return {
        f"signal_cnn{number}": Recipe(
            f"1-D CNN for signals: convolutions of {_joined(filters)} with {kernel} steps, a linear layer of 128",
            128,
            partial(signal_cnn, filters=filters, kernel=kernel, features=128),
        )
        for number, (filters, kernel) in sizes.items()
    }


def _tables() -> dict[str, Recipe]:
    sizes = {1: (256, 128, 64), 2: (128, 128, 64), 3: (128, 64), 4: (64,)}
    return {
        f"tabular_mlp{number}": Recipe(
            f"MLP for tables: linear layer{'s' if len(widths) > 1 else ''} of {_joined(widths)}",
            64,
            partial(tabular_mlp, widths=widths),
        )
        for number, widths in sizes.items()
    }


def _texts() -> dict[str, Recipe]:
    return {
        "text_cnn": Recipe(
            "TextCNN for token ids: 64 filters each over 3, 4 and 5 tokens",
            128,
            partial(TextCNN, filters=64, features=128),
        ),
        "text_transformer": Recipe(
            "transformer encoder for token ids: 2 blocks of width 64 with 4 heads",
            128,
            partial(TextTransformer, blocks=2, heads=4, features=128),
        ),
        "text_gru": Recipe("GRU of 64 for token ids", 128, partial(TextGRU, hidden=64, features=128)),
        "text_lstm": Recipe("LSTM of 64 for token ids", 128, partial(TextLSTM, hidden=64, features=128)),
    }


def _joined(numbers: Sequence[int]) -> str:
    *first, last = (str(number) for number in numbers)
    return f"{', '.join(first)} and {last}" if first else last


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
    **_signals(),
    **_texts(),
    **_tables(),
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
    "signal4": list(_signals()),
    "text4": list(_texts()),
    "tabular4": list(_tables()),
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
    "signal4": "4 CNNs of different sizes for signals (channels, length)",
    "text4": "4 different networks for token ids",
    "tabular4": "4 MLPs of different depths and widths for tables",
}

AUXILIARIES: dict[str, str] = {
    "papers": "cnn5",
    **dict.fromkeys(("htfe2", "htfe4", "htfe8", "res34-htc4", "htfe8-htc4", "htm10"), "cnn"),
    "htfe3": "resnet10",
    "htfe5": "googlenet",
    "htfe9": "resnet4",
    "signal4": "signal_cnn4",
    "text4": "text_cnn",
    "tabular4": "tabular_mlp4",
}
"""The small common network of mutual-learning methods in each group."""

# The networks of all other groups differ in their number of features; FedTGP pools all of them to 512.
_POOLED_FEATURES = 512
_EQUAL_FEATURES = ("papers", "signal4", "text4", "tabular4")


def default_features(models: object) -> int | None:
    """The number of features that a group of the papers prescribes; None leaves every network its own.

    >>> default_features("htfe8"), default_features("papers"), default_features("cnn1,htfe2")
    (512, None, 512)
    """
    return next((_POOLED_FEATURES for group in _named_groups(models) if group not in _EQUAL_FEATURES), None)


def default_group(shape: tuple[int, ...]) -> str:
    """The group of networks for samples of this shape: images, signals, texts or rows of a table.

    >>> default_group((3, 32, 32)), default_group((6, 128)), default_group((13,))
    ('papers', 'signal4', 'tabular4')
    """
    if isinstance(shape, TokenShape):
        return "text4"
    return {1: "tabular4", 2: "signal4"}.get(len(shape), "papers")


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
