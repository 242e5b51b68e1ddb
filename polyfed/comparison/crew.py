"""Worker processes, each of which works on one run at a time. One that is killed costs its run, not the others.

They talk in lines of JSON and not by `multiprocessing`, which would import the caller's script again in every worker.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import TracebackType
from typing import IO, Any

from polyfed.compute import available_cores


class Worker:
    """A process that is given one task after another."""

    def __init__(self, threads: int) -> None:
        paths = os.pathsep.join(path for path in sys.path if path)
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": paths}
        self._errors: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115  # it lives as long as the worker
        self._process = subprocess.Popen(
            [sys.executable, "-m", "polyfed.comparison.worker", str(threads)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, env=environment,
            start_new_session=True,  # Ctrl-C on the terminal is for the parent, which lets workers end their rounds
        )  # fmt: skip

    def do(self, task: Mapping[str, Any], hear: Callable[[dict[str, Any]], None]) -> dict[str, Any] | None:
        """Give a task and wait for the answer; None if the worker has died. Until then, `hear` gets its notes."""
        assert self._process.stdin and self._process.stdout
        try:
            self._process.stdin.write(json.dumps(task) + "\n")
            self._process.stdin.flush()
        except (OSError, ValueError):  # it has died, or was told to stop
            return None
        while (line := self._process.stdout.readline()).endswith("\n"):
            answer: dict[str, Any] = json.loads(line)
            if "note" not in answer:
                return answer
            hear(answer)
        return None

    def epitaph(self) -> str:
        """What a dead worker died of."""
        status = self._process.wait()
        if status < 0:
            name = signal.Signals(-status).name
            cause = "; the machine may be short of memory, so try fewer jobs" * (name == "SIGKILL")
            return f"its process was ended by {name}{cause}."
        self._errors.seek(0)
        last = (self._errors.read().strip().splitlines() or [""])[-1]
        return f"its process ended with status {status}{f': {last}' if last else ''}."

    def stop(self) -> None:
        """Let it end after the round in progress."""
        if self._process.stdin:
            try:
                self._process.stdin.close()
            except OSError:
                return

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()

    def join(self) -> None:
        self._process.wait()
        if self._process.stdout:
            self._process.stdout.close()
        self._errors.close()


class Crew:
    """So many workers, which share the cores."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._threads = max(1, available_cores() // number)
        self._workers: set[Worker] = set()
        self._lock = threading.Lock()
        self._stopping = False
        self._chosen = threading.Condition()
        self._in_progress = 0
        self._answers: queue.Queue[tuple[str, dict[str, Any]] | Exception | None] = queue.Queue()
        self._hands: list[threading.Thread] = []

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop(at_once=kind is not None)

    def work(
        self,
        tasks: Mapping[str, Mapping[str, Any]],
        stop_requested: Callable[[], bool] = lambda: False,
        may_begin: Callable[[str], bool] = lambda task: True,
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """Do all tasks; gives each one's name and answer when it is done, and before that its notes.

        If a stop is requested, those in progress end early. A task that may not begin now is asked about again when
        another has ended, and left out if none is in progress any more. A worker that can't be started costs one task.
        """
        left = dict(tasks)
        self._hands = [
            threading.Thread(target=self._hand, args=(left, may_begin), daemon=True) for _ in range(self._number)
        ]
        for hand in self._hands:
            hand.start()
        busy = self._number
        while busy:
            if stop_requested():
                self._let_go()
            try:
                answer = self._answers.get(timeout=0.2)  # wakes up for signals and for requests to stop
            except queue.Empty:
                continue
            if isinstance(answer, Exception):
                raise answer
            if answer is None:
                busy -= 1
            else:
                yield answer

    def stop(self, *, at_once: bool = False) -> None:
        """Let all workers end after their rounds, or at once, and wait for them."""
        self._let_go()
        try:
            for hand in [] if at_once else self._hands:
                while hand.is_alive():
                    hand.join(0.2)
        finally:
            with self._lock:
                for worker in self._workers:
                    worker.kill()
            for hand in self._hands:
                hand.join()

    def _let_go(self) -> None:
        with self._lock:
            self._stopping = True
            for worker in self._workers:
                worker.stop()
        with self._chosen:
            self._chosen.notify_all()

    def _hand(self, left: dict[str, Mapping[str, Any]], may_begin: Callable[[str], bool]) -> None:
        """One worker after another, as long as there are tasks; a new one if the last has died or lost its GPU."""
        worker: Worker | None = None
        try:
            while chosen := self._choose(left, may_begin):
                name, task = chosen
                try:
                    worker = worker or self._hire()
                except OSError as error:  # such as too little memory; the other hands keep their workers
                    self._ended(name, {"reason": f"its process could not be started: {error}"})
                    return
                answer = worker.do(task, partial(self._pass_on, name)) if worker else None
                if worker and answer is None and not self._stopping:
                    answer = {"reason": worker.epitaph(), "last": True}
                if worker and answer is not None and answer.get("last"):
                    self._dismiss(worker)
                    worker = None
                self._ended(name, answer)
        except Exception as error:  # the caller's own, from `may_begin`
            self._answers.put(error)
        finally:
            if worker:
                worker.stop()
                self._dismiss(worker)
            self._answers.put(None)

    def _choose(
        self, left: dict[str, Mapping[str, Any]], may_begin: Callable[[str], bool]
    ) -> tuple[str, Mapping[str, Any]] | None:
        """The first task that may begin, which is then nobody else's. If none may, wait for others to end.

        None if all have begun, if none is in progress whose end could change anything, or if they are to stop.
        """
        with self._chosen:
            while left and not self._stopping:
                for name in left:
                    if may_begin(name):
                        self._in_progress += 1
                        return name, left.pop(name)
                if not self._in_progress:
                    break
                self._chosen.wait()
        return None

    def _ended(self, name: str, answer: dict[str, Any] | None) -> None:
        """A task is no longer in progress; without an answer it was stopped."""
        if answer is not None and not answer.get("stopped"):
            self._pass_on(name, answer)
        with self._chosen:
            self._in_progress -= 1
            self._chosen.notify_all()

    def _pass_on(self, name: str, answer: dict[str, Any]) -> None:
        self._answers.put((name, answer))

    def _hire(self) -> Worker | None:
        with self._lock:
            if self._stopping:
                return None
            worker = Worker(self._threads)
            self._workers.add(worker)
            return worker

    def _dismiss(self, worker: Worker) -> None:
        worker.join()
        with self._lock:
            self._workers.discard(worker)
