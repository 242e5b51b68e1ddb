"""Whatever a user holds, as a dataset: arrays, frames, torch and Hugging Face datasets, paths, one per client."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from polyfed.data.columns import Columns, class_names_of, is_categorical, is_columnar, is_frame, is_series
from polyfed.data.dataset import Dataset
from polyfed.data.own import guess_address, no_columns
from polyfed.data.samples import Samples, join_samples
from polyfed.data.sources import load_dataset
from polyfed.data.table_columns import with_texts_as_names
from polyfed.data.tables import Table, from_frame
from polyfed.data.torch_datasets import no_dataset, read_samples
from polyfed.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

CLIENT = "client (polyfed)"
"""The column that is added to frames of several clients."""
LABEL = "label (polyfed)"
"""The column that is added to frames whose labels are given beside them."""


def as_data(data: Any, settings: Mapping[str, Any]) -> str | Dataset:
    """What `data=` may be, as a name or a dataset: a path becomes the address of what is there.

    Of the settings, `label`, `client` and `image` name columns.

    One of these for each client, in a list or behind `load_partition(number)`, becomes one dataset that knows whose
    each sample is.
    """
    if isinstance(data, str):
        return data
    if isinstance(data, Path):
        return guess_address(str(data)).text
    named = [settings.get(name) for name in ("label", "client", "image")]
    columns = Columns(*(None if name is None else str(name) for name in named))
    if isinstance(data, Dataset):
        columns.refuse(data.name)
        return data
    parts = _clients(data)
    if parts is None:
        return _dataset(_read(data, columns), columns)
    read = {name: _read(part, columns) for name, part in parts.items()}
    if columns.client is not None:
        raise no_columns("client", columns.client, "one dataset per client")
    return _joined(read, columns)


def _dataset(read: Samples | pd.DataFrame, columns: Columns) -> Dataset:
    if is_frame(read):
        client = columns.client or (CLIENT if CLIENT in read else None)
        return from_frame(read, _label(read, columns), name="frame", client=client)
    return read.dataset("arrays")


def _read(data: Any, columns: Columns) -> Samples | pd.DataFrame:
    """Samples or a table, from one thing that a user holds."""
    if isinstance(data, str | Path):
        name = data if isinstance(data, str) else guess_address(str(data)).text
        return _from_dataset(load_dataset(name, label=columns.label))
    if isinstance(data, Dataset):
        return _from_dataset(data)
    if is_frame(data):
        return data
    if isinstance(data, tuple) and len(data) in (2, 3, 4) and is_frame(data[0]):
        return _with_labels(data, columns)
    if isinstance(data, tuple) and len(data) in (2, 3, 4) and all(_is_array(each) for each in data):
        columns.refuse("arrays")
        if len(data) == 3:
            return Samples(data[0], data[1], client=data[2])
        return Samples(*data)
    if isinstance(data, Mapping) and "train" in data:
        if not set(data) <= {"train", "test"}:
            others = ", ".join(sorted(str(each) for each in set(data) - {"train", "test"}))
            raise InputError(f"data has the parts {others} beside train and test: give a mapping of these two only.")
        return _with_test(*(_read(data[part], columns) for part in ("train", "test") if part in data))
    if is_columnar(data) and (frame := columns.as_frame(data)) is not None:
        return frame
    unfit = (Mapping, np.ndarray, Tensor, torch.utils.data.DataLoader)
    if not hasattr(data, "__len__") or isinstance(data, unfit) or is_series(data):
        raise no_dataset(data)
    x, y, owners = read_samples(data, "dataset", columns)
    return Samples(x, y, class_names=class_names_of(data, columns), client=owners)


def _with_labels(data: tuple[Any, ...], columns: Columns) -> pd.DataFrame:
    """A table from a frame of features and what belongs to it row by row: its labels, and perhaps its clients."""
    columns.refuse("a frame with labels beside it")
    if len(data) == 4:
        raise _no_test()
    added = dict(zip((LABEL, CLIENT), (np.asarray(each) for each in data[1:]), strict=False))
    for what, values in added.items():
        if values.shape != (len(data[0]),):
            raise InputError(
                f"the frame has {len(data[0])} rows, but what is given beside it as its {what.split()[0]} has the "
                f"shape {values.shape}: give one value per row."
            )
    return with_texts_as_names(data[0]).assign(**added)


def _label(frame: pd.DataFrame, columns: Columns) -> str | None:
    return columns.label or (LABEL if LABEL in frame else None)


def _no_test() -> InputError:
    return InputError("a table with a test set of its own is given by polyfed.data.from_frame(train, label, test).")


def _with_test(train: Samples | pd.DataFrame, test: Samples | pd.DataFrame | None = None) -> Samples | pd.DataFrame:
    if test is None or is_frame(train) or is_frame(test):
        if test is None:
            return train
        raise _no_test()
    return replace(train, x_test=test.x, y_test=test.y, client_test=test.client)


def _from_dataset(dataset: Dataset) -> Samples | pd.DataFrame:
    """What a dataset was made from."""
    if isinstance(dataset.table, Table) and not dataset.table.agreed:
        return dataset.table.frame
    cut, x, y = len(dataset) - dataset.official_test, dataset.images, dataset.labels
    x_test, y_test = (x[cut:], y[cut:]) if dataset.official_test else (None, None)
    names = dataset.class_names or tuple(str(each) for each in range(dataset.classes))
    tokens = {"vocabulary": dataset.vocabulary, "padding": dataset.padding}
    return Samples(x[:cut], y[:cut], x_test, y_test, names, **tokens)


def _clients(data: Any) -> dict[str, Any] | None:
    """One part per client, by its name; None if these are the data of all clients together."""
    if hasattr(data, "load_partition"):
        return {str(number): data.load_partition(number) for number in range(_count_partitions(data))}
    if not isinstance(data, list) or not data:
        return None
    first = data[0]
    several = isinstance(first, Dataset | str | Path | torch.utils.data.Dataset)
    several = several or is_frame(first) or is_columnar(first)
    pairs = isinstance(first, tuple) and len(first) > 1 and all(_is_array(each) and np.ndim(each) for each in first)
    pairs = pairs or (isinstance(first, tuple) and len(first) == 2 and is_frame(first[0]))
    # An image with a one-hot label is a pair of arrays too, but they do not have the same length.
    if several or (pairs and len(first[0]) == len(first[1])):
        return {str(number): part for number, part in enumerate(data)}
    return None


def _count_partitions(data: Any) -> int:
    holders = [data, getattr(data, "partitioner", None), *(getattr(data, "partitioners", None) or {}).values()]
    for holder in holders:
        count = getattr(holder, "num_partitions", None)
        if isinstance(count, int) and count > 0:
            return count
    raise InputError(
        f"data is a {type(data).__name__} with load_partition, but its num_partitions is not known: give a list of the "
        f"partitions."
    )


def _joined(parts: Mapping[str, Samples | pd.DataFrame], columns: Columns) -> Dataset:
    """One dataset from one part per client."""
    frames = {name: part for name, part in parts.items() if is_frame(part)}
    if len(frames) == len(parts):
        import pandas as pd

        rows = pd.concat([frame.assign(**{CLIENT: name}) for name, frame in frames.items()], ignore_index=True)
        return from_frame(rows, _label(rows, columns), name="clients", client=CLIENT)
    if frames:
        raise InputError("some clients' data are tables and others are not: give the same kind for each client.")
    return join_samples({name: part for name, part in parts.items() if isinstance(part, Samples)}).dataset("clients")


def _is_array(value: Any) -> bool:
    listed = isinstance(value, list) and bool(value) and not isinstance(value[0], Mapping)
    return listed or isinstance(value, np.ndarray | Tensor) or is_series(value) or is_categorical(value)
