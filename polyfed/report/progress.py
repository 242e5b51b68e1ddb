"""How a run shows itself while it goes on: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from polyfed.config import Experiment
from polyfed.federation import Watcher


class QuietProgress(Watcher):
    """Says nothing, but lets Ctrl-C end the run after the round in progress."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.terminated = False
        """Whether it was SIGTERM, not Ctrl-C, that asked the run to stop."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While inside, the first Ctrl-C or SIGTERM asks the run to stop after its round, the second stops at once."""

        def interrupt(number: int, frame: FrameType | None) -> None:
            if self.stop_requested:
                raise KeyboardInterrupt
            self.stop_requested, self.terminated = True, number == signal.SIGTERM
            words = "Stopping after this round, with a checkpoint; press Ctrl-C again to stop at once."
            self.console.print(words, soft_wrap=True)

        before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class LineProgress(QuietProgress):
    """A line for every evaluated round, for files and pipes."""

    _begin = 0.0
    _first = 1
    _rounds = 0

    def on_start(self, config: Experiment, first_round: int) -> None:
        self._begin, self._first, self._rounds = time.perf_counter(), first_round, config.rounds

    def on_round(self, round: int, row: Mapping[str, Any] | None) -> None:
        if row is not None:
            per_round = (time.perf_counter() - self._begin) / (round - self._first + 1)
            left = per_round * (self._rounds - round)
            self.console.print(
                f"round {round}/{self._rounds}  accuracy {100 * row['accuracy_mean']:.2f} %  "
                f"loss {row['loss_mean']:.4f}  {row['seconds']:.1f} s  {left:.0f} s left",
                highlight=False,
                soft_wrap=True,
            )

    def on_note(self, note: str) -> None:
        self.console.print(f"note: {note}", highlight=False, markup=False, soft_wrap=True)


class BarProgress(QuietProgress):
    """A live bar over rounds, with the latest accuracy and the time left."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._bar = Progress(
            TextColumn("round"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[accuracy]}"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=console,
        )
        self._per_round = 1
        self._task = self._bar.add_task("rounds", total=None, accuracy="accuracy –")

    @contextmanager
    def watching(self) -> Iterator[None]:
        with super().watching(), self._bar:
            yield

    def on_start(self, config: Experiment, first_round: int) -> None:
        self._per_round = config.participants
        self._bar.update(self._task, total=config.rounds, completed=first_round - 1)

    def on_client(self, round: int, client: int) -> None:
        self._bar.advance(self._task, 1 / self._per_round)

    def on_round(self, round: int, row: Mapping[str, Any] | None) -> None:
        self._bar.update(self._task, completed=round)
        if row is not None:
            text = f"accuracy {100 * row['accuracy_mean']:.2f} %  loss {row['loss_mean']:.4f}"
            self._bar.update(self._task, accuracy=text)

    def on_note(self, note: str) -> None:
        self._bar.console.print(f"note: {note}", highlight=False, markup=False)
