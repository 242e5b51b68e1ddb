"""The table of what methods gain without partners, from what papers.few records, beside what the same clients gain."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from statistics import mean
from typing import Any

from papers.few import late
from papers.records import Record
from papers.tables import Comparison, markdown, title_of, with_interval
from polyfed.comparison.statistics import Interval, t_interval
from polyfed.errors import counted

ALONE = "alone"
"""The folder of these records in papers/results."""
HOW = """Without partners, clients have a server of their own that hears of nobody else; their gain is that of the last
tenth of the rounds. They train independently of one another, so the interval is over clients. It says little about
other seeds."""
Gains = dict[tuple[int, int], float]
"""By seed and client, points more than Standalone."""


def alone(given: Comparison, setting: str) -> str:
    """For each method what clients gain without partners, and what they gain among all; nothing without records."""
    base, digits, rows = given.entry.base, given.entry.digits, []
    own: dict[str, dict[int, Record]] = defaultdict(dict)
    for run in given.runs:
        if run.setting == setting and run.key in given.few:
            own[run.row][run.seed] = given.few[run.key]
    for row in given.rows:
        gains = over(own.get(row, {}), own.get(base, {}))
        if row != base and gains:
            rows.append([
                title_of(row), _of_seeds(gains), with_interval(t_interval(list(gains.values())), digits),
                with_interval(Interval(among(given, row, gains), math.nan, math.nan), digits), given.gain(row, setting),
            ])  # fmt: skip
    head = [f"minus {title_of(base)}", "clients", "without partners", "the same among all, last round", "all clients"]
    return f"{HOW}\n\n{markdown(head, rows)}" if rows else ""


def over(found: Mapping[int, Record], base: Mapping[int, Record]) -> Gains:
    """What each client is above its own base without partners, in the last tenth of the rounds."""
    return {
        (seed, int(client)): 100 * (_late(record, client) - _late(base[seed], client))
        for seed, record in found.items()
        for client in record["curves"]
        if seed in base and client in base[seed]["curves"]
    }


def among(given: Comparison, row: str, gains: Gains) -> float:
    """What these clients gain in the runs with all, whose records have each client's last accuracy by its own rule.

    NaN if that rule is not the one that is compared. Clients of a run depend on one another: no interval over them.
    """
    records = {each: {record["seed"]: record for record in given.of(each)} for each in (row, given.entry.base)}
    ours, base = records[row], records[given.entry.base]
    if any(seed not in ours or seed not in base or _own_rule(ours[seed]) != given.rule(row) for seed, _ in gains):
        return math.nan
    return 100 * mean(float(ours[seed]["clients"][c] - base[seed]["clients"][c]) for seed, c in gains)


def _of_seeds(gains: Gains) -> str:
    """
    >>> _of_seeds({(2, 0): 1.0, (2, 1): 2.0, (3, 0): 0.5})
    '3 (2 seeds)'
    """
    return f"{len(gains)} ({counted(len({seed for seed, _ in gains}), 'seed')})"


def _late(record: Record, client: str) -> float:
    return late(dict(zip(record["rounds"], record["curves"][client], strict=True)))


def _own_rule(record: Record) -> Any:
    return next(iter(record["accuracy"]))
