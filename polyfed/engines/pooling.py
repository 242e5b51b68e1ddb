"""Max-pooling of stacked images where they lie.

`vmap` turns the convolutions of a cohort into one convolution with a group of channels per client, so its results lie
as [batch, clients × channels, …]. Its rule for max-pooling wants [clients × batch, …] and copies every image, there and
back, forth and back. Pooling looks at one channel at a time, so clients can stay among the channels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_pool = torch.ops.aten.max_pool2d_with_indices.default
_pool_backward = torch.ops.aten.max_pool2d_with_indices_backward.default

Window = tuple[Any, ...]
"""Kernel size, stride, padding, dilation, and whether sizes are rounded up: as PyTorch's operators take them."""


class PoolingInPlace(TorchFunctionMode):
    """Inside, max-pooling of stacked images leaves clients among the channels."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is functional.max_pool2d and args[0].dim() == 4 and not kwargs.get("return_indices"):
            return _Pooled.apply(args[0], _window(*args[1:], **kwargs))[0]
        return function(*args, **kwargs)


def _window(
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Window:
    pairs = (kernel_size, kernel_size if stride is None else stride, padding, dilation)
    return (*([each] * 2 if isinstance(each, int) else list(each) for each in pairs), ceil_mode)


class _Pooled(Function):
    """The largest values in the windows, and where they were."""

    @staticmethod
    def forward(x: Tensor, window: Window) -> tuple[Tensor, Tensor]:
        largest, places = _pool(x, *window)
        return largest, places

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Window], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(inputs[0], output[1])
        ctx.window = inputs[1]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        x, places = ctx.saved_tensors
        return _PooledBackward.apply(gradients[0], x, places, ctx.window), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int, None], x: Tensor, window: Window) -> tuple[Any, tuple[int, int]]:
        largest, places = _pool(_among_channels(x, in_dims[0]), *window)
        clients = (info.batch_size, -1)
        return (largest.unflatten(1, clients), places.unflatten(1, clients)), (1, 1)


class _PooledBackward(Function):
    """The gradients of the windows' largest values, each where its value was."""

    @staticmethod
    def forward(gradient: Tensor, x: Tensor, places: Tensor, window: Window) -> Tensor:
        result: Tensor = _pool_backward(gradient, x, *window, places)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None: ...

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], gradient: Tensor, x: Tensor, places: Tensor, window: Window
    ) -> tuple[Tensor, int]:
        stacked = (
            tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
            for tensor, dim in zip((gradient, x, places), in_dims, strict=False)
        )
        folded = [_among_channels(tensor, 0) for tensor in stacked]
        result: Tensor = _pool_backward(folded[0], folded[1], *window, folded[2])
        return result.unflatten(1, (info.batch_size, -1)), 1


def _among_channels(x: Tensor, dim: int) -> Tensor:
    """Stacked images with their clients among the channels: a view if they already lie so."""
    return x.movedim(dim, 1).flatten(1, 2)
