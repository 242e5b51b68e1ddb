"""How well a client predicts: as counts where they are known, as shares where a client keeps its counts to itself."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self, TypeAlias, TypeVar

from polyfed.confusion import Cells, Counts, as_text, from_text
from polyfed.metrics import FURTHER, Metric, from_counts, is_imbalanced

Part = Literal["test", "validation"]
PARTS: tuple[Part, ...] = ("test", "validation")
Value = TypeVar("Value")
Further: TypeAlias = Mapping[Part, Mapping[str, Mapping[Metric, float | None]]]
"""Metrics beside accuracy by part and rule; None where one is not known."""


class Score(ABC):
    """How well a client predicts the samples of each part, by each of the method's rules of prediction."""

    confusion: Mapping[str, Cells]
    """By rule, which classes of the test samples are predicted as which; empty where that is not known."""
    further: Further
    """Metrics beside accuracy; empty where they are not known."""

    @property
    @abstractmethod
    def rules(self) -> tuple[str, ...]:
        """The rules of prediction; the first is the method's own."""

    @abstractmethod
    def share(self, part: Part, rule: str | None = None) -> float:
        """The share of a part's samples that is predicted correctly, by default by the method's own rule.

        NaN for a client without samples in that part.
        """

    @abstractmethod
    def counts(self, part: Part, rule: str) -> tuple[int, int] | None:
        """How many of a part's samples are predicted correctly, and how many there are; None if that is not told."""

    @abstractmethod
    def without_confusion(self) -> Self:
        """The same without the counts of classes."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """All of it as plain values, for a checkpoint."""

    def measure(self, metric: Metric, part: Part = "test", rule: str | None = None) -> float:
        """One metric of a part's samples, by default by the method's own rule; NaN where it is not known."""
        if metric == "accuracy":
            return self.share(part, rule)
        known = self.measured(part, rule).get(metric)
        return math.nan if known is None else known

    def measured(self, part: Part = "test", rule: str | None = None) -> Mapping[Metric, float | None]:
        """The metrics beside accuracy that are known of a part's samples, by default by the method's own rule."""
        return self.further.get(part, {}).get(rule or self.rules[0], {})

    @property
    def largest_class(self) -> float:
        """The share of the test samples that the largest of their classes has; NaN where that is not known."""
        return math.nan

    @property
    def imbalanced(self) -> bool:
        """Whether the client's test samples are known to be imbalanced."""
        return False

    def accuracy(self, rule: str | None = None) -> float:
        """Test accuracy, by default of the method's own rule; NaN for a client without test samples."""
        return self.share("test", rule)

    def validation_accuracy(self, rule: str | None = None) -> float:
        """Validation accuracy; NaN for a client without validation samples."""
        return self.share("validation", rule)

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Score:
        """What `to_dict` gave; raises a `TypeError` or a `ValueError` for anything else."""
        if isinstance(values.get("test"), Mapping):
            return Shares.from_dict(values)
        confusion = {rule: from_text(text) for rule, text in dict(values.get("confusion", {})).items()}
        classes = values.get("test_classes")
        known = None if classes is None else (int(classes[0]), int(classes[1]))
        return Evaluation(**{**values, "confusion": confusion, "test_classes": known})


