"""Whether two objects hold the same values, functions and what they were made with included; methods above all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from functools import cached_property, partial
from random import Random
from threading import Lock, RLock
from types import FunctionType, MethodType
from typing import Any

import numpy as np
from torch import Tensor

from polyfed.methods.base import Method

Pairs = dict[tuple[int, int], tuple[object, object]]
LOCKS = (type(Lock()), type(RLock()))
"""They hold nothing but who waits."""


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
        return one.shape == two.shape and _equal(one, two)
    if isinstance(one, (int, float, str, bytes, Set, type)):
        return _equal(one, two)
    if isinstance(one, LOCKS):
        return True
    if isinstance(one, Random):
        return each(one.getstate(), two.getstate())
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
    return each(vars(one), vars(two)) if hasattr(one, "__dict__") else _equal(one, two)


def _equal(one: Any, two: Any) -> bool:
    """Whether two values, or all values in two tensors, are equal; a missing one (NaN) is like another."""
    try:
        equal = (one == two) | ((one != one) & (two != two))
        return bool(equal.all() if isinstance(one, Tensor | np.ndarray) else equal)
    except Exception:  # anybody's `==`: what can't be compared may differ
        return False


def _captured(function: FunctionType) -> list[Any]:
    """The values that a function took along when it was made."""
    return [
        function.__defaults__,
        function.__kwdefaults__,
        *(cell.cell_contents for cell in function.__closure__ or ()),
    ]


def differs_in(one: Method, two: Method) -> str | None:
    """The first attribute beside their settings in which two methods differ, or None."""
    ours, theirs = map(_kept, (one, two))
    # A function that took a method along finds that method's own settings, like any function of its class.
    known: Pairs = {(id(one), id(two)): (one, two)}
    differing = [n for n in ours.keys() | theirs.keys() if not same(ours.get(n), theirs.get(n), dict(known))]
    return min(differing, default=None)


def _kept(method: Method) -> dict[str, Any]:
    """A method's attributes, without its settings and what it computes when it is first needed.

    What engines ask for before they know a client's numbers is always among them.
    """
    own = ("config", "task", "training")
    kept = {n: v for n, v in vars(method).items() if n not in own and not is_cached(method, n)}
    return kept | {"collect": method.collect, "probe": method.probe}


def is_cached(method: Method, name: str) -> bool:
    """Whether the method computes this attribute once, when it is first needed."""
    return isinstance(getattr(type(method), name, None), cached_property)
