"""What records look like as text: rows of CSV, lines of JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from polyfed.records import disk

ROUND_COLUMNS = (
    "round", "accuracy_mean", "accuracy_weighted", "accuracy_std", "accuracy_worst_decile", "loss_mean", "participants",
    "replies", "upload_floats", "download_floats", "upload_bytes", "download_bytes", "flops", "seconds",
)  # fmt: skip
EVALUATION_COLUMNS = (
    "round", "part", "rule", "accuracy_mean", "accuracy_weighted", "accuracy_std", "accuracy_worst_decile",
    "accuracy_participants", "simulated_seconds",
)  # fmt: skip
EARLIER_EVALUATION_COLUMNS = EVALUATION_COLUMNS[:7]
"""The columns of runs that started with polyfed 0.1."""
CLIENT_COLUMNS = (
    "client", "architecture", "parameters", "train_samples", "validation_samples", "test_samples", "classes",
    "accuracy_final", "accuracy_at_best_validation", "accuracy_best",
)  # fmt: skip


def evaluation_columns(path: Path) -> tuple[str, ...]:
    """The columns of a run's evaluations.csv: those that it started with, so that all rows have the same."""
    header = (disk.read(path) or b"").partition(b"\n")[0]
    earlier = header == ",".join(EARLIER_EVALUATION_COLUMNS).encode()
    return EARLIER_EVALUATION_COLUMNS if earlier else EVALUATION_COLUMNS


def event_of(line: bytes) -> dict[str, Any] | None:
    """A line of events.jsonl; None if a kill or a fault left something else."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    whole = isinstance(event, dict) and "event" in event and isinstance(event.get("round", 0), int)
    return event if whole else None


def as_csv(rows: Iterable[Iterable[Any]]) -> str:
    """Rows as CSV."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def as_json(values: Mapping[str, Any], indent: int | None = None) -> str:
    """JSON that every program reads: it has no NaN, so a missing number is null."""
    return json.dumps({name: None if value != value else value for name, value in values.items()}, indent=indent)
