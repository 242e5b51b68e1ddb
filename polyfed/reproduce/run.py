"""Runs a recipe and puts our numbers beside the published ones."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pandas as pd

from polyfed.comparison.outcomes import finished_run
from polyfed.comparison.plan import Cell, checked_seeds
from polyfed.comparison.runner import run_cells
from polyfed.comparison.together import most_together
from polyfed.errors import InputError, RunError, unknown_name
from polyfed.methods import METHODS
from polyfed.records import disk
from polyfed.records.claim import locked, writable
from polyfed.records.origin import settings_by_name, shown
from polyfed.reproduce.measures import costs, measured, series
from polyfed.reproduce.published import applicable, published
from polyfed.reproduce.recipes import SCALES, Recipe, ScaleName, find_recipe, setting_of
from polyfed.server.federation import Watcher

RECORD, TABLE, SERIES = "reproduction.json", "reproduction.csv", "series.csv"
BASELINE = "standalone"
COST_COLUMNS = ["target", "rounds_to_target", "floats_to_target", "flops_to_target"]
COLUMNS = [
    "method", "setting", "ours", "std", "published", "published_std", "ours_minus_standalone",
    "published_minus_standalone", "gain_difference", "reference", "ours_minus_reference",
    "published_minus_reference", "seeds", "scale", "note",
]  # fmt: skip


@dataclass(frozen=True)
class Reproduction:
    """A recipe that was run: a row per cell, and a figure's data."""

    recipe: Recipe
    scale: ScaleName
    folder: Path
    table: pd.DataFrame
    series: pd.DataFrame
    left_out: int
    """Settings of the recipe that were not run."""
    warning: str = ""
    """How this is not the paper's setting."""
    failures: Mapping[str, str] = field(default_factory=dict)
    """Why runs failed, by their names."""


def reproduce(
    name: str,
    out: str | Path,
    *,
    scale: ScaleName = "small",
    methods: Sequence[str] | None = None,
    settings: Sequence[str] | None = None,
    seeds: Sequence[int] | str | None = None,
    jobs: int = 1,
    together: int | None = None,
    tell: Callable[[str], None] = lambda line: None,
    watcher: Watcher | None = None,
    **machine: Any,
) -> Reproduction:
    """Run a recipe, or some of its methods, settings and seeds, and write what came out of it into a folder.

    Finished runs in the folder are used again. Up to `together` runs that differ in seeds and numbers only train their
    clients as one batch; None: as many as make sense on a GPU. `machine` says where to run: device, engine,
    data_folder.

    >>> reproduce("fedssa-table2", "out", scale="smoke", methods=["standalone", "fedssa"])    # doctest: +SKIP
    """
    recipe = find_recipe(name)
    _check(recipe, scale, jobs)
    rows = _chosen_methods(recipe, methods)
    columns = _chosen_settings(recipe, settings, scale)
    used = checked_seeds(recipe.seeds(scale) if seeds is None else seeds)
    cells = [
        Cell(method, seed, recipe.point(setting), experiment.model_copy(update={"seed": seed}))
        for setting in columns
        for method in rows
        if applicable(recipe, method, setting)
        for experiment in [recipe.experiment(method, setting, scale, **machine)]
        for seed in used
    ]
    for cell in cells:
        most_together(cell.config, together)  # refuses what can't be, before the folder is made
    warning = _warning(recipe, rows[-1], columns[0], scale) if scale != "paper" else ""
    with _claimed(Path(out), recipe, scale) as folder:
        if warning:
            tell(warning)
        failures = run_cells(cells, folder, jobs=jobs, together=together, tell=tell, watcher=watcher)
        failures |= _damaged(cells, folder, failures)
        done = [cell for cell in cells if cell.name not in failures]
        table = _with_differences([_row(recipe, scale, own, folder, failures) for own in _by_cell(cells)], recipe)
        figure = _series(recipe, done, folder)
        try:
            disk.write(folder / TABLE, table.to_csv(index=False))
            if recipe.entry.series not in (None, "costs"):  # costs are columns of the table
                disk.write(folder / SERIES, figure.to_csv(index=False))
        except OSError as error:
            raise RunError(
                f"the table can't be written to '{folder}': {error.strerror or error}; all runs are kept, and when "
                "that is fixed the same command writes the table."
            ) from error
    return Reproduction(recipe, scale, folder, table, figure, len(recipe.settings) - len(columns), warning, failures)


