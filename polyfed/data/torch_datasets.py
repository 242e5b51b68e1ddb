"""Datasets from torch datasets; and what to do with anything else that a user may hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from polyfed.data.arrays import from_arrays, text_labels
from polyfed.data.dataset import Dataset
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
) -> Dataset:
    """A dataset from any torch dataset of pairs (image, label); every sample is read once.

    Pictures (PIL) and `uint8` arrays become `uint8` images; float tensors stay floats, as the dataset's transform
    made them, so give it no random transform: `Augmentation` draws again in every round. Class names are those that
    `train.classes` lists, as torchvision's datasets do, unless `class_names` gives others.
    """
    x, y = _read_samples(train, name)
    x_test, y_test = _read_samples(test, name) if test is not None else (None, None)
    listed = getattr(train, "classes", None)
    if classes is None and class_names is None and isinstance(listed, Sequence) and not isinstance(listed, str):
        class_names = [str(each) for each in listed]
    return from_arrays(x, y, x_test, y_test, name, classes=classes, class_names=class_names)


def as_sample(image: Any) -> Tensor:
    """One sample as a tensor; pictures as [channels, height, width]."""
    if hasattr(image, "convert") and hasattr(image, "mode"):  # a PIL picture, without importing PIL to find out
        image = np.asarray(image if image.mode in ("L", "RGB") else image.convert("RGB"))
        return torch.from_numpy(image.copy() if image.ndim == 2 else image.transpose(2, 0, 1).copy())
    return image if isinstance(image, Tensor) else torch.from_numpy(np.array(image))


def no_dataset(data: object) -> InputError:
    """The error for `data=` that is neither a name nor a `Dataset`: how to make one from it."""
    kind, home = type(data).__name__, type(data).__module__.partition(".")[0]
    if home == "pandas" and kind in ("DataFrame", "Series"):
        remedy = "make it with polyfed.from_arrays(frame[columns].to_numpy('float32'), frame[label].to_numpy())"
    elif isinstance(data, np.ndarray | Tensor):
        remedy = "make it with polyfed.from_arrays(x, y), which needs the labels too"
    elif isinstance(data, Path):
        remedy = f"write data='npz:{data}' for an npz archive"
    elif isinstance(data, torch.utils.data.DataLoader):
        remedy = "make it with polyfed.from_torch_dataset(loader.dataset)"
    elif isinstance(data, Mapping) or home == "datasets":  # Hugging Face's library is called datasets
        remedy = (
            "extract the pairs, such as polyfed.from_torch_dataset([(s['image'], s['label']) for s in data]), "
            "or the arrays with polyfed.from_arrays(x, y)"
        )
    elif isinstance(data, torch.utils.data.Dataset):
        remedy = "make it with polyfed.from_torch_dataset(train, test)"
    elif isinstance(data, list | tuple):
        remedy = (
            "make it with polyfed.from_arrays(x, y, x_test, y_test) from arrays, or with "
            "polyfed.from_torch_dataset(data) from pairs (image, label)"
        )
    else:
        remedy = "make it with polyfed.from_arrays(x, y) or polyfed.from_torch_dataset(train, test)"
    return InputError(f"data is a value of type {kind}, but must be a dataset's name or a polyfed.Dataset: {remedy}.")


def _read_samples(samples: TorchDataset, name: str) -> tuple[Tensor, Tensor]:
    """Every sample of a torch dataset, stacked."""
    if isinstance(samples, torch.utils.data.DataLoader):
        raise InputError(f"dataset '{name}' is a DataLoader, which gives batches: give its dataset, loader.dataset.")
    if not hasattr(samples, "__getitem__") or not hasattr(samples, "__len__"):
        raise InputError(
            f"dataset '{name}' is a {type(samples).__name__} without a length or without positions, as iterable "
            f"datasets are: give its samples as a list, such as list(dataset)."
        )
    pairs = [_pair(samples[position], position, name) for position in range(len(samples))]
    if not pairs:
        raise InputError(f"dataset '{name}' has no samples: give at least one.")
    images = [as_sample(image) for image, _ in pairs]
    shapes = {tuple(image.shape) for image in images}
    if len(shapes) > 1:
        examples = " and ".join(str(shape) for shape in sorted(shapes)[:2])
        raise InputError(f"dataset '{name}' has samples of different shapes, such as {examples}: resize them first.")
    return torch.stack(images), torch.tensor([label for _, label in pairs])


def _pair(sample: Any, position: int, name: str) -> tuple[Any, float]:
    """A sample as an image and a number, or what to do with a sample that is something else."""
    if isinstance(sample, Mapping):
        keys = ", ".join(repr(key) for key in list(sample)[:4])
        raise InputError(
            f"dataset '{name}' has samples that are mappings with {keys}: give pairs (image, label), such as "
            f"[(s['image'], s['label']) for s in dataset]."
        )
    if not isinstance(sample, tuple | list) or len(sample) != 2:
        what = f"has {len(sample)} entries" if isinstance(sample, tuple | list) else f"is a {type(sample).__name__}"
        raise InputError(f"sample {position} of dataset '{name}' {what}: give pairs (image, label).")
    image, label = sample
    if isinstance(label, str | bytes):
        raise text_labels(name, str(label))
    values = np.asarray(label)
    if values.dtype.kind not in "biuf":
        raise InputError(
            f"dataset '{name}' has a label of type {type(label).__name__} at position {position}: give whole numbers "
            f"from 0."
        )
    if values.size != 1:
        raise InputError(
            f"dataset '{name}' has labels of {values.size} values each: give one whole number per sample; for "
            f"one-hot labels that is int(label.argmax())."
        )
    return image, values.reshape(()).item()
