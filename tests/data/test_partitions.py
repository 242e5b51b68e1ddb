"""Who owns what: facts known from the papers, and promises that hold for any numbers."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polyfed.data import PARTITIONS, SPLITS, ClientData, Dataset, partition
from polyfed.data.owners import apportion, default_minimum, plan_shares
from polyfed.errors import InputError


def labelled(labels: list[int] | torch.Tensor, classes: int, official_test: int = 0) -> Dataset:
    """A dataset of which only the labels matter."""
    labels = torch.as_tensor(labels, dtype=torch.int64)
    images = torch.zeros(len(labels), 1)
    return Dataset("labels", images, labels, classes, official_test=official_test, pools_test=True)


def even(samples: int, classes: int, official_test: int = 0) -> Dataset:
    return labelled(torch.arange(samples) % classes, classes, official_test)


def counts(dataset: Dataset, clients: list[ClientData], part: str | None = None) -> np.ndarray:
    """Samples [client, class], of one part or of all."""
    table = np.zeros((len(clients), dataset.classes), dtype=int)
    for row, client in zip(table, clients, strict=True):
        indices = getattr(client, part) if part else torch.cat([client.train, client.validation, client.test])
        row += np.bincount(dataset.labels[indices].numpy(), minlength=dataset.classes)
    return table


def used(clients: list[ClientData]) -> list[int]:
    return torch.cat([part for c in clients for part in (c.train, c.validation, c.test)]).tolist()


CIFAR10 = even(60_000, 10, 10_000)


@pytest.mark.parametrize(("clients", "owners"), [(10, 2), (50, 10), (100, 20)])
@pytest.mark.parametrize("compat", [False, True])
def test_shares_owners_per_class_as_in_the_papers(clients: int, owners: int, compat: bool) -> None:
    table = counts(CIFAR10, partition(CIFAR10, "shares", clients, compat=compat))
    assert ((table > 0).sum(0) == owners).all() and ((table > 0).sum(1) == 2).all()


@pytest.mark.parametrize(("clients", "owners"), [(10, 1), (50, 5), (100, 10)])
def test_shares_owners_per_class_for_a_hundred_classes(clients: int, owners: int) -> None:
    dataset = even(60_000, 100)
    table = counts(dataset, partition(dataset, "shares", clients, classes_per_client=10))
    assert ((table > 0).sum(0) == owners).all() and ((table > 0).sum(1) == 10).all()


def test_shares_are_between_two_fifths_and_three_fifths_of_each_other() -> None:
    table = counts(CIFAR10, partition(CIFAR10, "shares", 10))
    sizes = table[table > 0]
    assert table.sum() == 60_000 and sizes.min() >= 6000 * 0.4 - 1 and sizes.max() <= 6000 * 0.6 + 1


def test_shares_differ_in_size() -> None:
    table = counts(CIFAR10, partition(CIFAR10, "shares", 100))
    assert len(set(table[table > 0].tolist())) > 50


def test_released_code_split_keeps_the_official_test_set_apart() -> None:
    """Ten clients, two of ten classes: about 4000, 1000 and 1000 samples each."""
    clients = partition(CIFAR10, "shares", 10, split="released-code")
    assert all(int(c.test.min()) >= 50_000 and int(torch.cat([c.train, c.validation]).max()) < 50_000 for c in clients)
    sizes = np.array([[len(c.train), len(c.validation), len(c.test)] for c in clients])
    assert sizes.sum(0).tolist() == [40_000, 10_000, 10_000]
    assert (abs(sizes / sizes.sum(1, keepdims=True) - np.array([4, 1, 1]) / 6) < 0.01).all()
    tables = [counts(CIFAR10, clients, part) for part in ("train", "validation", "test")]
    assert ((tables[0] > 0) == (tables[1] > 0)).all() and ((tables[0] > 0) == (tables[2] > 0)).all()
    shares = [table / table.sum(0) for table in tables]
    assert abs(shares[0] - shares[1]).max() < 0.002 and abs(shares[0] - shares[2]).max() < 0.002


def test_compat_rounds_down_and_may_give_a_class_twice() -> None:
    clients = partition(CIFAR10, "shares", 100, classes_per_client=8, compat=True)
    table = counts(CIFAR10, clients)
    assert 59_000 < table.sum() < 60_000
    # About 55 of 100 clients own fewer than eight classes in the released code.
    assert 30 <= ((table > 0).sum(1) < 8).sum() <= 75
    assert ((counts(CIFAR10, partition(CIFAR10, "shares", 100, classes_per_client=8)) > 0).sum(1) == 8).all()


def test_compat_needs_numbers_that_fit() -> None:
    with pytest.raises(InputError, match="7 × 3 is not a multiple of 10"):
        partition(CIFAR10, "shares", 7, classes_per_client=3, compat=True)


def test_fewer_shares_than_classes_leave_whole_classes_unused() -> None:
    table = counts(CIFAR10, partition(CIFAR10, "shares", 3, classes_per_client=2))
    assert sorted(table.sum(0).tolist()) == [0] * 4 + [6000] * 6


def test_classes_without_samples_are_not_given_away() -> None:
    dataset = labelled([1, 3, 5] * 20, 8)
    for kind in PARTITIONS:
        table = counts(dataset, partition(dataset, kind, 3, classes_per_client=3, alpha=10))
        assert table.sum() == 60 and (table.sum(1) > 0).all()
    with pytest.raises(InputError, match="samples of 3 classes: use 1 to 3"):
        partition(dataset, "shares", 3, classes_per_client=4)


def test_share_weights_come_from_the_given_range() -> None:
    plan = plan_shares(np.arange(4), 40, 2, np.random.default_rng(0), low=0.1, high=0.9)
    shares = np.concatenate(list(plan.shares.values()))
    assert shares.max() / shares.min() > 3 and all(abs(s.sum() - 1) < 1e-12 for s in plan.shares.values())


def test_pathological_groups_are_fixed() -> None:
    """Twenty clients, two of ten classes: clients 0–3 own {0, 1}, 4–7 own {2, 3}, …"""
    for seed in range(3):
        table = counts(CIFAR10, partition(CIFAR10, "pathological", 20, split="fedtgp", seed=seed))
        for client in range(20):
            first = client // 4 * 2
            assert np.flatnonzero(table[client]).tolist() == [first, first + 1]
        assert table.sum() == 60_000


def test_pathological_groups_of_a_hundred_classes() -> None:
    """Clients 0 and 1 own classes 0–9, 2 and 3 own 10–19, …"""
    dataset = even(60_000, 100)
    table = counts(dataset, partition(dataset, "pathological", 20, classes_per_client=10))
    assert all(np.flatnonzero(table[c]).tolist() == list(range(c // 2 * 10, c // 2 * 10 + 10)) for c in range(20))


def test_pathological_drops_the_last_classes_of_flowers() -> None:
    """102 classes, ten per client, twenty clients: classes 100 and 101 stay unused."""
    dataset = even(8160, 102)
    table = counts(dataset, partition(dataset, "pathological", 20, classes_per_client=10))
    assert np.flatnonzero(table.sum(0) == 0).tolist() == [100, 101] and ((table > 0).sum(1) == 10).all()


def test_pathological_sizes_lie_between_a_tenth_and_the_whole_of_an_even_share() -> None:
    table = counts(CIFAR10, partition(CIFAR10, "pathological", 20))
    for group in range(5):
        columns = table[group * 4 : group * 4 + 4, group * 2 : group * 2 + 2]
        assert (columns[:3] >= 150).all() and (columns[:3] < 1500).all() and (columns[3] >= 1500).all()


@pytest.mark.parametrize(("minimum", "smallest"), [(1, 2), (20, 10)])
def test_pathological_sizes_reach_their_bounds_and_no_further(minimum: int, smallest: int) -> None:
    """80 samples of a class for four clients: at least a tenth of 20, or half the least of two classes; less than 20.

    All sizes in between are drawn, by every client but the last, which gets the rest.
    """
    dataset = even(160, 2)
    tables = [
        counts(dataset, partition(dataset, "pathological", 4, minimum=minimum, split="1:1", seed=seed))
        for seed in range(150)
    ]
    for client in range(3):
        assert {size for table in tables for size in table[client].tolist()} == set(range(smallest, 20))
    assert all((table.sum(0) == 80).all() for table in tables)


def test_dirichlet_is_more_uneven_for_smaller_alpha() -> None:
    spread = []
    for alpha in (0.1, 1.0, 100.0):
        table = counts(CIFAR10, partition(CIFAR10, "dirichlet", 20, alpha=alpha))
        assert table.sum() == 60_000 and table.sum(1).min() >= 40
        spread.append((table > 60).sum())
    assert spread[0] < spread[1] < spread[2] == 200


def test_dirichlet_looks_like_the_published_partition() -> None:
    """FedTGP's CIFAR-10 partition of 20 clients has 102 pairs of a client and one of its classes."""
    tables = [counts(CIFAR10, partition(CIFAR10, "dirichlet", 20, seed=seed)) for seed in range(5)]
    assert 85 < np.mean([(table > 0).sum() for table in tables]) < 110


