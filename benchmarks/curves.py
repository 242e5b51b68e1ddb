"""Pictures of accuracy over rounds, one with all methods and one for each method beside Standalone."""

from __future__ import annotations

import io
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import pandas as pd

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
"""Okabe and Ito's, which colour-blind people can tell apart, without the black and the pale yellow."""
STYLES = (
    {"linestyle": "-", "marker": "o"}, {"linestyle": "-.", "marker": "s"}, {"linestyle": ":", "marker": "^"},
)  # fmt: skip
"""After six methods the colours come again with the next of these."""


def draw_all(curves: pd.DataFrame, folder: Path, title: str, data: str) -> None:
    """curves.png and curve-METHOD.png of a frame with the columns method, round, accuracy and std."""
    draw_one(curves, folder / "curves.png", title)
    styles = styles_of(curves)
    for method in styles:
        if method != "standalone":
            shown = [name for name in ("standalone", method) if name in set(curves["method"])]
            draw(curves, shown, styles, folder / f"curve-{method}.png", (6, 3.6), f"{method} on {data}")


def draw_one(curves: pd.DataFrame, path: Path, title: str) -> None:
    """All methods of the frame in one picture."""
    draw(curves, list(curves["method"].unique()), styles_of(curves), path, (9, 6), title)


def styles_of(curves: pd.DataFrame) -> dict[str, Any]:
    """How each method's line looks."""
    others = [method for method in curves["method"].unique() if method != "standalone"]
    looks = [{**style, "color": colour, "markersize": 4} for style in STYLES for colour in COLOURS]
    return dict(zip(others, cycle(looks), strict=False)) | {"standalone": {"color": "black", "linestyle": "--"}}


def draw(
    curves: pd.DataFrame, methods: Sequence[str], styles: dict[str, Any], path: Path, inches: tuple[float, float],
    title: str,
) -> None:  # fmt: skip
    """Accuracy over rounds as a small PNG, 100 pixels to an inch."""
    from matplotlib.figure import Figure  # used without pyplot, it draws with Agg and needs no screen
    from matplotlib.ticker import MaxNLocator
    from PIL import Image

    figure = Figure(figsize=inches, dpi=100, layout="constrained")
    axes = figure.subplots()
    for method in methods:
        own = curves[curves["method"] == method]
        middle, around, style = 100 * own["accuracy"], 100 * own["std"].fillna(0), styles[method]
        axes.plot(own["round"], middle, label=method, linewidth=1.6, markevery=max(1, len(own) // 8), **style)
        axes.fill_between(own["round"], middle - around, middle + around, color=style["color"], alpha=0.1, linewidth=0)
    axes.set(xlabel="round", ylabel="accuracy on test samples (%)")
    axes.set_title(title, fontsize=10)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    if len(methods) > 4:
        figure.legend(loc="outside right center", frameon=False, handlelength=3)
    else:
        axes.legend(loc="best", frameon=False, handlelength=3)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png")
    Image.open(drawn).convert("RGB").quantize(64).save(path, optimize=True)
