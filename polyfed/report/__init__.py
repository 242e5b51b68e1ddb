"""Tables and pictures from runs, and the display of a run's progress.

`read` reads runs and comparisons, `write_report` and `write_figures` write what `polyfed report` does, and the figures
(`curves`, `clients`, `trade_off` and the others of `polyfed.report.figures`) are drawn from frames in a notebook.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {
    "data": ("read",),
    "page": ("write_report", "write_figures"),
    "figures": (
        "curves", "clients", "client_curves", "holdings", "class_accuracies", "confusion", "trade_off", "distances",
        "margins", "features", "pictures",
    ),
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Imported when first used: progress bars need none of this, and Altair is an extra."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"polyfed.report.{home}"), name)
    raise AttributeError(f"polyfed.report has no '{name}'")


def __dir__() -> list[str]:
    return sorted(name for names in _HOMES.values() for name in names)
