"""Layers that follow each other in a plain `nn.Sequential`, computed as one layer where our kernels can.

A function such as `conv2d` can't know that only the largest of its results will be kept; a sequence of layers can. In
`join_layers` a network's sequences come to ask, before each layer, whether it and the next ones can be one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

JOINED = (
    (nn.Conv2d, nn.MaxPool2d, nn.ReLU),
    (nn.Conv2d, nn.ReLU, nn.MaxPool2d),
    (nn.Conv2d, nn.MaxPool2d),
    (nn.Linear, nn.ReLU),
)
"""Types of layers that may be one; the longer come first."""


def join_layers(network: nn.Module) -> None:
    """Let the network's sequences compute layers as one where an engine offers that, and as usual elsewhere."""
    for module in network.modules():
        if type(module) is nn.Sequential and "forward" not in vars(module):
            module.__dict__["forward"] = partial(_in_order, module)


def joins(value: object) -> bool:
    """Whether this attribute of a module is what `join_layers` has put there."""
    return isinstance(value, partial) and value.func is _in_order


def joined(x: Any, layers: Sequence[nn.Module]) -> Tensor | None:
    """What these layers make of x, one after another, if an engine computes them as one; None elsewhere."""
    if has_torch_function((x,)):  # as PyTorch's own functions ask
        result: Tensor | None = handle_torch_function(joined, (x,), x, layers)
        return result
    return None


def _in_order(sequence: nn.Sequential, input: Any) -> Any:
    """What `nn.Sequential.forward` does, with its argument's name."""
    x, left = input, list(sequence)
    while left:
        together = _first_of(left)
        y = joined(x, together) if len(together) > 1 else None
        if y is None:
            together = left[:1]
            y = together[0](x)
        x, left = y, left[len(together) :]
    return x


def _first_of(layers: Sequence[nn.Module]) -> Sequence[nn.Module]:
    """The first layer, with the next ones if they may be one. A layer that others have changed is called by itself."""
    for types in JOINED:
        together = layers[: len(types)]
        if tuple(map(type, together)) == types and not any(map(_changed, together)):
            return together
    return layers[:1]


def _changed(layer: nn.Module) -> bool:
    """Whether more happens in a call than its type says: there are hooks, on all modules too, or another `forward`."""
    own = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    return any(own) or "forward" in vars(layer) or nn.modules.module._has_any_global_hook()
