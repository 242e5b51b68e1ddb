"""The command line from its first moment: Ctrl-C is answered in one line even while PyTorch is imported."""

import os
import signal
from types import FrameType


def main() -> None:
    """Run `polyfed`."""
    # An exception in the middle of an import is caught or turned into another one by some packages, so none is raised.
    before = signal.signal(signal.SIGINT, _stop)
    from polyfed.cli import main as run

    signal.signal(signal.SIGINT, before)
    run()


def _stop(number: int, frame: FrameType | None) -> None:
    os.write(2, b"polyfed: stopped before anything ran.\n")
    os._exit(130)


if __name__ == "__main__":
    main()
