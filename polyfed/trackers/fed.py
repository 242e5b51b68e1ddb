"""Feeds trackers with a run's numbers, so that neither their slowness nor their failures reach the run."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from polyfed.config import Experiment
from polyfed.errors import PolyfedError, first_line
from polyfed.records.claim import read_claim
from polyfed.records.origin import settings_by_name
from polyfed.server.federation import Federation, Interrupted, Watcher
from polyfed.trackers import tracker_names
from polyfed.trackers.base import About, State, Tracker

HOMES = {
    "tensorboard": "polyfed.trackers.tensorboard:TensorBoard",
    "mlflow": "polyfed.trackers.mlflow:MLflow",
    "wandb": "polyfed.trackers.wandb:WeightsAndBiases",
}
SHARE = 0.01
"""The part of the time that a tracker may work while rounds are running."""
LONGEST_REST = 10.0
PATIENCE = 30.0
"""Seconds that a run waits for a tracker before its first round and at its end."""


def run_tracked(federation: Federation) -> dict[str, Any]:
    """Run all rounds that are left, with the trackers that the experiment names, and return the summary."""
    names = tracker_names(federation.config.tracker)
    if not names:
        return federation.run()
    audience = Audience(federation, names)
    federation.watcher = audience
    state: State = "failed"
    summary: dict[str, Any] = {}
    try:
        summary = federation.run()
        state = "finished"
    except (Interrupted, KeyboardInterrupt):
        state = "interrupted"
        raise
    finally:
        federation.watcher = audience.watcher
        audience.close(state, summary)
    return summary


class Audience(Watcher):
    """The run's own watcher and its trackers, in the place of the watcher."""

    def __init__(self, federation: Federation, names: list[str]) -> None:
        self.watcher = federation.watcher
        self._federation = federation
        self._names = names
        self._feeds: list[Feed] = []

    @property
    def stop_requested(self) -> bool:
        return self.watcher.stop_requested

    @stop_requested.setter
    def stop_requested(self, wanted: bool) -> None:
        self.watcher.stop_requested = wanted

    @property
    def folder(self) -> Path | None:  # type: ignore[override]
        return self.watcher.folder

    def on_start(self, config: Experiment, first_round: int) -> None:
        path = self._federation.folder.path
        about = About(path, str(read_claim(path).get("id")), first_round, settings_by_name(config))
        self._feeds = [Feed(name, about) for name in self._names]
        for feed in self._feeds:
            feed.catch_up()
        self._note_failures(self._federation.note)
        self.watcher.on_start(config, first_round)

    def on_client(self, round: int, client: int) -> None:
        self.watcher.on_client(round, client)

    def on_round(self, round: int, row: Mapping[str, Any] | None) -> None:
        self.watcher.on_round(round, row)
        if row is not None:
            numbers = finite(row)
            for feed in self._feeds:
                feed.add(round, numbers)
        if round == self._federation.config.rounds:  # the last moment for a note in the records
            for feed in self._feeds:
                feed.catch_up()
        self._note_failures(self._federation.note)

    def on_note(self, note: str) -> None:
        self.watcher.on_note(note)

    def close(self, state: State, summary: Mapping[str, Any]) -> None:
        """Let the trackers write what is left."""
        for feed in self._feeds:
            feed.close(state, finite(summary))
        self._note_failures(self.watcher.on_note)  # the records of a finished run are closed

    def _note_failures(self, note: Callable[[str], None]) -> None:
        for feed in [feed for feed in self._feeds if feed.failure]:
            self._feeds.remove(feed)
            note(f"{feed.name} does not follow the run any more: {feed.failure}")


class Feed:
    """One tracker in a thread of its own. A round only puts its numbers into a queue."""

    def __init__(self, name: str, about: About) -> None:
        self.name = name
        self.failure = ""
        self._changed = threading.Condition()
        self._tasks: deque[Callable[[Tracker], None]] = deque()
        self._done = 0
        self._busy, self._hurry, self._closing, self._over = True, False, False, False
        try:
            threading.Thread(target=self._work, args=(about,), name=f"polyfed-tracker-{name}", daemon=True).start()
        except RuntimeError as error:  # the machine has no more threads
            self.failure, self._over = reason(name, error), True

    def add(self, round: int, numbers: Mapping[str, float]) -> None:
        """Have the numbers logged soon."""
        self._add(lambda tracker: tracker.log(round, numbers))

    def close(self, state: State, summary: Mapping[str, float]) -> None:
        """Have the rest logged, and end the thread."""
        self._add(lambda tracker: tracker.close(state, summary), last=True)
        self.catch_up()

    def catch_up(self) -> None:
        """Wait until all that was added is logged, or nothing has happened for a while."""
        with self._changed:
            self._hurry, done = True, -1
            self._changed.notify_all()
            while not self._changed.wait_for(self._is_idle, PATIENCE):
                if done == self._done:
                    self.failure = f"it has not answered for {PATIENCE:g} seconds"
                    break
                done = self._done
            self._hurry = False

    def _add(self, task: Callable[[Tracker], None], *, last: bool = False) -> None:
        with self._changed:
            self._tasks.append(task)
            self._closing = last
            self._changed.notify_all()

    def _is_idle(self) -> bool:
        return self._over or not (self._busy or self._tasks)

    def _work(self, about: About) -> None:
        try:
            tracker = new_tracker(self.name, about)
            while not self._closing or self._tasks:
                self._wait(lambda: bool(self._tasks))
                begin = time.perf_counter()
                while self._tasks:
                    self._tasks.popleft()(tracker)
                    self._done += 1
                # Python runs one thread at a time, so what a tracker computes is taken from the rounds.
                self._rest((time.perf_counter() - begin) / SHARE)
        except BaseException as error:  # whatever it is, the run continues
            self.failure = reason(self.name, error)
        finally:
            with self._changed:
                self._over = True
                self._changed.notify_all()

    def _wait(self, ready: Callable[[], bool]) -> None:
        with self._changed:
            self._busy = False
            self._changed.notify_all()
            self._changed.wait_for(ready)
            self._busy = True

    def _rest(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._hurry, min(seconds, LONGEST_REST))


def new_tracker(name: str, about: About) -> Tracker:
    """A tracker by its name; its package is imported only now."""
    module, _, attribute = HOMES[name].partition(":")
    tracker: Tracker = getattr(import_module(module), attribute)(about)
    return tracker


def reason(name: str, error: BaseException) -> str:
    """Why a tracker failed, in words."""
    if isinstance(error, ImportError):
        return f"it can't be imported ({first_line(error)}); install it with `pip install 'polyfed[{name}]'`"
    if isinstance(error, PolyfedError):
        return str(error).rstrip(".")
    return f"{type(error).__name__}: {first_line(error)}" if isinstance(error, Exception) else type(error).__name__


def finite(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a row, without the round and what is missing.

    >>> finite({"round": 3, "accuracy_mean": 0.5, "loss_mean": float("nan"), "method": "fedproto"})
    {'accuracy_mean': 0.5}
    """
    numbers = {name: value for name, value in row.items() if isinstance(value, int | float) and name != "round"}
    return {name: float(value) for name, value in numbers.items() if math.isfinite(value)}