@pytest.mark.parametrize("alpha", [1e-300, 1e-6, 1e6, 1e300])
def test_dirichlet_survives_extreme_alphas(alpha: float) -> None:
    dataset = even(400, 40)
    table = counts(dataset, partition(dataset, "dirichlet", 4, alpha=alpha, minimum=1))
    assert table.sum() == 400
    if alpha < 1:
        assert ((table > 0).sum(0) == 1).all()
    else:
        assert (table > 0).mean() > 0.9


def test_dirichlet_gives_up_with_a_remedy() -> None:
    with pytest.raises(InputError) as caught:
        partition(even(200, 2), "dirichlet", 20, alpha=0.01, minimum=9)
    message = str(caught.value)
    assert all(words in message for words in ("alpha 0.01", "20 clients", "min_samples (now 9)", "raise alpha"))


def test_default_minimum_is_pfllibs() -> None:
    assert default_minimum(60_000, 20) == 40
    assert default_minimum(60_000, 1000) == 30
    assert default_minimum(10, 10) == 1


def test_iid_sizes_differ_by_at_most_one() -> None:
    dataset = even(103, 3)
    sizes = counts(dataset, partition(dataset, "iid", 10)).sum(1)
    assert sizes.sum() == 103 and sizes.max() - sizes.min() == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "share"}, "did you mean 'shares'"),
        ({"clients": 0}, "clients is 0, but must be a whole number at least 1"),
        ({"clients": 41}, "41 clients cannot share the 40 samples .*: use fewer"),
        ({"classes_per_client": 5}, "has samples of 4 classes: use 1 to 4"),
        ({"classes_per_client": 0}, "use 1 to 4"),
        ({"kind": "pathological", "classes_per_client": 5}, "use 1 to 4"),
        ({"kind": "dirichlet", "alpha": 0.0}, "above 0"),
        ({"kind": "dirichlet", "alpha": float("nan")}, "above 0"),
        ({"kind": "dirichlet", "compat": True}, "shares only"),
        ({"minimum": 0}, "allow 1 to 10"),
        ({"minimum": 11}, "allow 1 to 10"),
        ({"clients": 3, "classes_per_client": 1, "minimum": 11}, "would own 10 sample"),
        ({"clients": 30, "classes_per_client": 4}, "class 0 has 10 sample"),
        ({"kind": "pathological", "clients": 30, "classes_per_client": 4}, "class 0 has 10 sample"),
        ({"split": "1:x"}, "split"),
        ({"split": "released-code"}, "official test set"),
        ({"split": "released-code", "kind": "iid"}, "shares only"),
    ],
)
def test_impossible_wishes_are_refused_in_one_sentence(change: dict[str, object], words: str) -> None:
    wish = {"kind": "shares", "clients": 4, "classes_per_client": 2} | change
    with pytest.raises(InputError, match=words.replace("(", r"\(")) as caught:
        partition(even(40, 4), **wish)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_released_code_without_a_test_sample_for_a_client_is_refused() -> None:
    with pytest.raises(InputError, match="would own no test sample"):
        partition(even(102, 2, official_test=2), "shares", 10, classes_per_client=1, split="released-code")


