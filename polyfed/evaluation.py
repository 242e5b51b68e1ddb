"""How well a client predicts, as counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Evaluation:
    """How many of a client's samples are predicted correctly, by each of the method's rules of prediction."""

    test: int
    validation: int
    test_correct: dict[str, int]
    validation_correct: dict[str, int]

    def accuracy(self, rule: str | None = None) -> float:
        """Test accuracy, by default of the method's own rule; NaN for a client without test samples."""
        return self._share(self.test_correct, self.test, rule)

    def validation_accuracy(self, rule: str | None = None) -> float:
        """Validation accuracy; NaN for a client without validation samples."""
        return self._share(self.validation_correct, self.validation, rule)

    @staticmethod
    def _share(correct: dict[str, int], samples: int, rule: str | None) -> float:
        return correct[rule or next(iter(correct))] / samples if samples else float("nan")
