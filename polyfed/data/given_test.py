"""What happens to the test set that comes with a dataset: pooled with the other samples, or kept apart."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np

from polyfed.data.dataset import ClientData, Dataset
from polyfed.data.owners import NOBODY
from polyfed.data.splits import OFFICIAL_SPLIT, Integers, parse_split
from polyfed.errors import InputError, unknown_name

TestSet = Literal["auto", "apart", "pooled"]
"""How to treat a dataset's own test set."""


def chosen_test_set(dataset: Dataset, split: str, wish: str) -> Literal["apart", "pooled", "none"]:
    """What the setting means for this dataset; none: the dataset has no test set."""
    if wish not in get_args(TestSet):
        raise unknown_name("test_set", wish, get_args(TestSet))
    by_code = split.lower() == OFFICIAL_SPLIT
    if by_code and wish == "pooled":
        raise InputError(
            f"split '{OFFICIAL_SPLIT}' keeps the test set apart, but test_set is pooled: change one of them."
        )
    if not dataset.official_test:
        if wish == "apart":
            raise InputError(
                f"test_set is apart, but '{dataset.name}' comes without a test set: leave test_set on auto, and the "
                f"split reserves test samples in each client."
            )
        return "none"
    if by_code or wish == "apart" or (wish == "auto" and not dataset.pools_test):
        return "apart"
    return "pooled"


def deal_test_set(dataset: Dataset, owners: Integers, clients: int, generator: np.random.Generator) -> Integers:
    """The owner of every sample of the test set, where `owners` are those of the training samples.

    The test samples of a class go to the clients that have training samples of it, in proportion to these, each to one
    client. So a client's test samples have the mixture of its classes. Where shares are not whole numbers, clients that
    have no test sample yet come first, then those that lack most of their share. Samples of a class that nobody has
    stay unused.
    """
    labels = np.asarray(dataset.labels.cpu().numpy(), dtype=np.int64)
    training = len(owners)
    held = _counts(labels[:training], owners, clients, dataset.classes)
    given = np.bincount(labels[training:], minlength=dataset.classes)
    present = np.flatnonzero(held.sum(0) * given)
    if len(present) == 0:
        raise InputError(
            f"no sample of the test set of '{dataset.name}' is of a class that a client trains on: give one with "
            f"the classes of the training samples, or pool it with them (test_set: pooled)."
        )
    exact = held * (given / np.maximum(held.sum(0), 1))
    sizes = np.zeros_like(held)
    sizes[:, present] = held[:, present] * given[present] // held.sum(0)[present]
    for label in present:
        left = given[label] - sizes[:, label].sum()
        rest = held[:, label] * given[label] % held[:, label].sum() > 0
        lacks = (exact.sum(1) - sizes.sum(1)) + np.where(sizes.sum(1) == 0, clients + dataset.classes, 0)
        order = np.lexsort((generator.random(clients), -np.where(rest, lacks, -np.inf)))
        sizes[order[:left], label] += 1
    testers = np.full(len(labels) - training, NOBODY, dtype=np.int64)
    for label in present:
        samples = generator.permutation(np.flatnonzero(labels[training:] == label))
        testers[samples] = np.repeat(np.arange(clients), sizes[:, label])
    return testers


def describe_test_set(dataset: Dataset, split: str, wish: str, data: list[ClientData]) -> list[str]:
    """Remarks on how the test set is used, and on clients that have nothing to test on."""
    choice, given = chosen_test_set(dataset, split, wish), dataset.official_test
    notes = []
    if choice == "pooled":
        notes.append(
            f"the {given} samples of the test set of '{dataset.name}' are pooled with the others and "
            f"distributed again (test_set: apart would keep them for testing)"
        )
    tested = sum(len(own.test) for own in data)
    if choice == "apart":
        unused = f"; {given - tested} stay unused, because nobody trains on their class" if tested < given else ""
        notes.append(
            f"the {given} samples of the test set of '{dataset.name}' are kept apart for testing, and each client gets "
            f"its share{unused}"
        )
    without = sum(len(own.test) == 0 for own in data)
    if without == len(data):
        notes.append(f"split {split} has no test part, so there are no accuracies")
    elif without:
        notes.append(f"{without} of {len(data)} clients have no test samples and are left out of all accuracies")
    return notes


def check_tested(dataset: Dataset, split: str, data: list[ClientData]) -> None:
    """Raise if the split has a test part but no client has a test sample: the run would have no accuracy."""
    if parse_split(split).test and all(len(own.test) == 0 for own in data):
        raise InputError(
            f"no client would have a test sample, because {len(data)} clients share {len(dataset)} samples: use fewer "
            f"clients, so that each has at least 2 samples."
        )


def _counts(labels: Integers, owners: Integers, clients: int, classes: int) -> Integers:
    """Samples [client, class]."""
    owned = owners != NOBODY
    cells = np.bincount(owners[owned] * classes + labels[owned], minlength=clients * classes)
    return cells.reshape(clients, classes).astype(np.int64)
