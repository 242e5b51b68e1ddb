"""Samples that are mappings of column names to values, as Hugging Face's datasets and many torch datasets give them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from polyfed.data.own import no_columns
from polyfed.errors import InputError

if TYPE_CHECKING:
    import pandas as pd
    from typing_extensions import TypeIs

LABELS = ("label", "labels", "target", "class", "y", "fine_label")
IMAGES = ("image", "img", "images", "pixel_values", "picture", "x", "input", "inputs", "signal", "features", "data")
"""What columns are usually called, the likeliest first."""


@dataclass(frozen=True)
class Columns:
    """The columns that a user named; None: found by their usual names."""

    label: str | None = None
    client: str | None = None
    image: str | None = None

    def refuse(self, data: str) -> None:
        """Raise if a column was named for data that have none."""
        for name, value in (("label", self.label), ("client", self.client), ("image", self.image)):
            if value is not None:
                raise no_columns(name, value, data)

    def found(self, known: Sequence[str], name: str) -> Columns:
        """The columns that samples with these columns have."""
        for what, column in (("label", self.label), ("client", self.client), ("image", self.image)):
            if column is not None and column not in known:
                raise InputError(f"{what} is '{column}', but samples of '{name}' have {_listed(known)}.")
        label = self.label or next((column for column in LABELS if column in known), None)
        if label is None:
            raise InputError(
                f"samples of '{name}' have {_listed(known)}, and none looks like the label: name it, label='COLUMN'."
            )
        rest = [column for column in known if column not in (label, self.client)]
        image = self.image or next((column for column in IMAGES if column in rest), rest[0] if len(rest) == 1 else None)
        if image is None:
            raise InputError(
                f"samples of '{name}' have {_listed(known)}, and none looks like the sample itself: name it, "
                f"image='COLUMN'."
            )
        return Columns(label, self.client, image)

    def as_frame(self, data: Any) -> pd.DataFrame | None:
        """The rows of a dataset with columns as a frame, if its columns are plain values; otherwise None."""
        if self.image is not None or len(data) == 0 or not hasattr(data, "to_pandas"):
            return None
        plain = all(np.ndim(value) == 0 and _is_plain(value) for value in data[0].values())
        return data.to_pandas() if plain else None


def is_frame(value: object) -> TypeIs[pd.DataFrame]:
    """Whether this is a frame of pandas. Where that was never imported nothing is, and it takes long to import."""
    pandas = sys.modules.get("pandas")
    return pandas is not None and isinstance(value, pandas.DataFrame)


def is_series(value: object) -> bool:
    """Whether this is a column of pandas."""
    pandas = sys.modules.get("pandas")
    return pandas is not None and isinstance(value, pandas.Series)


def is_categorical(value: object) -> bool:
    """Whether these are labels as pandas' `Categorical`."""
    pandas = sys.modules.get("pandas")
    return pandas is not None and isinstance(value, pandas.Categorical)


def is_columnar(data: Any) -> bool:
    """Whether these are data in the manner of Hugging Face's datasets: named columns and a length."""
    return hasattr(data, "column_names") and hasattr(data, "features") and hasattr(data, "__len__")


def class_names_of(data: Any, columns: Columns) -> list[str] | None:
    """The names of the classes, where a dataset lists them: as torchvision does, or as Hugging Face's features do."""
    if is_columnar(data):
        features = data.features if isinstance(data.features, Mapping) else {}
        label = columns.found(list(data.column_names), "dataset").label
        names = getattr(features.get(label), "names", None)
    else:
        names = getattr(data, "classes", None)
    listed = isinstance(names, Sequence) and not isinstance(names, str) and len(names) > 0
    return [str(each) for each in names] if listed and names is not None else None


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float | np.generic)


def _listed(known: Sequence[str]) -> str:
    shown = ", ".join(repr(column) for column in list(known)[:8])
    return f"the columns {shown}{', …' if len(known) > 8 else ''}"
