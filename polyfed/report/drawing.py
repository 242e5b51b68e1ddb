"""Pictures by matplotlib: the colours and lines of methods, a figure, and its files. Nothing without matplotlib."""

from __future__ import annotations

import io
from collections.abc import Iterable
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from typing import Any

from polyfed.records import disk

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
"""Okabe and Ito's, which colour-blind people can tell apart, without the black and the pale yellow."""
STYLES = (
    {"linestyle": "-", "marker": "o"}, {"linestyle": "-.", "marker": "s"}, {"linestyle": ":", "marker": "^"},
)  # fmt: skip
"""After six methods the colours come again with the next of these."""
ALONE = {"color": "black", "linestyle": "--"}
KINDS = ("png", "pdf")


def missing() -> bool:
    """Whether pictures can't be drawn."""
    return find_spec("matplotlib") is None


def looks(methods: Iterable[str]) -> dict[str, Any]:
    """How each method's line looks; standalone always the same."""
    others = [method for method in methods if method != "standalone"]
    lines = [{**style, "color": colour, "markersize": 4} for style in STYLES for colour in COLOURS]
    return {**dict(zip(others, cycle(lines), strict=False)), "standalone": ALONE}


def new_figure(inches: tuple[float, float], rows: int = 1, columns: int = 1) -> tuple[Any, Any]:
    """A figure and its axes."""
    from matplotlib.figure import Figure  # used without pyplot, it needs no screen

    figure = Figure(figsize=inches, dpi=100, layout="constrained")
    return figure, figure.subplots(rows, columns)


def add_legend(figure: Any, axes: Any) -> None:
    """Name the lines of these axes beside the figure."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False, handlelength=3)


def save(figure: Any, stem: Path) -> None:
    """Write the figure as png and as pdf."""
    for kind in KINDS:
        drawn = io.BytesIO()
        figure.savefig(drawn, format=kind)
        disk.write(stem.with_name(f"{stem.name}.{kind}"), drawn.getvalue())
