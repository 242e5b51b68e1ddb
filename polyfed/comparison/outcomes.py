"""What a finished run came to, in numbers small enough to keep those of many runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd

from polyfed.data import SOURCES, Dataset
from polyfed.errors import InputError
from polyfed.metrics import FURTHER, METRICS, TITLES, Metric, checked_metric
from polyfed.records import RunFolder
from polyfed.records.claim import read_claim
from polyfed.report.summary import tells_more

RoundChoice = Literal["final", "best-validation", "best-test"]
ROUNDS: dict[RoundChoice, str] = {
    "final": "accuracy_final",
    "best-validation": "accuracy_at_best_validation",
    "best-test": "accuracy_best",
}
"""Which round counts, and what the accuracy in it is called."""
COSTS = ("upload_floats", "download_floats", "upload_bytes", "download_bytes", "flops", "seconds")
SIMULATED = "simulated_seconds"


@dataclass(frozen=True)
class Outcome:
    """A finished run by one rule of prediction."""

    rule: str
    rules: tuple[str, ...]
    """All rules of the method; the first is its own."""
    accuracy_final: float
    accuracy_at_best_validation: float
    accuracy_best: float
    """Best on test: chosen by looking at the test samples."""
    best_validation: float
    """The best accuracy on validation samples, for choosing settings."""
    worst_deciles: Mapping[RoundChoice, float]
    """Mean over the worst tenth of the clients, in the round of the federation that counts."""
    clients: Mapping[RoundChoice, np.ndarray]
    """Each client's accuracy, in its own best rounds except for `final`; empty for any other rule than the method's."""
    curve: pd.DataFrame
    """A row per evaluated round: round, accuracy, validation, and all costs up to then."""
    totals: Mapping[str, float]
    """Costs of all rounds: floats and bytes up and down, flops, seconds, and simulated_seconds if there is a clock."""
    replies_left_out: int
    facts: Mapping[str, str]
    """Hashes of the data, the partition and the networks that the run began with."""
    further: Mapping[Metric, Mapping[RoundChoice, float]] = field(default_factory=dict)
    """Metrics beside accuracy as far as they are known, in the last round and in those that are best by the metric."""
    further_clients: Mapping[Metric, np.ndarray] = field(default_factory=dict)
    """Each client's in the last round; empty for any other rule than the method's."""
    largest_class: float = math.nan
    """The share of the largest class of a client's test samples, mean over clients."""
    tells_more: bool = False
    """Whether metrics beside accuracy say more: there are two classes, or they are imbalanced."""

    @property
    def seconds(self) -> float:
        """Measured time of training and server."""
        return self.totals["seconds"]

    def accuracy(self, choice: RoundChoice = "final") -> float:
        """The federation's accuracy in the round that counts."""
        return float(getattr(self, ROUNDS[choice]))

    def value(self, metric: Metric, choice: RoundChoice = "final") -> float:
        """The federation's mean of a metric in the round that counts; NaN where it is not known."""
        return self.accuracy(choice) if metric == "accuracy" else self.further.get(metric, {}).get(choice, math.nan)

    def client_values(self, metric: Metric, choice: RoundChoice) -> np.ndarray:
        """Each client's value of a metric; empty where that is not recorded."""
        if metric == "accuracy":
            return self.clients[choice]
        return self.further_clients.get(metric, np.array([])) if choice == "final" else np.array([])

    def worst_decile(self, metric: Metric, choice: RoundChoice) -> float:
        """Mean over the worst tenth of the clients, as recorded; NaN where it is not."""
        return self.worst_deciles[choice] if metric == "accuracy" else math.nan


def finished_run(path: str | Path) -> RunFolder:
    """The folder of a finished run; raises if its records are not those with which it ended."""
    folder = RunFolder.open(path)
    folder.summary()
    if damage := folder.damage():
        raise InputError(
            f"the run in '{path}' can't be read: {damage[0]}; restore that, or move the run away and run it again."
        )
    return folder


