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


def in_memory(tensor: Tensor) -> bool:
    """Whether a kernel can read it: not where a network itself uses `vmap` or a gradient, and this is one of several.

    What PyTorch's own operations make of such a tensor has gradients and rules for `vmap` again.
    """
    return not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
