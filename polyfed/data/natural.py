"""Natural partitions: each client keeps the samples that are its own, and its own test set where it has one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyfed.data.dataset import Dataset
from polyfed.data.given_test import deal_test_set
from polyfed.data.labels import as_array, in_order
from polyfed.data.owners import NOBODY
from polyfed.data.splits import TEST, Integers, Ratio, divide
from polyfed.errors import InputError, counted
from polyfed.seeds import numpy_generator

Given = Sequence[Any] | Callable[[Dataset, int], Sequence[Any]]
"""A list of indices for each client, or a function from a dataset and the seed to such lists."""


def number_clients(client: Any, client_test: Any, name: str) -> tuple[Tensor, Tensor | None, tuple[str, ...]]:
    """Who owns each training and each test sample, as numbers, and the clients' names, in ascending order."""
    values = [_client_values(each, name) for each in (client, client_test) if each is not None]
    numeric = all(array.dtype.kind in "biu" for array in values)
    found: list[Any] = sorted(set(values[0].tolist())) if numeric else in_order({str(v) for v in values[0]})
    numbers = {str(value): number for number, value in enumerate(found)}
    owners = []
    for array in values:
        strange = next((value for value in array.tolist() if str(value) not in numbers), None)
        if strange is not None:
            raise InputError(f"client '{strange}' of dataset '{name}' has test samples but none to train on: add some.")
        owners.append(torch.tensor([numbers[str(value)] for value in array.tolist()], dtype=torch.int64))
    return owners[0], owners[1] if len(owners) > 1 else None, tuple(str(value) for value in found)


def with_clients(dataset: Dataset, client: Any, client_test: Any = None) -> Dataset:
    """The dataset, where `client` says whose each sample is: of the training samples, or of all."""
    if client is None:
        if client_test is not None:
            raise InputError(f"dataset '{dataset.name}' has client_test without client: give both, or only client.")
        return dataset
    training = len(dataset) - dataset.official_test
    lengths = len(client), 0 if client_test is None else len(client_test)
    if client_test is None and lengths[0] == len(dataset) and dataset.official_test:
        client, client_test = client[:training], client[training:]
    elif lengths[0] != training or (client_test is not None and lengths[1] != dataset.official_test):
        raise InputError(
            f"dataset '{dataset.name}' has {training} training and {dataset.official_test} test samples, but says of "
            f"{lengths[0]} and {lengths[1]} whose they are: give one client per sample."
        )
    owners, testers, names = number_clients(client, client_test, dataset.name)
    if testers is None:
        testers = torch.full((dataset.official_test,), NOBODY)
    return replace(dataset, owners=torch.cat([owners, testers]), client_names=names)


def without_lists(settings: Mapping[str, Any]) -> tuple[Mapping[str, Any], Given | None]:
    """Settings where a partition that is a list or a function is called given, and that list or function."""
    partition = settings.get("partition")
    if partition == "given":
        raise InputError("partition is given, which stands for lists of indices: pass the lists themselves.")
    if isinstance(partition, str | None):
        return settings, None
    return {**settings, "partition": "given"}, partition


def with_given(dataset: Dataset, partition: Given | None, seed: int) -> Dataset:
    """The dataset, where each client owns the samples that a list, or a function, says; none: as it is."""
    if partition is None:
        return dataset
    lists = partition(dataset, seed) if callable(partition) else partition
    try:
        parts = [np.asarray(as_array(each)) for each in lists]
    except (TypeError, ValueError) as error:
        raise _no_lists(f"holds values that are no lists ({error})") from error
    owners = np.full(len(dataset), NOBODY, dtype=np.int64)
    for client, part in enumerate(parts):
        if part.size == 0:
            raise _no_lists(f"gives client {client} no samples")
        if part.ndim != 1 or part.dtype.kind not in "iu":
            raise _no_lists(f"gives client {client} a {part.dtype} array of shape {part.shape}")
        if part.min() < 0 or part.max() >= len(dataset):
            raise InputError(
                f"partition gives client {client} the sample {int(part[(part < 0) | (part >= len(dataset))][0])}, but "
                f"'{dataset.name}' has the samples 0 to {len(dataset) - 1}."
            )
        if len(np.unique(part)) < len(part) or (owners[part] != NOBODY).any():
            raise InputError(f"partition gives client {client} a sample that is given twice: give each to one client.")
        owners[part] = client
    if not parts:
        raise _no_lists("is empty")
    return replace(dataset, owners=torch.from_numpy(owners), client_names=())


