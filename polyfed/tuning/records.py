"""What a search leaves on disk: its plan, every trial, the curves of trials, and the best settings."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import yaml

from polyfed.errors import InputError
from polyfed.metrics import Metric
from polyfed.records import disk
from polyfed.records.claim import locked, writable
from polyfed.records.rows import as_csv
from polyfed.yaml_text import parse_yaml

State: TypeAlias = Literal["finished", "pruned", "failed"]
DATA = "the data"
"""What a plan calls the hash of its data, as run folders do."""
TRIALS = ("method", "trial", "state", "{score}", "best_so_far", "seconds", "settings", "reason")
CURVES = ("method", "trial", "round", "{score}")


@dataclass(frozen=True)
class Trial:
    """One tried combination of settings."""

    method: str
    number: int
    settings: Mapping[str, Any]
    state: State
    value: float = math.nan
    """Mean over the seeds of the search of the metric on validation samples; of a pruned trial what it had reached."""
    seconds: float = 0.0
    reason: str = ""
    curve: Mapping[int, float] = field(default_factory=dict)
    """Validation accuracy of the first seed by round."""


@dataclass(frozen=True)
class Tuned:
    """What a search found for one method."""

    method: str
    best: Trial
    trials: int
    file: Path
    """An experiment file with the best settings, for `polyfed run` and `polyfed compare`."""


class TuneFolder:
    """The folder of a search. Trials are the only state: a search that was stopped continues from them."""

    def __init__(self, path: Path, metric: Metric = "accuracy") -> None:
        self.path = path
        self.metric = metric
        """What validation samples are scored by."""
        self.trials: list[Trial] = []

    @staticmethod
    @contextmanager
    def claimed(path: Path, plan: Mapping[str, Any], metric: Metric = "accuracy") -> Iterator[TuneFolder]:
        """The folder for this search: a new one, or that of the same search with other methods or fewer trials.

        Inside, no other process searches in it.
        """
        with ExitStack() as held:
            with writable(path):
                disk.make_folder(path)
                held.enter_context(locked(path))
                _settle(path, plan)
            folder = TuneFolder(path, metric)
            folder.trials = folder._read_trials()
            yield folder

    def of(self, method: str) -> list[Trial]:
        """A method's trials in their order."""
        return [trial for trial in self.trials if trial.method == method]

    def best(self, method: str) -> Trial | None:
        """The finished trial with the highest validation accuracy; the first of equals."""
        done = [trial for trial in self.of(method) if trial.state == "finished"]
        return max(done, key=lambda trial: trial.value, default=None)

    def add(self, trial: Trial) -> None:
        """Keep a trial; it counts as soon as it is on disk."""
        self.trials.append(trial)
        # The curves first: a trial without its curve could not be pruned against, a curve without its trial is ignored.
        disk.write(self.path / "curves.csv", as_csv([self._header(CURVES), *self._curve_rows()]))
        disk.write(self.path / "trials.csv", as_csv([self._header(TRIALS), *self._trial_rows()]))

    def write_best(self, name: str, content: Mapping[str, Any]) -> Path:
        """Write an experiment file with the best settings of a method."""
        file = self.path / name
        disk.write(file, yaml.safe_dump(dict(content), sort_keys=False))
        return file

    @property
    def _score(self) -> str:
        return f"validation_{self.metric}"

    def _header(self, columns: Sequence[str]) -> list[str]:
        return [column.format(score=self._score) for column in columns]

    def _trial_rows(self) -> Iterable[Sequence[Any]]:
        for trial, best in zip(self.trials, best_so_far(self.trials), strict=True):
            yield (
                trial.method, trial.number, trial.state, trial.value, math.nan if best is None else best,
                round(trial.seconds, 2), json.dumps(trial.settings), trial.reason,
            )  # fmt: skip

    def _curve_rows(self) -> Iterable[Sequence[Any]]:
        for trial in self.trials:
            for number, value in trial.curve.items():
                yield trial.method, trial.number, number, value

    def _read_trials(self) -> list[Trial]:
        if not (self.path / "trials.csv").exists():
            return []
        try:
            curves: dict[tuple[str, int], dict[int, float]] = {}
            for row in self._rows("curves.csv"):
                curve = curves.setdefault((row["method"], int(row["trial"])), {})
                curve[int(row["round"])] = float(row[self._score])
            trials = [
                Trial(
                    row["method"], int(row["trial"]), _settings(row["settings"]), _state(row["state"]),
                    float(row[self._score]), float(row["seconds"]), row["reason"],
                    curves.get((row["method"], int(row["trial"])), {}),
                )
                for row in self._rows("trials.csv")
            ]  # fmt: skip
            for method in {trial.method for trial in trials}:
                numbers = [trial.number for trial in trials if trial.method == method]
                if numbers != list(range(len(numbers))):
                    raise ValueError(f"trials of {method} are missing or not in order")
        except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
            raise self.unreadable(error) from error
        return trials

    def unreadable(self, error: Exception | str) -> InputError:
        """The error for trials that can't be those of this search."""
        return InputError(
            f"the trials in '{self.path}' can't be read ({' '.join(str(error).split())}): restore trials.csv and "
            "curves.csv, or choose another folder with --out."
        )

    def _rows(self, name: str) -> list[dict[str, str]]:
        with (self.path / name).open(newline="") as file:
            return list(csv.DictReader(file))


def best_so_far(trials: Iterable[Trial]) -> Iterator[float | None]:
    """After each trial the best value that its method has had; none before the first finished one."""
    best: dict[str, float] = {}
    for trial in trials:
        if trial.state == "finished":
            best[trial.method] = max(trial.value, best.get(trial.method, -math.inf))
        yield best.get(trial.method)


def _settings(text: str) -> dict[str, Any]:
    settings = json.loads(text)
    if not isinstance(settings, dict):
        raise ValueError(f"'{text}' is not what a trial has set")
    return settings


def _state(text: str) -> State:
    for state in get_args(State):
        if text == state:
            return state  # type: ignore[no-any-return]
    raise ValueError(f"unknown state '{text}'")


def _settle(path: Path, plan: Mapping[str, Any]) -> None:
    """Make the folder this search's; raises if it is another's."""
    file = path / "tune.yaml"
    if not file.exists():
        if any(path.iterdir()):
            raise InputError(f"'{path}' is not empty and holds no search: choose another folder with --out.")
        disk.write(file, yaml.safe_dump(dict(plan), sort_keys=False))
        return
    # What searches of earlier versions did not write: they know no other metric, and not what their data were.
    found = {"metric": "accuracy", DATA: plan.get(DATA), **_read_plan(file)}
    for name in {**found, **plan}:
        if found.get(name) != plan.get(name):
            raise InputError(
                f"'{path}' holds a search with {name} {found.get(name)!r}, not {plan.get(name)!r}: choose another "
                "folder with --out, or the same settings and data."
            )


def _read_plan(file: Path) -> dict[str, Any]:
    try:
        content = parse_yaml(file.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"'{file}' can't be read: restore it, or choose another folder with --out.") from error
    if not isinstance(content, dict):
        raise InputError(f"'{file}' does not describe a search: restore it, or choose another folder with --out.")
    return content
