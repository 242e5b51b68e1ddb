"""Arrays that stay on disk: a dataset larger than memory is read as its samples are needed."""

from __future__ import annotations

import warnings
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyfed.compute import physical_memory
from polyfed.errors import InputError

SHARE_OF_MEMORY = 4
"""Arrays above this fraction (one over it) of the machine's memory stay on disk."""
ROWS = 4096
"""Samples that are looked at together when all are checked."""
MAPPABLE = (np.dtype(np.uint8), np.dtype(np.float32))


def wants_map(wish: str | None, size: int) -> bool:
    """Whether an array of so many bytes stays on disk."""
    if wish not in (None, "yes", "no"):
        raise InputError(f"map is '{wish}': give yes (samples stay on disk) or no (they are read into memory).")
    return wish == "yes" or (wish is None and size > physical_memory() // SHARE_OF_MEMORY)


def map_member(path: Path, key: str, wish: str | None) -> NDArray[Any] | None:
    """An array of an npz archive as it is on disk; None if it can be read into memory."""
    with zipfile.ZipFile(path) as archive:
        member = archive.getinfo(f"{key}.npy")
        if not wants_map(wish, member.file_size):
            return None
        if member.compress_type != zipfile.ZIP_STORED:
            raise InputError(
                f"'{key}' in {path} is compressed, so it can't stay on disk: save it with numpy.savez, or as a folder "
                f"with {key}.npy."
            )
    with path.open("rb") as file:
        # A zip file repeats a member's name before its data, with extra fields whose length only this header says.
        file.seek(member.header_offset + 26)
        file.seek(sum(int.from_bytes(file.read(2), "little") for _ in range(2)), 1)
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(file)
        if dtype.hasobject:
            raise ValueError("an array of objects")
        return np.memmap(path, dtype, "c", file.tell(), shape, "F" if fortran else "C")


def read_npy_folder(folder: Path, wish: str | None) -> dict[str, NDArray[Any]]:
    """The arrays of a folder with one npy file each, by the files' names; large ones stay on disk."""
    arrays: dict[str, NDArray[Any]] = {}
    for path in sorted(folder.glob("*.npy")):
        mode: Literal["c"] | None = "c" if wants_map(wish, path.stat().st_size) else None
        try:
            arrays[path.stem] = np.load(path, mmap_mode=mode, allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise InputError(f"{path} cannot be read as an array ({error}): save it with numpy.save.") from error
    return arrays


def mapped_tensor(array: NDArray[Any], name: str) -> Tensor:
    """A tensor over an array on disk, without reading it."""
    if array.dtype not in MAPPABLE or not array.flags.c_contiguous:
        raise InputError(
            f"dataset '{name}' has {array.dtype} samples that are not to be read into memory: save them as uint8 or "
            f"float32, in C order."
        )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")  # a dataset is never written to
        return torch.from_numpy(array)


def in_pieces(tensor: Tensor) -> Iterator[Tensor]:
    """The samples in pieces that fit into memory."""
    return (tensor[start : start + ROWS] for start in range(0, len(tensor), ROWS))


def write_samples(samples: Iterable[Tensor], count: int, folder: Path, name: str) -> NDArray[Any]:
    """Write samples one after another into FOLDER/x.npy; the array on disk."""
    path = folder / "x.npy"
    if path.exists():
        raise InputError(f"{path} exists already: use data='npz:{folder}', or choose another folder.")
    folder.mkdir(parents=True, exist_ok=True)
    array: np.memmap[Any, Any] | None = None
    for position, sample in enumerate(samples):
        kind = np.uint8 if sample.dtype == torch.uint8 else np.float32
        if array is None:
            array = np.lib.format.open_memmap(path, "w+", kind, (count, *sample.shape))
        if array.shape[1:] != tuple(sample.shape) or array.dtype != kind:
            path.unlink()
            raise InputError(
                f"sample {position} of dataset '{name}' has the shape {tuple(sample.shape)} and type {sample.dtype}, "
                f"but the first has {array.shape[1:]} and {array.dtype}: make them the same."
            )
        array[position] = sample.numpy()
    if array is None:
        raise InputError(f"dataset '{name}' has no samples: give at least one.")
    array.flush()
    return array
