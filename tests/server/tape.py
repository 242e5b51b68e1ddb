"""What stands for a CUDA graph where there is no GPU: operations are recorded, and done again in the same memory.

As with a graph, numbers in Python stay those of the capture, nothing is done while it is recorded, and nobody may look
at a value meanwhile. Kernels that are no operations of PyTorch are not seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Tape(TorchDispatchMode):
    """A recorded call."""

    made: list[Tape] = []

    def __init__(self, call: Callable[[], object]) -> None:
        super().__init__()
        self.replays = 0
        self._operations: list[tuple[Any, Any, Any, Any]] = []
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        """Memory that was there, and what was in it."""
        self._new: set[int] = set()
        with self:
            call()
        for storage, value in self._before.values():
            storage.copy_(value)
        Tape.made.append(self)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        for tensor in _tensors((args, kwargs)):
            storage, place = tensor.untyped_storage(), _memory(tensor)
            if place not in self._new and place not in self._before:
                self._before[place] = (storage, storage.clone())
        result = function(*args, **(kwargs or {}))
        if not any(each.alias_info and not each.alias_info.is_write for each in function._schema.returns):  # no view
            self._new |= {_memory(tensor) for tensor in _tensors(result)} - self._before.keys()
            self._operations.append((function, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        self.replays += 1
        with torch.no_grad():
            for function, args, kwargs, result in self._operations:
                again = function(*args, **kwargs)
                for into, new in zip(_tensors(result), _tensors(again), strict=True):
                    if into is not new:
                        into.copy_(new)

    def pool(self) -> None:
        return None


class Again:
    """Makes a call again, for kernels that a tape does not see and numbers that only a GPU keeps in memory."""

    made: list[Again] = []

    def __init__(self, call: Callable[[], object]) -> None:
        self.replays = 0
        self._call = call
        Again.made.append(self)

    def replay(self) -> None:
        self.replays += 1
        self._call()

    def pool(self) -> None:
        return None
