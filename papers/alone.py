"""The table of what methods gain without partners, from what papers.few records, beside what the same clients gain."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from papers.few import late
from papers.records import Key, Record, key_of
from papers.tables import Comparison, markdown, title_of, with_interval
from polyfed.comparison.statistics import Interval, t_interval
from polyfed.errors import InputError

ALONE = "alone"
"""The folder of these records in papers/results."""
Gains = dict[tuple[int, int], float]
"""By seed and client, points more than Standalone."""


def read_alone(folder: Path) -> dict[Key, Record]:
    """All records that papers.few wrote in a folder; raises for lines that are none, and for two of the same run."""
    found: dict[Key, Record] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            try:
                record = json.loads(line)
                key, _ = key_of(record), (record["rounds"], record["curves"], record["settings"])
            except (ValueError, KeyError, TypeError) as error:
                raise InputError(f"line {number} of '{path}' is no record of papers.few: remove it.") from error
            if key in found:
                raise InputError(f"line {number} of '{path}' is of a run that was read before: remove one of them.")
            found[key] = record
    return found


def alone(given: Comparison, setting: str) -> str:
    """For each method what clients gain without partners, and what they gain among all; nothing without records."""
    base, rows = given.entry.base, []
    own: dict[str, dict[int, Record]] = defaultdict(dict)
    for run in given.runs:
        if run.setting == setting and run.key in given.few:
            own[run.row][run.seed] = given.few[run.key]
    for row in given.rows:
        gains = over(own.get(row, {}), own.get(base, {}))
        if row != base and gains:
            rows.append([
                title_of(row), str(len(gains)), with_interval(t_interval(list(gains.values()))),
                with_interval(among(given, row, gains)), given.gain(row, setting),
            ])  # fmt: skip
    name = title_of(base)
    head = [f"minus {name}", "clients", "without partners", "the same clients among all, last round", "all clients"]
    return markdown(head, rows)


def over(found: Mapping[int, Record], base: Mapping[int, Record]) -> Gains:
    """What each client is above its own base without partners, in the last tenth of the rounds."""
    return {
        (seed, int(client)): 100 * (_late(record, client) - _late(base[seed], client))
        for seed, record in found.items()
        for client in record["curves"]
        if seed in base and client in base[seed]["curves"]
    }


def among(given: Comparison, row: str, gains: Gains) -> Interval:
    """What these clients gain in the runs with all, whose records have each client's last accuracy by its own rule.

    NaN if that rule is not the one that is compared.
    """
    records = {each: {record["seed"]: record for record in given.of(each)} for each in (row, given.entry.base)}
    ours, base = records[row], records[given.entry.base]
    if any(seed not in ours or seed not in base or _own_rule(ours[seed]) != given.rule(row) for seed, _ in gains):
        return t_interval([])
    return t_interval([100 * (ours[seed]["clients"][c] - base[seed]["clients"][c]) for seed, c in gains])


def _late(record: Record, client: str) -> float:
    return late(dict(zip(record["rounds"], record["curves"][client], strict=True)))


def _own_rule(record: Record) -> Any:
    return next(iter(record["accuracy"]))
