"""A comparison from its plan to its tables: `polyfed.compare`, and what stands behind `polyfed compare`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from polyfed.addresses import PYTHON
from polyfed.assemble import data_facts
from polyfed.comparison import folder as folders
from polyfed.comparison import pictures, render
from polyfed.comparison.outcomes import ROUNDS, Outcome, RoundChoice, check_metric, read_outcome, without
from polyfed.comparison.plan import Cell, MethodChoice, common_settings, grid, plan
from polyfed.comparison.runner import run_cells
from polyfed.comparison.table import Question, by_method, check_same_federation, notes_on, shared_accuracies, table_of
from polyfed.data import Dataset, as_data
from polyfed.errors import InputError, RunError
from polyfed.models import Models, resolve
from polyfed.ranges import typed
from polyfed.records import RunFolder, disk
from polyfed.records.claim import read_claim
from polyfed.report import drawing
from polyfed.server.federation import Watcher


@dataclass(frozen=True)
class Comparison:
    """What came of a comparison."""

    folder: Path
    table: pd.DataFrame
    """A row per method at every point of the swept settings, as in comparison.csv."""
    question: Question
    swept: list[str]
    failures: dict[str, str]
    """The reason of every run that failed, by the run's name."""
    notes: list[str]
    """What a reader of the table must know."""
    noise: float | None = None
    """By how much one run done twice differed; none: not measured."""
    curves: pd.DataFrame = field(default_factory=pd.DataFrame, repr=False)

    @property
    def sheets(self) -> list[render.Sheet]:
        """The table in parts for people."""
        return render.sheets(self.table, self.swept, self.question)

    @property
    def remarks(self) -> list[str]:
        """What the columns are, and what a reader must know."""
        return [*render.legend(self.table, self.question, self.noise), *self.notes]


def compare(
    methods: Sequence[MethodChoice],
    *,
    out: str | Path,
    seeds: Sequence[int] | str = "0-4",
    sweeps: Mapping[str, Sequence[Any]] | None = None,
    jobs: int = 1,
    together: int | None = None,
    baseline: str | None = "standalone",
    round: str = "final",
    rule: str | None = None,
    target: float | None = None,
    metric: str = "accuracy",
    noise_floor: bool = True,
    data: Any = None,
    models: Models | None = None,
    trust: bool = False,
    watcher: Watcher | None = None,
    tell: Callable[[str], None] = lambda line: None,
    **settings: Any,
) -> Comparison:
    """Run methods with several seeds and compare them; what is already finished in `out` is not run again.

    `methods` are names, classes, YAML files, or mappings with a `name`, options and a `label`. `sweeps` maps settings
    to the values to try. `metric` is what methods are ranked by: accuracy, balanced_accuracy, macro_f1 or, for two
    classes, auc. `baseline` is the method that the others are compared with, or None. `settings` are those of
    `polyfed.run`. `jobs` processes work at a time. Up to `together` runs that differ in seeds and numbers only train
    their clients in the same cohorts of the vectorized engine; none: as many as make sense on a GPU, one on a CPU. Runs
    that fail are in `failures`; the table has the others.

    >>> found = compare(["standalone", "fedproto"], seeds="0-2", rounds=5, out="proto")   # doctest: +SKIP
    >>> found.table[["method", "accuracy_final_mean", "difference_low", "difference_high"]]   # doctest: +SKIP
    """
    data = None if data is None else as_data(data, settings)
    given = dict(settings) | _named(data, models)
    cells = plan(methods, seeds, given, sweeps, trust=trust)
    ranked = check_metric(metric, data if isinstance(data, Dataset) else cells[0].config.data)
    question = Question(_checked_round(round), rule, find_baseline(cells, baseline), _checked_target(target), ranked)
    path = Path(out)
    finish = partial(
        run_cells, jobs=jobs, together=together, watcher=watcher,
        data=data if isinstance(data, Dataset) else None, models=None if isinstance(models, str) else models,
    )  # fmt: skip
    with folders.claimed(path, cells):
        if isinstance(data, Dataset):
            _check_data(cells, path, data)
        failures = finish(cells, path, tell=tell)
        outcomes = _read(cells, path, question, failures)
        check_same_federation(cells, outcomes)
        again, noise = _noise_cell(cells, outcomes, question), None
        if noise_floor and again is not None:
            if not (path / "noise").exists():
                tell(f"{again.name} once more, to see how much the same run varies")
            try:
                failed = finish([again], path / "noise")
                noise = None if failed else _noise(again, path, outcomes, question)
            except InputError as error:  # the tables can do without
                failed = {again.name: str(error)}
            failures |= {f"noise/{name}": reason for name, reason in failed.items()}
        comparison = _conclude(path, cells, outcomes, question, failures, noise)
        try:
            _write(comparison, cells, outcomes)
        except OSError as error:
            raise RunError(
                f"the tables can't be written to '{path}': {error.strerror or error}; all runs are kept, and when that "
                "is fixed the same command writes the tables."
            ) from error
    return comparison


def find_baseline(cells: Sequence[Cell], wanted: str | None) -> str | None:
    """The label of the method that the others are compared with."""
    if wanted is None:
        return None
    labels = list(dict.fromkeys(cell.method for cell in cells))
    if wanted in labels:
        return wanted
    named = list(dict.fromkeys(cell.method for cell in cells if cell.config.method["name"] == wanted))
    if len(named) == 1:
        return named[0]
    if wanted != "standalone":
        raise InputError(f"the baseline '{wanted}' is not one of the methods: choose one of {', '.join(labels)}.")
    raise InputError(
        f"there is no standalone to compare with: add standalone to the methods, choose another baseline "
        f"(--baseline {labels[0]}), or do without differences (--no-differences)."
    )


