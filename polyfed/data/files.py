"""Readers of the file formats in which image datasets travel: npz archives, idx files, folders of pictures."""

from __future__ import annotations

import gzip
import math
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from polyfed.data.dataset import Dataset
from polyfed.data.mapped import map_member, read_npy_folder
from polyfed.data.reading import read_many
from polyfed.errors import InputError

IDX_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
"""The four files in which MNIST and its relatives are published, each perhaps with .gz at the end."""


KEYS = ("x", "y", "x_test", "y_test", "class_names", "client", "client_test", "vocabulary", "padding")
"""The arrays of an archive, where x, y and client may also be called x_train, y_train and client_train."""


def read_npz(path: Path, map: str | None = None) -> dict[str, Any]:
    """The arrays of an npz archive, or of a folder of npy files, by the names of `KEYS`, those that it holds.

    It holds x_train, y_train and perhaps x_test, y_test; or x, y; and perhaps class_names, client and client_test.
    """
    remedy = "save it with numpy.savez(path, x_train=…, y_train=…, x_test=…, y_test=…)"
    arrays = read_npy_folder(path, map) if path.is_dir() else read_arrays(path, remedy, map)
    training = ("x_train", "y_train") if "x_train" in arrays or "y_train" in arrays else ("x", "y")
    missing = [key for key in training if key not in arrays]
    if missing:
        raise InputError(f"{path} lacks {' and '.join(missing)}: save x_train, y_train, x_test, y_test or x, y in it.")
    sizes = {len(array) for key, array in arrays.items() if key in (*training, "x_test") and array.ndim}
    found: dict[str, Any] = {key: arrays.pop(other) for key, other in zip(("x", "y"), training, strict=True)}
    if "client_train" in arrays:
        found["client"] = arrays.pop("client_train")
    found |= {key: arrays.pop(key) for key in KEYS if key in arrays and key not in found}
    for key, array in arrays.items():
        if key.startswith(("x", "y", "client")) or (array.ndim and len(array) in {*sizes, sum(sizes)}):
            raise InputError(
                f"{path} also holds an array '{key}', which polyfed does not use: leave it out (whose each sample is "
                f"may be said by 'client')."
            )
    found |= {key: int(found[key]) for key in ("vocabulary", "padding") if key in found}
    if "class_names" in found:
        found["class_names"] = [str(each) for each in found["class_names"].reshape(-1)]
    return found


def read_arrays(path: Path, remedy: str, map: str | None = "no") -> dict[str, NDArray[np.generic]]:
    """All arrays of an npz archive; `remedy` says how to make one, `map` whether samples stay on disk."""
    try:
        with path.open("rb") as file:
            start = file.read(6)
        if start[:2] != b"PK":  # how every zip archive starts; numpy would read anything else as a pickle
            what = "holds a single array" if start == b"\x93NUMPY" else "is not an npz archive, in spite of its name"
            raise InputError(f"{path} {what}: {remedy}.")
        # Without pickle: reading a file must never run code from it.
        with np.load(path, allow_pickle=False) as archive:
            mapped = {key: map_member(path, key, map) for key in archive if key in ("x", "x_train")}
            return {key: archive[key] if (kept := mapped.get(key)) is None else kept for key in archive}
    except FileNotFoundError:
        raise InputError(f"there is no file {path}: give the path of an npz archive, or {remedy}.") from None
    except (OSError, ValueError, EOFError, TypeError, zipfile.BadZipFile, zlib.error) as error:
        raise InputError(
            f"{path} cannot be read as an npz archive of plain arrays ({one_line(error)}): {remedy}."
        ) from error


def save_npz(dataset: Dataset, path: Path | str) -> None:
    """Write a dataset as the npz archive that `load_dataset` reads, for a machine without internet access."""
    images, labels = dataset.images.cpu().numpy(), dataset.labels.cpu().numpy()
    training = len(dataset) - dataset.official_test
    arrays = {"x_train": images[:training], "y_train": labels[:training]}
    if dataset.official_test:
        arrays |= {"x_test": images[training:], "y_test": labels[training:]}
    if dataset.class_names:
        arrays["class_names"] = np.array(dataset.class_names)
    tokens = {"vocabulary": dataset.vocabulary, "padding": dataset.padding}
    arrays |= {name: np.array(value) for name, value in tokens.items() if value is not None}
    if dataset.owners is not None:
        arrays |= _whose(dataset, training)
    with Path(path).open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)


