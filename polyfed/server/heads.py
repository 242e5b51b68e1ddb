"""Many steps of SGD on a linear layer that stays on the CPU: a GPU makes them in one kernel, where that is quicker."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from polyfed.compute import to_device, working_kernels
from polyfed.server.kept import Kept

WORTH_MOVING = 200
"""Steps from which a GPU should be quicker: 1600 were 5 to 8 times as fast as a core's, fewer were not measured."""
MOST_WORK = 50_000_000
"""Multiplications in a step up to which one multiprocessor, or one core, may be quicker than the cores together."""


def train_by_one_kernel(
    layer: nn.Module,
    vectors: Tensor,
    labels: Tensor,
    orders: Tensor,
    *,
    lr: float,
    size: int,
    device: torch.device,
    kept: Kept | None,
    notes: list[str],
) -> float | None:
    """Steps on the mean cross entropy of batches of so many vectors, in the order [epochs, vectors] of each epoch.

    Returns the mean loss of the last epoch. None: this is not for the device, or it could not do it, for a reason that
    is noted; then nothing has changed.
    """
    if not (_is_gpu(device) and _is_small(layer, vectors, size)) or _steps(orders, size) < WORTH_MOVING:
        return None
    assert isinstance(layer, nn.Linear)
    kernels, trouble = working_kernels("polyfed.server.head_kernels", _trial)
    if kernels is None or layer.out_features > kernels.MOST_CLASSES or size > kernels.MOST_SAMPLES:
        notes.extend([_slow(trouble)] if trouble else [])
        return None
    try:
        with kept.aside() if kept is not None else nullcontext():
            return _train(kernels, layer, vectors, labels, orders, lr, size, device)
    except Exception as error:  # such as too little memory of one kind or another
        notes.append(_slow(" ".join(str(error).split())[:200]))
        return None


def is_plain(layer: nn.Linear) -> bool:
    """Whether all that a linear layer does is done by a weight and a bias that train: nothing is frozen or hooked."""
    trained = {name for name, parameter in layer.named_parameters() if parameter.requires_grad}
    return trained == {"weight", "bias"} and not layer._forward_hooks and not layer._forward_pre_hooks


def _is_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def _is_small(layer: nn.Module, vectors: Tensor, size: int) -> bool:
    """Whether it is a plain linear layer on the CPU, in 32 bits, with little to do in a step."""
    if type(layer) is not nn.Linear or not is_plain(layer) or 3 * size * layer.weight.numel() > MOST_WORK:
        return False
    return all(each.device.type == "cpu" and each.dtype == torch.float32 for each in (layer.weight, vectors))


def _steps(orders: Tensor, size: int) -> int:
    epochs, samples = orders.shape
    return epochs * -(-samples // size)


def _train(
    kernels: Any,
    layer: nn.Linear,
    vectors: Tensor,
    labels: Tensor,
    orders: Tensor,
    lr: float,
    size: int,
    device: torch.device,
) -> float:
    parameters = [layer.weight.detach(), layer.bias.detach()]
    there = [to_device(each.clone(memory_format=torch.contiguous_format), device) for each in parameters]
    given = [to_device(each.contiguous(), device) for each in (vectors, labels, orders)]
    losses = given[0].new_empty(len(vectors))
    kernels.train(*there, *given, losses, lr, size)
    mean = float(losses.mean())  # here what has failed is known, before the layer changes
    for parameter, trained in zip(parameters, there, strict=True):
        parameter.copy_(trained)
    return mean


def _slow(reason: str) -> str:
    return f"the server's head is trained on the CPU, which takes longer than our kernel on the GPU ({reason})"


def _trial(kernels: Any, device: str) -> None:
    """A step on one tiny vector, to see whether the kernels work."""
    weight, bias, vector, losses = torch.ones(2, 2), torch.ones(2), torch.ones(1, 2), torch.ones(1)
    label, order = torch.zeros(1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int64)
    tensors = [each.to(device) for each in (weight, bias, vector, label, order, losses)]
    kernels.train(*tensors, 0.1, 1)
