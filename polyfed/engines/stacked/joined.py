"""Several layers as one, with gradients and a rule for `vmap`: convolution, pooling and ReLU; linear layer and ReLU."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from polyfed.engines.stacked.batched import in_memory, only, stacked


class Linear(Function):
    """A linear layer: samples, weight, bias, and whether ReLU follows."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor, relu: bool) -> Tensor:
        y = functional.linear(x, weight, bias)
        return y.relu_() if relu else y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, _, ctx.relu = inputs
        ctx.save_for_backward(x, weight, *([output] if ctx.relu else []))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *y = ctx.saved_tensors
        rows = gradients[0].flatten(0, -2)
        if ctx.relu:
            rows, of_bias = _BeforeReLU.apply(rows, y[0].flatten(0, -2))
        else:
            of_bias = rows.sum(0) if ctx.needs_input_grad[2] else None
        of_x = (rows @ weight).unflatten(0, x.shape[:-1]) if ctx.needs_input_grad[0] else None
        of_weight = rows.mT @ x.flatten(0, -2) if ctx.needs_input_grad[1] else None
        return of_x, of_weight, of_bias, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Tensor, int]:
        x, weight, bias, relu = stacked(info, in_dims, inputs)
        y = torch.bmm(x.flatten(1, -2), weight.mT)
        if in_memory(y):
            y = _kernels("linear").add_bias(y, bias, relu)
        else:
            y = (y + bias[:, None]).relu() if relu else y + bias[:, None]
        return y.unflatten(1, x.shape[1:-1]), 0


class _BeforeReLU(Function):
    """The gradient before ReLU, and its sum over the rows: the gradient after ReLU, and ReLU's results.

    A method may differentiate a linear layer's gradient.
    """

    @staticmethod
    def forward(gradient: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        before = torch.where(y <= 0, 0.0, gradient)
        return before, before.sum(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return torch.where(ctx.saved_tensors[0] <= 0, 0.0, gradients[0] + gradients[1]), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        gradient, y = stacked(info, in_dims, inputs)
        if in_memory(gradient) and in_memory(y):
            return _kernels("linear").before_relu(gradient, y), (0, 0)
        before = torch.where(y <= 0, 0.0, gradient)
        return (before, before.sum(1)), (0, 0)


def pooled(x: Tensor, weight: Tensor, bias: Tensor | None, relu: bool) -> Tensor:
    """A convolution of images [samples, channels, H, W], max-pooling in windows of 2 × 2, and ReLU if wanted."""
    y: Tensor = Pooled.apply(x.permute(0, 2, 3, 1).contiguous(), weight, bias, relu)[0]
    return y.permute(0, 3, 1, 2)


class Pooled(Function):
    """The same with channels last, and the places of the largest values: images, weight, bias or None, ReLU or not."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, relu: bool) -> tuple[Tensor, Tensor]:
        y, places = _kernels("pooled").convolve(x[None], weight[None], None if bias is None else bias[None], relu)
        return only(y), only(places)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, weight, bias, _ = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)  # nobody needs zeros for the places
        ctx.save_for_backward(x, weight, output[1])
        ctx.biased = bias is not None

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight, places = ctx.saved_tensors
        of_x = of_weight = of_bias = None
        if gradients[0] is not None and ctx.needs_input_grad[0]:
            of_x = _ImageGradient.apply(gradients[0], places, weight, tuple(x.shape))
        if gradients[0] is not None and any(ctx.needs_input_grad[1:3]):
            of_weight, of_bias = _WeightGradient.apply(x, gradients[0], places, tuple(weight.shape))
        return of_x, of_weight, of_bias if ctx.biased else None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        return _kernels("pooled").convolve(*stacked(info, in_dims, inputs)), (0, 0)


class _ImageGradient(Function):
    """Gradient of the results, places, weight, shape of the images."""

    @staticmethod
    def forward(gradient: Tensor, places: Tensor, weight: Tensor, shape: tuple[int, ...]) -> Tensor:
        result: Tensor = _kernels("pooled").image_gradient(gradient[None], places[None], weight[None], shape)[0]
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None: ...

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Tensor, int]:
        return _kernels("pooled").image_gradient(*stacked(info, in_dims, inputs)), 0


class _WeightGradient(Function):
    """Of weight and bias: images, gradient of the results, places, shape of the weight."""

    @staticmethod
    def forward(x: Tensor, gradient: Tensor, places: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        weight, bias = _kernels("pooled").weight_gradient(x[None], gradient[None], places[None], shape)
        return weight[0], bias[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None: ...

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        return _kernels("pooled").weight_gradient(*stacked(info, in_dims, inputs)), (0, 0)


def _kernels(name: str) -> Any:
    """A module that can be imported only where Triton is."""
    return import_module(f"polyfed.engines.stacked.{name}_kernels")
