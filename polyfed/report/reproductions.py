"""What there is to reproduce, and our numbers beside the published ones, for the terminal and for programs."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from polyfed.report.summary import quantity
from polyfed.report.tables import plain_table
from polyfed.reproduce.recipes import Recipe, recipes
from polyfed.reproduce.run import Reproduction

NAMES = {
    "clients": "clients' accuracies", "rounds": "accuracy by round", "margins": "margins of prototypes",
    "features": "features in two dimensions", "decay": "how much of its own rows a client adds",
}  # fmt: skip
"""What series.csv has."""


STDS = {"ours": "std", "published": "published_std"}
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


def reproduction_tables(done: Reproduction) -> list[tuple[str, Table]]:
    """Ours beside theirs, a table for each setting."""
    columns = {"method": "method", "ours": "ours", "published": "published", **_further(done)}
    rows = [{str(name): value for name, value in row.items()} for row in done.table.to_dict("records")]
    return [
        (setting, _setting_table(columns, [row for row in rows if row["setting"] == setting]))
        for setting in dict.fromkeys(done.table["setting"])
    ]


def _setting_table(columns: dict[str, str], rows: list[dict[str, Any]]) -> Table:
    table = plain_table(list(columns.values()), [[_cell(row, name) for name in columns] for row in rows])
    for column in table.columns[1:]:
        column.no_wrap, column.justify = True, "right"
    return table


def _further(done: Reproduction) -> dict[str, str]:
    """Columns that only some recipes have: costs up to a target, or else gains."""
    if done.recipe.entry.targets:
        return {f"{cost}_to_target": f"{cost} to\ntarget" for cost in ("rounds", "floats", "flops")}
    base = done.recipe.base
    if done.table[f"ours_minus_{base}"].isna().all():
        return {}
    return {
        f"ours_minus_{base}": "our\ngain",
        f"published_minus_{base}": "published\ngain",
        "gain_difference": "difference\nof gains",
    }


def _cell(row: dict[str, Any], name: str) -> str:
    value = row[name]
    if isinstance(value, str):
        return value
    if value != value:
        return "–" if name in STDS or name.endswith("_to_target") else ""
    if name in STDS:
        std = row[STDS[name]]
        return f"{value:.2f} ± {std:.2f}" if std == std else f"{value:.2f}"
    return quantity(value).strip() if name.endswith("_to_target") else f"{value:+z.2f}"


def remarks(done: Reproduction) -> list[str]:
    """What a reader must know before comparing the numbers."""
    compare = done.recipe.compare
    what = f"accuracy in percent, {AVERAGES[compare.average]}, {ROUNDS[compare.round]}"
    lines = [f"Ours: {what if compare.what == 'accuracy' else 'numbers sent in the last round, in millions'}."]
    if "gain_difference" in _further(done):
        other = done.recipe.entry.reference if done.recipe.base == "reference" else "standalone"
        lines.append(f"Gain: over {other} in the same setting.")
    if done.warning:
        lines.append(done.warning)
    if done.left_out:
        lines.append(f"{done.left_out} of {len(done.recipe.settings)} settings were not run.")
    written = "reproduction.csv" + (
        f" and series.csv ({NAMES[kind]})" if (kind := done.recipe.entry.series) in NAMES else ""
    )
    return [*lines, f"Written: {written}."]
