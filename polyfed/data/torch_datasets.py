"""Datasets from torch datasets; and what to do with anything else that a user may hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from polyfed.data.arrays import from_arrays
from polyfed.data.columns import Columns, class_names_of
from polyfed.data.dataset import Dataset
from polyfed.data.mapped import write_samples
from polyfed.errors import InputError


class TorchDataset(Protocol):
    """What a torch dataset must have: a length, and pairs (image, label) by position."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def from_torch_dataset(
    train: TorchDataset,
    test: TorchDataset | None = None,
    name: str = "dataset",
    *,
    classes: int | None = None,
    class_names: Sequence[str] | None = None,
    folder: Path | str | None = None,
) -> Dataset:
    """A dataset from any torch dataset of pairs (image, label); every sample is read once.

    For one that does not fit into memory, name a `folder`: samples are written there one after another, and stay there.
    A later run may use `data="npz:FOLDER"`.

    Pictures (PIL) and `uint8` arrays become `uint8` images; float tensors stay floats, as the dataset's transform
    made them, so give it no random transform: `Augmentation` draws again in every round. Class names are those that
    `train.classes` lists, as torchvision's datasets do, unless `class_names` gives others.
    """
    if folder is not None and test is not None:
        raise InputError(f"dataset '{name}' is kept in a folder, so it can't have a test set of its own: leave it out.")
    x, y, _ = read_samples(train, name) if folder is None else read_into(Path(folder), train, name)
    x_test, y_test, _ = read_samples(test, name) if test is not None else (None, None, None)
    if classes is None and class_names is None:
        class_names = class_names_of(train, Columns())
    return from_arrays(x, y, x_test, y_test, name, classes=classes, class_names=class_names)


def as_sample(image: Any) -> Tensor:
    """One sample as a tensor; pictures as [channels, height, width]."""
    if hasattr(image, "convert") and hasattr(image, "mode"):  # a PIL picture, without importing PIL to find out
        image = np.asarray(image if image.mode in ("L", "RGB") else image.convert("RGB"))
        return torch.from_numpy(image.copy() if image.ndim == 2 else image.transpose(2, 0, 1).copy())
    return image if isinstance(image, Tensor) else torch.from_numpy(np.array(image))


def no_dataset(data: object) -> InputError:
    """The error for `data=` that nothing can be made of: what to give instead."""
    if isinstance(data, np.ndarray | Tensor):
        remedy = "give a pair (x, y), because labels are needed too"
    elif isinstance(data, torch.utils.data.DataLoader):
        remedy = "give its dataset, loader.dataset"
    elif isinstance(data, Mapping):
        remedy = "give a pair of arrays (x, y), or {'train': …, 'test': …} with a dataset each"
    elif hasattr(data, "__iter__"):
        remedy = "it has no length, so give its samples as a list, such as list(dataset)"
    else:
        remedy = "give a name, a path, arrays (x, y), a frame with label='COLUMN', or a dataset with a length"
    return InputError(f"data is a value of type {type(data).__name__}, which holds no samples with labels: {remedy}.")


def read_samples(samples: Any, name: str, columns: Columns | None = None) -> tuple[Tensor, Any, list[Any] | None]:
    """Every sample of a torch dataset, stacked, with labels as they are, and whose each is where a column says it."""
    if isinstance(samples, torch.utils.data.DataLoader):
        raise InputError(f"dataset '{name}' is a DataLoader, which gives batches: give its dataset, loader.dataset.")
    if not hasattr(samples, "__len__") or not (hasattr(samples, "__getitem__") or hasattr(samples, "__iter__")):
        raise InputError(
            f"dataset '{name}' is a {type(samples).__name__} without a length, as iterable datasets are: give its "
            f"samples as a list, such as list(dataset)."
        )
    entries = (samples[n] for n in range(len(samples))) if hasattr(samples, "__getitem__") else iter(samples)
    triples = [_sample(entry, position, name, columns or Columns()) for position, entry in enumerate(entries)]
    if not triples:
        raise InputError(f"dataset '{name}' has no samples: give at least one.")
    images = [as_sample(image) for image, _, _ in triples]
    shapes = {tuple(image.shape) for image in images}
    if len(shapes) > 1:
        examples = " and ".join(str(shape) for shape in sorted(shapes)[:2])
        raise InputError(f"dataset '{name}' has samples of different shapes, such as {examples}: resize them first.")
    owners = [owner for _, _, owner in triples]
    known = columns is not None and columns.client is not None
    return torch.stack(images), _stacked([label for _, label, _ in triples], name), owners if known else None


def read_into(folder: Path, samples: Any, name: str) -> tuple[Any, Any, None]:
    """The same, one sample at a time, into a folder with x.npy and y.npy."""
    labels: list[Any] = []

    def images() -> Iterator[Tensor]:
        for position in range(len(samples)):
            image, label, _ = _sample(samples[position], position, name, Columns())
            labels.append(label)
            yield as_sample(image)

    x = write_samples(images(), len(samples), folder, name)
    y = _stacked(labels, name)
    np.save(folder / "y.npy", y.astype(str) if y.dtype == object else y, allow_pickle=False)
    return x, y, None


def _sample(sample: Any, position: int, name: str, columns: Columns) -> tuple[Any, Any, Any]:
    """A sample as an image, a label and its owner, or what to do with a sample that is something else."""
    if isinstance(sample, Mapping):
        used = columns.found(list(sample), name)
        return sample[used.image], sample[used.label], sample[used.client] if used.client else None
    columns.refuse(name)
    if not isinstance(sample, tuple | list) or len(sample) != 2:
        what = f"has {len(sample)} entries" if isinstance(sample, tuple | list) else f"is a {type(sample).__name__}"
        raise InputError(f"sample {position} of dataset '{name}' {what}: give pairs (image, label).")
    return sample[0], sample[1], None


def _stacked(labels: list[Any], name: str) -> Any:
    """Labels as one array; words, numbers and one-hot rows must not be mixed."""
    texts = sum(isinstance(label, str | bytes) for label in labels)
    if texts:
        if texts < len(labels):
            raise InputError(f"dataset '{name}' has labels that are text and others that are not: use one kind.")
        return np.array([label.decode() if isinstance(label, bytes) else label for label in labels], dtype=object)
    arrays = [np.asarray(label) for label in labels]
    strange = next((n for n, array in enumerate(arrays) if array.dtype.kind not in "biuf"), None)
    if strange is not None:
        raise InputError(
            f"dataset '{name}' has a label of type {type(labels[strange]).__name__} at position {strange}: give whole "
            f"numbers from 0, or words."
        )
    sizes = {array.size for array in arrays}
    if len(sizes) > 1:
        raise InputError(f"dataset '{name}' has labels of {min(sizes)} and of {max(sizes)} values: give one class.")
    return np.stack([array.reshape(-1) for array in arrays]).reshape(len(arrays), *((-1,) if sizes != {1} else ()))
