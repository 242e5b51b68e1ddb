"""The pictures of docs/results.md: accuracy over rounds, and the gain over the base."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from papers.tables import Comparison, method_of, title_of
from polyfed.comparison.pictures import draw_lines
from polyfed.records import disk
from polyfed.report import drawing


class Picture(NamedTuple):
    """One of a comparison's pictures."""

    file: str
    title: str
    rows: Sequence[str]
    """Also those without runs so far, so that colours stay when they have some."""


def pictures(given: Comparison) -> list[Picture]:
    """One of the methods, and one of their options and parts where any were run; an entry of several settings has none.

    All in one would be too many lines.
    """
    if not given.compares or len(given.entry.points) > 1:
        return []
    file, title, base = f"results-{given.name}", given.entry.title, given.entry.base
    variants = [row for row in given.order if row not in (method_of(row), base)]
    found = [Picture(f"{file}.png", title, [row for row in given.order if row not in variants])]
    if any(row in given.rows for row in variants):
        whole = {base, *map(method_of, variants)}
        rows = [row for row in given.order if row in variants or row in whole]
        found.append(Picture(f"{file}-variants.png", f"Options and parts of methods: {title}", rows))
    return found


def draw(given: Comparison, rows: Sequence[str], path: Path) -> None:
    """Mean accuracy by the compared rule over rounds, and the gain beside it; bands of one standard deviation.

    A row that lacks seeds says so.
    """
    seeds = {row: given.seeds(row, given.entry.points[0]) for row in rows}
    names = {row: title_of(row) + f" ({each})" * (row in given.rows and " of " in each) for row, each in seeds.items()}
    looks = drawing.looks(names[row] for row in rows if row != "standalone")
    looks |= {names[row]: drawing.ALONE for row in rows if row == "standalone"}
    curves = pd.concat(
        pd.DataFrame(
            {"method": names[row], "seed": r["seed"], "round": r["rounds"], "accuracy": r["curves"][given.rule(row)]}
        )
        for row in rows
        for r in given.of(row)
    )
    base = names[given.entry.base]
    figure, (levels, gains) = drawing.new_figure((12, 4.8), columns=2)
    draw_lines(levels, _over_seeds(curves), "round", "accuracy", looks)
    levels.set(xlabel="round", ylabel="accuracy on test samples (%)")
    gained = _over_seeds(gained_over(curves, base))
    if not gained.empty:
        draw_lines(gains, gained, "round", "accuracy", looks)
        gains.set(xlabel="round", ylabel=f"points more than {title_of(given.entry.base)}", ylim=later(gained))
    else:
        gains.set_axis_off()
    drawing.add_legend(figure, levels)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png")
    disk.write(path, drawn.getvalue())


def gained_over(curves: pd.DataFrame, base: str) -> pd.DataFrame:
    """What each run of a method is above the base's run with the same seed, in the rounds that both have."""
    own = curves[curves["method"] == base].drop(columns="method")
    both = curves.merge(own, on=["seed", "round"], suffixes=("", "_base"))
    return both.assign(accuracy=both["accuracy"] - both["accuracy_base"]).drop(columns="accuracy_base")


def later(gained: pd.DataFrame) -> tuple[float, float]:
    """Limits of the axis in which the second half of the rounds fits; what is beyond in the first is cut off."""
    half = gained[2 * gained["round"] >= gained["round"].max()]
    low, high = (half["accuracy"] - half["std"].fillna(0)).min(), (half["accuracy"] + half["std"].fillna(0)).max()
    space = max(0.1 * (high - low), 0.005)
    return 100 * (low - space), 100 * (high + space)


def _over_seeds(curves: pd.DataFrame) -> pd.DataFrame:
    grouped = curves.groupby(["method", "round"], sort=False)["accuracy"]
    return grouped.agg(accuracy="mean", std="std").reset_index()
