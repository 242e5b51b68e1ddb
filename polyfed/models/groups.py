"""Groups of networks by name, as the papers use them: client i gets member i modulo the size of the group."""

from __future__ import annotations

from collections.abc import Sequence

_CNNS = ["cnn1", "cnn2", "cnn3", "cnn4", "cnn5"]
_LARGE_RESNETS = ["resnet18", "resnet34", "resnet50", "resnet101", "resnet152"]
_EIGHT = ["cnn", "googlenet", "mobilenet_v2", *_LARGE_RESNETS]
_HEADS = ["", "+mlp512", "+mlp256", "+mlp128"]

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
