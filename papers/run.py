"""Runs entries of the campaign until a deadline, and records every run as soon as it is finished.

    python -m papers.run cifar100-n100:fedkd cifar10-n100 --data-dir data --device cuda --jobs 6 --out new --minutes 9

Runs begin in the order in which their entries, and the rows behind a colon, are named; what takes longest should come
first, or it is still going when the others have ended. Where time on a machine is short, `--whole` begins no run that
could not end in time, judging by how long the others take; those then end sooner. Runs that are recorded already are
skipped. A run that the deadline stops leaves a checkpoint under --work; the same command continues from there, or
starts the run again if that folder is gone. Ctrl-C and SIGTERM stop runs as the deadline does. A run that fails after
it has begun is tried once more.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from papers.campaign import FOLDER, Campaign, Run, read_campaign
from papers.pace import Pace, progress
from papers.records import RESULTS, append, check, check_settings, in_a_line, line_of, parse, read_records, record_of
from polyfed.comparison.plan import Cell, parse_seeds
from polyfed.comparison.runner import is_finished, reason_of, run_cells
from polyfed.compute import gpu_has_failed
from polyfed.errors import InputError, PolyfedError, counted, unknown_name
from polyfed.records import disk
from polyfed.server.federation import Interrupted, Watcher

CLIENTS = re.compile(r"\b(clients?|round) \d+(?:(?:, | and )\d+)*(?: others)?")
"""What differs between notes that say the same of other clients or in another round."""


def say(line: str) -> None:
    """Print a line in one piece, as other threads print too."""
    print(f"{line}\n", end="", flush=True)


class Overseer(Watcher):
    """Lets no run begin late, asks all to stop when the time is up, and prints what they note, each note once.

    Notes say for example that a network's clients train one after another, which may take many times as long.
    """

    def __init__(self, minutes: float, names: Collection[str], pace: Pace | None = None) -> None:
        self._end, self._names, self._pace = time.monotonic() + 60 * minutes, set(names), pace
        self._runs: dict[str, set[str]] = {}
        """By note, the runs that have it."""
        self._hurried = False
        self.begun: set[str] = set()
        """The runs that were let begin."""
        self._refused: dict[str, str] = {}
        """By the first run of a group that was not begun, what is to be said of it."""
        self._lock = threading.Lock()  # runs that train together are in threads of their own

    @property
    def stop_requested(self) -> bool:  # type: ignore[override]
        return time.monotonic() >= self._end

    def may_begin(self, runs: Sequence[str]) -> bool:
        if not self.can_end(runs):
            return False
        self.begun |= set(runs)
        return True

    def can_end(self, runs: Sequence[str]) -> bool:
        """Whether these runs can end in time at the pace seen so far; yes if none is known."""
        if self._pace is None:
            return True
        with self._lock:
            seconds = self._pace.expected(runs)
            if seconds is not None and time.monotonic() + seconds > self._end:
                others = f" and {len(runs) - 1} more" if len(runs) > 1 else ""
                minutes = max(1, round(seconds / 60))
                self._refused[runs[0]] = f"not begun: {runs[0]}{others}, expected to take {counted(minutes, 'minute')}"
                return False
            self._refused.pop(runs[0], None)
            self._pace.begins(runs)
        return True

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, Ctrl-C or SIGTERM brings the deadline to now.

        Further signals are left to `run_cells`, which may kill processes. Where these share a GPU by NVIDIA's MPS, that
        costs all others their work.
        """

        def hurry(number: int, frame: FrameType | None) -> None:
            if self._hurried:
                raise KeyboardInterrupt
            self._hurried, self._end = True, time.monotonic()
            os.write(1, b"stopping after the rounds in progress, with checkpoints\n")  # print may be interrupted itself

        before = {number: signal.signal(number, hurry) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def on_note(self, note: str) -> None:
        name, _, words = note.partition(": ")
        if name not in self._names:  # a run in this process, beside no other
            name, words = self.folder.name if self.folder else "", note
        line = in_a_line(CLIENTS.sub(r"\1 …", words))
        with self._lock:
            if line not in self._runs:
                say(f"note of {name}: {line}")
            self._runs.setdefault(line, set()).add(name)

    def summary(self) -> list[str]:
        """What was not begun, and for each note how many runs have it."""
        return list(self._refused.values()) + [
            f"noted by {len(runs)} of {len(self._names)} runs: {line}" for line, runs in self._runs.items()
        ]


class Recorder:
    """Turns finished run folders into records and removes the folders: a run's networks are hundreds of megabytes."""

    def __init__(self, campaign: Campaign, given: argparse.Namespace) -> None:
        self._campaign, self._given, self._commit = campaign, given, given.commit or commit()
        self.failures: dict[str, str] = {}
        seeds, settings = given.seeds and parse_seeds(given.seeds), given.settings and given.settings.split(",")
        machine = {"device": given.device} | ({"data_folder": str(given.data_dir)} if given.data_dir else {})
        recorded = read_records([given.results])
        check(recorded, campaign)
        planned = [run for name in given.names or campaign.entries for run in asked(campaign, name, machine)]
        if missing := sorted(set(seeds or ()) - {run.seed for run in planned}):
            known_seeds = ", ".join(str(seed) for seed in sorted({run.seed for run in planned}))
            raise InputError(f"no run has the seed {missing[0]}: the campaign has {known_seeds}.")
        known = {run.setting for run in planned}
        for setting in settings or ():
            if setting not in known:
                raise unknown_name("setting", setting, known)
        self.left = {
            run.cell.name: run
            for run in planned
            if run.key not in recorded
            and (not seeds or run.seed in seeds)
            and (not settings or run.setting in settings)
        }
        self.pace = Pace(campaign, self.left, given.work / "runs")

    def sweep(self, names: Collection[str] | None = None) -> None:
        """Record these runs, or all, where they are finished; also in --out what an earlier command had recorded."""
        for name, run in [(name, run) for name, run in self.left.items() if names is None or name in names]:
            kept, folder = self._given.work / "records" / f"{name}.json", self._given.work / "runs" / name
            if kept.exists():
                record = parse(kept.read_bytes(), f"'{kept}'")
                check_settings(run, record)
            else:
                margins = run.row in self._campaign.entries[run.entry].margins
                try:
                    if not is_finished(run.config, folder):
                        continue
                    record = record_of(run, folder, commit=self._commit, margins=margins)
                except Exception as error:  # one run's failure must not cost the others, which are still going
                    self.failures[name] = reason_of(error)
                    continue
                disk.write(kept, line_of(record))
            append(record, self._given.out)
            self.pace.ended(name, record["seconds"] / run.config.rounds)
            del self.left[name]
            shutil.rmtree(folder, ignore_errors=True)

    def unfinished(self) -> list[str]:
        """For each run that has begun and not ended, how many rounds are done and how long a round takes."""
        lines = []
        for name, run in list(self.left.items()):
            found = progress(self._given.work / "runs" / name)
            if found is None or name in self.failures:
                continue
            pace = f", {found.seconds:.3g} s a round" if found.seconds is not None else ""
            lines.append(f"{name}: {found.rounds} of {run.config.rounds} rounds{pace}")
        return lines

    def begun(self, name: str) -> bool:
        """Whether a run has made a round."""
        found = progress(self._given.work / "runs" / name)
        return found is not None and found.rounds > 0

    def tell_pace(self) -> None:
        for line in self.unfinished():
            say(line)

    def tell(self, line: str) -> None:
        say(line)
        self.sweep(line.split())  # only what the line names: others may still be writing


def asked(campaign: Campaign, name: str, machine: Mapping[str, Any]) -> list[Run]:
    """The runs of an entry, in its order; or those of the rows that are named behind a colon, in that order."""
    entry, colon, named = name.partition(":")
    found, rows = campaign.runs([entry], **machine), named.split(",") if colon else []
    for row in rows:
        if row not in campaign.rows[entry]:
            raise unknown_name(f"row of {entry}", row, campaign.rows[entry])
    return [run for row in rows for run in found if run.row == row] if rows else found


def commit() -> str | None:
    """The commit of this checkout, marked if files differ from it; None where git does not know."""
    command = ["git", "-C", str(FOLDER), "describe", "--always", "--dirty", "--abbrev=9", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() or None
    except (OSError, subprocess.CalledProcessError):
        return None


@contextmanager
def every(minutes: float, act: Callable[[], object]) -> Iterator[None]:
    """Inside, another thread does something as often as this."""
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(max(0.1, min(60 * minutes, threading.TIMEOUT_MAX))):
            act()

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _minutes(text: str) -> float:
    minutes = float(text)
    if math.isnan(minutes):
        raise ValueError
    return minutes


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m papers.run", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME[:ROW,…]",
        help="entries, in the order to run them, or some rows of one; none: list",
    )
    parser.add_argument("--seeds", help="only these seeds, such as 2-3")
    parser.add_argument("--settings", metavar="NAME,…", help="of entries with several settings, only these")
    parser.add_argument("--data-dir", type=Path, help="where the datasets are")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--jobs", type=int, default=1, help="processes that run at the same time")
    parser.add_argument(
        "--together", type=int, help="runs whose clients train as one batch; polyfed's default if left out"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/campaign/new"), help="where new records are written")
    parser.add_argument("--work", type=Path, default=Path("runs/campaign"), help="where unfinished runs are kept")
    parser.add_argument("--minutes", type=_minutes, default=math.inf, help="stop after this time; by default never")
    parser.add_argument("--whole", action="store_true", help="begin no run that would not end in --minutes")
    parser.add_argument("--pace", type=_minutes, default=math.inf, help="say how far runs are every so many minutes")
    parser.add_argument("--commit", help="the commit that is recorded; by default git's answer")
    parser.add_argument("--campaign", type=Path, default=FOLDER / "campaign.yaml", help="another file of entries")
    parser.add_argument("--results", type=Path, default=RESULTS, help="records that are there already")
    return parser.parse_args(arguments)


def _attempt(run_all: Callable[[list[Cell]], dict[str, str]], cells: list[Cell]) -> dict[str, str]:
    """Run these as far as the time goes; returns the reason of each that failed."""
    try:
        return run_all(cells)
    except Interrupted as stop:  # the deadline, Ctrl-C, or nothing that may begin
        say(str(stop))
        return dict(stop.failures)


def run(given: argparse.Namespace) -> int:
    """Do what the command line asks for; returns the exit status."""
    campaign = read_campaign(given.campaign)
    recorder = Recorder(campaign, given)
    if not given.names:
        for name in campaign.entries:
            left = sum(run.entry == name for run in recorder.left.values())
            print(f"{name:32} {left:4} of {len(campaign.runs([name])):4} runs left")
        return 0
    for folder in (given.out, given.work / "records"):
        disk.make_folder(folder)
    total = len(recorder.left)
    recorder.sweep()
    overseer = Overseer(given.minutes, recorder.left, recorder.pace if given.whole else None)
    run_all = partial(
        run_cells, folder=given.work, jobs=given.jobs, tell=recorder.tell, watcher=overseer, together=given.together
    )
    with overseer.listening(), every(given.pace, recorder.tell_pace):
        cells = [run.cell for run in recorder.left.values()]
        failures = _attempt(run_all, cells)
        again = [cell for cell in cells if cell.name in failures and recorder.begun(cell.name)]
        if again and not overseer.stop_requested and not gpu_has_failed(given.device):
            say(f"once more: {', '.join(cell.name for cell in again)}")
            overseer.begun.clear()
            try:
                second = _attempt(run_all, again)
            except InputError as error:  # the same for all of them, so for one if it is the only one
                second = {cell.name: str(error) for cell in again}
            failures = {name: failures[name] for name in failures.keys() - overseer.begun} | second
        recorder.failures |= failures
    recorder.sweep()
    for line in [*overseer.summary(), *recorder.unfinished()]:
        print(line)
    for name, reason in recorder.failures.items():
        print(f"{name} failed: {reason}", file=sys.stderr)
    print(f"{total - len(recorder.left)} of {total} runs recorded in '{given.out}'; {len(recorder.failures)} failed")
    return 1 if recorder.failures else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: one sentence and exit status 2 for wrong input; a reader that has left ends it quietly."""
    try:
        status = run(_parsed(arguments))
        sys.stdout.flush()
        return status
    except PolyfedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python writes what is left when it ends
        return 1


if __name__ == "__main__":
    sys.exit(main())
