"""A test set that comes with the data: kept apart or pooled, for any data and partition."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

import polyfed
from polyfed.data import PARTITIONS, SOURCES, ClientData, Dataset, describe_test_set, load_dataset, partition
from polyfed.errors import InputError
from tests import support


def own(train: list[int], test: list[int]) -> Dataset:
    """A user's data of which only the labels matter; the test samples come last."""
    x = np.zeros((len(train) + len(test), 1), np.float32)
    return polyfed.from_arrays(x[: len(train)], np.array(train), x[len(train) :], np.array(test), classes=20)


def by_class(dataset: Dataset, indices: torch.Tensor) -> np.ndarray:
    return np.bincount(dataset.labels[indices].numpy(), minlength=dataset.classes)


def trained(clients: list[ClientData]) -> list[int]:
    return [index for c in clients for index in (*c.train.tolist(), *c.validation.tolist())]


@given(
    kind=st.sampled_from(PARTITIONS),
    split=st.sampled_from(["8:1:1", "8:2", "1:0:0", "fedtgp"]),
    classes=st.integers(2, 6),
    clients=st.integers(1, 12),
    test=st.lists(st.integers(0, 7), min_size=1, max_size=60),
    seed=st.integers(0, 3),
)
@settings(max_examples=80, deadline=None)
def test_nobody_trains_on_a_given_test_set_and_all_of_it_is_used_once(
    kind: str, split: str, classes: int, clients: int, test: list[int], seed: int
) -> None:
    training = 30 * classes
    dataset = own([number % classes for number in range(training)], [*test, 0])
    shares = partition(dataset, kind, clients, classes_per_client=classes, alpha=5.0, split=split, seed=seed, minimum=1)
    assert sorted(trained(shares)) == list(range(training)), "exactly the training samples train or validate"
    tested = [index for c in shares for index in c.test.tolist()]
    wanted = [index for index in range(training, len(dataset)) if int(dataset.labels[index]) < classes]
    assert sorted(tested) == wanted, "every test sample of a class that somebody has is used, and once"
    total = by_class(dataset, torch.tensor(tested))
    held = np.array([by_class(dataset, torch.cat([c.train, c.validation])) for c in shares])
    shown = np.array([by_class(dataset, c.test) for c in shares])
    assert (abs(shown - held * (total / np.maximum(held.sum(0), 1))) < 1).all(), "shares differ by rounding alone"


def test_each_client_tests_on_its_classes_and_on_one_sample_at_least() -> None:
    dataset = own([number % 10 for number in range(1000)], [number % 10 for number in range(20)])
    for kind in ("iid", "shares"):
        shares = partition(dataset, kind, 10)
        assert all(len(c.test) >= 1 for c in shares)
        for c in shares:
            assert set(dataset.labels[c.test].tolist()) <= set(dataset.labels[c.train].tolist())
            assert len(c.validation) == pytest.approx((len(c.train) + len(c.validation)) / 9, abs=1)


def test_named_datasets_pool_and_own_ones_do_not_unless_asked_otherwise() -> None:
    mine = own([0, 1] * 50, [0, 1] * 10)
    named = replace(mine, pools_test=True)
    expected = {("auto", False): False, ("auto", True): True, ("apart", True): False, ("pooled", False): True}
    for (wish, pools), pooled in expected.items():
        shares = partition(named if pools else mine, "iid", 2, test_set=wish)  # type: ignore[arg-type]
        assert (max(trained(shares)) >= 100) == pooled, (wish, pools)


def test_files_torch_datasets_and_named_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pixels, labels = np.zeros((30, 28, 28), np.uint8), np.arange(30) % 10
    for name in ("mine", "mnist"):
        np.savez(tmp_path / f"{name}.npz", x_train=pixels, y_train=labels, x_test=pixels, y_test=labels)
    pairs = TensorDataset(torch.zeros(30, 2), torch.from_numpy(labels))
    small = replace(SOURCES["mnist"], samples=60, test_samples=30)
    monkeypatch.setitem(SOURCES, "mnist", small)
    assert not load_dataset(f"npz:{tmp_path}/mine.npz").pools_test
    assert not polyfed.from_torch_dataset(pairs, pairs).pools_test
    assert load_dataset("mnist", tmp_path).pools_test


def test_the_released_code_s_split_keeps_it_apart_in_any_case() -> None:
    dataset = replace(own([0, 1] * 50, [0, 1] * 10), pools_test=True)
    one, other = (partition(dataset, "shares", 2, split="released-code", test_set=wish) for wish in ("auto", "apart"))
    assert [c.train.tolist() for c in one] == [c.train.tolist() for c in other]
    with pytest.raises(InputError, match="keeps the test set apart, but test_set is pooled"):
        partition(dataset, "shares", 2, split="released-code", test_set="pooled")


@pytest.mark.parametrize(
    ("dataset", "wish", "words"),
    [
        (support.tiny_dataset(), "apart", "'tiny' comes without a test set: leave test_set on auto"),
        (own([0, 1] * 50, [7, 8]), "auto", "no sample of the test set .* pooled"),
        (own([0, 1] * 50, [0, 1]), "apat", "did you mean 'apart'"),
        (own([0, 1, 0], [0, 1] * 20), "auto", "4 clients cannot share the 3 training samples of .*: use fewer"),
    ],
)
def test_what_is_impossible_is_refused(dataset: Dataset, wish: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        partition(dataset, "iid", 4, test_set=wish)  # type: ignore[arg-type]


def test_a_run_says_what_became_of_the_test_set(tmp_path: Path) -> None:
    tiny = support.tiny_dataset()
    dataset = polyfed.from_arrays(tiny.images, tiny.labels, tiny.images[::4], tiny.labels[::4], name="mine")
    for wish, words in (("auto", "kept apart for testing"), ("pooled", "pooled with the others")):
        settings = {"clients": 3, "rounds": 1, "device": "cpu", "test_set": wish}
        result = polyfed.run("standalone", data=dataset, models=support.Wide, out=tmp_path / wish, **settings)
        notes = [event["note"] for event in result.folder.events() if event["event"] == "note"]
        assert any(words in note and "30 samples of the test set of 'mine'" in note for note in notes)
        assert result.folder.summary()["test_set"] == ("apart" if wish == "auto" else "pooled")
    assert polyfed.run("standalone", data=tiny, models=support.Wide, clients=3, rounds=1).summary["test_set"] == "none"


def test_clients_without_test_samples_are_counted() -> None:
    dataset = own([0, 1] * 50, [0, 1])
    shares = partition(dataset, "iid", 10)
    notes = describe_test_set(dataset, "8:1:1", "auto", shares)
    assert notes[1] == "8 of 10 clients have no test samples and are left out of all accuracies"
    dataset = own([0, 1] * 50, [0, 1, 7])
    notes = describe_test_set(dataset, "8:1:1", "auto", partition(dataset, "iid", 2))
    assert "1 stay unused, because nobody trains" in notes[0]
