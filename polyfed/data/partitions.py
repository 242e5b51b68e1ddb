"""Which client owns which samples of a dataset.

A partition is made in two steps. First every sample gets an owner (or none): one pure function per kind of partition
(see `owners`). Then each client's samples are divided into training, validation and test samples (see `splits`). The
two steps draw from separate generators, so the owners do not depend on the split.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import numpy as np
import torch

from polyfed.data.dataset import ClientData, Dataset
from polyfed.data.given_test import TestSet, chosen_test_set, deal_test_set
from polyfed.data.natural import check_natural, natural_parts
from polyfed.data.owners import (
    NOBODY,
    SharePlan,
    default_minimum,
    dirichlet_owners,
    iid_owners,
    pathological_owners,
    plan_shares,
    share_owners,
    too_few_samples,
)
from polyfed.data.splits import OFFICIAL_SPLIT, SPLITS, TEST, TRAIN, VALIDATION, Integers, Ratio, divide, parse_split
from polyfed.errors import InputError, counted, unknown_name
from polyfed.seeds import numpy_generator

__all__ = [
    "PARTITIONS",
    "SPLITS",
    "SharePlan",
    "default_minimum",
    "dirichlet_owners",
    "iid_owners",
    "partition",
    "pathological_owners",
    "plan_shares",
    "share_owners",
]

Partition = Literal["shares", "pathological", "dirichlet", "iid", "natural", "given"]
NATURAL = ("natural", "given")
"""The kinds for which the data, or the user, say whose each sample is."""
PARTITIONS: tuple[str, ...] = tuple(kind for kind in get_args(Partition) if kind not in NATURAL)
"""The kinds of partition that are drawn."""


def partition(
    dataset: Dataset,
    kind: str,
    clients: int,
    *,
    classes_per_client: int = 2,
    alpha: float = 0.1,
    split: str = "8:1:1",
    seed: int = 0,
    minimum: int | None = None,
    compat: bool = False,
    test_set: TestSet = "auto",
) -> list[ClientData]:
    """Give the dataset's samples to clients; the same seed gives the same partition anywhere.

    - `shares` (pFedES, FedSSA, DC-PFL): each client owns `classes_per_client` different classes and a share of each.
      Samples of classes that get no owner (only when clients × classes per client is below the number of classes)
      stay unused.
    - `pathological` (FedTGP): groups of clients own the same consecutive classes, in sizes that differ widely. Classes
      that come after the last group stay unused.
    - `dirichlet` (FedTGP's practical setting): each class is spread by a draw from a Dirichlet distribution with
      parameter `alpha`; the smaller, the more uneven. Every sample is used.
    - `iid`: shuffled and cut evenly. Every sample is used.
    - `natural`: each client keeps the samples that the dataset says are its own (`Dataset.owners`), and its own test
      set where it has one. `given` is the same for owners that a user listed in Python.

    `split` is a ratio train:validation:test or train:test, or a name of `SPLITS`. `test_set` says how the test
    set that comes with a dataset is used: `pooled` with the other samples before they are distributed, or kept `apart`,
    so that nobody trains on it; then each client gets its share of it, class by class, and only the ratio of training
    to validation in `split` counts. `auto` is what the dataset itself says (`Dataset.pools_test`). The split
    `released-code` always keeps the test set apart.

    `minimum` is the smallest number of samples a client may own (for training and validation, if the test set is kept
    apart); None stands for `default_minimum` with dirichlet and for one sample otherwise. `compat` makes `shares`
    behave as the released code does: a client may draw a class twice, and a few samples per class stay unused because
    every share is rounded down.
    """
    if kind not in get_args(Partition):
        raise unknown_name("partition", kind, get_args(Partition))
    by_code = split.lower() == OFFICIAL_SPLIT
    apart = chosen_test_set(dataset, split, test_set) == "apart" and not by_code
    labels = np.asarray(dataset.labels.cpu().numpy(), dtype=np.int64)
    dealt = labels[: len(labels) - dataset.official_test] if apart else labels
    if kind not in NATURAL:
        _check(dataset, len(dealt), kind, clients, alpha, minimum, compat)
    if kind in ("shares", "pathological"):
        _check_classes_per_client(dataset, dealt, classes_per_client)
    ratio = parse_split(split)
    if kind in NATURAL:
        check_natural(dataset, clients, minimum or 1)
        if by_code:
            raise InputError(f"split '{OFFICIAL_SPLIT}' exists for the partition shares only: give a ratio for {kind}.")
        owners, parts = natural_parts(dataset, labels, clients, ratio, seed, apart=apart)
        return _client_data(owners, parts, clients)
    generator = numpy_generator(seed, "partition")
    if by_code:
        if kind != "shares":
            raise InputError(f"split '{OFFICIAL_SPLIT}' exists for the partition shares only: give a ratio for {kind}.")
        owners, parts = _official_parts(dataset, labels, clients, classes_per_client, compat, generator)
        _check_official(owners, parts, clients)
        _check_sizes(owners, clients, minimum or 1)
        return _client_data(owners, parts, clients)
    owners = _owners(dealt, kind, clients, classes_per_client, alpha, minimum, compat, generator)
    _check_sizes(owners, clients, minimum or 1)
    if not apart:
        return _client_data(owners, divide(owners, labels, ratio, numpy_generator(seed, "split")), clients)
    ratio = Ratio(ratio.train, ratio.validation, 0)
    parts = divide(owners, dealt, ratio, numpy_generator(seed, "split"))
    testers = deal_test_set(dataset, owners, clients, numpy_generator(seed, "test set"))
    parts = np.concatenate([parts, np.where(testers == NOBODY, NOBODY, TEST)])
    return _client_data(np.concatenate([owners, testers]), parts, clients)


def _owners(
    labels: Integers,
    kind: str,
    clients: int,
    classes_per_client: int,
    alpha: float,
    minimum: int | None,
    compat: bool,
    generator: np.random.Generator,
) -> Integers:
    """The owner of every sample, by kind of partition."""
    present = np.unique(labels)
    least = default_minimum(len(labels), clients) if minimum is None else minimum
    if kind == "iid":
        return iid_owners(len(labels), clients, generator)
    if kind == "dirichlet":
        return dirichlet_owners(labels, int(present[-1]) + 1, clients, alpha, least, generator)
    if kind == "pathological":
        return pathological_owners(labels, present, clients, classes_per_client, least, generator)
    plan = plan_shares(present, clients, classes_per_client, generator, compat=compat)
    everything = np.arange(len(labels))
    _check_enough(labels, everything, plan)
    return share_owners(labels, everything, plan, generator, round_down=compat)


def _official_parts(
    dataset: Dataset,
    labels: Integers,
    clients: int,
    classes_per_client: int,
    compat: bool,
    generator: np.random.Generator,
) -> tuple[Integers, Integers]:
    """Owner and part of every sample, where one plan of shares is applied to three pools.

    The pools are four fifths of the official training set, drawn at random, the other fifth, and the official test set.
    """
    if not dataset.official_test:
        raise InputError(
            f"split '{OFFICIAL_SPLIT}' needs a dataset with an official test set, but '{dataset.name}' has none: give "
            f"a ratio such as {SPLITS[OFFICIAL_SPLIT]}."
        )
    training = len(labels) - dataset.official_test
    shuffled = generator.permutation(training)
    cut = training * 4 // 5
    pools = {TRAIN: shuffled[:cut], VALIDATION: shuffled[cut:], TEST: np.arange(training, len(labels))}
    plan = plan_shares(np.unique(labels), clients, classes_per_client, generator, compat=compat)
    _check_enough(labels, pools[TRAIN], plan)
    owners = np.full(len(labels), NOBODY, dtype=np.int64)
    parts = np.full(len(labels), NOBODY, dtype=np.int64)
    for part, pool in pools.items():
        owners[pool] = share_owners(labels, pool, plan, generator, round_down=compat)[pool]
        parts[pool] = part
    return owners, parts


def _check(
    dataset: Dataset, samples: int, kind: str, clients: int, alpha: float, minimum: int | None, compat: bool
) -> None:
    """Check the settings themselves, before any draw; `samples` is how many samples are distributed."""
    if clients < 1:
        raise InputError(f"clients is {clients}, but must be a whole number at least 1.")
    if clients > samples:
        raise too_many_clients(clients, samples, dataset)
    if kind == "dirichlet" and not (math.isfinite(alpha) and alpha > 0):
        raise InputError(f"alpha is {alpha}: the partition dirichlet needs a number above 0, such as 0.1.")
    if minimum is not None and not 1 <= minimum <= samples // clients:
        raise InputError(
            f"min_samples is {minimum}: {clients} clients and {samples} samples allow 1 to {samples // clients}."
        )
    if compat and kind != "shares":
        raise InputError(f"compat exists for the partition shares only: leave it out for {kind}.")


def _check_classes_per_client(dataset: Dataset, labels: Integers, classes_per_client: int) -> None:
    present = len(np.unique(labels))
    if not 1 <= classes_per_client <= present:
        raise InputError(
            f"classes_per_client is {classes_per_client}, but '{dataset.name}' has samples of {present} classes: use "
            f"1 to {present}."
        )


def _check_enough(labels: Integers, pool: Integers, plan: SharePlan) -> None:
    """Check that every owner of a class can get a sample of it."""
    for label, takers in plan.owners.items():
        samples = int(np.count_nonzero(labels[pool] == label))
        if samples < len(takers):
            raise too_few_samples(label, samples, len(takers))


def _check_sizes(owners: Integers, clients: int, least: int) -> None:
    """Check that no client has fewer samples than asked for."""
    sizes = np.bincount(owners[owners != NOBODY], minlength=clients)
    smallest = int(sizes.argmin())
    if sizes[smallest] < least:
        raise InputError(
            f"client {smallest} of {clients} would own {counted(int(sizes[smallest]), 'sample')}, fewer than "
            f"{least}: use fewer clients, another seed or a smaller min_samples."
        )


def _check_official(owners: Integers, parts: Integers, clients: int) -> None:
    """Check that every client can train and test on what the pools gave it."""
    for part, words in ((TRAIN, "training"), (TEST, "test")):
        sizes = np.bincount(owners[(owners != NOBODY) & (parts == part)], minlength=clients)
        if sizes.min() == 0:
            raise InputError(
                f"client {int(sizes.argmin())} of {clients} would own no {words} sample: use fewer clients, or a ratio "
                f"such as {SPLITS[OFFICIAL_SPLIT]} as the split."
            )


def _client_data(owners: Integers, parts: Integers, clients: int) -> list[ClientData]:
    """Each client's indices, in ascending order, as separate tensors (a view would keep all of them in memory)."""
    used = np.flatnonzero(owners != NOBODY)
    places = owners[used] * 3 + parts[used]
    indices = used[np.argsort(places, kind="stable")]
    ends = np.cumsum(np.bincount(places, minlength=3 * clients))
    pieces = [torch.from_numpy(piece.copy()) for piece in np.split(indices, ends[:-1])]
    return [ClientData(*pieces[start : start + 3]) for start in range(0, 3 * clients, 3)]


def too_many_clients(clients: int, samples: int, dataset: Dataset) -> InputError:
    """The error for more clients than samples. How many are possible is not promised: partitions need more of them."""
    what = "samples" if samples == len(dataset) else "training samples"
    return InputError(
        f"{clients} clients cannot share the {samples} {what} of '{dataset.name}': use fewer clients; how many are "
        "possible depends on the partition."
    )
