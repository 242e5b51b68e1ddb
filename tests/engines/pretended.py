"""A GPU that is only pretended: its tensors are computed on the CPU, but must not meet those of the CPU.

Finds what only a GPU would show otherwise: a tensor that was left on the other device. Our own kernels, streams and
graphs are left out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

OTHER = torch.device("meta")
"""Stands for a GPU; autograd refuses to compute on one that does not exist."""
aten = torch.ops.aten
MOVES = {aten._to_copy.default, aten.copy_.default, aten._foreach_copy_.default}
"""Operations between devices."""
WAITS: list[str] = []
"""What has waited for the GPU: moves to it that do not say otherwise, and looks at its values."""


class OnGpu(Tensor):
    """A tensor that says that it is on a GPU."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> OnGpu:
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=OTHER, requires_grad=inner.requires_grad,
        )  # fmt: skip
        made.inner = inner
        return made  # type: ignore[no-any-return]

    def tolist(self) -> Any:
        WAITS.append("tolist")
        return self.inner.tolist()

    def __repr__(self, **rest: Any) -> str:
        return f"OnGpu({self.inner!r})"

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with Pretended():
            return function(*args, **(kwargs or {}))


class Pretended(TorchDispatchMode):
    """Inside, there is a GPU."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        there = [leaf for leaf in given if isinstance(leaf, OnGpu)]
        here = [leaf for leaf in given if not isinstance(leaf, OnGpu)]
        # A single number of the CPU may meet a GPU's tensors.
        if there and function not in MOVES and any(leaf.dim() for leaf in here):
            raise RuntimeError(f"{function}: expected all tensors on the same device, but found {OTHER} and cpu")
        wanted = kwargs.get("device")
        on_gpu = torch.device(wanted).type == OTHER.type if wanted is not None else bool(there)
        if function in (aten.copy_.default, aten._foreach_copy_.default):
            on_gpu = isinstance(tree_leaves(args)[0], OnGpu)
        if function is aten._to_copy.default and on_gpu != bool(there) and not (on_gpu and kwargs.get("non_blocking")):
            WAITS.append("a move to the GPU" if on_gpu else "a move to the CPU")
        if function is aten._local_scalar_dense.default and there:
            WAITS.append("a look at a value")
        if wanted is not None:
            kwargs["device"] = torch.device("cpu")
        plain_args, plain_kwargs = tree_map(lambda x: x.inner if isinstance(x, OnGpu) else x, (args, kwargs))
        result = function(*plain_args, **plain_kwargs)
        if not on_gpu:
            return result
        known = {id(leaf.inner): leaf for leaf in there}  # what is changed in place stays the same tensor
        return tree_map(lambda x: known.get(id(x), OnGpu(x)) if isinstance(x, Tensor) else x, result)