@dataclass(frozen=True)
class Evaluation(Score):
    """How many of a client's samples are predicted correctly."""

    test: int
    validation: int
    test_correct: dict[str, int]
    validation_correct: dict[str, int]
    confusion: Mapping[str, Cells] = field(default_factory=dict)
    further: Further = field(default_factory=dict)
    test_classes: tuple[int, int] | None = None
    """How many classes the test samples have, and how many samples the largest; None where it was not recorded."""

    @staticmethod
    def of(
        test: Mapping[str, Counts],
        validation: Mapping[str, Counts],
        aucs: Mapping[Part, Mapping[str, Sequence[float | None]]] | None = None,
    ) -> list[Evaluation]:
        """One for each client, from the counts of both parts, by the same rules; with two classes also their AUC."""
        parts: dict[Part, Mapping[str, Counts]] = {"test": test, "validation": validation}
        tables = {name: {rule: own.by_class() for rule, own in part.items()} for name, part in parts.items()}
        first = {name: next(iter(part.values()))[0] for name, part in tables.items()}  # the same by every rule
        sizes = {name: table.sum(1).tolist() for name, table in first.items()}
        right = {name: {rule: t[1].sum(1).tolist() for rule, t in part.items()} for name, part in tables.items()}
        held, largest = (first["test"] > 0).sum(1).tolist(), first["test"].max(1).tolist()
        cells = {rule: own.cells() for rule, own in test.items()}
        further = {name: {rule: from_counts(*t) for rule, t in part.items()} for name, part in tables.items()}
        for name, known in (aucs or {}).items():
            for rule, own in further[name].items():
                areas = known.get(rule, [None] * len(own))
                further[name][rule] = [{**each, "auc": area} for each, area in zip(own, areas, strict=True)]
        return [
            Evaluation(
                sizes["test"][i], sizes["validation"][i], _nth(right["test"], i), _nth(right["validation"], i),
                _nth(cells, i), {name: _nth(part, i) for name, part in further.items()}, (held[i], largest[i]),
            )
            for i in range(len(held))
        ]  # fmt: skip

    @property
    def rules(self) -> tuple[str, ...]:
        return tuple(self.test_correct)

    def share(self, part: Part, rule: str | None = None) -> float:
        correct, size = self.counts(part, rule or next(iter(self.test_correct)))
        return correct / size if size else math.nan

    def counts(self, part: Part, rule: str) -> tuple[int, int]:
        if part == "test":
            return self.test_correct[rule], self.test
        return self.validation_correct[rule], self.validation

    @property
    def largest_class(self) -> float:
        return math.nan if self.test_classes is None or not self.test else self.test_classes[1] / self.test

    @property
    def imbalanced(self) -> bool:
        return self.test_classes is not None and is_imbalanced(self.largest_class, self.test_classes[0])

    def without_confusion(self) -> Evaluation:
        return replace(self, confusion={})

    def told(self) -> dict[str, Any]:
        """What a client elsewhere tells of it, as plain values: counts would show how much of which data it has."""
        test, validation = ({rule: self.share(part, rule) for rule in self.rules} for part in PARTS)
        return Shares(test, validation, self.further).to_dict()

    def to_dict(self) -> dict[str, Any]:
        counts = {name: value for name, value in vars(self).items() if name != "confusion"}
        return {**counts, "confusion": {rule: as_text(cells) for rule, cells in self.confusion.items()}}


@dataclass(frozen=True)
class Shares(Score):
    """Which share of a client's samples is predicted correctly, by rule, and further metrics; NaN where it has none."""

    test: Mapping[str, float]
    validation: Mapping[str, float]
    further: Further = field(default_factory=dict)
    confusion: Mapping[str, Cells] = field(default_factory=dict, init=False, repr=False)

    @property
    def rules(self) -> tuple[str, ...]:
        return tuple(self.test)

    def share(self, part: Part, rule: str | None = None) -> float:
        found = self.test if part == "test" else self.validation
        return found[rule or next(iter(found))]

    def counts(self, part: Part, rule: str) -> None:
        return None

    def without_confusion(self) -> Shares:
        return self

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as they travel too; JSON has no NaN, so a missing share is None."""
        parts: dict[str, Mapping[str, float]] = {part: getattr(self, part) for part in PARTS}
        told = {part: {rule: None if x != x else x for rule, x in found.items()} for part, found in parts.items()}
        return {**told, **({"further": self.further} if self.further else {})}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Shares:
        """What `to_dict` gave; raises a `TypeError` or a `ValueError` for anything but shares by the same rules.

        >>> Shares.from_dict({"test": {"classifier": 0.5}, "validation": {"classifier": None}}).accuracy()
        0.5
        """
        if not isinstance(values, Mapping) or values.keys() - {"further"} != set(PARTS):
            raise ValueError(f"scores are not those of {' and '.join(PARTS)}")
        test, validation = ({rule: _checked(x) for rule, x in dict(values[part]).items()} for part in PARTS)
        if not test or list(test) != list(validation):
            raise ValueError("the parts are not scored by the same rules")
        return Shares(test, validation, _checked_further(values.get("further", {}), list(test)))


def _nth(lists: Mapping[str, Sequence[Value]], number: int) -> dict[str, Value]:
    return {name: values[number] for name, values in lists.items()}


def _checked_further(values: object, rules: list[str]) -> Further:
    """Metrics beside accuracy as they came: none, or of both parts by the same rules, each a share or missing."""
    if not isinstance(values, Mapping) or values.keys() - set(PARTS) or (values and len(values) != len(PARTS)):
        raise ValueError("further scores are not those of the parts")
    found: dict[Part, dict[str, Mapping[Metric, float | None]]] = {}
    for part in PARTS if values else ():
        if list(values[part]) != rules:
            raise ValueError("further scores are not by the same rules")
        found[part] = {}
        for rule in rules:
            own = dict(values[part][rule])
            if own.keys() - set(FURTHER):
                raise ValueError("there is a score of another name")
            found[part][rule] = {each: None if own[each] is None else _checked(own[each]) for each in own}
    return found


def _checked(share: object) -> float:
    if share is None:
        return math.nan
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
        raise ValueError("a score is not a share from 0 to 1")
    return float(share)