def natural_parts(
    dataset: Dataset, labels: Integers, clients: int, ratio: Ratio, seed: int, *, apart: bool
) -> tuple[Integers, Integers]:
    """Owner and part of every sample.

    A test set that is kept apart stays with its owners; where it has none, it is shared out by classes. Clients without
    test samples of their own get some from the split, unless the whole test set has no owners.
    """
    assert dataset.owners is not None
    owners = dataset.owners.numpy().astype(np.int64)
    if not apart:
        return owners, divide(owners, labels, ratio, numpy_generator(seed, "split"))
    training = len(labels) - dataset.official_test
    mine, testers = owners[:training], owners[training:]
    without_test = Ratio(ratio.train, ratio.validation, 0)
    parts = divide(mine, labels[:training], without_test, numpy_generator(seed, "split"))
    if (testers == NOBODY).all():
        testers = deal_test_set(dataset, mine, clients, numpy_generator(seed, "test set"))
    else:
        untested = ~np.isin(mine, testers)
        # Drawn for all clients, so that what one gets does not depend on who else has a test set.
        split = divide(mine, labels[:training], ratio, numpy_generator(seed, "split"))
        parts = np.where(untested, split, parts)
    own_tests = np.where(testers == NOBODY, NOBODY, TEST)
    return np.concatenate([mine, testers]), np.concatenate([parts, own_tests])


def check_natural(dataset: Dataset, clients: int, least: int) -> None:
    """Raise unless the data say whose they are, and are of that many clients with so many training samples each."""
    if dataset.owners is None:
        raise InputError(
            f"the partition natural needs to know whose each sample is, but '{dataset.name}' does not say it: give "
            f"client, a list of datasets or folders CLIENT/CLASS/PICTURE, or choose another partition, such as shares."
        )
    if clients != dataset.clients:
        raise InputError(
            f"the samples of '{dataset.name}' are those of {dataset.clients} clients, but clients is {clients}: leave "
            f"clients out, or choose another partition, such as shares."
        )
    training = dataset.owners[: len(dataset) - dataset.official_test]
    sizes = torch.bincount(training[training != NOBODY], minlength=clients)
    if int(sizes.min()) < least:
        smallest = int(sizes.argmin())
        name = dataset.client_names[smallest] if dataset.client_names else smallest
        raise InputError(
            f"client {name} of '{dataset.name}' has only {counted(int(sizes.min()), 'sample')} not for testing, "
            f"fewer than {least}: give it more, leave it out of the data, or lower min_samples."
        )


def describe_clients(dataset: Dataset) -> str:
    """A remark on whose the samples are."""
    names = dataset.client_names
    shown = f" ({', '.join(names[:5])}{', …' if len(names) > 5 else ''})" if names else ""
    assert dataset.owners is not None
    unused = int((dataset.owners == NOBODY)[: len(dataset) - dataset.official_test].sum())
    return f"{dataset.clients} clients{shown} keep their own samples" + (f"; {unused} stay unused" if unused else "")


def _client_values(client: Any, name: str) -> NDArray[Any]:
    array = as_array(client)
    if array.ndim == 2 and array.shape[1] == 1:
        array = array.reshape(-1)
    missing = array.dtype.kind == "f" and bool((array != np.round(array)).any())
    missing = missing or any(v is None or (isinstance(v, float) and v != v) for v in array.reshape(-1).tolist())
    if array.ndim != 1 or array.dtype.kind not in "biufUTO" or missing:
        raise InputError(
            f"dataset '{name}' has a client array of {array.dtype} values and shape {array.shape}, or with values "
            f"missing: give one number or name per sample."
        )
    return array.astype(np.int64) if array.dtype.kind == "f" else array


def _no_lists(why: str) -> InputError:
    return InputError(f"partition {why}: give a list with the indices of each client's samples, such as [[0, 1], [2]].")