def _whose(dataset: Dataset, training: int) -> dict[str, NDArray[Any]]:
    """The clients by name; a test set without owners is left to be shared out again."""
    assert dataset.owners is not None
    names = np.array(dataset.client_names or [str(number) for number in range(dataset.clients)])
    owners = dataset.owners.numpy()
    known = dataset.official_test and (owners[training:] >= 0).all()
    whose = {"client": names[owners[:training]]}
    return whose | ({"client_test": names[owners[training:]]} if known else {})


def find_idx_folder(folders: Sequence[Path]) -> Path | None:
    """The first folder that holds all four idx files, gzipped or not."""
    for folder in folders:
        if all(_idx_path(folder, file) for file in IDX_FILES):
            return folder
    return None


def read_idx_folder(folder: Path) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images and labels, test images and labels, from the four idx files of a folder."""
    x_train, y_train, x_test, y_test = (read_idx(_idx_path(folder, file) or folder / file) for file in IDX_FILES)
    return x_train, y_train, x_test, y_test


def read_idx(path: Path) -> Tensor:
    """The bytes of an idx file (perhaps gzipped), in the shape its header states."""
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path} cannot be read ({one_line(error)}): fetch the file again.") from error
    # The header: two zero bytes, 8 for unsigned bytes, the number of axes, then each axis as a big-endian integer.
    axes = content[3] if content[:3] == b"\x00\x00\x08" and len(content) > 3 else 0
    start = 4 + 4 * axes
    shape = [int.from_bytes(content[position : position + 4], "big") for position in range(4, start, 4)]
    if axes == 0 or len(content) != start + math.prod(shape):
        raise InputError(f"{path} is not a complete idx file of unsigned bytes: fetch the file again.")
    return torch.frombuffer(bytearray(content[start:]), dtype=torch.uint8).reshape(shape)


def read_class_folders(folder: Path, size: tuple[int, int], name: str) -> tuple[Tensor, Tensor]:
    """Pictures from FOLDER/CLASS/images/*.JPEG: images, and labels by the classes' sorted names."""
    classes = sorted(entry for entry in folder.iterdir() if (entry / "images").is_dir())
    paths, labels = [], []
    for label, entry in enumerate(classes):
        pictures = sorted((entry / "images").glob("*.JPEG"))
        paths += pictures
        labels += [label] * len(pictures)
    if not paths:
        raise InputError(f"dataset '{name}' has no pictures CLASS/images/*.JPEG in {folder}: unpack its archive there.")
    images = np.stack(read_many(lambda path: read_picture(path, size), paths, name))
    return torch.from_numpy(images), torch.tensor(labels, dtype=torch.int64)


def read_picture(path: Path, size: tuple[int, int], mode: str = "RGB") -> NDArray[np.uint8]:
    """One picture file as `uint8` [channels, height, width], resized if it has another size; mode L: one channel."""
    try:
        with Image.open(path) as image:
            colours = image.convert(mode)
    except (OSError, SyntaxError) as error:
        raise InputError(f"{path} cannot be read as a picture ({one_line(error)}): fetch the file again.") from error
    height, width = size
    if colours.size != (width, height):
        colours = colours.resize((width, height), Image.Resampling.BILINEAR)
    pixels = np.asarray(colours, dtype=np.uint8)
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def one_line(error: BaseException) -> str:
    """The first sentence of an error's own text, short enough for use inside a sentence."""
    words = " ".join(str(error).split()).split(". ")[0].rstrip(".") or type(error).__name__
    return words if len(words) <= 160 else words[:157] + "..."


def _idx_path(folder: Path, file: str) -> Path | None:
    """The file in that folder, gzipped or not."""
    return next((path for path in (folder / file, folder / f"{file}.gz") if path.is_file()), None)
