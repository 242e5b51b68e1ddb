"""How much trackers slow a round: the same run with and without each, round by round, in one process.

    python benchmarks/trackers.py [--rounds 30] [--repeats 3]

Prints the median time between the ends of two rounds, and the CPU time of the tracker's thread as a share of the time
that the rounds took. The first is what a user notices, but on a busy machine it varies by far more than a tracker
costs, as the two runs without one show. The second depends less on what else is running, and must stay below 1 %.
Trackers that are not installed are left out.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import polyfed
from polyfed.trackers import TRACKERS


class Stopwatch(polyfed.Watcher):
    """Notes when rounds end, and which notes there are."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.worked: list[float] = []
        self.notes: list[str] = []

    def on_round(self, round: int, row: Mapping[str, Any] | None) -> None:
        self.ends.append(time.perf_counter())
        clocks = [
            time.pthread_getcpuclockid(thread.ident)
            for thread in threading.enumerate()
            if thread.name.startswith("polyfed-tracker-") and thread.ident
        ]
        self.worked.append(sum(map(time.clock_gettime, clocks), 0.0))

    @property
    def share(self) -> float:
        """The part of the time that the tracker's thread has worked, since the end of the first round."""
        return (self.worked[-1] - self.worked[0]) / (self.ends[-1] - self.ends[0])

    def on_note(self, note: str) -> None:
        self.notes.append(note)

    def gaps(self) -> list[float]:
        """Seconds from the end of a round to the end of the next, without the first rounds, which warm up."""
        pairs = list(zip(self.ends, self.ends[1:], strict=False))
        return [after - before for before, after in pairs[2:]]


def measure(tracker: str, rounds: int) -> tuple[list[float], float]:
    """The rounds of one run, and the tracker's share of their time."""
    watch = Stopwatch()
    polyfed.run("fedproto", rounds=rounds, device="cpu", tracker=tracker, watcher=watch)
    if watch.notes:
        raise SystemExit(f"{tracker}: {watch.notes[0]}")
    return watch.gaps(), watch.share


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    names = [name for name in TRACKERS if find_spec(name)]
    found: dict[str, list[float]] = {name: [] for name in ("none", "none again", *names)}
    shares: dict[str, float] = {}
    for _ in range(given.repeats):  # in turn, so that a machine that slows down slows all of them
        for name, gaps in found.items():
            more, share = measure(name.split()[0], given.rounds)
            gaps += more
            shares[name] = max(shares.get(name, 0.0), share)
    plain = statistics.median(found["none"])
    for name, gaps in found.items():
        median = statistics.median(gaps)
        print(
            f"{name:12} {1000 * median:8.2f} ms per round  {100 * (median / plain - 1):+6.2f} %  "
            f"its thread: at most {100 * shares[name]:.3f} % of the time"
        )


if __name__ == "__main__":
    main()
