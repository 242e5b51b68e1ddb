"""What a named source of data is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from polyfed.data.dataset import Dataset
from polyfed.errors import InputError

FOLDER_VARIABLE = "POLYFED_DATA"
"""The environment variable that names the folder of datasets."""

Normalisation = tuple[tuple[float, ...], tuple[float, ...]]


@dataclass(frozen=True)
class Source:
    """One place that images come from, as `polyfed datasets` shows it."""

    name: str
    title: str
    """What the images show."""
    samples: int
    """How many there are; 0: the file decides."""
    classes: int
    """0: the file decides."""
    input_shape: tuple[int, ...]
    """Channels, height, width; empty: the file decides."""
    obtained: str
    """How to get the data."""
    normalisation: Normalisation
    """Mean and standard deviation per channel; empty: computed from the images."""
    load: Callable[[Source, Path, bool], Dataset] | None = None
    """Makes the dataset, given this entry, a folder and whether a download is allowed; None: data of your own."""
    test_samples: int = 0
    """How many of the samples are the official test set."""
    layout: str = ""
    """What the folder of datasets may hold besides NAME.npz, in words."""

    def dataset(
        self, images: Tensor, labels: Tensor, official_test: int = 0, class_names: Sequence[str] | None = None
    ) -> Dataset:
        """A dataset with this source's name, classes and normalisation."""
        if images.dtype != torch.uint8 or tuple(images.shape[1:]) != self.input_shape:
            raise InputError(
                f"dataset '{self.name}' has uint8 images of shape {self.input_shape}, but {images.dtype} samples of "
                f"shape {tuple(images.shape[1:])} were found under its name: use other data as npz:PATH."
            )
        found = len(torch.unique(labels))
        if len(images) != self.samples or official_test not in (0, self.test_samples) or found != self.classes:
            raise InputError(
                f"dataset '{self.name}' has {self.samples} samples of {self.classes} classes, {self.test_samples} of "
                f"them for testing, but {len(images)} of {found} classes with {official_test} for testing were found "
                f"under its name: complete the files, or use other data as npz:PATH."
            )
        return Dataset(
            self.name,
            images,
            labels,
            self.classes,
            *self.normalisation,
            official_test,
            pools_test=True,
            class_names=tuple(class_names or ()),
        )


def missing(name: str, files: str, obtained: str) -> InputError:
    """The error for files that are not there: which, and how to get them."""
    return InputError(
        f"dataset '{name}' is missing: there is no {files}, so {obtained}, or name another folder with "
        f"{FOLDER_VARIABLE}."
    )
