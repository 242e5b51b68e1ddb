"""A kernel for a GPU: all steps of SGD on a linear layer, in one program.

A step needs the one before it and computes little. Launched operation by operation, from a CPU or from a graph, it is
mostly waiting, all the more where other programs keep the GPU busy. Here a single multiprocessor makes all of them, one
behind the other, and leaves the rest of the GPU to others.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_CLASSES, MOST_SAMPLES = 256, 128
"""Classes, and samples in a step, at most: the program holds the logits of a step."""
ROOMY = 128 * 1024
"""Bytes of shared memory of a multiprocessor from which wider blocks of features fit there."""


def train(
    weight: Tensor, bias: Tensor, vectors: Tensor, labels: Tensor, orders: Tensor, losses: Tensor, lr: float, size: int
) -> None:
    """Change a layer by steps on batches of so many vectors, in the order [epochs, vectors] of each epoch.

    A step is one on the mean cross entropy of its batch. `losses` get those of the last epoch, in its order.
    """
    classes, features = weight.shape
    epochs, samples = orders.shape
    precise = torch.get_float32_matmul_precision() == "highest"
    _train[(1,)](
        weight, bias, vectors, labels, orders, losses, lr, epochs, samples, classes, features, size,
        _block(size), _block(classes), 64 if _is_roomy(weight.device) else 32, "ieee" if precise else "tf32",
        num_warps=8, num_stages=2,
    )  # fmt: skip


def _block(number: int) -> int:
    """The next power of two; a product of matrices has at least 16."""
    found: int = max(16, triton.next_power_of_2(number))
    return found


def _is_roomy(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", 0) >= ROOMY


# Constants are written in capitals: C classes, K features, SIZE of a batch, B… the size of a block.


@triton.jit(do_not_specialize=["epochs", "samples"])
def _train(
    w, bias, x, labels, orders, losses, lr, epochs, samples, C: tl.constexpr, K: tl.constexpr, SIZE: tl.constexpr,
    BB: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    b, c, column = tl.arange(0, BB), tl.arange(0, BC), tl.arange(0, BK)
    is_class = c < C
    shift = tl.load(bias + c, is_class, 0.0)
    for _ in range(0, epochs):
        for first in range(0, samples, SIZE):
            count = tl.minimum(samples - first, SIZE)
            here = b < count
            row = tl.load(orders + first + b, here, 0)
            own = tl.load(labels + row, here, 0)[:, None] == c[None, :]
            logits = tl.zeros((BB, BC), tl.float32)
            for k in range(0, K, BK):
                inside = k + column < K
                values = tl.load(x + row[:, None] * K + (k + column)[None, :], here[:, None] & inside[None, :], 0.0)
                weights = tl.load(w + c[:, None] * K + (k + column)[None, :], is_class[:, None] & inside[None, :], 0.0)
                logits = tl.dot(values, tl.trans(weights), logits, input_precision=PRECISION)
            logits = tl.where(is_class[None, :], logits + shift[None, :], float("-inf"))
            top = tl.max(logits, 1)
            powers = tl.exp(logits - top[:, None])
            total = tl.sum(powers, 1)
            tl.store(losses + first + b, tl.log(total) + top - tl.sum(tl.where(own, logits, 0.0), 1), here)
            slope = (powers / total[:, None] - tl.where(own, 1.0, 0.0)) / count
            slope = tl.where(here[:, None], slope, 0.0)
            shift -= lr * tl.sum(slope, 0)
            tl.debug_barrier()  # all threads have read the weights
            for k in range(0, K, BK):
                inside = k + column < K
                values = tl.load(x + row[:, None] * K + (k + column)[None, :], here[:, None] & inside[None, :], 0.0)
                places, real = w + c[:, None] * K + (k + column)[None, :], is_class[:, None] & inside[None, :]
                change = tl.dot(tl.trans(slope), values, input_precision=PRECISION)
                tl.store(places, tl.load(places, real, 0.0) - lr * change, real)
            tl.debug_barrier()  # the next step reads what other threads have written
        orders += samples
    tl.store(bias + c, shift, is_class)
