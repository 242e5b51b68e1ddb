"""Counting waits for a GPU without one: tensors are declared to be on it, and so is all that is computed from them.

Looking at a value of such a tensor would wait for the GPU, and so would whatever has a size that depends on values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

LOOKS = {
    "item", "tolist", "cpu", "numpy", "nonzero", "unique", "masked_select", "equal", "allclose", "is_nonzero",
    "__bool__", "__int__", "__float__", "__index__", "__contains__",
}  # fmt: skip


class Waits(TorchFunctionMode):
    """Inside, counts by function how often somebody would wait for a GPU that holds these tensors."""

    def __init__(self, on_gpu: Iterable[Tensor]) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self._memory: dict[int, Any] = {}
        for tensor in on_gpu:
            self._declare(tensor)

    def _declare(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._memory[storage.data_ptr()] = storage  # kept, so that nothing else gets its address

    def _is_there(self, value: object) -> bool:
        return isinstance(value, Tensor) and value.numel() > 0 and value.untyped_storage().data_ptr() in self._memory

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        there = [value for value in tree_leaves((args, kwargs or {})) if self._is_there(value)]
        result = func(*args, **(kwargs or {}))
        if name in ("__get__", "untyped_storage", "numel") or not there:
            return result
        masks = name in ("__getitem__", "__setitem__") and any(value.dtype == torch.bool for value in there[1:])
        if name in LOOKS or masks:
            self.found[name] += 1
            return result.clone() if name == "cpu" else result  # from a GPU it would be a copy
        for value in [args[0]] if name == "__setitem__" else tree_leaves(result):
            if isinstance(value, Tensor):
                self._declare(value)
        return result