def _check(recipe: Recipe, scale: str, jobs: int) -> None:
    if jobs < 1:
        raise InputError(f"jobs is {jobs}, but must be a whole number at least 1.")
    if recipe.entry.not_yet:
        raise InputError(f"{recipe.name} can't be reproduced yet: {recipe.entry.not_yet}.")
    if scale not in SCALES:
        raise unknown_name("scale", scale, SCALES)


def _chosen_methods(recipe: Recipe, asked: Sequence[str] | None) -> list[str]:
    known = recipe.entry.methods
    for name in asked or ():
        if name not in known and name not in METHODS and name not in recipe.paper.methods:
            raise unknown_name("method", name, known)
        if name not in known:
            raise InputError(f"{recipe.name} has no method '{name}'; it has {', '.join(known)}.")
    return [name for name in known if asked is None or name in asked]


def _chosen_settings(recipe: Recipe, asked: Sequence[str] | None, scale: ScaleName) -> list[str]:
    """A setting is named by itself or by a part that several have, such as n100."""
    if asked is None:
        return recipe.settings_at(scale)
    for name in asked:
        if not any(_is_part(name, setting) for setting in recipe.settings):
            raise InputError(f"{recipe.name} has no setting '{name}'; it has {', '.join(recipe.settings)}.")
    return [setting for setting in recipe.settings if any(_is_part(name, setting) for name in asked)]


def _is_part(name: str, setting: str) -> bool:
    """
    >>> _is_part("n100", "n100/cifar100"), _is_part("n10", "n100/cifar100"), _is_part("n100/cifar10", "n100/cifar100")
    (True, False, False)
    """
    return f"/{name}/" in f"/{setting}/"


def _warning(recipe: Recipe, method: str, setting: str, scale: ScaleName) -> str:
    """What is different from the paper's setting, in one setting as an example."""
    theirs, here = (settings_by_name(recipe.experiment(method, setting, which)) for which in ("paper", scale))
    changes = [
        f"{name} {shown(here[name])} instead of {shown(value)}"
        for name, value in theirs.items()
        if here[name] != value and name not in ("engine", "device")
    ]
    return f"NOT THE PAPER'S SETTING ({method}, {setting}): {', '.join(changes)}."


@contextmanager
def _claimed(folder: Path, recipe: Recipe, scale: ScaleName) -> Iterator[Path]:
    """The folder, which belongs to this recipe and scale from now on; inside, no other process works on it."""
    with ExitStack() as held:
        with writable(folder):
            if folder.exists() and not folder.is_dir():
                raise _not_ours(folder)
            disk.make_folder(folder)
            held.enter_context(locked(folder))
            _settle(folder, {"recipe": recipe.name, "scale": scale})
        yield folder


def _settle(folder: Path, wanted: Mapping[str, str]) -> None:
    """Make the folder this reproduction's; raises if it is another's."""
    if (folder / RECORD).is_file():
        found = _read_record(folder / RECORD)
        if found != wanted:
            raise InputError(
                f"'{folder}' holds {found.get('recipe')} at scale {found.get('scale')}, not {wanted['recipe']} at "
                f"scale {wanted['scale']}: choose another folder (--out)."
            )
        return
    if any(folder.iterdir()):
        raise _not_ours(folder)
    disk.write(folder / RECORD, json.dumps(wanted, indent=2) + "\n")


def _not_ours(folder: Path) -> InputError:
    return InputError(f"'{folder}' exists and is not a reproduction: choose a new or empty folder (--out).")


