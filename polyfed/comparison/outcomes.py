"""What a finished run came to, in numbers small enough to keep those of many runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd

from polyfed.errors import InputError
from polyfed.records import RunFolder
from polyfed.records.claim import read_claim

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

    @property
    def seconds(self) -> float:
        """Measured time of training and server."""
        return self.totals["seconds"]

    def accuracy(self, choice: RoundChoice = "final") -> float:
        """The federation's accuracy in the round that counts."""
        return float(getattr(self, ROUNDS[choice]))


def read_outcome(path: str | Path, rule: str | None = None) -> Outcome:
    """The outcome of the finished run in a folder, by the method's own rule of prediction or by another."""
    folder = RunFolder.open(path)
    summary = folder.summary()
    if damage := folder.damage():
        raise InputError(
            f"the run in '{path}' can't be read: {damage[0]}; restore that, or move the run away and run it again."
        )
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
    )


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
    if SIMULATED in test:
        columns[SIMULATED] = test[SIMULATED]
    return pd.DataFrame(columns).reindex(test.index).reset_index()
