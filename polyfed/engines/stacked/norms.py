"""Batch norm of stacked clients: each client's statistics are its own, and padding is not part of them.

A network calls PyTorch's batch norm as usual. While a padded batch trains, `MaskedNorms` computes it: mean and variance
of the real samples, and running statistics that stay as they are for a client that has finished.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from polyfed.engines.stacked import layers
from polyfed.engines.stacked.batched import DTYPES, only, stacked
from polyfed.engines.stacked.convolutions import MOST_VALUES
from polyfed.engines.stacked.layers import Norm


class OtherRows(RuntimeError):
    """Batch norm whose rows are not the samples of the batch, so that nobody knows which of them are padding."""


class MaskedNorms(TorchFunctionMode):
    """Inside, the batch norms of a network look at the real samples of a batch only.

    `mask` marks them. A client that is not active has finished: then `mask` marks any samples, so that it gets numbers,
    and its running statistics stay.
    """

    def __init__(self, network: nn.Module, mask: Tensor, active: Tensor) -> None:
        super().__init__()
        self._mask = mask
        self._active = active
        # Most layers of a network have them in common.
        self._corrections: dict[int, Tensor] = {}
        self._factors: dict[tuple[float, torch.dtype], Tensor] = {}
        norms = (module for module in network.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm))
        self._counters = {id(norm.num_batches_tracked) for norm in norms}

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is functional.batch_norm:
            rested = layers.batch_norm(*args, **kwargs)
            return self._batch_norm(Norm(*args, **kwargs)) if rested is None else rested
        if function is Tensor.add_ and id(args[0]) in self._counters:
            return args[0].add_(self._active)
        return function(*args, **kwargs)

    def _batch_norm(self, norm: Norm) -> Tensor:
        x = norm.input
        if len(x) != len(self._mask):
            raise OtherRows(f"its batch norm gets {len(x)} rows for {len(self._mask)} samples")
        y, mean, variance = BatchNorm.apply(x, self._mask, *_scales(x, norm.weight, norm.bias), norm.eps)
        if norm.running_mean is not None and norm.running_var is not None:
            unbiased = variance * self._correction(prod(x.shape[2:]))
            factor = self._factor(norm.momentum, mean.dtype)
            with torch.no_grad():
                # `vmap` has no rule for `lerp_` with a weight per client.
                norm.running_mean.copy_(torch.lerp(norm.running_mean, mean, factor))
                norm.running_var.copy_(torch.lerp(norm.running_var, unbiased, factor))
        normed: Tensor = y
        return normed

    def _correction(self, pixels: int) -> Tensor:
        """By what the variance of a channel is multiplied to be unbiased."""
        if pixels not in self._corrections:
            count = self._mask.sum() * pixels
            self._corrections[pixels] = count / (count - 1).clamp(min=1)
        return self._corrections[pixels]

    def _factor(self, momentum: float, dtype: torch.dtype) -> Tensor:
        """How much of a batch enters the running statistics."""
        if (momentum, dtype) not in self._factors:
            self._factors[momentum, dtype] = momentum * self._active.to(dtype)
        return self._factors[momentum, dtype]


def _scales(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Weight and bias; where a norm has none, those that change nothing."""
    channels, dtype = x.shape[1], torch.promote_types(x.dtype, torch.float32)
    weight = torch.ones(channels, dtype=dtype, device=x.device) if weight is None else weight
    return weight, torch.zeros(channels, dtype=dtype, device=x.device) if bias is None else bias


class BatchNorm(Function):
    """Batch norm by the real samples of a batch: samples, mask, weight, bias, eps.

    It returns the mean and the variance too, over real samples, without correction.
    """

    @staticmethod
    def forward(x: Tensor, mask: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, ...]:
        return tuple(only(part) for part in _way(x[None]).normalise(x[None], mask[None], weight[None], bias[None], eps))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, mask, weight, _, ctx.eps = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)  # nobody needs zeros for the statistics
        ctx.save_for_backward(x, mask, weight, *output[1:])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if gradients[0] is None:
            return (None,) * 5
        of_x, of_weight, of_bias = _BatchNormGradient.apply(gradients[0], *ctx.saved_tensors, ctx.eps)
        return of_x, None, of_weight, of_bias, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        given = stacked(info, in_dims, inputs)
        return _way(given[0]).normalise(*given), (0, 0, 0)


class _BatchNormGradient(Function):
    """The gradients of samples, weight and bias."""

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, ...]:
        alone: list[Any] = [each[None] if isinstance(each, Tensor) else each for each in inputs]
        return tuple(only(part) for part in _way(alone[0]).gradients(*alone))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None: ...

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        given = stacked(info, in_dims, inputs)
        return _way(given[0]).gradients(*given), (0, 0, 0)


def _way(x: Tensor) -> Any:
    """The module whose `normalise` and `gradients` are used: kernels on a GPU, this one elsewhere."""
    small = x.dtype in DTYPES and x[0].numel() < MOST_VALUES
    served = small and layers.on_gpu(x) and layers.kernels() is not None
    return import_module("polyfed.engines.stacked.norm_kernels" if served else __name__)


def normalise(x: Tensor, mask: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Samples [clients, batch, channels, …], normalised, and the means and variances [clients, channels]."""
    inner = tuple(range(3, x.dim()))
    wide = x.to(weight.dtype)
    # First within each sample, then over real samples: so the images are read once, and a mask costs nothing.
    within, means = torch.var_mean(wide, inner, correction=0) if inner else (torch.zeros_like(wide), wide)
    share = _shares(mask, means)
    mean = (means * share).sum(1)
    variance = ((within + (means - mean[:, None]).square()) * share).sum(1)
    scale = weight * (variance + eps).rsqrt()
    y = torch.addcmul(_along(bias - mean * scale, x), wide, _along(scale, x)).to(x.dtype)
    return y, mean, variance


def gradients(
    gradient: Tensor, x: Tensor, mask: Tensor, weight: Tensor, mean: Tensor, variance: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of samples, weights and biases, from that of the result."""
    others = (1, *range(3, x.dim()))
    rate = (variance + eps).rsqrt()
    normed = (x - _along(mean, x)) * _along(rate, x)
    of_bias = gradient.sum(others, dtype=weight.dtype)
    of_weight = (gradient * normed).sum(others)
    # Mean and variance depend on real samples only.
    share = _shares(mask, x) / prod(x.shape[3:])
    inner = gradient - share * (_along(of_bias, x) + normed * _along(of_weight, x))
    return (inner * _along(weight * rate, x)).to(x.dtype), of_weight, of_bias


def _shares(mask: Tensor, like: Tensor) -> Tensor:
    """The share of each sample [clients, batch] in a mean over real ones, shaped to multiply a stacked tensor."""
    share = mask / mask.sum(1, keepdim=True)
    return share.to(torch.promote_types(like.dtype, torch.float32)).view(*mask.shape, *(1,) * (like.dim() - 2))


def _along(values: Tensor, x: Tensor) -> Tensor:
    """Values [clients, channels], shaped to multiply stacked samples."""
    return values.view(len(values), 1, -1, *(1,) * (x.dim() - 3))
