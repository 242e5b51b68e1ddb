"""Statistics against numbers from tables and by hand, and whether intervals cover what they promise."""

from __future__ import annotations

import math

import numpy as np
import pytest

from polyfed.comparison import statistics
from polyfed.comparison.statistics import Interval
from polyfed.seeds import numpy_generator


@pytest.mark.parametrize(
    ("values", "quantile"),
    [([1.0, 2.0, 6.0], 4.302653), ([1.0, 2.0, 3.0, 4.0, 10.0], 2.776445)],
)
def test_an_interval_uses_the_quantile_of_the_t_table(values: list[float], quantile: float) -> None:
    """Printed tables of Student's t: 4.303 with 2 degrees of freedom, 2.776 with 4, two-sided 95 %.

    1, 2, 6: mean 3, sum of squares 4 + 1 + 9 = 14, variance 7, standard error sqrt(7/3).
    1, 2, 3, 4, 10: mean 4, 9 + 4 + 1 + 0 + 36 = 50, variance 12.5, standard error sqrt(2.5).
    """
    middle, error = (3.0, math.sqrt(7 / 3)) if len(values) == 3 else (4.0, math.sqrt(2.5))
    found = statistics.t_interval(values)
    assert found == pytest.approx((middle, middle - quantile * error, middle + quantile * error), abs=1e-5)


def test_p_values_of_t() -> None:
    """With 2 degrees of freedom the distribution is elementary: p = 1 - t / sqrt(2 + t²).

    1, 2, 6: t = 3 / sqrt(7/3) = 1.963961, so p = 1 - 1.963961 / sqrt(2 + 3.857143) = 0.188498. Signs don't matter.
    """
    assert statistics.t_test([1.0, 2.0, 6.0]) == pytest.approx(0.188498, abs=1e-6)
    assert statistics.t_test([-1.0, -2.0, -6.0]) == pytest.approx(0.188498, abs=1e-6)
    assert (statistics.t_test([0.0, 0.0, 0.0]), statistics.t_test([1.0, 1.0, 1.0])) == (1.0, 0.0)


def test_an_interval_and_a_test_agree_on_five_percent() -> None:
    """The interval excludes zero exactly where p < 0.05."""
    draw = numpy_generator(1, "test")
    for _ in range(200):
        values = draw.normal(1, 1, 5)
        assert statistics.t_interval(values).excludes_zero == (statistics.t_test(values) < 0.05)


def test_two_seeds_give_no_interval() -> None:
    assert statistics.t_interval([1.0, 2.0])[0] == 1.5
    assert all(math.isnan(bound) for bound in statistics.t_interval([1.0, 2.0])[1:])
    assert math.isnan(statistics.t_test([1.0, 2.0]))
    assert not Interval(1.0, math.nan, math.nan).excludes_zero


@pytest.mark.parametrize("seeds", [3, 5])
def test_95_percent_of_intervals_cover_the_truth(seeds: int) -> None:
    """4000 draws: the share that covers has a standard error of 0.0034, and three of these make 0.01.

    A percentile bootstrap of three values covers about 0.75, of five about 0.83: it would fail by far.
    """
    draw = numpy_generator(7, "coverage", seeds)
    samples = draw.normal(0.3, 2.0, (4000, seeds))
    intervals = [statistics.t_interval(sample) for sample in samples]
    covered = np.mean([low <= 0.3 <= high for _, low, high in intervals])
    assert abs(covered - 0.95) < 0.011


def test_holm_by_hand() -> None:
    """Sorted: 0.005·4 = 0.02, 0.01·3 = 0.03, 0.03·2 = 0.06, 0.04·1 = 0.04, which must not fall below 0.06."""
    assert statistics.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert statistics.holm([0.6, 0.7]) == [1.0, 1.0]
    with_gap = statistics.holm([0.02, math.nan, 0.5])
    assert with_gap[0] == pytest.approx(0.04) and math.isnan(with_gap[1]) and with_gap[2] == 0.5


