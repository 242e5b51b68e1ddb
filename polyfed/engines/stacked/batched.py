"""What our own functions with a rule for `vmap` share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16)
"""Numbers that our kernels read and write."""


def only(result: Tensor) -> Tensor:
    """A single client's part; not as a view, which a layer that follows could not change in place."""
    part: Tensor = torch.ops.aten._unsafe_view(result, result.shape[1:])
    return part


def stacked(info: Any, dims: tuple[Any, ...], inputs: tuple[Any, ...]) -> list[Any]:
    """The inputs of a batched call with clients first in every tensor."""
    return [
        tensor if not isinstance(tensor, Tensor)
        else tensor.expand(info.batch_size, *tensor.shape) if dim is None
        else tensor.movedim(dim, 0)
        for tensor, dim in zip(inputs, dims, strict=True)
    ]  # fmt: skip
