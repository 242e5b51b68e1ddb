"""Every random draw of a run comes from here, from a seed derived from (run seed, purpose, round, client, …).

So a draw does not depend on the engine, on the number of workers or on the order in which clients finish, and a
resumed run draws what the uninterrupted one would have drawn.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
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
def seeded(seed: int, *purpose: str | int) -> Iterator[None]:
    """Fix torch's global generator inside the block (network initialisers know no other) and restore it afterwards.

    One thread at a time: two that build networks at once would take draws from each other.
    """
    with _GLOBAL_GENERATOR, torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(seed, *purpose))
        yield