def test_wilcoxon_needs_ten_seeds() -> None:
    """All ten differences positive: both signs of all ranks are equally likely, so p = 2 / 2**10."""
    positive = np.arange(1.0, 11.0)
    assert statistics.wilcoxon(positive) == pytest.approx(2 / 1024)
    assert math.isnan(statistics.wilcoxon(positive[:9]))
    assert statistics.wilcoxon(np.zeros(10)) == 1.0


def test_clients_worse_by_hand() -> None:
    """Seed 0: worse, tie, better; seed 1: worse, worse, no test samples. Three of five are worse."""
    method = [np.array([0.4, 0.5, 0.9]), np.array([0.1, 0.2, math.nan])]
    alone = [np.array([0.5, 0.5, 0.8]), np.array([0.3, 0.3, 0.7])]
    assert statistics.share_worse(method, alone) == pytest.approx(3 / 5)
    assert statistics.share_worse(alone, method) == pytest.approx(1 / 5)
    assert math.isnan(statistics.share_worse([], []))


def test_the_worst_decile_is_of_at_least_one_client() -> None:
    assert statistics.worst_decile(np.array([0.9, 0.3, math.nan, 0.5])) == 0.3
    assert statistics.worst_decile(np.linspace(1, 0.05, 20)) == pytest.approx(0.075)


def test_the_bootstrap_of_the_worst_decile() -> None:
    """Every client equal within a seed: only seeds are drawn, so the mean of three drawn from 0.2, 0.5, 0.8.

    Of 27 draws one gives 0.2, three give 0.3 (two of 0.2, one of 0.5): 2.5 % of all draws lie at or below 0.2 since
    1/27 = 3.7 %. So the bounds are 0.2 and 0.8; without drawing seeds both would be 0.5.
    """
    seeds = [np.full(10, level) for level in (0.2, 0.5, 0.8)]
    low, high = statistics.bootstrap_worst_decile(seeds, numpy_generator(0, "test"))
    assert (low, high) == (pytest.approx(0.2), pytest.approx(0.8))
    spread = [np.linspace(0, 1, 50)] * 3  # equal seeds: only clients differ
    low, high = statistics.bootstrap_worst_decile(spread, numpy_generator(0, "test"))
    assert 0 < low < statistics.worst_decile(spread[0]) < high < 0.2
    again = statistics.bootstrap_worst_decile(spread, numpy_generator(0, "test"))
    assert again == (low, high)
    assert all(map(math.isnan, statistics.bootstrap_worst_decile(seeds[:2], numpy_generator(0, "test"))))


def test_a_best_value_needs_an_interval_against_the_second_best() -> None:
    """A lead of 0.9, 1.0 and 1.1 at three seeds is clear; one of -1, 1 and 3 is not, though its mean is 1 too."""
    base = np.array([5.0, 6.0, 9.0])
    poor = base - 4
    assert statistics.clear_best(np.stack([poor, base + [0.9, 1.0, 1.1], base])) == 1
    assert statistics.clear_best(np.stack([poor, base + [-1, 1, 3], base])) is None
    assert statistics.clear_best(np.stack([base, base])) is None
    assert statistics.clear_best(np.stack([base + 1, base])[:, :2]) is None
    assert statistics.clear_best(base[None]) is None


def test_the_target_is_reached_at_or_above_it() -> None:
    assert statistics.first_reaching([0.1, 0.5, 0.4, 0.9], 0.5) == 1
    assert statistics.first_reaching([0.1, math.nan], 0.5) is None


def test_ranks_and_critical_difference() -> None:
    """Demšar (2006), Table 5: q = 2.343 for three methods and 2.728 for five, at 0.05.

    Two seeds, three methods: ranks 1, 2.5, 2.5 and 1, 2, 3.
    """
    values = np.array([[0.9, 0.9], [0.5, 0.8], [0.5, 0.7]])
    assert statistics.mean_ranks(values).tolist() == [1.0, 2.25, 2.75]
    assert statistics.critical_difference(3, 10) == pytest.approx(2.343 * math.sqrt(3 * 4 / 60), abs=1e-3)
    assert statistics.critical_difference(5, 30) == pytest.approx(2.728 * math.sqrt(5 * 6 / 180), abs=1e-3)
