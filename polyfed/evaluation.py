"""How well a client predicts, as counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from polyfed.confusion import Cells, as_text, correct, from_text, samples


@dataclass(frozen=True)
class Evaluation:
    """How many of a client's samples are predicted correctly, by each of the method's rules of prediction."""

    test: int
    validation: int
    test_correct: dict[str, int]
    validation_correct: dict[str, int]
    confusion: Mapping[str, Cells] = field(default_factory=dict)
    """By rule, which classes of the test samples are predicted as which; empty where a client keeps that to itself."""

    @staticmethod
    def of(test: Mapping[str, Cells], validation: Mapping[str, Cells]) -> Evaluation:
        """From the counts of both parts, by the same rules."""
        sizes = [samples(next(iter(part.values()))) for part in (test, validation)]  # the same by every rule
        right = [{rule: correct(cells) for rule, cells in part.items()} for part in (test, validation)]
        return Evaluation(sizes[0], sizes[1], right[0], right[1], dict(test))

    def accuracy(self, rule: str | None = None) -> float:
        """Test accuracy, by default of the method's own rule; NaN for a client without test samples."""
        return self._share(self.test_correct, self.test, rule)

    def validation_accuracy(self, rule: str | None = None) -> float:
        """Validation accuracy; NaN for a client without validation samples."""
        return self._share(self.validation_correct, self.validation, rule)

    def without_confusion(self) -> Evaluation:
        """The same without the counts of classes."""
        return replace(self, confusion={})

    def told(self) -> dict[str, Any]:
        """What a client elsewhere tells of it, as plain values: counts of classes would show what data it has."""
        return {name: value for name, value in vars(self).items() if name != "confusion"}

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain values, for a checkpoint."""
        return {**self.told(), "confusion": {rule: as_text(cells) for rule, cells in self.confusion.items()}}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Evaluation:
        """What `told` or `to_dict` gave; raises a `TypeError` or a `ValueError` for anything else."""
        confusion = {rule: from_text(text) for rule, text in dict(values.get("confusion", {})).items()}
        return Evaluation(**{**values, "confusion": confusion})

    @staticmethod
    def _share(correct: dict[str, int], samples: int, rule: str | None) -> float:
        return correct[rule or next(iter(correct))] / samples if samples else float("nan")
