"""The same rounds in HtFLlib and here: how many times faster is polyfed?

    git clone https://github.com/TsingZ0/HtFLlib /tmp/HtFLlib
    python benchmarks/htfllib.py --checkout /tmp/HtFLlib [--methods fedproto,fedtgp] [--models papers] [--device cuda]

Nothing is fetched. Both sides train the same networks (polyfed's, put into HtFLlib as models of its own) on the same
samples of the same clients, with the same batch size and number of steps, on clients and on the server. They take
turns, each in a process of its own, and every round ends with an evaluation of all clients, as it does in HtFLlib by
default. Prints two Markdown tables: the median seconds of a round on each side with their ratio, and what was counted
in a round on each side. A ratio is printed only if both sides did the same work.

HtFLlib is imported from the checkout as it is; its files go into a temporary folder. Only system/flcore and
system/utils are needed. It keeps its models as pickled modules, which PyTorch 2.6 and later only load if
TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD is set: it is, for that process. It needs scikit-learn; packages that it only imports
are replaced by empty modules if they are not installed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import IO

import torch
from htfllib_sides import SERVERS, WARM_UP, Measured, ours, own_rounds, theirs

from polyfed.assemble import find_device
from polyfed.compute import machine_name
from polyfed.errors import first_line
from polyfed.methods import find_method

HERE = Path(__file__).resolve().parents[1]
SIDES = {"theirs": "HtFLlib", "ours": "polyfed"}
EQUAL = (
    "client steps", "samples trained", "parameters updated, clients", "server steps", "parameters updated, server",
    "samples evaluated", "samples gathered", "numbers factored",
)  # fmt: skip
"""What both sides must do equally often in a round."""
_TWICE = "HtFLlib's gradients also run through the network that the other learns from; polyfed detaches it"
DIFFERENT = {
    "fedproto": {"samples gathered": "polyfed averages features in a pass after training, HtFLlib while it trains"},
    "fedtgp": {"operations": "distances are matrix products in HtFLlib; polyfed's, from differences, are not counted"},
    "fml": {"operations": _TWICE},
    "fedkd": {"operations": _TWICE},
    "fedgen": {
        "operations": "only polyfed has the paper's guidance and its term for diversity, and only HtFLlib's clients "
        "compute gradients of the generator, which nobody uses"
    },
}
"""By method, what is done differently on purpose, and why."""


@dataclass
class Turns:
    """What was measured of a method on both sides."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: {side: [] for side in SIDES})
    first: dict[str, float] = field(default_factory=dict)
    work: dict[str, dict[str, int]] = field(default_factory=dict)

    def add(self, side: str, found: Measured) -> None:
        self.seconds[side] += found.seconds
        self.first.setdefault(side, found.first)
        self.work[side] = found.work


def unequal(method: str, work: Mapping[str, Mapping[str, int]]) -> str:
    """Where the two sides did not do the same, in a sentence; empty if they did."""
    there, here = work["theirs"], work["ours"]
    found = [
        f"{name}: {there.get(name, 0):,} in HtFLlib, {here.get(name, 0):,} in polyfed"
        for name in EQUAL
        if there.get(name, 0) != here.get(name, 0) and name not in DIFFERENT.get(method, {})
    ]
    return f"the two sides do not do the same work ({'; '.join(found)})" if found else ""


def title_of(method: str) -> str:
    """What papers call a method."""
    return find_method(method).title


def seconds_row(method: str, turns: Turns) -> str:
    """A line of the first table."""
    slow, fast = (median(turns.seconds[side]) for side in SIDES)
    first = " | ".join(f"{turns.first[side]:.3g}" for side in SIDES)
    return f"| {title_of(method)} | {slow:.3g} | {fast:.3g} | {slow / fast:.1f} | {first} |"


def work_row(method: str, turns: Turns) -> str:
    """A line of the second table: one number where both sides agree, otherwise both."""
    there, here = (turns.work[side] for side in SIDES)
    cells = [cell(there.get(name, 0), here.get(name, 0)) for name in EQUAL]
    operations = " / ".join(f"{side.get('operations', 0) / 1e9:.4g}" for side in (there, here))
    return f"| {title_of(method)} | {' | '.join(cells)} | {operations} |"


