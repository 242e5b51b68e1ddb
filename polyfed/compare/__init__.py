"""Methods compared fairly: same data, clients, networks and participants per seed; several seeds; statistics."""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polyfed.compare.comparison import Comparison, compare

__all__ = ["Comparison", "compare"]


class _Callable(ModuleType):
    """To users `polyfed.compare` is a function, but importing a part of this package puts the package in its place."""

    def __call__(self, *arguments: Any, **settings: Any) -> Any:
        return _find("compare")(*arguments, **settings)


def _find(name: str) -> Any:
    """Import statistics only when they are needed: workers, which run no more than a run, start faster."""
    if name not in __all__:
        raise AttributeError(f"module 'polyfed.compare' has no attribute '{name}'")
    return getattr(import_module("polyfed.compare.comparison"), name)


sys.modules[__name__].__class__ = _Callable
if not TYPE_CHECKING:  # type checkers know the names above and should miss any other
    __getattr__ = _find
