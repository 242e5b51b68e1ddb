"""Slow reading: a listener is told about its progress, and what was decoded once is kept beside its source."""

from __future__ import annotations

import hashlib
import os
import zipfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

Item = TypeVar("Item")
Result = TypeVar("Result")

Listener = Callable[[str, int, int], None]
"""Is told what is read, how many are done and how many there are."""

_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Inside, the listener is told about the progress of reading."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def read_many(read: Callable[[Item], Result], items: Sequence[Item], what: str) -> list[Result]:
    """Read many pictures, several at a time: decoding releases Python's lock."""
    tell, step = _listener.get() or (lambda *_: None), max(1, len(items) // 100)
    results: list[Result] = []
    pool = ThreadPoolExecutor()
    try:
        tell(what, 0, len(items))
        for result in pool.map(read, items):
            results.append(result)
            if len(results) % step == 0 or len(results) == len(items):
                tell(what, len(results), len(items))
    finally:
        pool.shutdown(cancel_futures=True)  # an interrupted read does not continue to the end
    return results


Decoded = tuple[Tensor, Tensor, int]
"""Images, labels, number of test samples."""


def decoded_once(source: Path, size: tuple[int, int], decode: Callable[[], Decoded]) -> Decoded:
    """What `decode` makes of a folder of pictures, kept in a file beside the folder.

    The file is used as long as no picture is added, removed, or changed in size or date. Where it can't be written,
    pictures are decoded every time.
    """
    cache = source.with_name(f"{source.name}.decoded-{size[0]}x{size[1]}.npz")
    if source.is_dir() and (kept := _read_cache(cache, _fingerprint(source))) is not None:
        return kept
    images, labels, official_test = decode()
    if source.is_dir():
        arrays = {"images": images.numpy(), "labels": labels.numpy(), "official_test": np.array(official_test)}
        beside = cache.with_name(f"{cache.name}.{os.getpid()}.new")
        try:
            with beside.open("wb") as file:
                np.savez(file, allow_pickle=False, fingerprint=np.array(_fingerprint(source)), **arrays)
            beside.replace(cache)
        except OSError:  # someone else's folder, or a full disk
            pass
        finally:
            with suppress(OSError):
                beside.unlink(missing_ok=True)
    return images, labels, official_test


def _read_cache(cache: Path, fingerprint: str) -> Decoded | None:
    try:
        with np.load(cache, allow_pickle=False) as arrays:
            if str(arrays["fingerprint"]) != fingerprint:
                return None
            images, labels = (torch.from_numpy(arrays[name]) for name in ("images", "labels"))
            return images, labels, int(arrays["official_test"])
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile):
        return None


def _fingerprint(folder: Path) -> str:
    """A digest of the names, sizes and dates of all files in a folder."""
    digest, waiting = hashlib.sha256(), [folder]
    while waiting:
        place = waiting.pop()
        with os.scandir(place) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                if entry.is_dir():
                    waiting.append(Path(entry.path))
                else:
                    name, facts = os.path.relpath(entry.path, folder), entry.stat()
                    digest.update(os.fsencode(f"{name} {facts.st_size} {facts.st_mtime_ns}\n"))
    return digest.hexdigest()
