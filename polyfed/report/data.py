"""What a report is made of: runs and comparisons, read from their folders into plain frames.

Every frame has a column `method` with the name under which a run is shown, and accuracies are in percent.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pandas as pd

from polyfed import confusion
from polyfed.comparison.folder import PLAN
from polyfed.comparison.outcomes import SIMULATED, Outcome, RoundChoice, read_curve, read_outcome
from polyfed.comparison.plan import folder_name
from polyfed.comparison.render import Sheet, legend, sheets
from polyfed.comparison.table import Question, rows_at
from polyfed.config import read_yaml
from polyfed.errors import InputError
from polyfed.ranges import typed
from polyfed.records import RunFolder
from polyfed.records.claim import read_claim

X_AXES = {"round": "round", "floats": "floats sent, up and down", "flops": "FLOPs of the clients"}
X_AXES |= {SIMULATED: "simulated seconds"}
"""What accuracy can be drawn over, and what the axis is called."""


@dataclass(frozen=True)
class Run:
    """One run, finished or not."""

    folder: RunFolder
    label: str
    """What it is called in tables; runs that differ only in their seeds share it."""
    point: Mapping[str, Any] = field(default_factory=dict)
    """The swept settings that concern it."""
    source: str = ""
    """Where it comes from, if runs of several comparisons are shown together."""

    @property
    def path(self) -> Path:
        """Its folder."""
        return self.folder.path

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """The settings that determine its numbers, by name."""
        settings: Mapping[str, Any] = read_claim(self.path).get("settings", {})
        return settings

    @property
    def method(self) -> str:
        """The method's own name."""
        return str(self.settings.get("method.name", "unknown"))

    @property
    def seed(self) -> int:
        """Its seed."""
        return int(self.settings.get("seed", 0))

    @property
    def name(self) -> str:
        """What it is called in figures: its label, the swept settings if there are any, and where it comes from."""
        words = ", ".join([self.label, *(f"{name}={typed(value)}" for name, value in self.point.items())])
        return f"{words} ({self.source})" if self.source else words

    @cached_property
    def outcome(self) -> Outcome | None:
        """What it came to; None if it has not ended."""
        return read_outcome(self.path) if self.folder.finished else None

    @cached_property
    def curve(self) -> pd.DataFrame:
        """Accuracies and costs so far."""
        return self.outcome.curve if self.outcome else read_curve(self.folder)

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        """Everything noteworthy."""
        return self.folder.events()

    @cached_property
    def confusion(self) -> pd.DataFrame:
        """confusion.csv by the method's own rule; empty if nothing is recorded."""
        try:
            counts = self.folder.confusion()
        except InputError:
            return pd.DataFrame(columns=list(confusion.COLUMNS))
        return _where(counts, "rule", counts["rule"].iloc[0])

    @property
    def last_confusion(self) -> pd.DataFrame:
        """The same of the last round that has it."""
        return _where(self.confusion, "round", self.confusion["round"].max())


@dataclass(frozen=True)
class Source:
    """Runs that belong into one table: those of a comparison, or single runs."""

    title: str
    runs: Sequence[Run]
    swept: Mapping[str, Sequence[Any]]
    question: Question
    notes: Sequence[str] = ()

    @cached_property
    def table(self) -> pd.DataFrame:
        """A row per method at every point, as in comparison.csv; of finished runs only."""
        rows = []
        for values in product(*self.swept.values()):
            point = dict(zip(self.swept, values, strict=True))
            found: dict[str, dict[int, Outcome]] = {}
            for run in self.runs:
                if run.outcome and all(point[name] == value for name, value in run.point.items()):
                    found.setdefault(run.label, {})[run.seed] = run.outcome
            rows += rows_at(point, found, self.question)
        return pd.DataFrame(rows)

    @property
    def sheets(self) -> list[Sheet]:
        """The table in parts for people."""
        return [] if self.table.empty else sheets(self.table, list(self.swept), self.question)

    @property
    def remarks(self) -> list[str]:
        """What the columns are, and what a reader must know."""
        return [*([] if self.table.empty else legend(self.table, self.question, None)), *self.notes]


