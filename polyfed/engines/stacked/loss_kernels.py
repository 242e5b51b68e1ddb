"""Kernels for a GPU: cross entropy of samples, and the mean loss of each client's real ones.

PyTorch's operations are about thirty small kernels, which take longer to start than to run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST = 2**14
"""Classes, or samples of a client, at most: a program reads all of them at once."""
VALUES = 1024
"""Logits that a program reads, at least."""


def cross_entropy(logits: Tensor, labels: Tensor, ignored: int | None) -> Tensor:
    """Of each sample, from logits [samples, classes]; zero for the label to ignore."""
    values = torch.empty(len(logits), device=logits.device)
    _launch(_cross_entropy, logits, labels, ignored, values)
    return values


def cross_entropy_gradient(gradient: Tensor, logits: Tensor, labels: Tensor, ignored: int | None) -> Tensor:
    """The gradient of the logits, from that of the values."""
    of_logits = torch.empty_like(logits, memory_format=torch.contiguous_format)
    _launch(_cross_entropy_gradient, logits, labels, ignored, gradient.contiguous(), of_logits)
    return of_logits


def mean(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """For each client the mean of the real ones of its values [clients, samples], and their sum; zero without any."""
    clients, samples = values.shape
    means, totals = (torch.empty(clients, device=values.device) for _ in range(2))
    _mean[(clients,)](values.contiguous(), _bytes(mask), means, totals, samples, triton.next_power_of_2(samples))
    return means, totals


def mean_gradient(gradient: Tensor, mask: Tensor) -> Tensor:
    """The gradient of the values, from that of the means."""
    clients, samples = mask.shape
    of_values = torch.empty(clients, samples, device=mask.device)
    _mean_gradient[(clients,)](
        gradient.contiguous(), _bytes(mask), of_values, samples, triton.next_power_of_2(samples)
    )  # fmt: skip
    return of_values


def _launch(kernel, logits: Tensor, labels: Tensor, ignored: int | None, *others: Tensor) -> None:
    samples, classes = logits.shape
    block = max(16, triton.next_power_of_2(classes))
    rows = max(1, VALUES // block)
    kernel[(triton.cdiv(samples, rows),)](
        logits.contiguous(), labels.contiguous(), *others, samples, classes, 0 if ignored is None else ignored,
        ignored is not None, rows, block, num_warps=4 if block <= 2048 else 8,
    )  # fmt: skip


def _bytes(mask: Tensor) -> Tensor:
    return mask.contiguous().view(torch.uint8)


@triton.jit
def _shares(logits, row, samples, classes, BLOCK: tl.constexpr):
    """The largest logit of each of these samples, exponentials relative to it, and their sum."""
    column = tl.arange(0, BLOCK)[None, :]
    first = tl.minimum(row, samples - 1).to(tl.int64)[:, None] * classes  # the last sample stands in for those after it
    x = tl.load(logits + first + column, column < classes, float("-inf")).to(tl.float32)
    largest = tl.max(x, 1)
    shares = tl.exp(x - largest[:, None])
    return largest, shares, tl.sum(shares, 1)


@triton.jit(do_not_specialize=["samples", "classes", "ignored"])
def _cross_entropy(
    logits, labels, values, samples, classes, ignored, IGNORES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """A label that is no class gives no number."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    label = tl.load(labels + row, row < samples, 0)
    largest, _, total = _shares(logits, row, samples, classes, BLOCK)
    known = (row < samples) & (label >= 0) & (label < classes)
    own = tl.load(logits + row.to(tl.int64) * classes + label, known, float("nan")).to(tl.float32)
    value = tl.log(total) - (own - largest)
    if IGNORES:
        value = tl.where(label == ignored, 0.0, value)
    tl.store(values + row, value, row < samples)


@triton.jit(do_not_specialize=["samples", "classes", "ignored"])
def _cross_entropy_gradient(
    logits, labels, gradients, of_logits, samples, classes, ignored,
    IGNORES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    label = tl.load(labels + row, row < samples, 0)[:, None]
    gradient = tl.load(gradients + row, row < samples, 0.0)[:, None]
    _, shares, total = _shares(logits, row, samples, classes, BLOCK)
    column = tl.arange(0, BLOCK)[None, :]
    value = shares / total[:, None] * gradient - tl.where(column == label, gradient, 0.0)
    value = tl.where((label >= 0) & (label < classes), value, float("nan"))
    if IGNORES:
        value = tl.where(label == ignored, 0.0, value)
    there = (row < samples)[:, None] & (column < classes)
    tl.store(of_logits + row.to(tl.int64)[:, None] * classes + column, value, there)


@triton.jit(do_not_specialize=["samples"])
def _mean(values, mask, means, totals, samples, BLOCK: tl.constexpr):
    client = tl.program_id(0)
    place = tl.arange(0, BLOCK)
    real = tl.load(mask + client * samples + place, place < samples, 0) != 0
    total = tl.sum(tl.load(values + client * samples + place, real, 0.0), 0)
    count = tl.maximum(tl.sum(real.to(tl.float32), 0), 1.0)
    tl.store(totals + client, total)
    tl.store(means + client, total / count)


@triton.jit(do_not_specialize=["samples"])
def _mean_gradient(gradients, mask, of_values, samples, BLOCK: tl.constexpr):
    client = tl.program_id(0)
    place = tl.arange(0, BLOCK)
    real = tl.load(mask + client * samples + place, place < samples, 0) != 0
    count = tl.maximum(tl.sum(real.to(tl.float32), 0), 1.0)
    value = tl.where(real, tl.load(gradients + client) / count, 0.0)
    tl.store(of_values + client * samples + place, value, place < samples)
