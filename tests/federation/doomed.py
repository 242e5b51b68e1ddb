"""polyfed in a process that is killed at a chosen moment: `python doomed.py MOMENT COUNT polyfed's arguments…`.

COUNT says how often the moment is survived. Killed is killed: nothing is closed, flushed or told to anybody.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

survived = 0


def die(times: int) -> None:
    """Kill this process, unless it has not survived this often yet."""
    global survived
    if survived >= times:
        os.kill(os.getpid(), signal.SIGKILL)
    survived += 1


def before(owner: Any, name: str, times: int) -> None:
    """Die when that function is called."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def doomed(*args: Any, **kwargs: Any) -> Any:
        die(times)
        return original(*args, **kwargs)

    setattr(owner, name, doomed)


def after(owner: Any, name: str, times: int) -> None:
    """Die when that function has done its work."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def doomed(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        die(times)
        return result

    setattr(owner, name, doomed)


def half_written(name: str, times: int) -> None:
    """Die when half of a file whose name begins like this is written."""
    from polyfed.records import disk

    original = disk._write_beside

    def doomed(path: Path, content: bytes | str, *args: Any) -> Path:
        if path.name.startswith(name):
            if survived >= times:
                original(path, content[: len(content) // 2], *args)
            die(times)
        return original(path, content, *args)

    disk._write_beside = doomed


def stand_by() -> None:
    """Import what takes long, and wait for the end of the input."""
    import polyfed.deploy.serve
    import polyfed.flower.node
    import polyfed.flower.server  # noqa: F401

    sys.stdin.read()


def main(moment: str, count: int) -> None:
    from polyfed.engines import SequentialEngine
    from polyfed.methods.fedproto import FedProto
    from polyfed.records import RunFolder
    from polyfed.remote import RemoteEngine
    from polyfed.remote.site import Diary
    from polyfed.server.federation import Federation

    moments: dict[str, Callable[[], None]] = {
        "aggregated": lambda: after(FedProto, "aggregate", count),
        "recorded": lambda: after(RunFolder, "add_round", count),
        "before checkpoint": lambda: before(Federation, "checkpoint", count),
        "half a state": lambda: half_written("server.", count),
        "half a manifest": lambda: half_written("manifest.json", count),
        "after checkpoint": lambda: after(Federation, "checkpoint", count),
        "before the end": lambda: before(RunFolder, "finish", count),
        "before the farewell": lambda: before(RemoteEngine, "finish", count),
        "training": lambda: before(SequentialEngine, "train", count),
        "trained": lambda: before(Diary, "add", count),
        "half a diary": lambda: half_written("site.json", count),
        "answering": lambda: after(Diary, "add", count),
        "standby": stand_by,
    }
    moments[moment]()


if __name__ == "__main__":
    from polyfed.__main__ import main as run

    when, times = sys.argv[1], int(sys.argv[2])
    sys.argv[1:3] = []
    main(when, times)
    run()
