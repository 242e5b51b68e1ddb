"""A worker process: reads tasks as lines of JSON, finishes the runs of each, and answers in a line, after its notes.

When its input ends, because it was told to stop or because its parent has died, the run stops after its round. After a
fault of its GPU it answers and ends: whatever it did there next would fail too.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import torch

from polyfed.addresses import trusting
from polyfed.comparison.runner import finish_group, reason_of
from polyfed.comparison.together import Named
from polyfed.compute import gpu_has_failed
from polyfed.config import Experiment, experiment
from polyfed.errors import InputError
from polyfed.server.federation import Interrupted, Watcher


class Teller(Watcher):
    """Tells the parent what is noted, as it happens; runs that train together are in threads of their own."""

    def __init__(self, answers: IO[str]) -> None:
        self._answers, self._lock = answers, threading.Lock()

    def tell(self, answer: dict[str, Any]) -> None:
        with self._lock:
            self._answers.write(json.dumps(answer) + "\n")
            self._answers.flush()

    def on_note(self, note: str) -> None:
        with suppress(OSError):  # a parent that has died hears nothing, and the run stops in order
            self.tell({"note": note})


def main() -> None:
    """Work until there are no more tasks."""
    # What networks or libraries print must not get between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    threads = int(sys.argv[1])
    torch.set_num_threads(threads)
    watcher, tasks = Teller(answers), queue.Queue[str | None]()
    threading.Thread(target=_read, args=(sys.stdin, tasks, watcher), daemon=True).start()
    while (line := tasks.get()) is not None:
        task = json.loads(line)
        answer = _do(task, threads, watcher)
        devices = {run["config"].get("device", "auto") for run in task.values()}
        failed = any("reason" in run for run in answer["runs"].values()) and any(map(gpu_has_failed, devices))
        watcher.tell({**answer, "last": failed})
        if failed:
            os._exit(1)  # at once: other processes that share the GPU may have to wait until this one has left it


def _read(lines: IO[str], tasks: queue.Queue[str | None], watcher: Watcher) -> None:
    for line in lines:
        tasks.put(line)
    watcher.stop_requested = True
    tasks.put(None)


def _do(task: dict[str, Any], threads: int, watcher: Watcher) -> dict[str, Any]:
    """Finish the runs of a task, and say what came of each."""
    try:
        runs = {name: (_config(run["config"], threads), Path(run["path"])) for name, run in task.items()}
        found = finish_group(runs, watcher if len(runs) > 1 else Named(watcher, *runs, leads=True))
    except Exception as error:  # the answer is what the parent names
        found = dict.fromkeys(task, error)
    return {"runs": {name: _answer(found.get(name)) for name in task}}


def _config(values: dict[str, Any], threads: int) -> Experiment:
    with trusting(True):  # the parent has settled what may be imported
        config = experiment(**values)
    return config.model_copy(update={"workers": threads}) if config.workers is None else config


def _answer(error: BaseException | None) -> dict[str, Any]:
    if isinstance(error, Interrupted | KeyboardInterrupt):
        return {"stopped": True}
    if error is not None:
        return {"reason": reason_of(error), "of_input": isinstance(error, InputError)}
    return {}


if __name__ == "__main__":
    main()