def read_outcome(path: str | Path, rule: str | None = None) -> Outcome:
    """The outcome of the finished run in a folder, by the method's own rule of prediction or by another."""
    folder = finished_run(path)
    summary = folder.summary()
    evaluations = folder.evaluations()
    rules = tuple(str(name) for name in evaluations["rule"].unique())
    chosen = rule or rules[0]
    if chosen not in rules:
        raise InputError(f"the run in '{path}' has no rule '{chosen}'; it predicts by {' and by '.join(rules)}.")
    own = evaluations[evaluations["rule"] == chosen]
    test, validation = (own[own["part"] == part].set_index("round") for part in ("test", "validation"))
    rounds = _rounds(folder)
    places = _places(test["accuracy_mean"], validation["accuracy_mean"])
    return Outcome(
        rule=chosen,
        rules=rules,
        **{name: _at(test["accuracy_mean"], places[choice]) for choice, name in ROUNDS.items()},
        best_validation=float(validation["accuracy_mean"].max()),
        worst_deciles={choice: _at(test["accuracy_worst_decile"], place) for choice, place in places.items()},
        clients=_clients(folder) if chosen == rules[0] else {choice: np.array([]) for choice in ROUNDS},
        curve=_curve(test, validation, rounds),
        totals={name: float(summary[name]) for name in (*COSTS, SIMULATED) if summary.get(name) is not None},
        replies_left_out=int((rounds["participants"] - rounds["replies"]).sum()),
        facts=read_claim(folder.path).get("facts", {}),
        further=_further(test, validation),
        further_clients=_further_clients(folder) if chosen == rules[0] else {},
        largest_class=math.nan if summary.get("largest_class_mean") is None else summary["largest_class_mean"],
        tells_more=tells_more(summary),
    )


def check_metric(name: str, data: str | Dataset | None) -> Metric:
    """The metric of that name; raises if there is none, or if it can't be known for these data."""
    metric = checked_metric(name)
    classes = data.classes if isinstance(data, Dataset) else SOURCES[data].classes if data in SOURCES else None
    if metric == "auc" and classes not in (None, 2):
        others = ", ".join(each for each in METRICS if each != metric)
        raise InputError(f"metric is auc, which is for two classes, but the data have {classes}: use one of {others}.")
    return metric


def without(path: Path, metric: Metric) -> InputError:
    """The error for a run that has not recorded a metric."""
    need = "two classes, and clients with samples of both" if metric == "auc" else "samples"
    return InputError(
        f"the run in '{path}' has recorded no {TITLES[metric]}: it needs {need}, and a run that began with this "
        "version of polyfed; use another metric, or run it again."
    )


def _further(test: pd.DataFrame, validation: pd.DataFrame) -> dict[Metric, dict[RoundChoice, float]]:
    found: dict[Metric, dict[RoundChoice, float]] = {}
    for metric in FURTHER:
        column = f"{metric}_mean"
        if column in test and test[column].notna().any():
            places = _places(test[column], validation[column])
            found[metric] = {choice: _at(test[column], place) for choice, place in places.items()}
    return found


def _further_clients(folder: RunFolder) -> dict[Metric, np.ndarray]:
    frame = folder.clients().sort_values("client")
    return {each: frame[f"{each}_final"].to_numpy(float) for each in FURTHER if f"{each}_final" in frame}


def read_curve(folder: RunFolder) -> pd.DataFrame:
    """The curve of a run that may not have ended, by the method's own rule; empty before the first evaluation."""
    evaluations = folder.evaluations()
    own = evaluations[evaluations["rule"] == evaluations["rule"].iloc[0]] if len(evaluations) else evaluations
    test, validation = (own[own["part"] == part].set_index("round") for part in ("test", "validation"))
    return _curve(test, validation, _rounds(folder)) if len(test) else pd.DataFrame()


def _rounds(folder: RunFolder) -> pd.DataFrame:
    """What every round cost, evaluated or not."""
    events = [event for event in folder.events() if event["event"] == "round"]
    return pd.DataFrame(events, columns=None if events else ["round", *COSTS]).set_index("round")


def _places(test: pd.Series, validation: pd.Series) -> dict[RoundChoice, int | None]:
    """Where in the records the rounds that count are; of equally good ones the first."""
    return {"final": len(test) - 1, "best-validation": _best(validation), "best-test": _best(test)}


def _best(values: pd.Series) -> int | None:
    return int(np.nanargmax(values)) if values.notna().any() else None


def _at(values: pd.Series, place: int | None) -> float:
    return math.nan if place is None else float(values.iloc[place])


def _clients(folder: RunFolder) -> dict[RoundChoice, np.ndarray]:
    frame = folder.clients().sort_values("client")
    return {choice: frame[name].to_numpy(float) for choice, name in ROUNDS.items()}


def _curve(test: pd.DataFrame, validation: pd.DataFrame, rounds: pd.DataFrame) -> pd.DataFrame:
    columns: dict[str, Any] = {"accuracy": test["accuracy_mean"], "validation": validation["accuracy_mean"]}
    columns |= {name: rounds[name].cumsum() for name in COSTS}
    columns |= {metric: test[f"{metric}_mean"] for metric in FURTHER if f"{metric}_mean" in test}
    if SIMULATED in test:
        columns[SIMULATED] = test[SIMULATED]
    return pd.DataFrame(columns).reindex(test.index).reset_index()
