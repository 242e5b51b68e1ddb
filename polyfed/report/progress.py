"""The display of a run's progress: a bar on a terminal and in a notebook, plain lines elsewhere."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from html import escape
from types import FrameType, MappingProxyType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from polyfed.config import Experiment
from polyfed.data.reading import listening
from polyfed.errors import InputError
from polyfed.report.console import plain_console
from polyfed.server.federation import Watcher
from polyfed.server.scores import percent

MOMENT = 0.2
"""Seconds between two drawings of a notebook's bar."""
PATIENCE, PAUSE = 2, 10
"""Seconds of reading before the first line about it, and between two of them."""


class QuietProgress(Watcher):
    """Shows nothing, but lets Ctrl-C end the run after the round in progress."""

    _running = False
    _names: Mapping[int, str] = MappingProxyType({})
    """Members of a real federation, by client number; empty in a simulation."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._answered: list[str] = []
        """Members that have answered in this round."""
        self.terminated = False
        """Whether it was SIGTERM, not Ctrl-C, that asked the run to stop."""

    def on_start(self, config: Experiment, first_round: int) -> None:
        self._running = True

    def on_reading(self, what: str, done: int, total: int) -> None:
        """This many pictures of a dataset have been read."""

    def on_members(self, present: Mapping[int, str], absent: Mapping[int, str]) -> None:
        self._names = {**present, **absent}
        here = f"here: {', '.join(present.values()) or 'nobody'}"
        self.on_attendance(f"{here}; missing: {', '.join(absent.values())}" if absent else here)

    def on_attendance(self, words: str) -> None:
        """Who is there, in words, whenever that changes."""

    @contextmanager
    def showing(self) -> Iterator[None]:
        """Inside, the display is on."""
        with listening(self.on_reading):
            yield

    @contextmanager
    def watching(self) -> Iterator[None]:
        """The same, and Ctrl-C or SIGTERM stops a run after its round; a second or an early one stops it at once."""

        def interrupt(number: int, frame: FrameType | None) -> None:
            self.terminated = self.terminated or number == signal.SIGTERM
            if self.stop_requested or not self._running:
                raise KeyboardInterrupt
            self.stop_requested = True
            words = "Stopping after this round, with a checkpoint; press Ctrl-C again to stop at once."
            self.console.print(words, soft_wrap=True)

        before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            with self.showing():
                yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class NoteProgress(QuietProgress):
    """Shows notes only, each once, although several runs may have it."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._shown: set[str] = set()

    def on_note(self, note: str) -> None:
        if note not in self._shown:
            self._shown.add(note)
            self.console.print(f"note: {note}", soft_wrap=True)


class LineProgress(QuietProgress):
    """A line for every evaluated round, for files and pipes."""

    _begin = 0.0
    _first = 1
    _rounds = 0
    _said = 0.0

    def on_start(self, config: Experiment, first_round: int) -> None:
        super().on_start(config, first_round)
        self._begin, self._first, self._rounds = time.perf_counter(), first_round, config.rounds

    def on_reading(self, what: str, done: int, total: int) -> None:
        if done == 0:
            self._said = time.perf_counter() - PAUSE + PATIENCE
        elif time.perf_counter() - self._said > PAUSE:
            self._said = time.perf_counter()
            self.show(f"reading {what}: {done} of {total} pictures")

    def on_round(self, round: int, row: Mapping[str, Any] | None) -> None:
        if row is not None:
            per_round = (time.perf_counter() - self._begin) / (round - self._first + 1)
            left = per_round * (self._rounds - round)
            answered = f"{row['replies']} of {len(self._names)} answered  " if self._names else ""
            self.show(
                f"{_run_of(row)}round {round}/{self._rounds}  {answered}accuracy {percent(row['accuracy_mean'])}  "
                f"loss {row['loss_mean']:.4f}  {row['seconds']:.1f} s  {left:.0f} s left"
            )

    def on_note(self, note: str) -> None:
        self.show(f"note: {note}")

    def on_attendance(self, words: str) -> None:
        self.show(words)

    def show(self, line: str) -> None:
        """Show a line."""
        self.console.print(line, soft_wrap=True)


