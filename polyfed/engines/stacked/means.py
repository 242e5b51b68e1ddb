"""The mean loss of a client's real samples; on a GPU by a kernel of our own."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from polyfed.engines.stacked import layers
from polyfed.engines.stacked.batched import stacked


def mean(values: Tensor, mask: Tensor, shown: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of those of a client's values that the mask marks, and their sum.

    `shown` is the mask, except in a batch of padding alone: there it marks every sample, and the mean is zero.
    """
    fits = values.dtype == torch.float32 and values.shape == mask.shape
    if fits and layers.on_gpu(values) and layers.kernels() is not None and len(values) <= _kernels().MOST:
        of_real, total = Mean.apply(values, mask)
        return of_real, total
    total = torch.where(mask, values, 0.0).sum()
    return total / shown.sum(), total


def _kernels() -> Any:
    return import_module("polyfed.engines.stacked.loss_kernels")


class Mean(Function):
    """The mean of a client's values that a mask marks, and their sum, which is only looked at."""

    @staticmethod
    def forward(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        means, totals = _kernels().mean(values[None], mask[None])
        return means[0], totals[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _MeanGradient.apply(gradients[0], *ctx.saved_tensors), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        return _kernels().mean(*stacked(info, in_dims, inputs)), (0, 0)


class _MeanGradient(Function):
    """The gradients of a client's values: gradient of their mean, mask."""

    @staticmethod
    def forward(gradient: Tensor, mask: Tensor) -> Tensor:
        result: Tensor = _kernels().mean_gradient(gradient[None], mask[None])[0]
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None: ...

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Tensor, int]:
        return _kernels().mean_gradient(*stacked(info, in_dims, inputs)), 0
