"""Kernels for a GPU: what surrounds the products of a linear layer, its bias and a ReLU that follows.

PyTorch would copy every bias to all rows before the product, set negative results to zero in another kernel, and read
the gradient twice.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS = 64, 32
"""Of the values at a time: few columns, because a column's sum is one program's work."""


def add_bias(y: Tensor, bias: Tensor, relu: bool) -> Tensor:
    """Add biases [clients, out] to results [clients, rows, out], in place, with ReLU if wanted."""
    clients, rows, out = y.shape
    _add_bias[(triton.cdiv(out, COLUMNS) * triton.cdiv(rows, ROWS), clients)](
        y, bias.contiguous(), rows, out, relu, ROWS, COLUMNS
    )
    return y


def before_relu(gradient: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient [clients, rows, out] before ReLU, whose results are y, and its sum over rows."""
    gradient = gradient.contiguous()
    clients, rows, out = gradient.shape
    before, total = torch.empty_like(gradient), gradient.new_empty(clients, out)
    _before_relu[(triton.cdiv(out, COLUMNS), clients)](
        gradient, y.contiguous(), before, total, rows, out, ROWS, COLUMNS
    )
    return before, total


@triton.jit(do_not_specialize=["rows"])
def _add_bias(y, bias, rows, out, RELU: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    client, across = tl.program_id(1).to(tl.int64), tl.cdiv(out, COLUMNS)
    # One axis for both, because a GPU allows few programs along the others.
    row = (tl.program_id(0) // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    there = (row < rows) & (column < out)
    y += (client * rows + row) * out + column
    value = tl.load(y, there).to(tl.float32) + tl.load(bias + client * out + column, column < out).to(tl.float32)
    if RELU:
        value = tl.where(value <= 0, 0.0, value)  # NaN stays
    tl.store(y, value.to(y.dtype.element_ty), there)


@triton.jit(do_not_specialize=["rows"])
def _before_relu(g, y, before, total, rows, out, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    client = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, rows, ROWS):
        row = first + tl.arange(0, ROWS)[:, None]
        there = (row < rows) & (column < out)[None, :]
        place = (client * rows + row) * out + column[None, :]
        gradient = tl.where(tl.load(y + place, there, 0.0) <= 0, 0.0, tl.load(g + place, there, 0.0))
        tl.store(before + place, gradient, there)
        sums += gradient.to(tl.float32)
    tl.store(total + client * out + column, tl.sum(sums, 0).to(total.dtype.element_ty), column < out)
