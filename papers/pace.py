"""Estimates how long runs will take from how long others of the same command took."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from papers.campaign import Campaign, Run
from polyfed.errors import PolyfedError
from polyfed.records import RunFolder

GROWTH = 0.6
"""Runs that train together take as long as one times their number to this power: five took 2.6 times as long."""
MARGIN = 1.2
"""For evaluations, for what comes before the first round and after the last, and for errors of the expectation."""


class Progress(NamedTuple):
    """How far a run is."""

    rounds: int
    seconds: float | None
    """Of a round, in the second half of those so far; not known after one, which compiles kernels."""


def progress(folder: Path, since: int = 0) -> Progress | None:
    """That of the run in a folder; None if it has not begun, or was recorded and its folder removed.

    Its pace is that of rounds after `since`.
    """
    try:
        rounds = [event for event in RunFolder.open(folder).events() if event["event"] == "round"]
    except (PolyfedError, OSError):
        return None
    own = [event["seconds"] for event in rounds if event["round"] > since]
    late = own[max(1, len(own) // 2) :]
    return Progress(rounds[-1]["round"] if rounds else 0, sum(late) / len(late) if late else None)


class Pace:
    """What groups of runs that train together are expected to take.

    A round's work is that of its local training, times what the method takes beside Standalone. How fast work is done
    is seen from the groups that have begun, if possible from those with the same networks and data.
    """

    def __init__(self, campaign: Campaign, runs: Mapping[str, Run], folder: Path) -> None:
        self._campaign, self._runs, self._folder = campaign, dict(runs), folder
        self._begun: dict[tuple[str, ...], float | None] = {}
        """By group, its seconds a round as they were last seen."""
        self._before: dict[tuple[str, ...], int] = {}
        """By group, how many rounds an earlier command had made, perhaps beside fewer others. One of whose runs some
        begin once more, on their own, is not here."""

    def begins(self, group: Sequence[str]) -> None:
        if tuple(group) not in self._begun:
            self._before = {other: made for other, made in self._before.items() if not set(other) & set(group)}
            self._begun[tuple(group)], self._before[tuple(group)] = None, self._made(group[0])

    def ended(self, name: str, seconds: float) -> None:
        """A run has ended; so many seconds a round is what it took, with the rounds of earlier commands."""
        for group, before in list(self._before.items()):  # others may begin meanwhile
            if name in group and before:
                self._look(group, name)
            elif name in group:
                self._begun[group] = seconds

    def expected(self, group: Sequence[str]) -> float | None:
        """How many seconds it will take from now to its last round; None if no pace is known yet."""
        for begun in self._before:
            self._look(begun, begun[0])
        rates = {begun: seconds / self._work(begun) for begun, seconds in self._begun.items() if seconds}
        if not rates:
            return None
        alike = [rate for begun, rate in rates.items() if self._kind(begun) == self._kind(group)]
        rounds = self._runs[group[0]].config.rounds
        made = min(map(self._made, group))
        return MARGIN * median(alike or list(rates.values())) * self._work(group) * (rounds - made)

    def _look(self, group: tuple[str, ...], name: str) -> None:
        """See how fast a group is now, by one of its runs."""
        if found := progress(self._folder / name, self._before.get(group, 0)):
            self._begun[group] = found.seconds or self._begun[group]

    def _made(self, name: str) -> int:
        """How many rounds a run has made."""
        found = progress(self._folder / name)
        return found.rounds if found else 0

    def _kind(self, group: Sequence[str]) -> tuple[str, str]:
        config = self._runs[group[0]].config
        return config.models, config.data

    def _work(self, group: Sequence[str]) -> float:
        """Of a round, beside that of other groups."""
        run = self._runs[group[0]]
        effort = self._campaign.effort.get(self._campaign.method(run.entry, run.row), 1.0)
        return effort * run.config.training.epochs * run.config.participation * math.pow(len(group), GROWTH)
