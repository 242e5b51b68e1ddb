"""Tiny datasets in the idx format."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np

from polyfed.data.files import IDX_FILES


def idx_bytes(array: np.ndarray) -> bytes:
    """An array of bytes in the idx format."""
    header = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    return header + array.astype(np.uint8).tobytes()


def write_idx_folder(folder: Path, packed: bool) -> None:
    """A tiny dataset of ten training and five test images, 28×28, as the four idx files."""
    folder.mkdir(parents=True)
    train, test = np.arange(10), np.arange(5)
    arrays = [np.repeat(train, 784).reshape(10, 28, 28), train, np.repeat(test, 784).reshape(5, 28, 28), test]
    for file, array in zip(IDX_FILES, arrays, strict=True):
        content = idx_bytes(array)
        if packed:
            (folder / f"{file}.gz").write_bytes(gzip.compress(content))
        else:
            (folder / file).write_bytes(content)
