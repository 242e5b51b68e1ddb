"""Datasets from torch datasets, and what is said of samples that are no pairs of an image and a class."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import polyfed
from polyfed.data import from_torch_dataset
from polyfed.errors import InputError

COLOUR = np.random.default_rng(0).integers(0, 256, (6, 3, 8, 9), dtype=np.uint8)
LABELS = np.array([0, 1, 2, 0, 1, 2])


class Pictures:
    """A torch dataset in the small: PIL pictures and labels."""

    classes = ("cat", "dog", "owl", "fox")

    def __init__(self, mode: str) -> None:
        self.mode = mode

    def __len__(self) -> int:
        return len(COLOUR)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return Image.fromarray(COLOUR[index].transpose(1, 2, 0)).convert(self.mode), int(LABELS[index])


def test_pictures_become_uint8_and_class_names_are_counted() -> None:
    dataset = from_torch_dataset(Pictures("RGB"), name="pets")
    assert torch.equal(dataset.images, torch.from_numpy(COLOUR))
    assert (dataset.name, dataset.classes, dataset.labels.tolist()) == ("pets", 4, LABELS.tolist())


@pytest.mark.parametrize(("mode", "channels"), [("L", 1), ("RGBA", 3), ("P", 3)])
def test_pictures_of_other_modes(mode: str, channels: int) -> None:
    assert from_torch_dataset(Pictures(mode)).input_shape == (channels, 8, 9)


def test_float_tensors_stay_floats_and_a_test_set_is_kept() -> None:
    values, labels = torch.randn(6, 2, 5), torch.from_numpy(LABELS)
    dataset = from_torch_dataset(TensorDataset(values, labels), TensorDataset(values[:2], labels[:2]))
    assert torch.equal(dataset.images, torch.cat([values, values[:2]])) and dataset.official_test == 2


def test_torch_datasets_without_samples_or_of_mixed_shapes_are_refused() -> None:
    with pytest.raises(InputError, match="no samples"):
        from_torch_dataset(TensorDataset(torch.zeros(0, 2), torch.zeros(0)))
    mixed = [(torch.zeros(1, 4, 4), 0), (torch.zeros(1, 5, 5), 1)]
    with pytest.raises(InputError, match="resize them first"):
        from_torch_dataset(mixed, name="mixed")


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([(torch.zeros(2), 0)])


IMAGE = torch.zeros(1, 4, 4)


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        ([(IMAGE, 0.0), (IMAGE, 1.5)], "the value 1.5 at index 1, but polyfed classifies"),
        (TensorDataset(torch.zeros(2, 3), torch.tensor([0.2, 1.7])), "polyfed classifies"),
        ([{"image": IMAGE, "kind": 0}], "have the columns 'image', 'kind', and none looks like the label"),
        ([{"a": IMAGE, "b": IMAGE, "label": 0}], "none looks like the sample itself: name it, image='COLUMN'"),
        (Stream(), r"is a Stream without a length.* list\(dataset\)"),
        (DataLoader(TensorDataset(IMAGE)), "give its dataset, loader.dataset"),
        ([(IMAGE, torch.ones(3))], "labels of shape .* one-hot rows with a single 1 each"),
        ([(IMAGE, torch.eye(3)[0]), (IMAGE, 1)], "labels of 1 and of 3 values"),
        ([(IMAGE, "cat"), (IMAGE, 1)], "text and others that are not"),
        ([(IMAGE, None)], "label of type NoneType at position 0"),
        (TensorDataset(IMAGE), "sample 0 of dataset 'mine' has 1 entries: give pairs"),
        ([IMAGE], "sample 0 of dataset 'mine' is a Tensor: give pairs"),
    ],
)
def test_samples_that_are_no_pairs_get_a_remedy(samples: Any, words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        from_torch_dataset(samples, name="mine")
    assert "mine" in str(caught.value) and "\n" not in str(caught.value)


def test_labels_may_be_whole_floats_tensors_and_truths() -> None:
    pairs = [(IMAGE, 0.0), (IMAGE, torch.tensor(1)), (IMAGE, torch.tensor([2])), (IMAGE, True)]
    assert from_torch_dataset(pairs).labels.tolist() == [0, 1, 2, 1]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (pd.DataFrame({"a": [1]}), "--label COLUMN of a"),
        (TensorDataset(torch.zeros(2, 3)), "sample 0 of .* has 1 entries: give pairs"),
        (Stream(), r"Stream.*no length.*list\(dataset\)"),
        ({"x": 1}, r"dict.*arrays \(x, y\)"),
        ((np.zeros((3, 1)), np.array([0.5, 1, 2])), "the value 0.5 at index 0, but polyfed classifies"),
        ([1], "sample 0 of .* is a int: give pairs"),
        (np.zeros((3, 2)), r"ndarray.*pair \(x, y\)"),
        (DataLoader(TensorDataset(IMAGE)), "loader.dataset"),
        (None, "NoneType.*give a name, a path, arrays"),
    ],
)
def test_data_that_is_no_dataset_gets_a_remedy(data: Any, words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        polyfed.run("standalone", data=data)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["my.npz", "folder/my", "./digits"])
def test_a_path_as_a_name_says_how_files_are_named(name: str) -> None:
    with pytest.raises(InputError, match=f"npz:{name}"):
        polyfed.load_dataset(name)
