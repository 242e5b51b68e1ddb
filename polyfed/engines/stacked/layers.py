"""How the layers of the vectorized engine's networks are computed: on a GPU some by our own kernels.

`vmap` has rules for convolution and max-pooling, but slow ones: a convolution with a group of channels per client, and
a pooling that first moves every image. A network calls PyTorch's functions as usual; inside `StackedLayers` the calls
that our kernels can serve go to them, with gradients and a rule for `vmap`, and all others are left alone. Attention
and recurrent layers, for which `vmap` has no rules, are made of plain operations on every device (`sequences.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from operator import index
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from polyfed.engines.stacked.sequences import UNFUSED

MOST_CHANNELS = (32, 64)
"""In and out, of a convolution for which our kernels are faster than cuDNN's."""
MOST_VALUES = 2**31
"""The most values in one client's images, which the kernels index with 32 bits."""
DTYPES = (torch.float32, torch.bfloat16)


class StackedLayers(TorchFunctionMode):
    """Inside, convolution and max-pooling on a GPU are done by our kernels where possible, fused layers in parts."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = None
        if function in UNFUSED:
            result = UNFUSED[function](*args, **kwargs)
        elif function in SERVED and args and on_gpu(args[0]) and kernels() is not None:
            result = SERVED[function](*args, **kwargs)
        if result is not None:
            return result
        return function(*args, **kwargs)


def on_gpu(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_cuda


def kernels() -> Any:
    """Our kernels, or None where they can't run."""
    return _tried()[0]


def trouble() -> str | None:
    """Why our kernels can't run here, if they can't."""
    return _tried()[1]


@cache
def _tried() -> tuple[Any, str | None]:
    """Whether Triton, which compiles the kernels, is there and finds all that it needs (a C compiler, a known GPU)."""
    try:
        module = import_module("polyfed.engines.stacked.kernels")
        some = torch.zeros(1, 1, 1, 3, 3, device="cuda" if torch.cuda.is_available() else "cpu")
        module.convolve(some, some, None, (0, 0))
    except Exception as error:  # whatever it is, PyTorch's own kernels still work
        return None, " ".join(str(error).split())[:200]
    return module, None


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor | None:
    """A convolution, or None if the kernels do not support it, or it is invalid: then PyTorch says what is wrong."""
    given = pairs(stride, padding, dilation)
    if given is None or groups != 1 or (given[0], given[2]) != ((1, 1), (1, 1)):
        return None
    dtypes = {tensor.dtype for tensor in (x, weight, bias) if tensor is not None}
    if not _fits(x, weight, bias, given[1]) or not dtypes.issubset(DTYPES):
        return None
    if torch.is_autocast_enabled("cuda"):
        dtypes = {torch.get_autocast_dtype("cuda")}
    if len(dtypes) > 1 or not dtypes.issubset(DTYPES):
        return None
    (dtype,) = dtypes
    result: Tensor = Convolution.apply(
        x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype), given[1]
    )
    return result


def _fits(x: Tensor, weight: Tensor, bias: Tensor | None, padding: tuple[int, int]) -> bool:
    """Whether shapes belong together, and are neither empty nor too large for the kernels."""
    if x.dim() != 4 or weight.dim() != 4 or x.shape[1] != weight.shape[1]:
        return False
    out, channels, *kernel = weight.shape
    if (bias is not None and bias.shape != (out,)) or channels > MOST_CHANNELS[0] or out > MOST_CHANNELS[1]:
        return False
    sides = [side + 2 * p for side, p in zip(x.shape[2:], padding, strict=True)]
    if not all(0 <= p < k <= side for side, k, p in zip(sides, kernel, padding, strict=True)):
        return False
    return 0 < len(x) * max(channels, out) * sides[0] * sides[1] < MOST_VALUES


def pooling(
    x: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor | None:
    """Max-pooling, or None if the kernels do not support it, or it is invalid: then PyTorch says what is wrong."""
    given = pairs(kernel_size, kernel_size if stride is None or stride == [] else stride, padding, dilation)
    if given is None or ceil_mode or return_indices or x.dim() != 4 or x.dtype not in DTYPES or not len(x):
        return None
    windows = kernels().Windows(*given)
    fits = all(0 <= 2 * p <= k and s > 0 and d > 0 for k, s, p, d in zip(*windows, strict=True))
    if not fits or max(windows.size) > 15 or min(windows.grid(*x.shape[2:])) < 1:  # a place in a window is a byte
        return None
    result: Tensor = Pooling.apply(x, windows)[0]
    return result


SERVED = {functional.conv2d: convolution, functional.max_pool2d: pooling}


class Convolution(Function):
    """A convolution with stride 1: images, weight, bias or None, padding."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, padding: tuple[int, int]) -> Tensor:
        result = kernels().convolve(x[None], weight[None], None if bias is None else bias[None], padding)
        # Not a view, which a layer that follows could not change in place.
        only: Tensor = torch.ops.aten._unsafe_view(result, result.shape[1:])
        return only

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
        weight, bias = kernels().weight_gradient(x[None], gradient[None], *shape)
        return weight[0], bias[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None: ...

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        return kernels().weight_gradient(*stacked(info, in_dims, inputs)), (0, 0)


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


def pairs(*values: Any) -> list[tuple[int, int]] | None:
    """Heights and widths from one number or two each; None if one of them is something else."""
    found = []
    for value in values:
        numbers = [value] * 2 if hasattr(value, "__index__") else [] if isinstance(value, str) else list(value)
        if len(numbers) not in (1, 2):
            return None
        found.append((index(numbers[0]), index(numbers[-1])))
    return found
