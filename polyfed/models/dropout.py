"""Dropout that draws from a generator of its own.

PyTorch's dropout layers draw from one global generator. Clients that train side by side in threads would share it, and
their masks would depend on who happens to come first. Here a layer holds a generator that the engine seeds per client
and round, so a run gives the same numbers whatever runs beside it.

Only layers are replaced: a network that calls `torch.nn.functional.dropout` in its own forward, or that gives a
dropout rate to `nn.MultiheadAttention`, still draws from the global generator. Engines seed that for such networks, one
client at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class SeededDropout(nn.Module):
    """`nn.Dropout` and its relatives for 1, 2 or 3 spatial dimensions, with a generator of its own.

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

    The result is the same object unless `module` itself is a dropout layer. Names, rates and training flags stay.
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
