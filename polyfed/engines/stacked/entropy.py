"""Cross entropy in a form that `vmap` serves by one kernel of our own, and its gradient by another.

A method may differentiate the gradient too; that derivative is made of plain operations.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from polyfed.engines.stacked.batched import DTYPES, stacked


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor | None:
    """As `polyfed.losses.cross_entropy`; None if the kernels do not support it, or it is invalid."""
    return _served(logits, labels, None) if logits.dtype in DTYPES else None


def torch_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """As PyTorch's own with one value per sample; None if the kernels do not support it, or it is invalid."""
    others = (weight, size_average, reduce)
    if any(other is not None for other in others) or reduction != "none" or label_smoothing != 0.0:
        return None
    return _served(logits, labels, ignore_index) if logits.dtype == torch.float32 else None


def _served(logits: Tensor, labels: Tensor, ignored: int | None) -> Tensor | None:
    fits = logits.dim() == 2 and labels.dtype == torch.int64 and labels.shape == logits.shape[:1]
    if not fits or logits.device != labels.device or not len(labels) or not 0 < logits.shape[1] <= _kernels().MOST:
        return None
    result: Tensor = CrossEntropy.apply(logits, labels, ignored)
    return result


def _kernels() -> Any:
    return import_module("polyfed.engines.stacked.loss_kernels")


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.ignored = inputs
    ctx.save_for_backward(*tensors)


class CrossEntropy(Function):
    """One value per sample: logits, labels, the label to ignore or None."""

    @staticmethod
    def forward(logits: Tensor, labels: Tensor, ignored: int | None) -> Tensor:
        result: Tensor = _kernels().cross_entropy(logits, labels, ignored)
        return result

    setup_context = staticmethod(_keep)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _Gradient.apply(gradients[0], *ctx.saved_tensors, ctx.ignored), None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Tensor, int]:
        return _of_all_samples(CrossEntropy, info, in_dims, inputs)


class _Gradient(Function):
    """The gradient of the logits: gradient of the values, logits, labels, the label to ignore or None."""

    @staticmethod
    def forward(gradient: Tensor, logits: Tensor, labels: Tensor, ignored: int | None) -> Tensor:
        result: Tensor = _kernels().cross_entropy_gradient(gradient, logits, labels, ignored)
        return result

    setup_context = staticmethod(_keep)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient, logits, labels = ctx.saved_tensors
        along = gradients[0].to(gradient.dtype)
        if ctx.ignored is not None:
            along = torch.where((labels == ctx.ignored)[:, None], 0.0, along)
        shares = logits.softmax(1, dtype=gradient.dtype)
        belongs = labels[:, None] == torch.arange(logits.shape[1], device=labels.device)
        mean = (along * shares).sum(1)
        of_gradient = mean - torch.where(belongs, along, 0.0).sum(1)
        of_logits = gradient[:, None] * shares * (along - mean[:, None])
        return of_gradient, of_logits.to(logits.dtype), None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Tensor, int]:
        return _of_all_samples(_Gradient, info, in_dims, inputs)


def _of_all_samples(
    function: type[Function], info: Any, in_dims: tuple[Any, ...], inputs: tuple[Any, ...]
) -> tuple[Tensor, int]:
    """What a function of samples gives for those of all clients as if they were one client's."""
    *tensors, ignored = stacked(info, in_dims, inputs)
    result: Tensor = function.apply(*(tensor.flatten(0, 1) for tensor in tensors), ignored)
    return result.unflatten(0, tensors[0].shape[:2]), 0
