"""All records as one table with a row for each run and rule of prediction, to be opened by other programs."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from typing import Any

import pandas as pd

from papers.records import Record, key_of

READINGS = {
    "last_tenth": ("mean", "last-tenth"),
    "last_round": ("mean", "last"),
    "best_round": ("mean", "best"),
    "weighted_last_tenth": ("weighted", "last-tenth"),
    "participants_last_tenth": ("participants", "last-tenth"),
    "validation_last_tenth": ("validation", "last-tenth"),
}
"""By column, whose mean accuracy it is, and of which rounds."""
COSTS = ("upload_bytes_per_round", "download_bytes_per_round", "flops_per_round", "floats_last_round")
ORIGIN = ("seconds", "polyfed", "commit", "torch", "machine", "date")


def sheet(records: Iterable[Record]) -> pd.DataFrame:
    """A row for each run and rule. Accuracies are shares."""
    return pd.DataFrame([_row(record, rule) for record in sorted(records, key=key_of) for rule in record["accuracy"]])


def command(record: Record) -> str:
    """What repeats the run; in the usual folders it would be skipped, because it is recorded."""
    name = shlex.quote(f"{record['entry']}:{record['method']}")
    places = "--results again --out again --work again/work"
    return f"python -m papers.run {name} --settings {record['setting']} --seeds {record['seed']} {places}"


def _row(record: Record, rule: str) -> dict[str, Any]:
    found = record["accuracy"][rule]
    return {
        **{name: record[name] for name in ("entry", "setting", "method", "seed")},
        "rule": rule,
        "rounds": record["rounds"][-1],
        **{column: found.get(average, {}).get(when) for column, (average, when) in READINGS.items()},
        "at_best_validation": record.get("at_best_validation", {}).get(rule),
        "own_best": record["own_best"] if rule == next(iter(record["accuracy"])) else None,  # of its own rule only
        **{name: record["costs"].get(name) for name in COSTS},
        **{name: record[name] for name in ORIGIN},
        "command": command(record),
    }
