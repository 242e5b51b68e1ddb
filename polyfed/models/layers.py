"""Layers of our own: those that change the number of features, and heads."""

from __future__ import annotations

from collections import OrderedDict
from typing import Literal, get_args

from torch import Tensor, nn
from torch.nn import functional

from polyfed.errors import InputError, unknown_name

Match = Literal["pool", "project"]
"""How clients with different networks come to the same number of features K."""

# None of the heads ends with an activation, so logits may have either sign.
HEADS: dict[str, str] = {
    "linear": "one linear layer",
    "mlp512": "a hidden layer of 512 with ReLU",
    "mlp256": "a hidden layer of 256 with ReLU",
    "mlp128": "a hidden layer of 128 with ReLU",
    "tanh768": "a hidden layer of 768 with tanh, the usual one of vision transformers",
}


class FeaturePool(nn.Module):
    """Average neighbouring features until K are left: [batch, D] to [batch, K], without parameters.

    Of 1024 features, 512 remain as means of pairs; where there are fewer features than K, each is repeated.
    """

    def __init__(self, features: int) -> None:
        super().__init__()
        self.features = features

    def forward(self, x: Tensor) -> Tensor:
        return functional.adaptive_avg_pool1d(x.unsqueeze(1), self.features).squeeze(1)

    def extra_repr(self) -> str:
        return f"features={self.features}"


def match_layer(given: int, wanted: int | None, match: Match = "pool") -> nn.Module:
    """The layer that brings `given` features to `wanted` ones; it does nothing where they already agree."""
    if wanted is None or wanted == given:
        return nn.Identity()
    return FeaturePool(wanted) if match == "pool" else nn.Linear(given, wanted)


def check_match(match: str) -> Match:
    """The name of a way to match features, or an error that lists them."""
    if match == "pool":
        return "pool"
    if match == "project":
        return "project"
    raise unknown_name("way to match features", match, get_args(Match))


def check_sizes(classes: int, features: int | None) -> None:
    """Refuse a task without classes and a network without features."""
    if classes < 1:
        raise InputError(f"a network needs at least 1 class, not {classes}.")
    if features is not None and features < 1:
        raise InputError(f"the number of features must be at least 1, not {features}.")


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
