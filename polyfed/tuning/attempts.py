"""A trial while it runs: its settings, its runs, and who may stop them early."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from polyfed.comparison.together import Named
from polyfed.config import Experiment
from polyfed.errors import InputError
from polyfed.metrics import Metric
from polyfed.records import RunFolder
from polyfed.server.federation import Watcher

if TYPE_CHECKING:
    import optuna


class Pruner(Watcher):
    """Passes everything on, and stops a run that is worse than the median of its method's earlier trials.

    `first` watches the trial's first run: if that one is pruned, so is this.
    """

    def __init__(
        self, outer: Watcher, trial: optuna.trial.Trial | None, metric: Metric, first: Pruner | None = None
    ) -> None:
        self._outer, self._trial, self._metric, self._reported = outer, trial, metric, 0
        self._first = first
        self.pruned = False

    @property
    def stop_requested(self) -> bool:  # type: ignore[override]
        if self._first is not None and self._first.pruned:
            return True
        return self.pruned or self._outer.stop_requested

    def call(self, name: str, *, leads: bool) -> None:
        """Give the run a name in what is passed on, because others run at the same time."""
        self._outer = Named(self._outer, name, leads=leads)

    def on_start(self, config: Any, first_round: int) -> None:
        self._outer.folder = self.folder
        self._outer.on_start(config, first_round)

    def on_client(self, round: int, client: int) -> None:
        self._outer.on_client(round, client)

    def on_note(self, note: str) -> None:
        self._outer.on_note(note)

    def on_round(self, round: int, row: Mapping[str, Any] | None) -> None:
        self._outer.on_round(round, row)
        if row is None or self._trial is None or self.folder is None:
            return
        curve = validation_curve(RunFolder.open(self.folder), self._metric)
        for number, value in list(curve.items())[self._reported :]:
            self._trial.report(value, number)
        self._reported = len(curve)
        self.pruned = self.pruned or self._trial.should_prune()


def validation_curve(folder: RunFolder, metric: Metric = "accuracy") -> dict[int, float]:
    """Mean validation accuracy, or another metric, over clients by round, by the method's own rule."""
    rows = folder.evaluations()
    rows = rows[rows.part == "validation"].drop_duplicates("round")  # the own rule comes first
    return {int(r): float(v) for r, v in zip(rows["round"], rows[f"{metric}_mean"], strict=True)}


@dataclass
class Attempt:
    """A trial whose settings have been suggested."""

    number: int
    values: Mapping[str, Any]
    config: Experiment | InputError
    """What to run, or what is wrong with the suggested settings."""
    watchers: Mapping[int, Pruner]
    """By seed."""
    outcomes: dict[int, BaseException | None] = field(default_factory=dict)
    """By seed, the errors, or None, of runs that were already done together with others."""

    def runs(self, seeds: Sequence[int]) -> list[tuple[Attempt, Experiment]]:
        """The attempt with the settings of each of its runs."""
        if isinstance(self.config, InputError):
            return []
        return [(self, self.config.model_copy(update={"seed": seed})) for seed in seeds]
