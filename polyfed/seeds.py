"""Every random draw of a run comes from here, from a seed derived from (run seed, purpose, round, client, …).

So a draw does not depend on the engine, on the number of workers or on the order in which clients finish, and a
resumed run draws what the uninterrupted one would have drawn.
"""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

_GLOBAL_GENERATOR = threading.RLock()


def derive(seed: int, *purpose: str | int) -> int:
    """A 63-bit seed that depends on every part of its address.

    >>> derive(0, "batches", 3, 7) == derive(0, "batches", 3, 7) != derive(0, "batches", 7, 3)
    True
    """
    address = "/".join(str(part) for part in (seed, *purpose))
    return int.from_bytes(hashlib.blake2b(address.encode(), digest_size=8).digest(), "little") >> 1


def torch_generator(seed: int, *purpose: str | int) -> torch.Generator:
    """A torch generator on the CPU for one purpose."""
    return torch.Generator().manual_seed(derive(seed, *purpose))


def numpy_generator(seed: int, *purpose: str | int) -> np.random.Generator:
    """A numpy generator for one purpose."""
    return np.random.default_rng(derive(seed, *purpose))


@contextmanager
def seeded(seed: int, *purpose: str | int, device: torch.device | None = None) -> Iterator[None]:
    """Fix the global generators of torch, Python and numpy inside the block, and restore them afterwards.

    Network initialisers use only these, and some networks draw from them in `forward`, on `device`. One thread at a
    time: two that build networks at once would use up each other's draws.
    """
    chosen = derive(seed, *purpose)
    devices = [device] if device is not None and device.type == "cuda" else []
    with _GLOBAL_GENERATOR, torch.random.fork_rng(devices=devices), others_restored():
        torch.manual_seed(chosen)
        random.seed(chosen)
        np.random.seed(chosen % 2**32)
        yield


@contextmanager
def watched() -> Iterator[Callable[[], bool]]:
    """Give a function that says whether the block has drawn from a global generator; restore them afterwards."""
    with _GLOBAL_GENERATOR, torch.random.fork_rng(devices=[]), others_restored():
        before = _global_states()
        yield lambda: _global_states() != before


@contextmanager
def restored() -> Iterator[None]:
    """Restore the global generators of torch (on the CPU), Python and numpy after the block."""
    with torch.random.fork_rng(devices=[]), others_restored():
        yield


def _global_states() -> tuple[object, ...]:
    """The states of torch's (on the CPU), Python's and numpy's global generators, to compare."""
    numpy = np.random.get_state(legacy=False)
    words = {name: np.asarray(value).tobytes() for name, value in numpy["state"].items()}
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), {**numpy, "state": words}


@contextmanager
def others_restored() -> Iterator[None]:
    """Restore the global generators of Python and numpy after the block."""
    python, numpy = random.getstate(), np.random.get_state(legacy=False)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
