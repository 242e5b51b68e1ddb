"""How the layers of the vectorized engine's networks are computed: on a GPU some by our own kernels.

`vmap` has rules for convolution and max-pooling, but slow ones: a convolution with a group of channels per client, and
a pooling that first moves every image. A network calls PyTorch's functions as usual; inside `StackedLayers` the calls
that our kernels can serve go to them, with gradients and a rule for `vmap`, and all others are left alone. Attention
and recurrent layers, for which `vmap` has no rules, are made of plain operations on every device (`sequences.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from operator import index
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from polyfed.compute import working_kernels
from polyfed.engines.stacked import entropy
from polyfed.engines.stacked.batched import DTYPES, only, stacked
from polyfed.engines.stacked.chains import joined
from polyfed.engines.stacked.convolutions import MOST_VALUES, Pair, Way, Windows, few_channels, way
from polyfed.engines.stacked.joined import Linear, pooled
from polyfed.engines.stacked.sequences import UNFUSED
from polyfed.losses import cross_entropy

_KERNELS = "polyfed.engines.stacked.kernels"


class StackedLayers(TorchFunctionMode):
    """Inside, layers on a GPU are computed in our ways where possible, some by our kernels; fused layers in parts."""

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
    first = x[0] if isinstance(x, list | tuple) and x else x
    return isinstance(first, Tensor) and first.is_cuda


def kernels() -> Any:
    """Our kernels, or None where they can't run."""
    return working_kernels(_KERNELS, _trial)[0]


def trouble() -> str | None:
    """Why our kernels can't run here, if they can't."""
    return working_kernels(_KERNELS, _trial)[1]


def _trial(module: Any, device: str) -> None:
    """One call of every kind of kernel that each network needs, so that all of them are used or none."""
    some, none = torch.zeros(1, 1, 1, 3, 3, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    module.convolve(some, some, None, (0, 0))
    rates = import_module("polyfed.engines.stacked.sgd").Rates(0.1, momentum=0.9, decay=0.1, clip=1.0)
    names = ("sgd", "image", "loss", "linear", "pooled")
    sgd, images, losses, linears, pools = (import_module(f"polyfed.engines.stacked.{name}_kernels") for name in names)
    sgd.update([some], [some], [some], some, sgd.squared_lengths([some]), rates)
    images.look_up(some[0].byte(), none, some, some, {})
    values = losses.cross_entropy(some.view(1, -1), none, None)
    losses.cross_entropy_gradient(values, some.view(1, -1), none, None)
    losses.mean_gradient(losses.mean(values[None], none[None] == 0)[0], none[None] == 0)
    linears.before_relu(linears.add_bias(some[0, 0], some[0, 0, 0], relu=True), some[0, 0])
    y, places = pools.convolve(some.view(1, 1, 3, 3, 1), some[..., :2, :2], None, relu=True)
    pools.image_gradient(y, places, some[..., :2, :2], (1, 3, 3, 1))
    pools.weight_gradient(some.view(1, 1, 3, 3, 1), y, places, (1, 1, 2, 2))


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
    dtypes = {tensor.dtype for tensor in (x, weight, bias) if tensor is not None}
    if x.dim() != 4 or weight.dim() != 4:
        return None
    size = weight.shape[2], weight.shape[3]
    given = pairs(stride, _around(padding, size, stride, dilation), dilation)
    if given is None:
        return None
    windows = Windows(size, *given)
    how = way(x, weight, windows, groups, bias is not None) if _fits(x, weight, bias, windows) else None
    dtype = _common(dtypes)
    if how is None or dtype is None:
        return None
    result: Tensor = Convolution.apply(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype), how)
    return result


