"""A dataset refuses what it cannot hold and hands out normalised batches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from polyfed.data import ClientData, Dataset
from polyfed.errors import InputError


@pytest.fixture
def colours() -> Dataset:
    images = torch.randint(0, 256, (6, 3, 4, 5), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return Dataset("colours", images, torch.tensor([0, 1, 2, 0, 1, 2]), 3, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6), 2)


def test_batch_follows_the_formula(colours: Dataset) -> None:
    indices = torch.tensor([4, 0, 4])
    images, labels = colours.batch(indices)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (colours.mean, colours.std))
    torch.testing.assert_close(images, (colours.images[indices] / 255 - mean) / std)
    assert images.dtype == torch.float32
    assert images.is_contiguous(memory_format=torch.channels_last)  # on a CPU, where that is faster
    assert labels.tolist() == [1, 0, 1]


def test_batch_leaves_the_dataset_as_it_is(colours: Dataset) -> None:
    before = colours.images.clone()
    images, labels = colours.batch(torch.arange(6))
    images.zero_()
    labels.zero_()
    assert torch.equal(colours.images, before) and colours.labels.tolist() == [0, 1, 2, 0, 1, 2]


def test_batch_on_a_device_moves_both(colours: Dataset) -> None:
    images, labels = colours.batch(torch.tensor([1]), device="cpu")
    assert images.device.type == labels.device.type == "cpu"


def test_empty_batch_is_possible(colours: Dataset) -> None:
    images, labels = colours.batch(torch.tensor([], dtype=torch.int64))
    assert images.shape == (0, 3, 4, 5) and labels.shape == (0,)


def test_normalise_takes_any_leading_axes(colours: Dataset) -> None:
    stacked = colours.images.view(2, 3, 3, 4, 5)
    torch.testing.assert_close(colours.normalise(stacked).view(6, 3, 4, 5), colours.batch(torch.arange(6))[0])


def test_float_data_are_used_as_they_are() -> None:
    table = torch.randn(3, 7)
    dataset = Dataset("table", table, torch.tensor([0, 1, 1]), 2)
    assert dataset.input_shape == (7,) and len(dataset) == 3
    assert torch.equal(dataset.batch(torch.tensor([2, 0]))[0], table[[2, 0]])


def test_a_copy_with_other_images_keeps_the_rest(colours: Dataset) -> None:
    copy = replace(colours, images=colours.images.flip(0))
    assert copy.official_test == 2 and copy.input_shape == (3, 4, 5)
    torch.testing.assert_close(copy.batch(torch.tensor([0]))[0], colours.batch(torch.tensor([5]))[0])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"images": torch.zeros(0, 3, 4, 5, dtype=torch.uint8)}, "no samples"),
        ({"images": torch.zeros(5, 3, 4, 5, dtype=torch.uint8)}, "5 images"),
        ({"images": torch.zeros(6, 4, 5, dtype=torch.uint8)}, "give uint8 images"),
        ({"images": torch.zeros(6, 3, 4, 5, dtype=torch.int64)}, "int64 images"),
        ({"images": torch.zeros(6, 3, 4, 5)}, "leave mean and std empty"),
        ({"mean": (0.5,)}, "one mean"),
        ({"std": (0.5, 0.0, 0.5)}, "positive std"),
        ({"labels": torch.tensor([0, 1, 2, 0, 1, 3])}, "must be 0 to 2"),
        ({"labels": torch.tensor([0, 1, 2, 0, 1, -1])}, "from -1"),
        ({"labels": torch.zeros(6)}, "int64 label"),
        ({"official_test": 6}, "official test set"),
        ({"official_test": -1}, "official test set"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(colours: Dataset, change: dict[str, object], words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        replace(colours, **change)
    assert "colours" in str(caught.value) and "\n" not in str(caught.value)


def test_client_data_counts_all_parts() -> None:
    assert len(ClientData(torch.arange(5), torch.arange(2), torch.arange(1))) == 8
