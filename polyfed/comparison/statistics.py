"""The statistics of a comparison, as pure functions of arrays. What does not exist is NaN."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

FEWEST_SEEDS = 3
"""With fewer there is no interval: from two seeds a t interval is thirteen times as wide as what lies between them."""
SEEDS_FOR_RANKS = 10
"""Ranks of fewer seeds take too few values: with five, Wilcoxon's smallest p value is 0.0625."""
LEVEL = 0.95


class Interval(NamedTuple):
    """A mean and where it may lie."""

    mean: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        """Whether the sign is clear."""
        return self.low > 0 or self.high < 0


def mean_of(values: Sequence[float] | np.ndarray) -> float:
    """The mean, or NaN without values."""
    return float(np.mean(values)) if len(values) else math.nan


def spread_of(values: Sequence[float] | np.ndarray) -> float:
    """The sample standard deviation; it needs two values.

    >>> spread_of([1.0, 3.0]), spread_of([1.0])
    (1.4142135623730951, nan)
    """
    return float(np.std(values, ddof=1)) if len(values) > 1 else math.nan


def t_interval(values: Sequence[float] | np.ndarray, level: float = LEVEL) -> Interval:
    """Student's interval for the mean of a few independent values, such as differences paired by seed."""
    number = len(values)
    middle = mean_of(values)
    if number < FEWEST_SEEDS:
        return Interval(middle, math.nan, math.nan)
    half = float(stats.t.ppf((1 + level) / 2, number - 1)) * spread_of(values) / math.sqrt(number)
    return Interval(middle, middle - half, middle + half)


def t_test(values: Sequence[float] | np.ndarray) -> float:
    """The two-sided p value of Student's test that the mean is zero."""
    if len(values) < FEWEST_SEEDS:
        return math.nan
    spread, middle = spread_of(values), mean_of(values)
    if spread == 0:  # every seed says the same
        return 1.0 if middle == 0 else 0.0
    return float(2 * stats.t.sf(abs(middle) / (spread / math.sqrt(len(values))), len(values) - 1))


def wilcoxon(values: Sequence[float] | np.ndarray) -> float:
    """The p value of Wilcoxon's signed-rank test that values are as often above zero as below."""
    if len(values) < SEEDS_FOR_RANKS:
        return math.nan
    return float(stats.wilcoxon(values).pvalue) if np.any(values) else 1.0


def holm(p_values: Sequence[float]) -> list[float]:
    """The p values of several tests, corrected by Holm's method; NaN stays and is no test.

    >>> [round(p, 3) for p in holm([0.01, 0.04, 0.03])]
    [0.03, 0.06, 0.06]
    """
    known = sorted((p, place) for place, p in enumerate(p_values) if not math.isnan(p))
    corrected = [math.nan] * len(p_values)
    largest = 0.0
    for rank, (p, place) in enumerate(known):
        largest = max(largest, min(1.0, (len(known) - rank) * p))
        corrected[place] = largest
    return corrected


def worst_decile(accuracies: np.ndarray) -> float:
    """Mean of the worst tenth of the clients, at least one; clients without test samples (NaN) are left out."""
    known = np.sort(accuracies[~np.isnan(accuracies)])
    return mean_of(known[: max(1, len(known) // 10)])


def bootstrap_worst_decile(
    seeds: Sequence[np.ndarray], draw: np.random.Generator, repetitions: int = 2000
) -> tuple[float, float]:
    """95 % of the worst deciles (mean over seeds) when seeds are drawn again, and then clients within each.

    NaN with fewer than three seeds.
    """
    known = [accuracies[~np.isnan(accuracies)] for accuracies in seeds]
    if len(known) < FEWEST_SEEDS or not all(map(len, known)):
        return math.nan, math.nan
    found = np.zeros(repetitions)
    for drawn in draw.integers(len(known), size=(len(known), repetitions)):
        for place, accuracies in enumerate(known):
            mine = np.flatnonzero(drawn == place)
            clients = draw.choice(accuracies, (len(mine), len(accuracies)))
            worst = max(1, len(accuracies) // 10)
            found[mine] += np.partition(clients, worst - 1, axis=1)[:, :worst].mean(axis=1) / len(known)
    low, high = np.quantile(found, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def share_worse(method: Sequence[np.ndarray], baseline: Sequence[np.ndarray]) -> float:
    """The share of clients that do worse than the same client of the same seed does with the baseline.

    A tie is not worse. Clients without test samples are left out.
    """
    differences = np.concatenate([ours - theirs for ours, theirs in zip(method, baseline, strict=True)] or [[]])
    known = differences[~np.isnan(differences)]
    return mean_of(known < 0)


def first_reaching(accuracies: Sequence[float] | np.ndarray, target: float) -> int | None:
    """Where an accuracy first reaches the target; None if it never does."""
    reached = np.flatnonzero(np.asarray(accuracies, float) >= target)
    return int(reached[0]) if len(reached) else None


def clear_best(values: np.ndarray) -> int | None:
    """The row with the best mean, if the paired t interval against the second best excludes zero; otherwise None.

    A row per method, a column per seed that all of them have.
    """
    if values.shape[0] < 2 or values.shape[1] < FEWEST_SEEDS or np.isnan(values).any():
        return None
    first, second = np.argsort(-values.mean(axis=1), kind="stable")[:2]
    return int(first) if t_interval(values[first] - values[second]).low > 0 else None


def mean_ranks(values: np.ndarray) -> np.ndarray:
    """Each method's mean rank over seeds, 1 for the best; ties share their ranks. A row per method."""
    ranks: np.ndarray = stats.rankdata(-values, axis=0).mean(axis=1)
    return ranks


def critical_difference(methods: int, seeds: int, level: float = LEVEL) -> float:
    """By how much mean ranks must differ to tell two of so many methods apart (Nemenyi's test after Friedman's)."""
    quantile = float(stats.studentized_range.ppf(level, methods, math.inf)) / math.sqrt(2)
    return quantile * math.sqrt(methods * (methods + 1) / (6 * seeds))