def _around(padding: Any, size: Pair, stride: Any, dilation: Any) -> Any:
    """Padding in numbers; a word if it differs between two sides, or is invalid."""
    known = pairs(stride, dilation)
    if padding == "valid":
        return 0
    if padding != "same" or known is None or known[0] != (1, 1):
        return padding
    both = [apart * (length - 1) for apart, length in zip(known[1], size, strict=True)]
    return padding if any(total % 2 for total in both) else [total // 2 for total in both]


def _common(dtypes: set[torch.dtype]) -> torch.dtype | None:
    """The type of numbers in which a layer computes; None if that is not clear, or not one of ours."""
    if torch.is_autocast_enabled("cuda") and dtypes.issubset(DTYPES):
        dtypes = {torch.get_autocast_dtype("cuda")}
    return next(iter(dtypes)) if len(dtypes) == 1 and dtypes.issubset(DTYPES) else None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, relu: bool = False) -> Tensor | None:
    """A linear layer with bias, and ReLU if wanted; None if it has no bias, or is invalid."""
    fits = x.dim() > 1 and weight.dim() == 2 and x.shape[-1] == weight.shape[1] and x.numel() > 0
    dtype = None if bias is None else _common({tensor.dtype for tensor in (x, weight, bias)})
    if bias is None or dtype is None or not fits or bias.shape != weight.shape[:1]:
        return None
    result: Tensor = Linear.apply(x.to(dtype), weight.to(dtype), bias.to(dtype), relu)
    return result


def _fits(x: Tensor, weight: Tensor, bias: Tensor | None, windows: Windows) -> bool:
    """Whether shapes belong together, and are neither empty nor too large for the kernels."""
    out, channels = weight.shape[:2]
    if x.shape[1] != channels or (bias is not None and bias.shape != (out,)):
        return False
    if any(p < 0 or s < 1 or d < 1 for _, s, p, d in zip(*windows, strict=True)) or min(windows.size) < 1:
        return False
    sides = [side + 2 * p for side, p in zip(x.shape[2:], windows.padding, strict=True)]
    return (
        min(windows.grid(x.shape[2], x.shape[3])) > 0
        and 0 < len(x) * max(channels, out) * sides[0] * sides[1] < MOST_VALUES
    )


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
    windows = Windows(*given)
    fits = all(0 <= 2 * p <= k and s > 0 and d > 0 for k, s, p, d in zip(*windows, strict=True))
    if not fits or max(windows.size) > 15 or min(windows.grid(*x.shape[2:])) < 1:  # a place in a window is a byte
        return None
    result: Tensor = Pooling.apply(x, windows)[0]
    return result


def as_one(x: Tensor, layers: Sequence[nn.Module]) -> Tensor | None:
    """What layers that `chains` has found make of x; None if the kernels do not support it, or it is invalid."""
    first, *others = layers
    relu = any(isinstance(layer, nn.ReLU) for layer in others)
    if isinstance(first, nn.Linear):
        return linear(x, first.weight, first.bias, relu)
    pool = next(layer for layer in others if isinstance(layer, nn.MaxPool2d))
    if not isinstance(first, nn.Conv2d) or x.dim() != 4 or not len(x) or not _in_twos(first, pool):
        return None
    weight, bias = first.weight, first.bias
    dtype = _common({tensor.dtype for tensor in (x, weight, bias) if tensor is not None})
    windows = Windows((weight.shape[2], weight.shape[3]), (1, 1), (0, 0), (1, 1))
    if dtype is None or not _fits(x, weight, bias, windows) or not few_channels(weight):
        return None
    if min(windows.grid(x.shape[2], x.shape[3])) < 2:
        return None
    return pooled(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype), relu)


def _in_twos(convolution: nn.Conv2d, pool: nn.MaxPool2d) -> bool:
    """Whether a convolution without stride or padding is pooled in windows of 2 × 2 that do not overlap."""
    step = pool.kernel_size if pool.stride is None else pool.stride
    windows = pairs(pool.kernel_size, step, pool.padding, pool.dilation)
    plain = pairs(convolution.stride, _around(convolution.padding, (2, 2), 1, 1), convolution.dilation)
    return (
        windows == [(2, 2), (2, 2), (0, 0), (1, 1)]
        and plain == [(1, 1), (0, 0), (1, 1)]
        and (convolution.groups, pool.ceil_mode, pool.return_indices) == (1, False, False)
    )


class Norm(NamedTuple):
    """The arguments of PyTorch's batch norm."""

    input: Tensor
    running_mean: Tensor | None
    running_var: Tensor | None
    weight: Tensor | None = None
    bias: Tensor | None = None
    training: bool = False
    momentum: float = 0.1
    eps: float = 1e-5


