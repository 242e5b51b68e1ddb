"""Files to predict: pictures, npz archives and CSV tables, as samples of the kind that a model accepts.

Nothing is changed silently: a picture is converted only where that loses nothing, and resized only if asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from polyfed.data import Constants
from polyfed.data.files import one_line, read_arrays
from polyfed.data.table_files import read_frame
from polyfed.errors import InputError
from polyfed.export.card import Inputs
from polyfed.predictions import as_batch


@dataclass(frozen=True)
class FileSamples:
    """The samples of one file; a picture has one, which has no number."""

    file: str
    batch: Tensor
    is_picture: bool


def read_samples(path: Path, inputs: Inputs, *, resize: bool = False) -> FileSamples:
    """What a file holds, checked and in the model's layout."""
    if not path.is_file():
        raise InputError(f"there is no file '{path}': give pictures, npz archives or CSV tables.")
    if path.suffix.lower() == ".npz":
        return FileSamples(str(path), _fitting(_read_npz(path), inputs, path), False)
    if inputs.table is not None:
        return FileSamples(str(path), _read_rows(path, inputs.table), False)
    if path.suffix.lower() == ".csv":
        return FileSamples(str(path), _fitting(_read_csv(path, inputs), inputs, path), False)
    return FileSamples(str(path), _fitting(_read_picture(path, inputs, resize), inputs, path), True)


def _fitting(values: NDArray[np.generic], inputs: Inputs, path: Path) -> Tensor:
    try:
        return as_batch(torch.from_numpy(np.array(values)), inputs.example())
    except (InputError, TypeError) as error:
        raise InputError(f"'{path}' can't be used: {error}") from error


def _read_npz(path: Path) -> NDArray[np.generic]:
    """The array `x`, or the only one."""
    arrays = read_arrays(path, "save it with numpy.savez(path, x=…)")
    if "x" not in arrays and len(arrays) != 1:
        raise InputError(f"'{path}' holds {', '.join(sorted(arrays)) or 'nothing'}: save the samples as x in it.")
    return arrays["x"] if "x" in arrays else next(iter(arrays.values()))


def _read_rows(path: Path, table: Constants) -> Tensor:
    """Rows as in the table that the model was trained on, with columns by their names."""
    rows = read_frame(path, texts=[each.column for each in table.categories])
    if not len(rows):
        raise InputError(f"'{path}' has no rows: give a row per sample, below the names of the columns.")
    return table.samples_of(rows, f"'{path}'")


def _read_csv(path: Path, inputs: Inputs) -> NDArray[np.generic]:
    """A row of numbers per sample, in the order of the model's inputs; a first row of names is skipped."""
    try:
        cells = pd.read_csv(path, header=None, dtype=str)
        named = bool(pd.to_numeric(cells.iloc[0], errors="coerce").isna().any())
        values: NDArray[np.float64] = cells.iloc[int(named) :].to_numpy("float64")
    except (OSError, ValueError, pd.errors.ParserError) as error:
        raise InputError(f"'{path}' is not a table of numbers ({one_line(error)}): give a row per sample.") from error
    size = int(np.prod(inputs.shape))
    if values.shape[1] != size:
        raise InputError(f"'{path}' has {values.shape[1]} columns, but a sample of this model has {size} numbers.")
    if not len(values) or not np.isfinite(values).all():
        raise InputError(f"'{path}' has no rows, or empty or infinite cells: fill them in.")
    shaped = values.reshape(-1, *inputs.shape)
    if inputs.vocabulary is not None:
        if (shaped % 1 != 0).any():
            raise InputError(f"'{path}' has values that are not whole numbers: this model needs token ids.")
        return shaped.astype(np.int64)
    if not inputs.pixels:
        return shaped.astype(np.float32)
    if (shaped % 1 != 0).any() or shaped.min() < 0 or shaped.max() > 255:
        raise InputError(f"'{path}' has values that are not pixels: this model needs whole numbers from 0 to 255.")
    return shaped.astype(np.uint8)


def _read_picture(path: Path, inputs: Inputs, resize: bool) -> NDArray[np.uint8]:
    if not inputs.pixels or len(inputs.shape) != 3 or inputs.shape[0] not in (1, 3):
        shape = "×".join(str(side) for side in inputs.shape)
        raise InputError(
            f"'{path}' can't be used: the model accepts samples of {shape} that are no pictures, so give an npz "
            "archive or a CSV table."
        )
    channels, height, width = inputs.shape
    try:
        with Image.open(path) as image:
            picture = _coloured(image, channels, path)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise InputError(
            f"'{path}' can't be read as a picture ({one_line(error)}): give PNG, JPEG or another kind of picture, an "
            "npz archive or a CSV table."
        ) from error
    if picture.size != (width, height):
        if not resize:
            raise InputError(
                f"'{path}' has {picture.size[0]}x{picture.size[1]} pixels (width x height), but the model was trained "
                f"on {width}x{height}: add --resize, or crop it yourself."
            )
        picture = picture.resize((width, height), Image.Resampling.BILINEAR)
    return np.asarray(picture, dtype=np.uint8)


def _coloured(image: Image.Image, channels: int, path: Path) -> Image.Image:
    """The picture with this many channels, if it can have them without loss."""
    if image.mode.startswith(("I", "F")):
        raise InputError(f"'{path}' has more than 8 bits per value: convert it to 8 bits first.")
    full = image.convert("RGBA")
    red, green, blue, opacity = full.split()
    if opacity.getextrema() != (255, 255):
        raise InputError(f"'{path}' is partly transparent: put it on a background first.")
    if channels == 3:
        return full.convert("RGB")
    if not red.tobytes() == green.tobytes() == blue.tobytes():
        raise InputError(f"'{path}' is in colour, but the model was trained on grey pictures: convert it first.")
    return red
