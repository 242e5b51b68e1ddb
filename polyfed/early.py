"""Ctrl-C while modules are imported: answered in one line."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def stopping_at_once() -> Iterator[None]:
    """Inside, Ctrl-C ends the process.

    An exception in the middle of an import is caught or turned into another one by some packages, so none is raised.
    """
    if threading.current_thread() is not threading.main_thread():  # others can't set handlers
        yield
        return
    before = signal.signal(signal.SIGINT, _stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _stop(number: int, frame: FrameType | None) -> None:
    os.write(2, b"polyfed: stopped before anything ran.\n")
    os._exit(130)
