"""Pictures of a comparison: accuracy over rounds, accuracy over a swept setting, mean ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from polyfed.comparison import statistics
from polyfed.comparison.outcomes import Outcome
from polyfed.comparison.plan import Cell, concerns, grid
from polyfed.comparison.table import column_of
from polyfed.metrics import TITLES, Metric
from polyfed.ranges import typed
from polyfed.report import drawing


def curves_of(cells: Sequence[Cell], outcomes: Mapping[str, Outcome], metric: Metric = "accuracy") -> pd.DataFrame:
    """A metric over rounds, mean and sample standard deviation over seeds, for every method at every point."""
    frames = [
        outcomes[cell.name].curve[["round", metric]].assign(
            method=cell.method, seed=cell.seed, **{name: typed(value) for name, value in point.items()}
        )
        for point in grid(cells)
        for cell in cells
        if cell.name in outcomes and concerns(cell, point)
    ]  # fmt: skip
    if not frames:
        return pd.DataFrame(columns=["method", "round", metric, "std"])
    swept = list(grid(cells)[0])
    grouped = pd.concat(frames).groupby(["method", *swept, "round"], sort=False)[metric]
    return grouped.agg(["mean", "std"]).rename(columns={"mean": metric}).reset_index()


def draw(
    curves: pd.DataFrame, table: pd.DataFrame, swept: Sequence[str], folder: Path, metric: Metric = "accuracy"
) -> None:
    """curves.png and curves.pdf; with one swept number sweep.png and sweep.pdf. Nothing without matplotlib."""
    if drawing.missing() or curves.empty:
        return
    _draw_curves(curves, swept, folder, metric)
    if len(swept) == 1 and table[swept[0]].nunique() > 1:
        values = pd.to_numeric(table[swept[0]], errors="coerce")
        if values.notna().all():
            _draw_sweep(table.assign(value=values), swept[0], folder, metric)


def draw_ranks(accuracies: pd.DataFrame, folder: Path) -> None:
    """critical-difference.png and .pdf: mean ranks, and bars over methods that these seeds can't tell apart.

    A row of accuracies per method, a column per seed. Nothing with fewer than ten seeds or without matplotlib.
    """
    if drawing.missing() or len(accuracies) < 2 or accuracies.shape[1] < statistics.SEEDS_FOR_RANKS:
        return
    methods, ranks = list(accuracies.index), statistics.mean_ranks(accuracies.to_numpy())
    gap = statistics.critical_difference(*accuracies.shape)
    order = np.argsort(ranks)
    figure, axes = drawing.new_figure((7, 1.4 + 0.25 * len(methods)))
    axes.set(xlim=(0.8, len(methods) + 0.2), ylim=(-len(methods) - 1, 1.6), xlabel="mean rank (1 is best)", yticks=[])
    for row, place in enumerate(order):
        axes.plot([ranks[place]] * 2, [0, -row - 1], color="grey", linewidth=0.8)
        axes.text(ranks[place], -row - 1, f" {methods[place]} ({ranks[place]:.2f})", va="center", fontsize=8)
    for level, (first, last) in enumerate(indistinct(ranks[order], gap)):
        axes.plot([first, last], [0.3 + 0.25 * level] * 2, color="black", linewidth=3)
    axes.set_title(f"critical difference {gap:.2f}", fontsize=9)
    drawing.save(figure, folder / "critical-difference")


def indistinct(ranks: np.ndarray, gap: float) -> list[tuple[float, float]]:
    """The widest groups of sorted ranks that lie within the gap, as their first and last rank."""
    groups: list[tuple[int, int]] = []
    for start in range(len(ranks)):
        end = int(np.searchsorted(ranks, ranks[start] + gap, side="right")) - 1
        if end > start and (not groups or end > groups[-1][1]):
            groups.append((start, end))
    return [(float(ranks[start]), float(ranks[end])) for start, end in groups]


def _draw_curves(curves: pd.DataFrame, swept: Sequence[str], folder: Path, metric: Metric) -> None:
    """A panel for every point."""
    panels = list(curves.groupby(list(swept), sort=False)) if swept else [("", curves)]
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = drawing.new_figure((1.5 + 4.5 * columns, 3.6 * rows), rows, columns)
    looks = drawing.looks(curves["method"].unique())
    for place, (point, frame) in zip(np.atleast_1d(axes).flat, panels, strict=False):
        draw_lines(place, frame, "round", metric, looks)
        values = point if isinstance(point, tuple) else (point,)
        place.set_title(", ".join(f"{n} = {v}" for n, v in zip(swept, values, strict=False)), fontsize=9)
        place.set(xlabel="round", ylabel=f"{TITLES[metric]} on test samples (%)")
        place.xaxis.get_major_locator().set_params(integer=True)
    for place in list(np.atleast_1d(axes).flat)[len(panels) :]:
        place.set_axis_off()
    drawing.add_legend(figure, np.atleast_1d(axes).flat[0])
    drawing.save(figure, folder / "curves")


def _draw_sweep(table: pd.DataFrame, name: str, folder: Path, metric: Metric) -> None:
    column = column_of(metric, table["round"].iloc[0])
    frame = table.rename(columns={f"{column}_mean": metric, f"{column}_std": "std"}).sort_values("value")
    figure, axes = drawing.new_figure((6, 3.6))
    draw_lines(axes, frame, "value", metric, drawing.looks(table["method"].unique()))
    axes.set(xlabel=name, ylabel=f"{TITLES[metric]} on test samples (%)")
    drawing.add_legend(figure, axes)
    drawing.save(figure, folder / "sweep")


def draw_lines(axes: Any, frame: pd.DataFrame, x: str, y: str, looks: Mapping[str, Any]) -> None:
    """A line per method with a band of one standard deviation, in percent."""
    for method, own in frame.groupby("method", sort=False):
        middle, around, look = 100 * own[y], 100 * own["std"].fillna(0), looks[str(method)]
        axes.plot(own[x], middle, label=method, linewidth=1.6, markevery=max(1, len(own) // 8), **look)
        axes.fill_between(own[x], middle - around, middle + around, color=look["color"], alpha=0.1, linewidth=0)
    axes.grid(alpha=0.3)
