"""How many threads an operation on the CPU uses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def compute_threads(number: int) -> Iterator[None]:
    """Inside, every operation uses so many threads; with 1, only the thread it was called from."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