@given(
    kind=st.sampled_from(PARTITIONS),
    split=st.sampled_from([name for name in SPLITS if name != "released-code"]),
    classes=st.integers(2, 12),
    clients=st.integers(1, 25),
    per_class=st.integers(25, 60),
    seed=st.integers(0, 3),
    data=st.data(),
)
@settings(max_examples=80, deadline=None)
def test_any_partition_keeps_the_promises(
    kind: str, split: str, classes: int, clients: int, per_class: int, seed: int, data: st.DataObject
) -> None:
    each = data.draw(st.integers(1, classes))
    dataset = even(per_class * classes, classes)

    def draw(seed: int) -> list[ClientData]:
        return partition(dataset, kind, clients, classes_per_client=each, alpha=5.0, split=split, seed=seed, minimum=1)

    parts = draw(seed)
    table, indices = counts(dataset, parts), used(parts)
    assert len(parts) == clients and len(set(indices)) == len(indices), "no sample belongs to two"
    assert all(len(c.train) >= 1 and (len(c) < 2 or len(c.test) >= 1) for c in parts)
    assert used(draw(seed)) == indices, "the same seed gives the same partition"
    if len(dataset) > 100:
        assert used(draw(seed + 1)) != indices, "another seed gives another one"
    owned = table.sum(0)
    if kind == "shares":
        assert ((table > 0).sum(1) == each).all(), "every client owns that many different classes"
        owners = (table > 0).sum(0)
        assert owners.max() - owners.min() <= 1
        assert (owned == np.where(owners > 0, per_class, 0)).all()
    elif kind == "pathological":
        assert ((table > 0).sum(1) <= each).all() and set(owned) <= {0, per_class}
        last = np.flatnonzero(owned)[-1]
        assert (owned[: last + 1] == per_class).all(), "only the last classes stay unused"
    else:
        assert (owned == per_class).all(), "every sample is used"


