"""Whether two objects hold the same values, functions and what they were made with included."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import numpy as np
from torch import Tensor

Pairs = dict[tuple[int, int], tuple[object, object]]


def same(one: Any, two: Any, seen: Pairs | None = None) -> bool:
    """Whether two objects hold the same values; functions hold what they were made with.

    `seen` are pairs of objects that are not looked at again, by their ids.

    >>> same({"a": (1, [2])}, {"a": (1, [2])}), same([1], [2]), same(min, max)
    (True, False, False)
    """
    seen = {} if seen is None else seen
    pair = id(one), id(two)
    if one is two or pair in seen:
        return True
    if type(one) is not type(two):
        return False
    seen[pair] = one, two  # which also keeps both, so that their ids stay theirs
    each = partial(same, seen=seen)
    if isinstance(one, Tensor | np.ndarray):
        return one.shape == two.shape and bool((one == two).all())
    if isinstance(one, (int, float, str, bytes, Set, type)):
        return bool(one == two)
    if isinstance(one, Mapping):
        return one.keys() == two.keys() and all(each(one[key], two[key]) for key in one)
    if isinstance(one, Sequence):
        return len(one) == len(two) and all(map(each, one, two))
    if isinstance(one, FunctionType):
        return one.__code__ == two.__code__ and each(_captured(one), _captured(two))
    if isinstance(one, MethodType):
        return each(one.__func__, two.__func__) and each(one.__self__, two.__self__)
    if isinstance(one, partial):
        return each((one.func, one.args, one.keywords), (two.func, two.args, two.keywords))
    return each(vars(one), vars(two)) if hasattr(one, "__dict__") else bool(one == two)


def _captured(function: FunctionType) -> list[Any]:
    """The values that a function took along when it was made."""
    return [
        function.__defaults__,
        function.__kwdefaults__,
        *(cell.cell_contents for cell in function.__closure__ or ()),
    ]
