"""Layers of our own: dropout that draws from its own generator, layers that change the number of features, heads."""

from __future__ import annotations

from collections import OrderedDict
from typing import Literal, get_args

import torch
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


class SeededDropout(nn.Module):
    """`nn.Dropout` and its relatives for 1, 2 or 3 spatial dimensions, with a generator of its own.

    PyTorch's layers draw from one global generator. Clients that train side by side in threads would share it, and
    their masks would depend on who happens to come first. The engine seeds this layer's generator per client and
    round, so a run gives the same numbers whatever runs beside it.

    `spatial_dimensions` 0 drops single values; 1, 2 or 3 drop whole channels of that many dimensions. Without a
    generator the mask comes from torch's global one. A generator on the CPU gives the same mask on every device.
    """

    generator: torch.Generator | None

    def __init__(self, p: float = 0.5, spatial_dimensions: int = 0) -> None:
        super().__init__()
        self.p = p
        self.spatial_dimensions = spatial_dimensions
        self.generator = None

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        if self.p == 1:
            return x * 0  # the general formula would divide by zero
        device = x.device if self.generator is None else self.generator.device
        kept = torch.rand(self._mask_shape(x), generator=self.generator, device=device) >= self.p
        return x * kept.to(device=x.device, dtype=x.dtype) / (1 - self.p)

    def _mask_shape(self, x: Tensor) -> tuple[int, ...]:
        if self.spatial_dimensions == 0:
            return tuple(x.shape)
        # nn.Dropout2d reads three axes as (batch, channel, length); the other two read one axis less as "no batch".
        leading = 2 if self.spatial_dimensions == 2 else x.dim() - self.spatial_dimensions
        return tuple(x.shape[:leading]) + (1,) * (x.dim() - leading)

    def extra_repr(self) -> str:
        return f"p={self.p}, spatial_dimensions={self.spatial_dimensions}"


# Exact types: a subclass may do something else, and replacing it would change the network.
_SPATIAL_DIMENSIONS: dict[type[nn.Module], int] = {nn.Dropout: 0, nn.Dropout1d: 1, nn.Dropout2d: 2, nn.Dropout3d: 3}


def seed_dropout(module: nn.Module) -> nn.Module:
    """Replace every dropout layer in a tree of modules, in place, and return the tree.

    The result is the same object unless `module` itself is a dropout layer. Names, rates and training flags stay. A
    network that calls `torch.nn.functional.dropout` in its own forward, or that gives a dropout rate to
    `nn.MultiheadAttention`, still draws from the global generator; engines seed that for such networks, one client at
    a time.
    """
    replaced: dict[nn.Module, nn.Module] = {}
    for parent in list(module.modules()):
        # Not named_children(), which lists a layer that two names share only once.
        for name, child in list(parent._modules.items()):
            if type(child) in _SPATIAL_DIMENSIONS and child is not None:
                replaced.setdefault(child, _seeded(child))
                setattr(parent, name, replaced[child])
    return _seeded(module) if type(module) in _SPATIAL_DIMENSIONS else module


def set_generator(module: nn.Module, generator: torch.Generator | None) -> None:
    """Let every `SeededDropout` in a tree of modules draw from this generator."""
    for part in module.modules():
        if isinstance(part, SeededDropout):
            part.generator = generator


def _seeded(layer: nn.Module) -> SeededDropout:
    rate = layer.p
    assert isinstance(rate, float | int)
    return SeededDropout(rate, _SPATIAL_DIMENSIONS[type(layer)]).train(layer.training)


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
