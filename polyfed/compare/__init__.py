"""Methods compared fairly: same data, clients, networks and participants per seed; several seeds; statistics."""

import sys
from types import ModuleType
from typing import Any

from polyfed.compare.comparison import Comparison, compare

__all__ = ["Comparison", "compare"]


class _Callable(ModuleType):
    """To users `polyfed.compare` is a function, but importing a part of this package puts the package in its place."""

    def __call__(self, *arguments: Any, **settings: Any) -> Comparison:
        return compare(*arguments, **settings)


sys.modules[__name__].__class__ = _Callable
