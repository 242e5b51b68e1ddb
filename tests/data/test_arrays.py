"""Datasets from arrays in all layouts, and arrays that are refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import polyfed
from polyfed.data import from_arrays
from polyfed.data.arrays import channel_statistics
from polyfed.errors import InputError
from tests import support

GENERATOR = np.random.default_rng(0)
COLOUR = GENERATOR.integers(0, 256, (6, 3, 8, 9), dtype=np.uint8)
LABELS = np.array([0, 1, 2, 0, 1, 2])


@pytest.mark.parametrize("as_array", [np.asarray, torch.as_tensor])
@pytest.mark.parametrize("layout", [(0, 1, 2, 3), (0, 2, 3, 1)])
def test_channels_are_found_first_or_last(layout: tuple[int, ...], as_array: object) -> None:
    dataset = from_arrays(as_array(COLOUR.transpose(layout).copy()), as_array(LABELS))  # type: ignore[operator]
    assert torch.equal(dataset.images, torch.from_numpy(COLOUR)) and dataset.images.is_contiguous()
    assert dataset.classes == 3 and dataset.official_test == 0


@pytest.mark.parametrize("shape", [(6, 8, 9), (6, 8, 9, 1), (6, 1, 8, 9)])
def test_grey_images_get_one_channel(shape: tuple[int, ...]) -> None:
    grey = COLOUR[:, 0]
    dataset = from_arrays(grey.reshape(shape), LABELS)
    assert torch.equal(dataset.images, torch.from_numpy(grey)[:, None])


@pytest.mark.parametrize(("shape", "expected"), [((6, 8, 9, 4), (4, 8, 9)), ((6, 4, 8, 9), (4, 8, 9))])
def test_other_numbers_of_channels_are_the_shorter_axis(shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    assert from_arrays(np.zeros(shape, np.uint8), LABELS).input_shape == expected


def test_test_samples_come_last_and_statistics_are_of_the_training_samples() -> None:
    dataset = from_arrays(COLOUR, LABELS, np.zeros_like(COLOUR[:2]), LABELS[:2], name="mine")
    assert (dataset.name, dataset.official_test, len(dataset)) == ("mine", 2, 8)
    assert int(dataset.images[-2:].max()) == 0
    pixels = COLOUR.transpose(1, 0, 2, 3).reshape(3, -1) / 255
    np.testing.assert_allclose(dataset.mean, pixels.mean(1))
    np.testing.assert_allclose(dataset.std, pixels.std(1))
    images = dataset.batch(torch.arange(6))[0]
    torch.testing.assert_close(images.mean((0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)


def test_statistics_of_more_images_than_one_step() -> None:
    images = torch.randint(0, 256, (2100, 1, 2, 2), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    mean, std = channel_statistics(images)
    assert mean[0] == pytest.approx(float(images.double().mean()) / 255)
    assert std[0] == pytest.approx(float(images.double().std(correction=0)) / 255)


def test_constant_images_stay_finite() -> None:
    dataset = from_arrays(np.full((3, 4, 4), 7, np.uint8), LABELS[:3])
    assert dataset.std == (1.0,) and bool((dataset.batch(torch.arange(3))[0].abs() < 1e-6).all())


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64, ">f4"])
def test_floats_of_any_shape_are_used_as_they_are(kind: str) -> None:
    table = GENERATOR.normal(size=(6, 5)).astype(kind)
    dataset = from_arrays(table, LABELS)
    assert dataset.images.dtype == torch.float32 and dataset.mean == ()
    np.testing.assert_array_equal(dataset.images.numpy(), table.astype(np.float32))


def test_the_dataset_does_not_change_with_the_callers_array() -> None:
    pixels, labels = COLOUR.copy(), torch.from_numpy(LABELS.copy())
    dataset = from_arrays(pixels, labels)
    pixels[:], labels[:] = 0, 0
    assert torch.equal(dataset.images, torch.from_numpy(COLOUR)) and dataset.labels.tolist() == LABELS.tolist()


@pytest.mark.parametrize("kind", [np.uint8, np.int16, np.int32, np.int64, np.uint16])
def test_labels_of_any_integer_type_and_as_a_column(kind: type) -> None:
    assert from_arrays(COLOUR, LABELS.astype(kind)[:, None]).labels.tolist() == LABELS.tolist()


def test_classes_that_do_not_occur_must_be_announced() -> None:
    with pytest.raises(InputError, match="number them 0 to 1, or, .* give class_names"):
        from_arrays(COLOUR[:2], np.array([3, 7]))
    assert from_arrays(COLOUR[:2], np.array([3, 7]), classes=10).classes == 10
    named = from_arrays(COLOUR[:2], np.array([3, 7]), class_names=np.array(list("abcdefgh")))
    assert named.classes == 8 and named.class_names[7] == "h"
    with pytest.raises(InputError, match="3 classes but 2 class names"):
        from_arrays(COLOUR, LABELS, classes=3, class_names=["a", "b"])


def test_floats_and_truths_are_labels_if_they_are_whole() -> None:
    assert from_arrays(COLOUR, LABELS.astype(float)).labels.tolist() == LABELS.tolist()
    assert from_arrays(COLOUR, LABELS > 0).classes == 2


@pytest.mark.parametrize(
    ("x", "y", "words"),
    [
        (COLOUR, LABELS[:5], "6 samples but 5 labels"),
        (COLOUR, LABELS + 1, "from 1 to 3"),
        (COLOUR, LABELS - 1, "from -1 to 1"),
        (COLOUR, LABELS + np.eye(6)[4] / 2, "the value 1.5 at index 4, but polyfed classifies"),
        (COLOUR, np.where(LABELS == 2, np.nan, LABELS), "the value nan at index 2, but polyfed classifies"),
        (COLOUR, np.where(LABELS == 2, np.inf, LABELS), "the value inf at index 2, but polyfed classifies"),
        (COLOUR, LABELS[:0].astype(str), "6 samples but 0 labels"),
        (COLOUR, np.ones((6, 6), dtype=int), r"shape \(6, 6\): give one whole number or word per sample, or one-hot"),
        (COLOUR, np.array(["a", 1, "b", 2, "c", 3], dtype=object), "labels of type object"),
        (COLOUR.astype(np.int64), LABELS, "int64 data"),
        (COLOUR.reshape(6, -1), LABELS, "uint8 data"),
        (COLOUR[:0], LABELS[:0], "no samples"),
        (np.where(np.eye(6) == 1, np.nan, 0.0)[:, 1:], LABELS, r"5 in all, .* NaN\) at index \[1, 0\]"),
        (np.full((6, 2), np.inf), LABELS, r"infinite\) at index \[0, 0\]"),
        (COLOUR.astype(np.float32), LABELS, "look like pixels of 0 to 255: give them as uint8"),
        (np.arange(6 * 64).reshape(6, 8, 8) % 256.0, LABELS, "look like pixels of 0 to 255: give them as uint8"),
        (COLOUR.transpose(0, 2, 3, 1) * 0.9, LABELS, "look like pixels of 0 to 255"),
        ([COLOUR[0], COLOUR[1, :, 1:]], LABELS[:2], "images of different shapes"),
        (np.array(["a"] * 6), LABELS, "images of type"),
    ],
)
def test_bad_arrays_are_refused_in_one_sentence(x: np.ndarray, y: np.ndarray, words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        from_arrays(x, y, name="mine")
    assert "mine" in str(caught.value) and "\n" not in str(caught.value)


def test_test_arrays_must_be_complete_and_alike() -> None:
    with pytest.raises(InputError, match="give both or neither"):
        from_arrays(COLOUR, LABELS, COLOUR)
    with pytest.raises(InputError, match="make them the same"):
        from_arrays(COLOUR, LABELS, COLOUR[:, :, :4], LABELS)
    with pytest.raises(InputError, match="make them the same"):
        from_arrays(COLOUR, LABELS, COLOUR / 255, LABELS)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((32, 32, 3), r"channels last: say so \(layout=channels-last\)"),
        ((28, 28), r"without a channel: say so \(layout=grey\)"),
        ((1, 8, 8), "at least 16x16 pixels, .* enlarge them"),
    ],
)
def test_float_images_in_another_layout_get_the_right_advice(shape: tuple[int, ...], words: str) -> None:
    data = from_arrays(GENERATOR.random((30, *shape)), np.arange(30) % 3)
    with pytest.raises(InputError, match=words):
        polyfed.run("standalone", data=data, models="cnn5", clients=2)


def test_a_network_that_wants_channels_last_gets_them() -> None:
    data = from_arrays(GENERATOR.random((30, 8, 8, 3)), np.arange(30) % 3)
    result = polyfed.run("standalone", data=data, models=support.Wide, clients=2, rounds=1, device="cpu")
    assert result.population.dataset.input_shape == (8, 8, 3)


def test_class_names_are_a_list_with_a_name_for_each_class() -> None:
    """A text would be taken for a list of letters, each of them a class."""
    with pytest.raises(InputError, match="class_names is the text 'cat,dog': give a list"):
        from_arrays(COLOUR, LABELS, class_names="cat,dog")
    with pytest.raises(InputError, match="labels up to 2, but 1 class_names: give a name for each class, so 3"):
        from_arrays(COLOUR, LABELS % 3, class_names=["cat"])


def test_an_empty_test_set_is_refused_as_such() -> None:
    with pytest.raises(InputError, match="has an empty test set: leave x_test and y_test out"):
        from_arrays(COLOUR, LABELS, COLOUR[:0], LABELS[:0])


def test_tables_of_whole_numbers_are_no_pixels() -> None:
    assert len(from_arrays(np.full((6, 4, 20), 100.0), LABELS)) == 6
    assert len(from_arrays(np.full((6, 8, 8), 100.5), LABELS)) == 6