def batch_norm(*args: Any, **kwargs: Any) -> Tensor | None:
    """Batch norm by running statistics, wherever clients lie in memory; None where it trains."""
    x, mean, variance, weight, bias, training, _, eps = Norm(*args, **kwargs)
    if training or mean is None or variance is None:
        return None
    scale = (variance + eps).rsqrt() if weight is None else weight * (variance + eps).rsqrt()
    shift = -mean * scale if bias is None else bias - mean * scale
    along = (-1, *(1,) * (x.dim() - 2))
    return torch.addcmul(shift.view(along), x, scale.view(along)).to(x.dtype)


def concatenation(tensors: Any, dim: Any = 0) -> Tensor | None:
    """Channels of images side by side, where they lie before samples: PyTorch would move them."""
    if dim != 1 or not all(isinstance(x, Tensor) and x.dim() == 4 and x.stride(1) > x.stride(0) for x in tensors):
        return None
    return torch.cat([x.transpose(0, 1) for x in tensors]).transpose(0, 1)


def view(x: Tensor, *shape: Any) -> Tensor | None:
    """A view, or a copy where a client's images do not lie as they would alone."""
    return None if isinstance(shape[0], torch.dtype) else x.reshape(*shape)


def view_as(x: Tensor, other: Tensor) -> Tensor:
    """The same with the shape of another tensor."""
    return x.reshape(other.shape)


SERVED: dict[Callable[..., Any], Callable[..., Tensor | None]] = {
    functional.conv2d: convolution,
    functional.linear: linear,
    functional.max_pool2d: pooling,
    functional.batch_norm: batch_norm,
    functional.cross_entropy: entropy.torch_cross_entropy,
    cross_entropy: entropy.cross_entropy,
    joined: as_one,
    torch.cat: concatenation,
    Tensor.view: view,
    Tensor.view_as: view_as,
}


class Convolution(Function):
    """A convolution: images, weight, bias or None, and the way to compute it."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, how: Way) -> Tensor:
        return only(how.convolve(x[None], weight[None], None if bias is None else bias[None]))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, bias, ctx.how = inputs
        ctx.save_for_backward(x, weight)
        ctx.biased = bias is not None

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_x = _ImageGradient.apply(gradients[0], weight, tuple(x.shape), ctx.how)
        if any(ctx.needs_input_grad[1:3]):
            of_weight, of_bias = _WeightGradient.apply(x, gradients[0], ctx.how)
        return of_x, of_weight, of_bias if ctx.biased else None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Tensor, int]:
        *tensors, how = stacked(info, in_dims, inputs)
        return how.convolve(*tensors), 0


class _ImageGradient(Function):
    """The gradient of a convolution's images: gradient of the result, weight, shape of the images, the way."""

    @staticmethod
    def forward(gradient: Tensor, weight: Tensor, shape: tuple[int, ...], how: Way) -> Tensor:
        return how.image_gradient(gradient[None], weight[None], shape)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None: ...

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Tensor, int]:
        gradient, weight = stacked(info, in_dims[:2], inputs[:2])
        return inputs[3].image_gradient(gradient, weight, inputs[2]), 0


class _WeightGradient(Function):
    """The gradients of a convolution's weight and bias: images, gradient of the result, the way."""

    @staticmethod
    def forward(x: Tensor, gradient: Tensor, how: Way) -> tuple[Tensor, Tensor]:
        weight, bias = how.weight_gradient(x[None], gradient[None])
        return weight[0], bias[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None: ...

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        x, gradient = stacked(info, in_dims[:2], inputs[:2])
        return inputs[2].weight_gradient(x, gradient), (0, 0)


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
        ctx.set_materialize_grads(False)  # nobody needs zeros for the places
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None]:
        if gradients[0] is None:
            return None, None
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


def pairs(*values: Any) -> list[tuple[int, int]] | None:
    """Heights and widths from one number or two each; None if one of them is something else."""
    found = []
    for value in values:
        numbers = [value] * 2 if hasattr(value, "__index__") else [] if isinstance(value, str) else list(value)
        if len(numbers) not in (1, 2):
            return None
        found.append((index(numbers[0]), index(numbers[-1])))
    return found