@given(seed=st.integers(0, 1000), clients=st.sampled_from([5, 10, 20]))
@settings(max_examples=20, deadline=None)
def test_parts_have_the_same_class_proportions(seed: int, clients: int) -> None:
    dataset = even(4000, 10)
    parts = partition(dataset, "shares", clients, seed=seed, split="6:2:2")
    ratio = {"train": 0.6, "validation": 0.2, "test": 0.2}
    tables = [counts(dataset, parts, part) / share for part, share in ratio.items()]
    assert all(abs(table - tables[0]).max() <= 10 for table in tables[1:])


@given(st.integers(0, 500), st.lists(st.floats(0, 1), min_size=1, max_size=20).filter(any))
@settings(max_examples=60, deadline=None)
def test_apportion_is_exact_and_close(total: int, shares: list[float]) -> None:
    weights = np.array(shares)
    sizes = apportion(total, weights)
    assert sizes.sum() == total and (sizes >= 0).all() and (sizes[weights == 0] == 0).all()
    assert (abs(sizes - total * weights / weights.sum()) <= 1 + 1e-6).all()


def test_owners_do_not_depend_on_the_split() -> None:
    one, other = (counts(CIFAR10, partition(CIFAR10, "dirichlet", 20, split=split)) for split in ("8:1:1", "fedtgp"))
    assert (one == other).all()


def test_indices_are_plain_sorted_tensors_of_their_own() -> None:
    client = partition(CIFAR10, "iid", 100)[7]
    for part in (client.train, client.validation, client.test):
        assert part.dtype == torch.int64 and torch.equal(part, part.sort().values)
        assert part.untyped_storage().nbytes() == part.numel() * 8


@pytest.mark.parametrize("kind", ["shares", "pathological", "iid"])
def test_a_thousand_clients_take_no_time(kind: str) -> None:
    start = time.perf_counter()
    assert len(partition(CIFAR10, kind, 1000)) == 1000
    assert time.perf_counter() - start < 3  # about 0.05 s on one core; the rest is for a busy machine


def test_the_partition_of_a_seed_never_changes() -> None:
    """Guards results across versions: these indices were drawn once and written down."""
    dataset = even(60, 3)
    first = [client.test.tolist() for client in partition(dataset, "shares", 3, classes_per_client=2, seed=1)]
    assert first == [[53, 55], [41, 51], [10, 39]]
    sizes = [len(client.train) for client in partition(even(400, 4), "pathological", 4, seed=1)]
    assert sizes == [26, 134, 31, 129]