class NotebookProgress(LineProgress):
    """A bar with one line below it under a notebook's cell, which change in their place; notes stay."""

    _per_round = 1
    _done = 0.0
    _drawn = 0.0

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        from IPython.display import display

        self._display = display
        self._handle: Any = None
        self._line = ""

    def on_start(self, config: Experiment, first_round: int) -> None:
        super().on_start(config, first_round)
        self._per_round, self._done = config.participants, float(first_round - 1)
        self.show(f"round {first_round}/{config.rounds}")

    def on_client(self, round: int, client: int) -> None:
        self._done += 1 / self._per_round
        if time.perf_counter() - self._drawn > MOMENT:  # a notebook that redraws for each of many clients is slow
            self.show(self._line)

    def on_round(self, round: int, row: Mapping[str, Any] | None) -> None:
        self._done = float(round)
        super().on_round(round, row)

    def on_note(self, note: str) -> None:
        self._display({"text/plain": f"note: {note}"}, raw=True)

    def show(self, line: str) -> None:
        self._line, self._drawn = line, time.perf_counter()
        # The element needs no script and no widget, so a saved notebook shows it too.
        bar = f'<progress value="{self._done:.2f}" max="{self._rounds}" style="width: 60%"></progress>'
        content = {"text/plain": line, "text/html": f"{bar if self._rounds else ''}<div>{escape(line)}</div>"}
        if self._handle is None:
            self._handle = self._display(content, raw=True, display_id=True)
        else:
            self._handle.update(content, raw=True)


class BarProgress(QuietProgress):
    """A live bar over rounds, with the latest accuracy and the time left."""

    def __init__(self, console: Console, *, transient: bool = False) -> None:
        super().__init__(console)
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[accuracy]}", markup=False),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=console,
            transient=transient,
        )
        self._per_round = 1
        self._task = self._bar.add_task("round", total=None, accuracy="accuracy –")

    @contextmanager
    def showing(self) -> Iterator[None]:
        with super().showing(), self._bar:
            yield

    def on_reading(self, what: str, done: int, total: int) -> None:
        self._bar.update(self._task, description=f"reading {what}", total=total, completed=done, accuracy="")

    def on_start(self, config: Experiment, first_round: int) -> None:
        super().on_start(config, first_round)
        self._per_round = config.participants
        self._bar.reset(self._task, description="round", total=config.rounds, completed=first_round - 1)
        self._bar.update(self._task, accuracy="accuracy –")

    def on_client(self, round: int, client: int) -> None:
        self._bar.advance(self._task, 1 / self._per_round)
        if self._names:
            self._answered.append(self._names[client])
            self._bar.update(self._task, description=f"round {round}, answered: {', '.join(self._answered)}")

    def on_attendance(self, words: str) -> None:
        self._bar.console.print(words)

    def on_round(self, round: int, row: Mapping[str, Any] | None) -> None:
        self._bar.update(self._task, completed=round, description="round")
        self._answered = []
        if row is not None:
            text = f"{_run_of(row)}accuracy {percent(row['accuracy_mean'])}  loss {row['loss_mean']:.4f}"
            self._bar.update(self._task, accuracy=text)

    def on_note(self, note: str) -> None:
        self._bar.console.print(f"note: {note}")


def _run_of(row: Mapping[str, Any]) -> str:
    """The name of a round's run, where several run at once."""
    return f"{row['run']}  " if "run" in row else ""


@contextmanager
def watched(watcher: Watcher | None, progress: bool | None) -> Iterator[Watcher]:
    """Who is told about the progress of a run from Python: the caller's watcher, or a bar where someone can see it.

    With `progress` None that is on a terminal and in a notebook; True shows it anywhere, False nowhere.
    """
    if watcher is not None and progress:
        raise InputError("a run has a watcher and progress=True: give one of them.")
    if watcher is not None and not isinstance(watcher, Watcher):
        raise InputError(f"the watcher is a value of type {type(watcher).__name__}: give a polyfed.Watcher.")
    console = plain_console(stderr=True)
    kind: QuietProgress | None = None
    if watcher is None and progress is not False:
        if in_notebook():
            kind = NotebookProgress(console)
        elif sys.stderr.isatty():
            kind = BarProgress(console, transient=True)
        elif progress:
            kind = LineProgress(console)
    if kind is None:
        yield watcher or Watcher()
        return
    with kind.showing():
        yield kind


@contextmanager
def bench_line(console: Console) -> Iterator[Callable[[str], None]]:
    """A line that says what is measured now: replaced by the next on a terminal, one below the other elsewhere."""
    if console.is_terminal:
        with console.status("") as status:
            yield lambda words: status.update(Text(words))
    else:
        yield lambda words: console.print(words, soft_wrap=True)


def in_notebook() -> bool:
    """Whether this is a notebook's kernel."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return type(shell).__name__ == "ZMQInteractiveShell"
