"""A worker process: reads tasks as lines of JSON, finishes the run of each, and answers in a line.

When its input ends, because it was told to stop or because its parent has died, the run stops after its round.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from pathlib import Path
from typing import IO, Any

import torch

from polyfed.addresses import trusting
from polyfed.comparison.runner import finish, reason_of
from polyfed.config import experiment
from polyfed.errors import InputError
from polyfed.server.federation import Interrupted, Watcher


def main() -> None:
    """Work until there are no more tasks."""
    # What networks or libraries print must not get between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    threads = int(sys.argv[1])
    torch.set_num_threads(threads)
    watcher, tasks = Watcher(), queue.Queue[str | None]()
    threading.Thread(target=_read, args=(sys.stdin, tasks, watcher), daemon=True).start()
    while (line := tasks.get()) is not None:
        answers.write(json.dumps(_do(json.loads(line), threads, watcher)) + "\n")
        answers.flush()


def _read(lines: IO[str], tasks: queue.Queue[str | None], watcher: Watcher) -> None:
    for line in lines:
        tasks.put(line)
    watcher.stop_requested = True
    tasks.put(None)


def _do(task: dict[str, Any], threads: int, watcher: Watcher) -> dict[str, Any]:
    try:
        with trusting(True):  # the parent has settled what may be imported
            config = experiment(**task["config"])
        if config.workers is None:
            config = config.model_copy(update={"workers": threads})
        finish(config, Path(task["path"]), watcher)
    except Interrupted:
        return {"stopped": True}
    except Exception as error:  # the answer is what the parent names
        return {"reason": reason_of(error), "of_input": isinstance(error, InputError)}
    return {}


if __name__ == "__main__":
    main()