@dataclass(frozen=True)
class Material:
    """All runs of a report, and the frames that its figures are drawn from."""

    sources: Sequence[Source]

    @property
    def runs(self) -> list[Run]:
        """All runs, in the order in which they were given."""
        return [run for source in self.sources for run in source.runs]

    @property
    def names(self) -> list[str]:
        """What runs are called in figures, each name once."""
        return list(dict.fromkeys(run.name for run in self.runs))

    @property
    def first_runs(self) -> list[Run]:
        """One run of each name, that of the first seed: for what can't be averaged over seeds."""
        first: dict[str, Run] = {}
        for run in self.runs:
            first.setdefault(run.name, run)
        return list(first.values())

    @cached_property
    def curves(self) -> pd.DataFrame:
        """By evaluated round, means over seeds: accuracy, low and high (one standard deviation away), costs so far."""
        frames = [run.curve.assign(method=run.name) for run in self.runs if len(run.curve)]
        if not frames:
            return pd.DataFrame(columns=["method", "round", "accuracy"])
        found = pd.concat(frames)
        found["floats"] = found["upload_floats"] + found["download_floats"]
        grouped = found.groupby(["method", "round"], sort=False)
        table = grouped[[c for c in (*X_AXES, "seconds") if c in found and c != "round"]].mean()
        accuracy = 100 * grouped["accuracy"].mean()
        spread = 100 * grouped["accuracy"].std().fillna(0)
        table = table.assign(accuracy=accuracy, low=accuracy - spread, high=accuracy + spread)
        return table.assign(seeds=grouped["accuracy"].size()).reset_index()

    @cached_property
    def clients(self) -> pd.DataFrame:
        """A row per client of each finished run: its network, samples, final accuracy and gain over the baseline."""
        frames = [
            run.folder.clients().assign(method=run.name, seed=run.seed, gain=self._gain(run))
            for run in self.runs
            if run.outcome
        ]
        if not frames:
            return pd.DataFrame(columns=["method", "seed", "client", "accuracy", "gain"])
        found = pd.concat(frames, ignore_index=True)
        return found.assign(accuracy=100 * found["accuracy_final"])

    def _gain(self, run: Run) -> Any:
        """By client, percentage points over the baseline's run of the same seed; NaN where there is none."""
        source = next(source for source in self.sources if run in source.runs)
        alone = next(
            (
                other
                for other in source.runs
                if other.label == source.question.baseline != run.label
                and other.seed == run.seed
                and all(run.point.get(name) == value for name, value in other.point.items())
            ),
            None,
        )
        if not run.outcome or not alone or not alone.outcome:
            return math.nan
        own, base = run.outcome.clients["final"], alone.outcome.clients["final"]
        return 100 * (own - base) if len(own) == len(base) else math.nan

    @cached_property
    def client_curves(self) -> pd.DataFrame:
        """Each client's accuracy by round, of the first seed; empty unless runs recorded `confusion: every`."""
        frames = [
            confusion.client_scores(run.confusion).assign(method=run.name)
            for run in self.first_runs
            if run.confusion["round"].nunique() > 2
        ]
        columns = ["method", "client", "round", "accuracy"]
        found = pd.concat(frames)[columns] if frames else pd.DataFrame(columns=columns)
        return found.assign(accuracy=100 * found["accuracy"])

    @cached_property
    def holdings(self) -> pd.DataFrame:
        """Test samples of each class that each client holds, in the first run that recorded them."""
        run = next((run for run in self.first_runs if len(run.confusion)), None)
        if run is None:
            return pd.DataFrame(columns=["client", "class", "samples"])
        held = run.last_confusion.rename(columns={"true": "class", "count": "samples"})
        return held.groupby(["client", "class"])["samples"].sum().reset_index()

    @cached_property
    def class_accuracies(self) -> pd.DataFrame:
        """By class, the share of all clients' test samples that are predicted correctly, in percent, over all seeds."""
        frames = [
            confusion.class_scores(run.last_confusion).assign(method=run.name)
            for run in self.runs
            if len(run.confusion)
        ]
        if not frames:
            return pd.DataFrame(columns=["method", "class", "samples", "accuracy"])
        sums = pd.concat(frames).groupby(["method", "class"], sort=False)[["samples", "correct"]].sum().reset_index()
        return sums.assign(accuracy=100 * sums["correct"] / sums["samples"])

    @cached_property
    def confusions(self) -> pd.DataFrame:
        """What is predicted as what: a row per pair of classes, by client and for all together; the first seed."""
        frames = [run.last_confusion.assign(method=run.name) for run in self.first_runs if len(run.confusion)]
        columns = ["method", "client", "true", "predicted", "count"]
        if not frames:
            return pd.DataFrame(columns=[*columns, "share"])
        each = pd.concat(frames)[columns]
        keys = ["method", "client", "true", "predicted"]
        both = pd.concat([each.assign(client="all"), each.assign(client=each["client"].astype(str))])
        found = both.groupby(keys, sort=False)["count"].sum().reset_index()
        return found.assign(share=100 * found["count"] / found.groupby(keys[:3])["count"].transform("sum"))

    @cached_property
    def trade_off(self) -> pd.DataFrame:
        """A row per name: final accuracy, floats sent and FLOPs of a run, mean over seeds of finished runs."""
        rows = [
            {"method": run.name, "accuracy": 100 * run.outcome.accuracy_final, "flops": run.outcome.totals["flops"],
             "floats": run.outcome.totals["upload_floats"] + run.outcome.totals["download_floats"]}
            for run in self.runs if run.outcome
        ]  # fmt: skip
        frame = pd.DataFrame(rows, columns=["method", "accuracy", "floats", "flops"])
        return frame.groupby("method", sort=False, as_index=False).mean()


