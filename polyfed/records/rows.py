"""What records look like as text: rows of CSV, lines of JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping
from typing import Any


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
