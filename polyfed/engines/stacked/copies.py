"""Copies of many tensors into others, by few kernels and with little work for each tensor."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from polyfed.message import State


def copy_states(targets: Sequence[State], sources: Sequence[State]) -> None:
    """Copy states of one architecture into others of it."""
    names: dict[torch.dtype, list[str]] = {}
    for name, tensor in targets[0].items() if targets else ():
        names.setdefault(tensor.dtype, []).append(name)
    for own in names.values():
        into, out_of = ([state[name] for state in states for name in own] for states in (targets, sources))
        torch._foreach_copy_(into, out_of)


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors into others, in a few kernels for all that are alike."""
    alike: dict[Hashable, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        # One that differs from its target in type or order of memory would make PyTorch copy all one by one.
        kind = target.dtype, source.dtype, source.stride() == target.stride()
        into, out_of = alike.setdefault(kind, ([], []))
        into.append(target)
        out_of.append(source)
    for into, out_of in alike.values():
        torch._foreach_copy_(into, out_of)
