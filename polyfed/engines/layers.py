"""How the layers of stacked networks are computed on a GPU: convolution and max-pooling by kernels of our own.

`vmap` has rules for both, but slow ones: a convolution with a group of channels per client, and a pooling that first
moves every image. A network calls PyTorch's functions as ever; inside `StackedLayers` the calls that our kernels can
serve go to them, with gradients and a rule for `vmap`, and all others pass.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional
from torch.overrides import TorchFunctionMode

MOST_CHANNELS = (32, 64)
"""In and out, of a convolution for which our kernels are faster than cuDNN's."""


class StackedLayers(TorchFunctionMode):
    """Inside, convolution and max-pooling on a GPU are done by our kernels where they can."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in SERVED and args and args[0].is_cuda and kernels() is not None:
            result = SERVED[function](*args, **kwargs)
            if result is not None:
                return result
        return function(*args, **kwargs)


@cache
def kernels() -> Any:
    """Our kernels, or None where Triton, which compiles them, is not installed."""
    try:
        return import_module("polyfed.engines.kernels")
    except ImportError:
        return None


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor | None:
    """A convolution, or None if the kernels do not serve it."""
    if isinstance(padding, str) or x.dim() != 4 or groups != 1 or pair(stride) != (1, 1) or pair(dilation) != (1, 1):
        return None
    out, channels, *kernel = weight.shape
    around = pair(padding)
    if channels > MOST_CHANNELS[0] or out > MOST_CHANNELS[1] or around[0] >= kernel[0] or around[1] >= kernel[1]:
        return None
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    if x.dtype not in (torch.float32, torch.bfloat16):
        return None
    result: Tensor = Convolution.apply(x, weight, bias, around)
    return result


def pooling(
    x: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor | None:
    """Max-pooling, or None if the kernels do not serve it."""
    if ceil_mode or return_indices or x.dim() != 4 or x.dtype not in (torch.float32, torch.bfloat16):
        return None
    windows = kernels().Windows(*map(pair, (kernel_size, stride or kernel_size, padding, dilation)))
    if windows.size[0] * windows.size[1] > 255:  # a place is a byte
        return None
    result: Tensor = Pooling.apply(x, windows)[0]
    return result


SERVED = {functional.conv2d: convolution, functional.max_pool2d: pooling}


class Convolution(Function):
    """A convolution with stride 1: images, weight, bias or None, padding."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, padding: tuple[int, int]) -> Tensor:
        result: Tensor = kernels().convolve(x[None], weight[None], None if bias is None else bias[None], padding)[0]
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, bias, ctx.padding = inputs
        ctx.save_for_backward(x, weight)
        ctx.biased = bias is not None

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        kernel = (weight.shape[2], weight.shape[3])
        of_x = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            around = (kernel[0] - 1 - ctx.padding[0], kernel[1] - 1 - ctx.padding[1])
            of_x = Convolution.apply(gradients[0], weight.transpose(0, 1).flip(2, 3), None, around)
        if any(ctx.needs_input_grad[1:3]):
            of_weight, of_bias = _WeightGradient.apply(x, gradients[0], kernel, ctx.padding)
        return of_x, of_weight, of_bias if ctx.biased else None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Tensor, int]:
        return kernels().convolve(*stacked(info, in_dims, inputs)), 0


class _WeightGradient(Function):
    """The gradients of a convolution's weight and bias: images, gradient of the result, filter size, padding."""

    @staticmethod
    def forward(x: Tensor, gradient: Tensor, *shape: Any) -> tuple[Tensor, Tensor]:
        weight, bias = kernels().weigh(x[None], gradient[None], *shape)
        return weight[0], bias[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None: ...

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        return kernels().weigh(*stacked(info, in_dims, inputs)), (0, 0)


class Pooling(Function):
    """The largest values in the windows of images, and where they were."""

    @staticmethod
    def forward(x: Tensor, windows: Any) -> tuple[Tensor, Tensor]:
        largest, places = kernels().pool(x, windows)
        return largest, places

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, ctx.windows = inputs
        ctx.shape = (x.shape[2], x.shape[3])
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _PoolingGradient.apply(gradients[0], *ctx.saved_tensors, ctx.windows, ctx.shape), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        return kernels().pool(*stacked(info, in_dims, inputs)), (0, 0)


class _PoolingGradient(Function):
    """The gradients of the windows' largest values, each where its value was."""

    @staticmethod
    def forward(*inputs: Any) -> Tensor:
        result: Tensor = kernels().unpool(*inputs)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None: ...

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Tensor, int]:
        return kernels().unpool(*stacked(info, in_dims, inputs)), 0


def stacked(info: Any, dims: tuple[Any, ...], inputs: tuple[Any, ...]) -> list[Any]:
    """The inputs of a batched call with clients first in every tensor."""
    return [
        tensor if not isinstance(tensor, Tensor)
        else tensor.expand(info.batch_size, *tensor.shape) if dim is None
        else tensor.movedim(dim, 0)
        for tensor, dim in zip(inputs, dims, strict=True)
    ]  # fmt: skip


def pair(value: Any) -> tuple[int, int]:
    """Height and width from one number or two."""
    return (value, value) if isinstance(value, int) else (value[0], value[-1])
