"""Scores beside accuracy, for data where accuracy says little: balanced accuracy, macro-F1 and, for two classes, AUC.

If 2 % of the samples are positive, always predicting the other class has an accuracy of 0.98, but a balanced accuracy
and an AUC of 0.5. A class of which a client has no samples in a part is left out of that client's means.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor

from polyfed.confusion import Table
from polyfed.errors import unknown_name

Metric: TypeAlias = Literal["accuracy", "balanced_accuracy", "macro_f1", "auc"]
METRICS: tuple[Metric, ...] = get_args(Metric)
FURTHER: tuple[Metric, ...] = METRICS[1:]
"""All but accuracy."""
TITLES: dict[Metric, str] = {
    "accuracy": "accuracy", "balanced_accuracy": "balanced accuracy", "macro_f1": "macro-F1", "auc": "AUC",
}  # fmt: skip
UNEVEN = 0.9
"""A class with a larger share of a client's samples makes them imbalanced, however few classes there are."""
DIGITS = 16
"""Binary digits of a margin that count, of 24: engines differ in the last ones, which must not order equal samples."""

Numbers: TypeAlias = np.ndarray[Any, np.dtype[Any]]


def checked_metric(name: str) -> Metric:
    """A metric by its name; raises for any other."""
    for known in METRICS:
        if name == known:
            return known
    raise unknown_name("metric", name, METRICS)


def from_counts(sizes: Table, right: Table, predicted: Table) -> list[dict[Metric, float | None]]:
    """Clients' balanced accuracies (means over classes of recall) and macro-F1 (those of F1); None without samples.

    Of their samples [clients, classes]: those of a class, those of them predicted so, all predicted so. Here recalls
    are 3/4 and 0, and the F1 of class 0 is 2·3 / (4 + 5).

    >>> from_counts(np.array([[4, 2]]), np.array([[3, 0]]), np.array([[5, 1]]))
    [{'balanced_accuracy': 0.375, 'macro_f1': 0.3333333333333333}]
    """
    held = (sizes > 0).sum(1).tolist()
    recall = right / np.maximum(sizes, 1)
    f1 = 2 * right / np.maximum(sizes + predicted, 1)
    # One after another: a sum in another order, or of more clients' classes, could differ in its last digit.
    totals = [np.cumsum(each, 1)[:, -1].tolist() for each in (recall, f1)]
    return [
        {"balanced_accuracy": recalls / number if number else None, "macro_f1": scores / number if number else None}
        for number, recalls, scores in zip(held, *totals, strict=True)
    ]


def margins(scores: Tensor) -> Tensor:
    """By how much the second of two classes is preferred; two equal scores, even infinite ones, prefer none."""
    first, second = scores[..., 0], scores[..., 1]
    return torch.where(first == second, 0.0, second - first)


def auc(true: Numbers, margin: Numbers) -> float | None:
    """The share of pairs of a sample of class 1 and one of class 0 in which the first has the larger margin.

    A tie counts half. None if a class is missing or a margin is not a number. A true class of −1 marks padding.

    >>> auc(np.array([0, 0, 1, 1, -1]), np.array([0.1, 0.4, 0.35, 0.8, 9.0]))
    0.75
    """
    real = true >= 0
    positive, values = true[real] == 1, np.asarray(margin, np.float64)[real]
    ones = int(positive.sum())
    zeros = len(positive) - ones
    if not ones or not zeros or np.isnan(values).any():
        return None
    mantissa, exponent = np.frexp(values)
    _, place, counts = np.unique(np.ldexp(np.rint(np.ldexp(mantissa, DIGITS)), exponent), return_inverse=True,
                                 return_counts=True)  # fmt: skip
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]  # equal values share the mean of their ranks
    return float((ranks[positive].sum() - ones * (ones + 1) / 2) / (ones * zeros))


def is_imbalanced(largest: float, classes: int) -> bool:
    """Whether the largest of a client's classes has over twice an even share of its samples, or nearly all of them.

    >>> is_imbalanced(0.5, 3), is_imbalanced(0.7, 3), is_imbalanced(0.6, 2), is_imbalanced(0.98, 2)
    (False, True, False, True)
    """
    return classes > 1 and largest > min(2 / classes, UNEVEN)