def _write(comparison: Comparison, cells: Sequence[Cell], outcomes: Mapping[str, Outcome]) -> None:
    """Write comparison.csv, comparison.md, comparison.tex, curves.csv, and pictures where they can be drawn."""
    path, parts = comparison.folder, comparison.sheets
    disk.write(path / "comparison.csv", comparison.table.to_csv(index=False))
    disk.write(path / "curves.csv", comparison.curves.to_csv(index=False))
    disk.write(path / "comparison.md", _markdown(comparison, cells, outcomes))
    remarks = "".join(f"% {line}\n" for line in comparison.remarks)
    tables = "\n".join(render.latex(sheet) for sheet in parts)
    disk.write(path / "comparison.tex", f"% needs \\usepackage{{booktabs}}\n{remarks}\n{tables}")
    pictures.draw(comparison.curves, comparison.table, comparison.swept, path, comparison.question.metric)
    if not comparison.swept:
        found = by_method({}, cells, outcomes)
        pictures.draw_ranks(shared_accuracies(found, comparison.question), path)


def _markdown(comparison: Comparison, cells: Sequence[Cell], outcomes: Mapping[str, Outcome]) -> str:
    settings = {n: v for n, v in common_settings(cells[0]).items() if n not in comparison.swept}
    origins = sorted({RunFolder.open(comparison.folder / "runs" / name).origin() for name in outcomes})
    blocks = [
        f"# {', '.join(dict.fromkeys(cell.method for cell in cells))}",
        ", ".join(f"{name} {typed(value)}" for name, value in settings.items()) + ".",
        *(render.markdown(sheet).rstrip() for sheet in comparison.sheets),
        "\n".join(f"- {line}" for line in comparison.remarks),
        "\n".join(f"- {name} failed: {reason}" for name, reason in comparison.failures.items()),
        "\n".join(origins),
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _named(data: str | Dataset | None, models: Models | None) -> dict[str, Any]:
    """Data and networks as settings; those from Python by their names."""
    given: dict[str, Any] = {}
    if data is not None:
        given["data"] = PYTHON + data.name if isinstance(data, Dataset) else data
    if models is not None:
        given["models"] = models if isinstance(models, str) else PYTHON + ",".join(a.name for a in resolve(models))
    return given


def _check_data(cells: Sequence[Cell], path: Path, data: Dataset) -> None:
    """Raise if a run began with other data than those that came from Python now."""
    now = data_facts(data, [])["the data"]
    for cell in cells:
        before = read_claim(path / "runs" / cell.name).get("facts", {}).get("the data", now)
        if before != now:
            raise InputError(
                f"{cell.name} in '{path}' has other data than are given now, {before} and not {now}: use these data, "
                "or choose another folder (--out)."
            )


def _checked_round(choice: str) -> RoundChoice:
    for known in ROUNDS:
        if choice == known:
            return known
    raise InputError(f"round is '{choice}', but must be one of {', '.join(ROUNDS)}.")


def _checked_target(target: float | None) -> float | None:
    if target is not None and not 0 < target <= 1:
        raise InputError(f"target is {target:g}, but must be a share greater than 0 and at most 1, such as 0.8.")
    return target


def _read(cells: Sequence[Cell], path: Path, question: Question, failures: dict[str, str]) -> dict[str, Outcome]:
    """The outcomes of all runs that did not fail; one that can't be read has failed."""
    outcomes = {}
    for cell in cells:
        if cell.name in failures:
            continue
        try:
            outcomes[cell.name] = read_outcome(path / "runs" / cell.name)
        except InputError as error:
            failures[cell.name] = str(error)
            continue
        if question.rule is not None:
            outcomes[cell.name] = read_outcome(path / "runs" / cell.name, question.rule)
        if question.metric not in ("accuracy", *outcomes[cell.name].further):
            raise without(path / "runs" / cell.name, question.metric)
    return outcomes


def _noise_cell(cells: Sequence[Cell], outcomes: Mapping[str, Outcome], question: Question) -> Cell | None:
    """The run to do again: one of the baseline if there is one."""
    done = [cell for cell in cells if cell.name in outcomes]
    return next((cell for cell in done if cell.method == question.baseline), done[0] if done else None)


def _noise(cell: Cell, path: Path, outcomes: Mapping[str, Outcome], question: Question) -> float:
    again = read_outcome(path / "noise" / "runs" / cell.name, question.rule)
    asked = question.metric, question.round
    return abs(again.value(*asked) - outcomes[cell.name].value(*asked))


def _conclude(
    path: Path,
    cells: Sequence[Cell],
    outcomes: Mapping[str, Outcome],
    question: Question,
    failures: dict[str, str],
    noise: float | None,
) -> Comparison:
    table = table_of(cells, outcomes, question)
    table["noise_floor"] = float("nan") if noise is None else noise
    swept = list(grid(cells)[0])
    notes = notes_on(cells, outcomes, question)
    if drawing.missing():
        notes.append("Pictures need matplotlib: pip install 'polyfed[pictures]'.")
    curves = pictures.curves_of(cells, outcomes, question.metric)
    return Comparison(path, table, question, swept, failures, notes, noise, curves)
