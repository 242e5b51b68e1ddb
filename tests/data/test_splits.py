"""Ratios are understood, and a client's samples are divided class by class."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyfed.data.splits import SPLITS, TEST, TRAIN, VALIDATION, Ratio, divide, parse_split
from polyfed.errors import InputError


@pytest.mark.parametrize(
    ("split", "ratio"),
    [
        ("8:1:1", Ratio(8, 1, 1)),
        ("8:2", Ratio(4, 0, 1)),
        ("75:0:25", Ratio(3, 0, 1)),
        ("0.8 : 0.1 : 0.1", Ratio(8, 1, 1)),
        ("1:0", Ratio(1, 0, 0)),
        ("pfedes", Ratio(4, 0, 1)),
        ("pfedes-arxiv", Ratio(8, 1, 1)),
        ("fedssa", Ratio(8, 1, 1)),
        ("dc-pfl", Ratio(8, 1, 1)),
        ("FedTGP", Ratio(3, 0, 1)),
        ("released-code", Ratio(4, 1, 1)),
    ],
)
def test_ratios_and_names(split: str, ratio: Ratio) -> None:
    assert parse_split(split) == ratio


@pytest.mark.parametrize("split", ["", "8", "8:1:1:1", "0:1:1", "-8:2", "8:", "8/2", "99999:1", "8:1e"])
def test_what_is_no_ratio_is_refused_in_one_sentence(split: str) -> None:
    with pytest.raises(InputError, match="split") as caught:
        parse_split(split)
    assert "\n" not in str(caught.value)


def test_an_unknown_name_gets_a_hint() -> None:
    with pytest.raises(InputError, match="did you mean 'pfedes'"):
        parse_split("pfedex")


def parts_of(sizes: list[list[int]], ratio: Ratio, seed: int = 0) -> np.ndarray:
    """Counts [client, class, part] after dividing clients that own so many samples of each class."""
    cells = [
        (client, label) for client, row in enumerate(sizes) for label, count in enumerate(row) for _ in range(count)
    ]
    owners, labels = np.array(cells, dtype=np.int64).T
    parts = divide(owners, labels, ratio, np.random.default_rng(seed))
    counts = np.zeros((len(sizes), len(sizes[0]), 3), dtype=int)
    np.add.at(counts, (owners, labels, parts), 1)
    return counts


def test_even_classes_are_divided_exactly() -> None:
    """100 and 50 samples at 8:1:1 are 80/10/10 and 40/5/5."""
    counts = parts_of([[100, 50]], Ratio(8, 1, 1))
    assert counts.tolist() == [[[80, 10, 10], [40, 5, 5]]]


def test_remainders_go_to_different_classes() -> None:
    """5 + 5 samples at 8:1:1 give one validation and one test sample, of different classes."""
    counts = parts_of([[5, 5]], Ratio(8, 1, 1))
    assert sorted(counts[0].tolist()) == [[4, 0, 1], [4, 1, 0]]


def test_a_class_of_one_sample_goes_to_training() -> None:
    counts = parts_of([[1, 9], [10, 1]], Ratio(1, 0, 1))
    assert counts[0, 0].tolist() == counts[1, 1].tolist() == [1, 0, 0]


def test_a_client_of_single_samples_still_tests_on_one() -> None:
    counts = parts_of([[1, 1, 1]], Ratio(8, 1, 1))
    assert counts.sum((0, 1)).tolist() == [2, 0, 1]


def test_two_samples_are_one_to_train_and_one_to_test() -> None:
    assert parts_of([[2, 0]], Ratio(8, 1, 1)).sum((0, 1)).tolist() == [1, 0, 1]
    assert parts_of([[0, 1]], Ratio(8, 1, 1)).sum((0, 1)).tolist() == [1, 0, 0]


def test_parts_without_a_share_stay_empty() -> None:
    assert parts_of([[7, 8]], Ratio(1, 0, 0)).sum((0, 1)).tolist() == [15, 0, 0]
    assert parts_of([[10, 10]], Ratio(4, 1, 0)).sum((0, 1)).tolist() == [16, 4, 0]


def test_samples_without_owner_have_no_part() -> None:
    owners, labels = np.array([0, -1, 0, 0]), np.array([0, 0, 0, 0])
    parts = divide(owners, labels, Ratio(2, 0, 1), np.random.default_rng(0))
    assert parts[1] == -1 and sorted(parts[[0, 2, 3]]) == [TRAIN, TRAIN, TEST]


@given(
    sizes=st.integers(1, 4).flatmap(
        lambda classes: st.lists(
            st.lists(st.integers(0, 40), min_size=classes, max_size=classes).filter(any), min_size=1, max_size=5
        )
    ),
    split=st.sampled_from([*SPLITS, "1:1", "1:9", "5:2:3"]),
    seed=st.integers(0, 9),
)
@settings(max_examples=80, deadline=None)
def test_any_division_keeps_the_promises(sizes: list[list[int]], split: str, seed: int) -> None:
    ratio = parse_split(split)
    counts, owned = parts_of(sizes, ratio, seed), np.array(sizes)
    assert (counts.sum(2) == owned).all()
    totals, samples = counts.sum(1), owned.sum(1)
    assert (totals[:, TRAIN] >= 1).all()
    assert (totals[samples >= 2, TEST] >= 1).all()
    if ratio.validation == 0:
        assert not totals[:, VALIDATION].any()
    several = (owned > 1).any(1)
    # A class that a client tests on it has trained on, unless all its classes are of one sample.
    assert (counts[several][owned[several] > 0][:, TRAIN] >= 1).all()
    for part, share in ((VALIDATION, ratio.validation / ratio.total), (TEST, ratio.test / ratio.total)):
        wanted = np.minimum(owned * share, owned)
        # Per class never more than one above its share; below it only where training needs the sample.
        assert (counts[:, :, part] <= np.ceil(wanted) + 1).all()
        plenty = (owned * ratio.train >= ratio.total).all(1)
        assert (abs(totals[plenty, part] - samples[plenty] * share) <= 1.5).all()
