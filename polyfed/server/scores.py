"""A federation's accuracy: means over clients, the worst clients, and the round that counts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from polyfed.confusion import Cells, as_text, from_text
from polyfed.errors import InputError
from polyfed.evaluation import Part, Score
from polyfed.metrics import FURTHER
from polyfed.server.replies import Sizes

ACCURACIES = ("accuracy_mean", "accuracy_weighted", "accuracy_std", "accuracy_worst_decile")
SCORES = (*ACCURACIES, *(f"{metric}_mean" for metric in FURTHER))
"""What an evaluated round's record says about all clients."""


def summarise(scores: Mapping[int, Score], part: Part, rule: str) -> dict[str, float]:
    """Accuracy over all clients that have samples in that part: plain and sample-weighted mean, spread, worst decile.

    The worst decile is the mean of the worst tenth of the clients, at least one. Without samples all are NaN, and the
    weighted mean is if a client does not tell how many it has.
    """
    shares = [(score.share(part, rule), score) for score in scores.values()]
    present = [(share, score.counts(part, rule)) for share, score in shares if not math.isnan(share)]
    if not present:
        return dict.fromkeys(ACCURACIES, math.nan)
    accuracies = np.sort([share for share, _ in present])
    told = [counts for _, counts in present if counts is not None]
    correct, samples = map(sum, zip(*told, strict=True)) if told else (0, 0)
    return {
        "accuracy_mean": float(accuracies.mean()),
        "accuracy_weighted": correct / samples if len(told) == len(present) else math.nan,
        "accuracy_std": float(accuracies.std()),
        "accuracy_worst_decile": float(accuracies[: max(1, len(accuracies) // 10)].mean()),
    }


def further_means(scores: Mapping[int, Score], part: Part = "test", rule: str | None = None) -> dict[str, float]:
    """The metrics beside accuracy, each the plain mean over the clients for which it is known."""
    measured = [score.measured(part, rule) for score in scores.values()]
    known = {metric: [value for own in measured if (value := own.get(metric)) is not None] for metric in FURTHER}
    return {f"{metric}_mean": _mean(values) for metric, values in known.items()}


def about_balance(scores: Mapping[int, Score], classes: int) -> dict[str, Any]:
    """For the summary: metrics beside accuracy, AUC only for two classes, and what tells how much accuracy says."""
    final = {f"{name.removesuffix('_mean')}_final": mean for name, mean in further_means(scores).items()}
    if classes != 2:
        del final["auc_final"]
    return {
        **final,
        "classes": classes,
        "largest_class_mean": _mean(score.largest_class for score in scores.values()),
        "imbalanced": any(score.imbalanced for score in scores.values()),
    }


def _mean(values: Iterable[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return float(np.mean(known)) if known else math.nan


@dataclass
class Best:
    """The final accuracy, the one at the round best on validation, and the best on test; of a client or a federation.

    Of rounds that are equally good on validation, the first counts.
    """

    final: float = math.nan
    at_best_validation: float = math.nan
    best: float = math.nan
    best_validation: float = math.nan
    best_validation_round: int = 0
    best_round: int = 0

    def add(self, round: int, test: float, validation: float) -> None:
        """Add an evaluated round."""
        self.final = test
        if not self.best >= test:
            self.best, self.best_round = test, round
        if not self.best_validation >= validation and not math.isnan(validation):
            self.best_validation, self.best_validation_round, self.at_best_validation = validation, round, test

    def to_dict(self) -> dict[str, Any]:
        """Plain values; JSON has no NaN, so a missing value is None."""
        return {name: None if value != value else value for name, value in asdict(self).items()}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Best:
        """What `to_dict` gave."""
        known: dict[str, Any] = {name: math.nan if value is None else value for name, value in values.items()}
        return Best(**known)


@dataclass
class Progress:
    """What a run remembers between rounds besides states: best accuracies, latest evaluations, costs so far."""

    federation: Best = field(default_factory=Best)
    clients: dict[int, Best] = field(default_factory=dict)
    latest: dict[int, Score] = field(default_factory=dict)
    totals: dict[str, float] = field(default_factory=dict)
    stale: set[int] = field(default_factory=set)
    """Clients that trained since they were last evaluated."""
    sizes: Sizes = field(default_factory=Sizes)
    """How large replies were, so that a resumed run refuses the same ones."""
    best_confusion: dict[int, dict[str, Cells]] = field(default_factory=dict)
    """By client and rule, what was predicted as what in the round that is best on validation."""
    engine: dict[str, Any] = field(default_factory=dict)
    """What the engine itself remembers: where clients are real, who has joined."""
    unsaved: str | None = None
    """An attribute of the method that has changed, although no checkpoint holds it."""

    def add_costs(self, costs: Mapping[str, float]) -> None:
        """Add a round's costs to the totals."""
        for name, value in costs.items():
            self.totals[name] = self.totals.get(name, 0) + value

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return {
            "federation": self.federation.to_dict(),
            "clients": {str(client): best.to_dict() for client, best in self.clients.items()},
            "latest": {str(client): score.to_dict() for client, score in self.latest.items()},
            "totals": self.totals,
            "stale": sorted(self.stale),
            "sizes": self.sizes.to_dict(),
            "best_confusion": {
                str(client): {rule: as_text(cells) for rule, cells in counts.items()}
                for client, counts in self.best_confusion.items()
            },
            "engine": self.engine,
            "unsaved": self.unsaved,
        }

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Progress:
        """What `to_dict` gave."""
        try:
            return Progress(
                Best.from_dict(values["federation"]),
                {int(client): Best.from_dict(best) for client, best in values["clients"].items()},
                {int(client): Score.from_dict(score) for client, score in values["latest"].items()},
                dict(values["totals"]),
                set(values["stale"]),
                Sizes.from_dict(values["sizes"]) if "sizes" in values else Sizes(),
                {
                    int(client): {rule: from_text(text) for rule, text in counts.items()}
                    for client, counts in values.get("best_confusion", {}).items()
                },
                dict(values.get("engine", {})),
                values.get("unsaved"),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InputError(
                f"the checkpoint holds no progress of a run ({error}): go back to an earlier checkpoint (--from), or "
                "start a new run."
            ) from error


def percent(share: float | None) -> str:
    """
    >>> percent(0.98765)
    '98.77 %'
    """
    return "–" if share is None or share != share else f"{100 * share:.2f} %"
