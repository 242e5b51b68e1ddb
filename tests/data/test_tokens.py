"""Token ids as samples: checked, never normalised, known by their vocabulary."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import polyfed
from polyfed.data import Dataset
from polyfed.errors import InputError
from polyfed.shapes import TokenShape
from tests import support
from tests.kinds import signals, texts

LABELS = np.array([0, 1, 1])


def dataset(x: Any, **options: Any) -> Dataset:
    return polyfed.from_arrays(x, LABELS, **{"vocabulary": 10, "padding": 0, **options})


def test_ids_are_used_as_they_are() -> None:
    ids = np.array([[1, 2, 0], [3, 0, 0], [9, 9, 9]], dtype=np.int32)
    made = dataset(ids)
    x, y = made.batch(torch.tensor([2, 0]))
    assert x.dtype == torch.int64
    assert x.tolist() == [[9, 9, 9], [1, 2, 0]] and y.tolist() == [1, 0]
    assert isinstance(made.input_shape, TokenShape)
    assert (made.input_shape, made.input_shape.vocabulary, made.input_shape.padding) == ((3,), 10, 0)
    assert isinstance(made.only(torch.tensor([0])).input_shape, TokenShape)


def test_lists_of_different_lengths_are_filled_up_to_the_longest() -> None:
    made = polyfed.from_arrays([[1, 2], [3], []], LABELS, [[4, 5, 6]], [0], vocabulary=10, padding=7)
    assert made.images.tolist() == [[1, 2, 7], [3, 7, 7], [7, 7, 7], [4, 5, 6]]
    assert made.official_test == 1


@pytest.mark.parametrize(
    ("x", "options", "words"),
    [
        (np.zeros((3, 4), np.int64), {"vocabulary": None, "padding": None}, "token ids with vocabulary="),
        (np.full((3, 4), 10), {}, "ids from 10 to 10 for a vocabulary of 10: ids must be 0 to 9"),
        (np.full((3, 4), -1), {}, "ids must be 0 to 9"),
        (np.zeros((3, 4), np.int64), {"padding": 10}, "the padding 10, which is not in its vocabulary"),
        (np.zeros((3, 4)), {}, "token ids must be integers"),
        (np.zeros((3, 4, 2), np.int64), {}, r"give int64 token ids \[samples, length\]"),
        (np.zeros((3, 4), np.float32), {"vocabulary": None}, "a padding but no vocabulary"),
        ([[1, 2], [3], [4]], {"padding": None}, "different shapes"),
    ],
)
def test_bad_ids_are_refused(x: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        dataset(x, **options)


def test_ids_have_no_mean() -> None:
    with pytest.raises(InputError, match="leave mean and std empty"):
        replace(texts(), mean=(0.5,), std=(0.5,))


@pytest.mark.parametrize(("data", "group"), [(texts, "text4"), (signals, "signal4")])
def test_augmentation_is_refused(data: Any, group: str) -> None:
    with pytest.raises(InputError, match="training.augment needs images, but samples of"):
        support.population("standalone", data=data(), models=[group], training={"augment": True})


@pytest.mark.parametrize(
    ("method", "words"), [("pfedes", "the proxy extractor needs images"), ("fedclassavg", "augmented views")]
)
def test_methods_that_need_images_say_so(method: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        support.population(method, data=texts(), models=["text4"])
