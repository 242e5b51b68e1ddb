"""How much trackers slow a round: the same run with and without each, round by round, in one process.

    python benchmarks/trackers.py [--rounds 30] [--repeats 3]

Prints the median time between the ends of two rounds. Trackers that are not installed are left out. A tracker may cost
at most 1 % of a round; on a busy machine the noise between two runs without a tracker, printed first, is larger.
"""

from __future__ import annotations

import argparse
import statistics
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
        self.notes: list[str] = []

    def on_round(self, round: int, row: Mapping[str, Any] | None) -> None:
        self.ends.append(time.perf_counter())

    def on_note(self, note: str) -> None:
        self.notes.append(note)

    def gaps(self) -> list[float]:
        """Seconds from the end of a round to the end of the next, without the first rounds, which warm up."""
        pairs = list(zip(self.ends, self.ends[1:], strict=False))
        return [after - before for before, after in pairs[2:]]


def measure(tracker: str, rounds: int) -> list[float]:
    """The rounds of one run."""
    watch = Stopwatch()
    polyfed.run("fedproto", rounds=rounds, device="cpu", tracker=tracker, watcher=watch)
    if watch.notes:
        raise SystemExit(f"{tracker}: {watch.notes[0]}")
    return watch.gaps()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    names = [name for name in TRACKERS if find_spec(name)]
    found: dict[str, list[float]] = {name: [] for name in ("none", "none again", *names)}
    for _ in range(given.repeats):  # in turn, so that a machine that slows down slows all of them
        for name, gaps in found.items():
            gaps += measure(name.split()[0], given.rounds)
    plain = statistics.median(found["none"])
    for name, gaps in found.items():
        median = statistics.median(gaps)
        print(f"{name:12} {1000 * median:8.2f} ms per round  {100 * (median / plain - 1):+6.2f} %")


if __name__ == "__main__":
    main()
