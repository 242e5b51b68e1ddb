"""What there is to reproduce, and our numbers beside the published ones, for the terminal and for programs."""

from __future__ import annotations

from typing import Any

import pandas as pd
from rich.table import Table

from polyfed.report.tables import _table as plain_table
from polyfed.report.tables import quantity
from polyfed.reproduce.recipes import Recipe, recipes
from polyfed.reproduce.run import Reproduction

NAMES = {
    "clients": "clients' accuracies", "rounds": "accuracy by round", "margins": "margins of prototypes",
    "features": "features in two dimensions", "decay": "how much of its own rows a client adds",
}  # fmt: skip
"""What series.csv has."""


AVERAGES = {"mean": "mean over clients", "weighted": "weighted by test samples"}
ROUNDS = {"last": "in the last round", "last-tenth": "mean over the last tenth of the rounds", "best": "best on test"}


def recipe_list() -> list[dict[str, Any]]:
    """Every recipe with its methods, its settings, and where these come from."""
    return [
        {
            "name": recipe.name,
            "paper": recipe.paper.paper,
            "title": recipe.entry.title,
            "shows": recipe.entry.shows,
            "methods": {name: recipe.variant(name).model_dump(exclude_defaults=True) for name in recipe.entry.methods},
            "settings": {name: recipe.sources(name).model_dump(exclude_defaults=True) for name in recipe.settings},
            "given": recipe.given,
            "ours": recipe.ours,
            "compares": recipe.compare.model_dump(),
            "series": recipe.entry.series,
            "not_yet": recipe.entry.not_yet,
        }
        for recipe in recipes()
    ]


def recipes_table() -> Table:
    """The recipes for people."""
    rows = [[recipe.name, _size(recipe), f"{recipe.paper.paper}: {recipe.entry.title}"] for recipe in recipes()]
    table = plain_table(["name", "runs", "what it repeats"], rows)
    table.columns[1].justify = "right"
    table.caption, table.caption_justify = "Runs: methods times settings, for each seed.", "left"
    return table


def _size(recipe: Recipe) -> str:
    return "not yet" if recipe.entry.not_yet else f"{len(recipe.entry.methods)}×{len(recipe.settings)}"


def reproduction_table(done: Reproduction) -> Table:
    """Cell by cell, ours beside theirs."""
    columns = {"setting": "setting", "method": "method", "ours": "ours", "published": "published", **_further(done)}
    table = plain_table(list(columns.values()), [[_cell(row, name) for name in columns] for row in _rows(done.table)])
    for number, column in enumerate(table.columns):
        column.no_wrap, column.justify = True, "left" if number < 2 else "right"
    return table


def _further(done: Reproduction) -> dict[str, str]:
    """Columns that only some recipes have: costs up to a target, or else gains."""
    if done.recipe.entry.targets:
        return {f"{cost}_to_target": f"{cost} to\ntarget" for cost in ("rounds", "floats", "flops")}
    base, name = "standalone", "Standalone"
    if done.table["ours_minus_standalone"].isna().all():
        base, name = "reference", done.recipe.entry.reference or ""
    if done.table[f"ours_minus_{base}"].isna().all():
        return {}
    columns = {f"ours_minus_{base}": f"ours −\n{name}", f"published_minus_{base}": f"published −\n{name}"}
    return columns if base == "reference" else {**columns, "gain_difference": "difference\nof gains"}


def _rows(table: pd.DataFrame) -> list[dict[str, Any]]:
    return [{str(name): value for name, value in row.items()} for row in table.to_dict("records")]


def _cell(row: dict[str, Any], name: str) -> str:
    value = row[name]
    if isinstance(value, str):
        return value
    if value != value:
        return "–" if name in ("ours", "published") or name.endswith("_to_target") else ""
    if name == "ours" and row["std"] == row["std"]:
        return f"{value:.2f} ± {row['std']:.2f}"
    if name.endswith("_to_target"):
        return quantity(value).strip()
    return f"{value:+.2f}" if "_minus_" in name or name == "gain_difference" else f"{value:.2f}"


def remarks(done: Reproduction) -> list[str]:
    """What a reader must know before comparing the numbers."""
    compare = done.recipe.compare
    what = f"accuracy in percent, {AVERAGES[compare.average]}, {ROUNDS[compare.round]}"
    lines = [f"Ours: {what if compare.what == 'accuracy' else 'numbers sent in the last round, in millions'}."]
    if done.warning:
        lines.append(done.warning)
    if done.left_out:
        lines.append(f"{done.left_out} of {len(done.recipe.settings)} settings were not run.")
    written = "reproduction.csv" + (
        f" and series.csv ({NAMES[kind]})" if (kind := done.recipe.entry.series) in NAMES else ""
    )
    return [*lines, f"Written: {written}."]
