"""What a table's columns hold: numbers, texts, or what only looks like one of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from polyfed.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

FEW_LEVELS = 20
"""A column of texts with fewer different values may be one of codes that look like numbers."""
COMMA = re.compile(r"\s*[-+]?[\d.,]*\d\s*")
DATE = re.compile(r"(\d{4}([-./])\d\d?\2\d\d?|\d\d?([./])\d\d?\3(\d\d|\d{4}))([ T]+\d\d?:.*)?")
NUMBER = re.compile(r"\s*[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?\s*")


def with_texts_as_names(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with a text as the name of each column: of a tuple, its parts with spaces between them."""
    names = [" ".join(map(str, name)) if isinstance(name, tuple) else str(name) for name in frame.columns]
    return frame.set_axis(names, axis=1)


def as_numbers(column: pd.Series[Any]) -> pd.Series[float]:
    """The values as floats; truths are 0 and 1."""
    return column.astype("float64")


def as_texts(column: pd.Series[Any]) -> NDArray[Any]:
    """The levels as texts; a missing one is empty."""
    import pandas as pd

    return np.array(["" if pd.isna(value) else _as_text(value) for value in column], dtype=object)


def _as_text(value: object) -> str:
    """A level as a text; a whole number is the same one whether or not pandas has made a float of it."""
    whole = isinstance(value, float | np.floating) and float(value).is_integer()
    return str(int(value)) if whole else str(value)  # type: ignore[call-overload]


def holds_numbers(column: pd.Series[Any]) -> bool:
    """Whether a column holds numbers or truths, of which some may be missing."""
    from pandas.api import types

    if types.is_complex_dtype(column):
        raise InputError(f"column '{column.name}' has complex numbers: make two columns of it.")
    if types.is_bool_dtype(column) or types.is_numeric_dtype(column):
        return True
    return types.is_object_dtype(column) and types.infer_dtype(column, skipna=True) == "boolean"


def text_columns(frame: pd.DataFrame) -> list[str]:
    """The columns that hold nothing but texts, as far as they hold something."""
    from pandas.api.types import infer_dtype

    return [name for name in frame.columns if infer_dtype(frame[name], skipna=True) == "string"]


def check_categories(levels: Sequence[str], column: str, name: str) -> None:
    """Raise if a column of texts is one of numbers that were not recognised, or of dates: these are no categories."""
    check_no_commas(levels, column, f"'{name}'")
    if all(DATE.fullmatch(level) for level in levels):
        raise no_dates(column, name, levels[0], ". If they are no dates, give a frame with a column of type 'category'")
    odd = [level for level in levels if not NUMBER.fullmatch(level)]
    if odd and len(levels) >= FEW_LEVELS and 10 * len(odd) <= len(levels):
        raise InputError(
            f"column '{column}' of '{name}' has {len(levels) - len(odd)} different numbers, but also texts such as "
            f"'{odd[0]}': leave fields empty where a number is missing, or leave the column out (drop={column})."
        )


def no_dates(column: str, name: str, example: object, hint: str = "") -> InputError:
    """The error for a column of dates."""
    return InputError(
        f"column '{column}' of '{name}' has dates, such as '{example}': make numbers of them, such as days since a "
        f"date that you choose, or leave the column out (drop={column}){hint}."
    )


def check_no_commas(levels: Sequence[str], column: str, what: str) -> None:
    """Raise if a column of texts is one of numbers with commas."""
    if any("," in level for level in levels) and all(COMMA.fullmatch(level) for level in levels):
        example = next(level for level in levels if "," in level)
        raise InputError(
            f"column '{column}' of {what} has numbers with commas, such as '{example}': write them with points "
            f"(pandas.read_csv(path, decimal=',') reads decimal commas)."
        )
