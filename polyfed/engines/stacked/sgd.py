"""SGD as torch.optim has it, for all clients of a cohort at once; on a GPU by a kernel of our own.

Numbers are the same for all clients, or a tensor with one for each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from polyfed.engines.stacked import layers
from polyfed.message import State


@dataclass(frozen=True, eq=False)
class Rates:
    """How far a step goes."""

    lr: float | Tensor
    momentum: float | Tensor = 0.0
    decay: float | Tensor = 0.0
    clip: float | Tensor | None = None


def some(number: float | Tensor) -> bool:
    """Whether a number is not zero, or may not be for some client."""
    return isinstance(number, Tensor) or bool(number)


def update(
    trained: State, gradients: State, moments: State, rates: Rates, groups: Iterable[Sequence[str]], active: Tensor
) -> None:
    """One step, in place. Clients that are not active have no gradient and stay where they are.

    Gradients are clipped by their length in each of the groups of names.
    """
    kernels = _kernels(trained.values())
    if kernels is None:
        _by_operations(trained, gradients, moments, rates, groups, active)
        return
    steps = -rates.lr * active
    gradients = {name: gradients[name].contiguous() for name in trained}
    lengths: State = {}
    if rates.clip is not None:
        for group in filter(None, groups):
            lengths |= dict.fromkeys(group, kernels.squared_lengths([gradients[name] for name in group]))
    for squares in dict.fromkeys([*lengths.values(), None]):
        names = [name for name in trained if lengths.get(name) is squares]
        given = ([state[name] for name in names if state] for state in (trained, gradients, moments))
        kernels.update(*given, steps, squares, rates)


def _kernels(parameters: Iterable[Tensor]) -> Any:
    """The module with the kernel, or None where it can't be used."""
    if all(map(_fits, parameters)) and layers.kernels() is not None:
        return import_module("polyfed.engines.stacked.sgd_kernels")
    return None


def _fits(parameter: Tensor) -> bool:
    return (
        layers.on_gpu(parameter)
        and parameter.dtype == torch.float32
        and parameter.is_contiguous()
        and parameter.numel() > 0
    )


def _by_operations(
    trained: State, gradients: State, moments: State, rates: Rates, groups: Iterable[Sequence[str]], active: Tensor
) -> None:
    """The same with PyTorch alone."""
    decay, momentum, lr = rates.decay, rates.momentum, rates.lr
    factors = {} if rates.clip is None else _factors(gradients, groups, rates.clip)
    parameters = list(trained.values())
    directions = [
        gradients[name] * _column(factors[name], gradients[name]) if name in factors else gradients[name]
        for name in trained
    ]
    if isinstance(decay, Tensor):
        directions = list(torch._foreach_addcmul(directions, parameters, [_column(decay, p) for p in parameters]))
    elif decay:
        directions = list(torch._foreach_add(directions, parameters, alpha=decay))
    if moments:
        remembered = list(moments.values())
        if isinstance(momentum, Tensor):
            torch._foreach_mul_(remembered, [_column(momentum, moment) for moment in remembered])
        else:
            torch._foreach_mul_(remembered, momentum)
        torch._foreach_add_(remembered, directions)
        directions = remembered
    # Decay and momentum would move even a client without a gradient.
    if some(decay) or moments or isinstance(lr, Tensor):
        steps = -lr * active
        for parameter, direction in zip(parameters, directions, strict=True):
            parameter.addcmul_(direction, _column(steps, parameter))
    else:
        torch._foreach_add_(parameters, directions, alpha=-lr)


def _factors(gradients: State, groups: Iterable[Sequence[str]], largest: float | Tensor) -> State:
    """By name, the number by which each client's gradient is multiplied so that no group of it is longer than that."""
    factors: State = {}
    for group in filter(None, groups):  # a module may be frozen, or out of the loss's reach
        norms = [torch.linalg.vector_norm(gradients[name].reshape(len(gradients[name]), -1), dim=1) for name in group]
        factor = (largest / (torch.linalg.vector_norm(torch.stack(norms), dim=0) + 1e-6)).clamp(max=1.0)
        factors |= dict.fromkeys(group, factor)
    return factors


def _column(values: Tensor, like: Tensor) -> Tensor:
    """One value per client, shaped to multiply a stacked tensor."""
    return values.view(-1, *(1,) * (like.dim() - 1))