def read(*paths: str | Path, baseline: str = "standalone", round: RoundChoice = "final") -> Material:
    """The runs and comparisons in these folders, finished or not.

    >>> found = read("runs/first", "runs/second")   # doctest: +SKIP
    >>> found.clients                               # doctest: +SKIP
    """
    if not paths:
        raise InputError("a report needs at least one folder of a run or a comparison.")
    folders = list(dict.fromkeys(Path(path) for path in paths))
    comparisons = [path for path in folders if (path / PLAN).is_file()]
    sources = [_comparison(path, str(path) if len(folders) > 1 else "", baseline, round) for path in comparisons]
    single = [RunFolder.open(_existing(path)) for path in folders if path not in comparisons]
    if single:
        runs = [Run(folder, label) for folder, label in zip(single, _labels(single), strict=True)]
        sources.append(_source("Runs", runs, {}, baseline, round, []))
    material = Material(sources)
    for run in material.runs:
        _check_readable(run)
    return material


def _where(frame: pd.DataFrame, column: str, value: Any) -> pd.DataFrame:
    chosen: pd.DataFrame = frame[frame[column] == value]
    return chosen


def _existing(path: Path) -> Path:
    if not path.is_dir():
        raise InputError(f"there is no folder '{path}': name the folder of a run or of a comparison.")
    return path


def _labels(folders: Sequence[RunFolder]) -> list[str]:
    """The method's name, or the folder's where runs of one method differ in more than the seed."""
    settings = [read_claim(folder.path).get("settings", {}) for folder in folders]
    kinds = [json.dumps({n: v for n, v in each.items() if n != "seed"}, sort_keys=True) for each in settings]
    methods = [str(each.get("method.name", "unknown")) for each in settings]
    seen = [(method, each.get("seed")) for method, each in zip(methods, settings, strict=True)]
    clear = {
        method
        for method in methods
        if len({kind for kind, own in zip(kinds, methods, strict=True) if own == method}) == 1
        and len({place for place in seen if place[0] == method}) == methods.count(method)
    }
    names = [folder.path.resolve().name for folder in folders]
    unique = [name if names.count(name) == 1 else str(f.path) for name, f in zip(names, folders, strict=True)]
    return [method if method in clear else name for method, name in zip(methods, unique, strict=True)]


