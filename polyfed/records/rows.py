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
    "balanced_accuracy_mean", "macro_f1_mean", "auc_mean",
)  # fmt: skip
EVALUATION_COLUMNS = (
    "round", "part", "rule", "accuracy_mean", "accuracy_weighted", "accuracy_std", "accuracy_worst_decile",
    "accuracy_participants", "simulated_seconds", "balanced_accuracy_mean", "macro_f1_mean", "auc_mean",
)  # fmt: skip
EARLIER = (EVALUATION_COLUMNS[:7], EVALUATION_COLUMNS[:9], ROUND_COLUMNS[:14])
"""The columns of runs that started with earlier versions."""
CLIENT_COLUMNS = (
    "client", "architecture", "parameters", "train_samples", "validation_samples", "test_samples", "classes",
    "accuracy_final", "accuracy_at_best_validation", "accuracy_best", "balanced_accuracy_final", "macro_f1_final",
    "auc_final", "largest_class",
)  # fmt: skip
MEMBER = "name"
"""One more column where clients are members of a federation."""


def started_with(path: Path, columns: tuple[str, ...]) -> tuple[str, ...]:
    """The columns of a file of records: those that its run started with, so that all rows have the same."""
    header = (disk.read(path) or b"").partition(b"\n")[0].decode(errors="replace")
    return next((earlier for earlier in EARLIER if header == ",".join(earlier)), columns)


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
