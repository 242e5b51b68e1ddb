"""While modules are imported: Ctrl-C is answered in one line, and nothing is collected."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def importing() -> Iterator[None]:
    """Inside, Ctrl-C ends the process, and Python's collector rests.

    Modules and their classes stay until the end, so the collector would only look at them again and again, for 0.3 s
    while PyTorch is imported. Later collections leave them out, too, except the last one at the exit: extensions
    complain there about what is left.
    """
    atexit.register(gc.unfreeze)
    collects = gc.isenabled()
    gc.disable()
    try:
        with stopping_at_once():
            yield
    finally:
        gc.freeze()
        if collects:
            gc.enable()


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