def _source(
    title: str, runs: Sequence[Run], sweeps: Mapping[str, Sequence[Any]], baseline: str, round: RoundChoice,
    notes: list[str],
) -> Source:  # fmt: skip
    compared = _baseline(runs, baseline)
    if compared is not None and not sweeps and not _one_federation(runs):
        notes.append("Runs of one seed began with different data or partitions, so there are no differences.")
        compared = None
    if open_runs := sum(not run.folder.finished for run in runs):
        notes.append(f"{open_runs} of {len(runs)} runs have not ended; the tables are of the others.")
    return Source(title, runs, sweeps, Question(round, None, compared), notes)


def _one_federation(runs: Sequence[Run]) -> bool:
    """Whether clients of runs with the same seed are the same."""
    first: dict[int, list[Any]] = {}
    for run in runs:
        facts = read_claim(run.path).get("facts", {})
        own = [facts.get(name) for name in ("the data", "the partition")]
        if first.setdefault(run.seed, own) != own:
            return False
    return True


def _comparison(path: Path, source: str, baseline: str, round: RoundChoice) -> Source:
    plan = read_yaml(path / PLAN)
    methods, sweeps, seeds = plan.get("methods") or {}, plan.get("sweeps") or {}, plan.get("seeds") or []
    if not isinstance(methods, dict) or not isinstance(sweeps, dict) or not isinstance(seeds, list):
        raise InputError(f"'{path / PLAN}' is damaged: restore the file, or name the runs in it one by one.")
    runs, notes = [], []
    for name, label, point in _planned(methods, sweeps, seeds):
        if (path / "runs" / name).is_dir():
            try:
                runs.append(Run(RunFolder.open(path / "runs" / name), label, point, source))
            except InputError as error:
                notes.append(f"Left out: {error}")
    if not runs:
        raise InputError(f"the comparison in '{path}' has no runs yet: its folder 'runs' is empty.")
    return _source(f"Comparison in {path}" if source else "Comparison", runs, sweeps, baseline, round, notes)


def _planned(
    methods: Mapping[str, Any], sweeps: Mapping[str, Sequence[Any]], seeds: Sequence[int]
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """The folders that runs of a plan can have, with label and point; a sweep concerns some methods only."""
    concerned = [chosen for size in range(len(sweeps) + 1) for chosen in combinations(sweeps, size)]
    for label, seed, chosen in product(methods, seeds, concerned):
        for values in product(*(sweeps[name] for name in chosen)):
            point = dict(zip(chosen, values, strict=True))
            yield folder_name(str(label), seed, point), str(label), point


def _baseline(runs: Sequence[Run], wanted: str) -> str | None:
    """The label to compare with; without standalone there are no differences."""
    labels = {run.label: run.method for run in runs}
    if wanted in labels:
        return wanted
    named = [label for label, method in labels.items() if method == wanted]
    if len(named) == 1:
        return named[0]
    if wanted != "standalone":
        raise InputError(f"the baseline '{wanted}' is not among the runs; there are {', '.join(labels)}.")
    return None


def _check_readable(run: Run) -> None:
    """Raise a sentence for records that can't be read, before anything is drawn."""
    try:
        _ = run.curve, run.confusion, run.seed
    except (KeyError, ValueError, TypeError) as error:
        raise InputError(
            f"the records of the run in '{run.path}' can't be read ({type(error).__name__}: {error}): they are damaged "
            "or come from another version; restore them, or run it again from its config.yaml."
        ) from error
