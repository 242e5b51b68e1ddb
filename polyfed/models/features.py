"""How clients with different networks come to the same number of features K."""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor, nn
from torch.nn import functional

from polyfed.errors import InputError, unknown_name

Match = Literal["pool", "project"]


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
