"""Labels as users hold them, numbers, words or one-hot rows: each becomes a class 0 … C − 1, perhaps with a name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyfed.errors import InputError

MANY = 100
"""More different labels than this, in fewer than twice as many samples, are values to predict, not classes."""


def numbered(y: Any, y_test: Any, name: str, names: Sequence[str] | None) -> tuple[Any, Any, Sequence[str] | None]:
    """Labels of training and test samples, where words and one-hot rows are numbers, and the names of the classes.

    Words are numbered as `names` lists them, otherwise in alphabetical order. Other labels stay as they are.

    >>> y, _, names = numbered(["dog", "cat"], None, "pets", None)
    >>> y.tolist(), names
    ([1, 0], ('cat', 'dog'))
    """
    parts = [as_array(each) for each in (y, y_test) if each is not None]
    if all(is_text(part) for part in parts):
        names = names or tuple(in_order({str(value) for part in parts for value in part.reshape(-1)}))
        _check_count(len(names), sum(len(part) for part in parts), name)
        parts = [_by_name(part, names, name) for part in parts]
    elif any(is_text(part) for part in parts):
        raise InputError(f"dataset '{name}' has labels that are text only in one of its parts: make them the same.")
    elif all(is_one_hot(part) for part in parts):
        columns = getattr(y, "columns", None)
        names = names or tuple(str(each) for each in (range(parts[0].shape[1]) if columns is None else columns))
        parts = [part.argmax(1) for part in parts]
    else:
        return y, y_test, names
    return parts[0], parts[1] if len(parts) > 1 else None, names


def as_array(values: Any) -> NDArray[Any]:
    """Labels as an array on the CPU; pandas' texts and bytes as plain ones."""
    if isinstance(values, Tensor):
        return values.detach().cpu().numpy()
    array = np.asarray(values)
    if array.dtype.kind == "S":
        return np.char.decode(array, "utf-8")
    return array


def is_text(array: NDArray[Any]) -> bool:
    return array.dtype.kind in "UT" or (
        array.dtype == object and array.size > 0 and all(isinstance(value, str) for value in array.flat)
    )


def is_one_hot(array: NDArray[Any]) -> bool:
    """Rows of two or more values that are 0, but for a single 1."""
    return (
        array.ndim == 2
        and array.shape[1] > 1
        and array.dtype.kind in "biuf"
        and bool(((array == 0) | (array == 1)).all() and (array.sum(1) == 1).all())
    )


def in_order(values: set[str]) -> list[str]:
    """Texts in alphabetical order, with numbers in them by their size.

    >>> in_order({"client-10", "client-9", "b"})
    ['b', 'client-9', 'client-10']
    """
    return sorted(values, key=lambda text: [(len(part), part) if part.isdigit() else (0, part) for part in _cut(text)])


def count_classes(labels: Tensor, name: str) -> int:
    """The number of classes, where labels are 0 … C − 1 and all occur; this catches labels that start at 1."""
    present = torch.unique(labels)
    _check_count(len(present), len(labels), name)
    classes = int(present[-1]) + 1
    if int(present[0]) < 0 or len(present) != classes:
        raise InputError(
            f"dataset '{name}' has {len(present)} different labels from {int(present[0])} to {classes - 1}: number "
            f"them 0 to {len(present) - 1}, or, if some classes do not occur here, give class_names with a name for "
            f"each class."
        )
    return classes


def check_complete(y: Any, name: str) -> None:
    """Raise where a label is missing, in an array of objects: words or numbers, and None or NaN between them."""
    array = as_array(y)
    if array.dtype != object:
        return
    missing = [index for index, value in enumerate(array.flat) if value is None or value != value]
    if missing:
        raise InputError(
            f"dataset '{name}' lacks {len(missing)} of its {len(array)} labels, the first at index {missing[0]}: fill "
            f"them in, or leave these samples out."
        )


def no_regression(name: str, why: str) -> InputError:
    """The error for labels that are values to predict, not classes."""
    return InputError(
        f"the labels of '{name}' have {why}, but polyfed classifies: give classes (values to predict by regression are "
        f"not supported)."
    )


def _check_count(found: int, samples: int, name: str) -> None:
    if found > MANY and 2 * found > samples:
        raise no_regression(name, f"{found} different values in {samples} samples")


def _by_name(texts: NDArray[Any], names: Sequence[str], name: str) -> NDArray[np.int64]:
    numbers = {each: number for number, each in enumerate(names)}
    flat = [str(value) for value in texts.reshape(-1)]
    unknown = next((text for text in flat if text not in numbers), None)
    if unknown is not None:
        raise InputError(
            f"dataset '{name}' has the label '{unknown}', but its class names are {', '.join(names[:8])}: use these."
        )
    return np.array([numbers[text] for text in flat], dtype=np.int64)


def _cut(text: str) -> list[str]:
    return re.split(r"(\d+)", text)
