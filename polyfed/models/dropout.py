"""Dropout that draws from a generator of its own: as a layer, and inside attention."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from polyfed.models.attention import Projection, multi_head, projections


class SeededDropout(nn.Module):
    """`nn.Dropout` and its relatives for 1, 2 or 3 spatial dimensions, with a generator of its own.

    PyTorch's layers draw from one global generator. Clients that train side by side in threads would share it, and
    their masks would depend on who happens to come first. The engine seeds this layer's generator per client and
    round, so a run gives the same numbers whatever runs beside it.

    `spatial_dimensions` 0 drops single values; 1, 2 or 3 drop whole channels of that many dimensions. Without a
    generator the mask comes from torch's global one. A generator on the CPU gives the same mask on every device.
    `given`, if set, gives the mask instead, from the rate and the mask's shape.
    """

    generator: torch.Generator | None
    given: Callable[[float, tuple[int, ...]], Tensor] | None

    def __init__(self, p: float = 0.5, spatial_dimensions: int = 0) -> None:
        super().__init__()
        self.p = p
        self.spatial_dimensions = spatial_dimensions
        self.generator = None
        self.given = None

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        if self.p == 1:
            return x * 0  # the general formula would divide by zero
        shape = self._mask_shape(x)
        kept = self._draw(shape, x.device) if self.given is None else self.given(self.p, shape)
        return x * kept.to(device=x.device, dtype=x.dtype) / (1 - self.p)

    def _draw(self, shape: tuple[int, ...], device: torch.device) -> Tensor:
        device = device if self.generator is None else self.generator.device
        return torch.rand(shape, generator=self.generator, device=device) >= self.p

    def _mask_shape(self, x: Tensor) -> tuple[int, ...]:
        if self.spatial_dimensions == 0:
            return tuple(x.shape)
        # nn.Dropout2d reads three axes as (batch, channel, length); the other two read one axis less as "no batch".
        leading = 2 if self.spatial_dimensions == 2 else x.dim() - self.spatial_dimensions
        return tuple(x.shape[:leading]) + (1,) * (x.dim() - leading)

    def extra_repr(self) -> str:
        return f"p={self.p}, spatial_dimensions={self.spatial_dimensions}"


class SeededAttention(nn.MultiheadAttention):
    """`nn.MultiheadAttention` whose dropout draws from a generator of its own, like that of `SeededDropout`."""

    masks: SeededDropout

    @classmethod
    def fits(cls, layer: nn.Module) -> bool:
        """Whether this can take a layer's place: it has dropout, and no keys besides those it is given."""
        if type(layer) is not nn.MultiheadAttention:  # a subclass may do something else
            return False
        return layer.dropout > 0 and layer.bias_k is None and layer.bias_v is None and not layer.add_zero_attn

    @classmethod
    def take_over(cls, layer: nn.Module) -> None:
        """Let a layer draw so, keeping its parameters, hooks and whatever else it has."""
        assert isinstance(layer, nn.MultiheadAttention)
        layer.__class__ = cls
        layer.masks = SeededDropout(layer.dropout).train(layer.training)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if not self.training or (is_causal and attn_mask is None):  # the latter is an error, which PyTorch explains
            return super().forward(
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        swapped = self.batch_first and query.dim() == 3
        inputs = [part.transpose(0, 1) if swapped else part for part in (query, key, value)]
        output = (self.out_proj.weight, self.out_proj.bias)
        result, weights = multi_head(
            inputs, self.num_heads, self._projections(), output, key_padding_mask, attn_mask, self.masks
        )
        result = result.transpose(0, 1) if swapped else result
        if not need_weights:
            return result, None
        return result, weights.mean(-3) if average_attn_weights else weights

    def _projections(self) -> list[Projection]:
        return projections(
            self.in_proj_weight, self.in_proj_bias, (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        )


# Exact types: a subclass may do something else, and replacing it would change the network.
_SPATIAL_DIMENSIONS: dict[type[nn.Module], int] = {nn.Dropout: 0, nn.Dropout1d: 1, nn.Dropout2d: 2, nn.Dropout3d: 3}


def seed_dropout(module: nn.Module) -> nn.Module:
    """Replace every dropout layer in a tree of modules, in place, and return the tree.

    The result is the same object unless `module` itself is a dropout layer. Names, rates and training flags stay.
    `nn.MultiheadAttention` with a dropout rate draws from its own generator too. A network that calls
    `torch.nn.functional.dropout` in its own forward, or that gives a dropout rate to `nn.LSTM`, still draws from the
    global generator; engines seed that for such networks, one client at a time.
    """
    replaced: dict[nn.Module, nn.Module] = {}
    for parent in list(module.modules()):
        if SeededAttention.fits(parent):
            SeededAttention.take_over(parent)
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
