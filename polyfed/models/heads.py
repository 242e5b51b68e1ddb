"""Heads: from K features to C logits. None ends with an activation, so logits may have either sign."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from polyfed.errors import unknown_name

HEADS: dict[str, str] = {
    "linear": "one linear layer",
    "mlp512": "a hidden layer of 512 with ReLU",
    "mlp256": "a hidden layer of 256 with ReLU",
    "mlp128": "a hidden layer of 128 with ReLU",
    "tanh768": "a hidden layer of 768 with tanh, the usual one of vision transformers",
}


def build_head(name: str, features: int, classes: int) -> nn.Module:
    """A head with new weights."""
    if name == "linear":
        return nn.Linear(features, classes)
    if name == "tanh768":
        return _one_hidden_layer(features, 768, nn.Tanh(), classes)
    if name in HEADS:
        return _one_hidden_layer(features, int(name.removeprefix("mlp")), nn.ReLU(), classes)
    raise unknown_name("head", name, HEADS)


def _one_hidden_layer(features: int, width: int, activation: nn.Module, classes: int) -> nn.Module:
    layers = {
        "hidden": nn.Linear(features, width),
        "activation": activation,
        "output": nn.Linear(width, classes),
    }
    return nn.Sequential(OrderedDict(layers))