def cell(there: int, here: int) -> str:
    """A count of both sides.

    >>> cell(1000, 1000), cell(0, 1000)
    ('1,000', '0 / 1,000')
    """
    return f"{there:,}" if there == here else f"{there:,} / {here:,}"


class Side:
    """A process in which one side runs, method after method; one that takes too long is ended and started anew."""

    def __init__(self, name: str, arguments: list[str], timeout: float) -> None:
        self.name = name
        self._arguments, self._timeout = arguments, timeout
        self._process: subprocess.Popen[str] | None = None
        self._errors: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115  # it lives as long as the side

    def measure(self, method: str) -> Measured | str:
        """One turn, or why there is none."""
        process = self._process = self._process or self._started()
        assert process.stdin and process.stdout
        timer = threading.Timer(self._timeout, process.kill)
        begin = time.perf_counter()
        timer.start()
        try:
            process.stdin.write(f"{method}\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        if not line:
            self._process = None
            status = process.wait()
            if time.perf_counter() - begin >= self._timeout:
                return f"takes longer than {self._timeout:g} s (--timeout)"
            return f"ends with status {status}: {self._last_words()}"
        answer = json.loads(line)
        return answer["failure"] if "failure" in answer else Measured(**answer)

    def _started(self) -> subprocess.Popen[str]:
        paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        if self.name == "theirs":
            environment["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
        command = [sys.executable, str(Path(__file__).resolve()), *self._arguments, "--side", self.name]
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, env=environment
        )

    def _last_words(self) -> str:
        self._errors.seek(0)
        return (self._errors.read().strip().splitlines() or ["no output"])[-1]

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._errors.close()


def work_as(side: str, given: Namespace) -> None:
    """What a side's process does: a turn for each line with a method's name, answered by a line of JSON."""
    answers = os.fdopen(os.dup(1), "w")
    measure = ours if side == "ours" else theirs
    for line in sys.stdin:
        with tempfile.TemporaryDirectory(prefix="polyfed-htfllib-") as folder, redirect_stdout(sys.stderr):
            os.chdir(folder)
            try:
                answer = asdict(measure(given, line.strip()))
            except Exception as error:  # whatever it is, the others continue
                answer = {"failure": f"fails: {type(error).__name__}: {first_line(error)}"}
            os.chdir(HERE)
        print(json.dumps(answer), file=answers, flush=True)


def compare(method: str, sides: Mapping[str, Side], repeats: int) -> Turns | str:
    """A method on both sides in turn, as often as asked; or why that failed."""
    turns = Turns()
    for _ in range(repeats):
        for name, side in sides.items():
            found = side.measure(method)
            if isinstance(found, str):
                return f"{SIDES[name]} {found}"
            turns.add(name, found)
            for package in found.stand_ins:
                print(f"{package} is not installed; HtFLlib gets an empty module for it.", file=sys.stderr)
    return unequal(method, turns.work) or turns


def commit(folder: Path) -> str:
    """The commit of a checkout, and whether files differ from it."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    # A copy inside another repository must not be taken for that one.
    if not (root := git("rev-parse", "--show-toplevel")) or Path(root).resolve() != folder.resolve():
        return "of an unknown commit"
    return git("rev-parse", "HEAD") + (" with changes" if git("status", "--porcelain", "-uno") else "")


def parsed(words: list[str] | None = None) -> Namespace:
    """The arguments, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, required=True, help="a checkout of HtFLlib")
    parser.add_argument("--commits", nargs=2, metavar=("HTFLLIB", "POLYFED"), help="where git can't tell them")
    parser.add_argument("--methods", default=",".join(SERVERS))
    parser.add_argument("--models", default="papers", help="networks of polyfed; default: the five CNNs")
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--images", type=int, default=640, help="to train on, per client; a multiple of the batch size")
    parser.add_argument("--tests", type=int, default=160, help="to test on, per client")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5, help="that count, per turn; on a GPU at least ten of polyfed")
    parser.add_argument("--repeats", type=int, default=1, help="turns of each side")
    parser.add_argument("--timeout", type=float, default=300, help="seconds that a turn may take")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--engine", default="auto", help="polyfed's engine")
    parser.add_argument("--cpu-time", action="store_true", help="seconds of CPU time, for a busy machine without a GPU")
    parser.add_argument("--no-evaluation", action="store_true", help="train only")
    parser.add_argument("--side", choices=list(SIDES), help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    given.checkout = given.checkout.resolve()
    given.methods = given.methods.split(",")
    if given.images % given.batch:
        parser.error(f"--images {given.images} is no multiple of --batch {given.batch}: HtFLlib drops the last batch.")
    if given.cpu_time and find_device(given.device).type != "cpu":
        parser.error("--cpu-time does not see what a GPU does: add --device cpu, or leave it out.")
    if not (given.checkout / "system" / "flcore").is_dir():
        parser.error(f"'{given.checkout}' is no checkout of HtFLlib: it has no folder system/flcore.")
    unknown = [method for method in given.methods if method not in SERVERS]
    if unknown:
        parser.error(f"'{unknown[0]}' is not among the methods that both have: {', '.join(SERVERS)}.")
    return given


@contextmanager
def both_sides(given: Namespace) -> Iterator[dict[str, Side]]:
    """The two processes."""
    words = [*sys.argv[1:], "--checkout", str(given.checkout)]  # the last one counts
    sides = {name: Side(name, words, given.timeout) for name in SIDES}
    try:
        yield sides
    finally:
        for side in sides.values():
            side.close()


def heading(given: Namespace) -> str:
    """What was compared, where and when."""
    there, here = given.commits or (commit(given.checkout), commit(HERE))
    clock = "seconds of CPU time" if given.cpu_time else "seconds"
    evaluated = "no evaluation" if given.no_evaluation else f"evaluated on {given.tests} images each after every round"
    counted = {"HtFLlib": (WARM_UP, given.rounds), "polyfed": own_rounds(given)}
    medians = [f"{side} of {given.repeats * rounds} after {before}" for side, (before, rounds) in counted.items()]
    return (
        f"HtFLlib {there}, polyfed {here}; {machine_name(find_device(given.device))}, torch {torch.__version__}, "
        f"{time.strftime('%d %B %Y')}.\n{given.clients} clients ({given.models}) with {given.images} images each, "
        f"batch {given.batch}, one epoch, {evaluated}; {clock}, "
        f"median of rounds: {', '.join(medians)} to warm up."
    )


def table_head(*columns: str) -> str:
    """The first two lines of a Markdown table of methods, with numbers in all other columns.

    >>> print(table_head("seconds"))
    | method | seconds |
    |---|---:|
    """
    return f"| method | {' | '.join(columns)} |\n|---|{'---:|' * len(columns)}"


def main() -> int:
    given = parsed()
    if given.side:
        work_as(given.side, given)
        return 0
    print(f"{heading(given)}\n", flush=True)
    print(table_head("HtFLlib, s", "polyfed, s", "times faster", "first round: HtFLlib, s", "polyfed, s"), flush=True)
    done: dict[str, Turns] = {}
    failures: list[str] = []
    with both_sides(given) as sides:
        for method in given.methods:
            found = compare(method, sides, given.repeats)
            if isinstance(found, Turns):
                done[method] = found
                print(seconds_row(method, found), flush=True)
            else:
                failures.append(f"{title_of(method)}: {found}.")
                print(f"| {title_of(method)} | failed, see below | | | | |", flush=True)
    print("\nDone in one round, in HtFLlib / in polyfed where they differ:\n")
    print(table_head(*EQUAL, "operations, 10⁹"))
    for method, turns in done.items():
        print(work_row(method, turns))
    reasons = [
        f"{title_of(method)}, {what}: {why}." for method in done for what, why in DIFFERENT.get(method, {}).items()
    ]
    print("\n".join(["", *reasons, *failures]))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