def _damaged(cells: Sequence[Cell], folder: Path, failures: Mapping[str, str]) -> dict[str, str]:
    """Why finished runs can't be read, by their names; one whose records were changed has failed."""
    found: dict[str, str] = {}
    for cell in cells:
        try:
            if cell.name not in failures:
                finished_run(folder / "runs" / cell.name)
        except InputError as error:
            found[cell.name] = str(error)
    return found


def _read_record(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"can't read '{path}': {error}; choose another folder (--out).") from error
    return found if isinstance(found, dict) else {}


def _by_cell(cells: Sequence[Cell]) -> list[list[Cell]]:
    """The runs of each method and setting: one per seed."""
    grouped: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        grouped.setdefault((cell.method, setting_of(cell.point.values())), []).append(cell)
    return list(grouped.values())


def _row(
    recipe: Recipe, scale: ScaleName, cells: Sequence[Cell], folder: Path, failures: Mapping[str, str]
) -> dict[str, Any]:
    method, setting = cells[0].method, setting_of(cells[0].point.values())
    theirs, rule = published(recipe, method, setting), recipe.variant(method).rule
    done = {cell.seed: folder / "runs" / cell.name for cell in cells if cell.name not in failures}
    by_seed = {seed: measured(path, recipe.compare, rule) for seed, path in done.items()}
    values = list(by_seed.values())
    notes = [theirs.note, *(failures[cell.name] for cell in cells if cell.name in failures)]
    row: dict[str, Any] = {
        "method": method, "setting": setting, "ours": fmean(values) if values else math.nan,
        "std": stdev(values) if len(values) > 1 else math.nan, "published": theirs.value,
        "published_std": theirs.std, "seeds": " ".join(map(str, done)), "scale": scale,
        "note": "; ".join(note for note in notes if note), "by_seed": by_seed,
    }  # fmt: skip
    target = recipe.entry.targets.get(setting)
    if target is not None:
        reached = pd.DataFrame([costs(path, target, rule) for path in done.values()])
        row |= {"target": target} | {str(name): mean for name, mean in reached.mean(skipna=False).items()}
    return row


def _with_differences(rows: Sequence[Mapping[str, Any]], recipe: Recipe) -> pd.DataFrame:
    """The table with the gains over Standalone and over the method that the paper compares with."""
    found = {(row["method"], row["setting"]): row for row in rows}
    reference = recipe.entry.reference
    complete = []
    for row in rows:
        gains: dict[str, Any] = {"reference": reference or ""}
        for name, base in (("standalone", BASELINE), ("reference", reference)):
            other = found.get((base, row["setting"])) if base and base != row["method"] else None
            gains[f"ours_minus_{name}"] = _gain(row["by_seed"], other["by_seed"]) if other else math.nan
            gains[f"published_minus_{name}"] = row["published"] - other["published"] if other else math.nan
        gains["gain_difference"] = gains[f"ours_minus_{recipe.base}"] - gains[f"published_minus_{recipe.base}"]
        complete.append({**row, **gains})
    columns = [*COLUMNS, *(COST_COLUMNS if recipe.entry.targets else [])]
    return pd.DataFrame(complete, columns=columns).round(4)


def _gain(ours: Mapping[int, float], base: Mapping[int, float]) -> float:
    """The mean difference over the seeds that both have: seeds differ more than methods do.

    >>> _gain({0: 51.0, 1: 70.0}, {0: 50.0})
    1.0
    """
    shared = ours.keys() & base.keys()
    return fmean(ours[seed] - base[seed] for seed in shared) if shared else math.nan


def _series(recipe: Recipe, cells: Sequence[Cell], folder: Path) -> pd.DataFrame:
    return pd.DataFrame(
        {"method": cell.method, "setting": setting_of(cell.point.values()), "seed": cell.seed, **row}
        for cell in cells
        for row in series(
            recipe.entry.series, folder / "runs" / cell.name, recipe.compare, recipe.variant(cell.method).rule
        )
    )
