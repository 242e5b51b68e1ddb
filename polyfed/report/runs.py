"""Runs for the terminal: one in full, many in a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import RenderableType
from rich.table import Table

from polyfed.records.rows import MEMBER
from polyfed.report.overview import Group, Overview, age
from polyfed.report.plot import plot
from polyfed.report.summary import tells_more
from polyfed.report.tables import plain_table, summary_table
from polyfed.server.scores import percent

NOTES = 8


def run_parts(run: Overview, width: int) -> Iterator[RenderableType]:
    """One run, part after part; a part that a run does not have yet is left out."""
    yield f"{run.path}: {run.state}, {_rounds(run)}, last written {age(run.changed)} ago"
    about = [run.method or "unknown method", f"on {run.data}" if run.data else "", _count(run.clients, "clients")]
    seed = "" if run.seed is None else f"seed {run.seed}"
    yield ", ".join(word for word in (" ".join(about[:2]).strip(), about[2], seed) if word)
    yield run.origin
    if run.problem:
        yield f"damaged: {run.problem}"
    if run.summary:
        yield ""
        yield summary_table(run.summary)
    if run.curve:
        best = max(run.curve, key=lambda number: run.curve[number])
        yield ""
        yield f"accuracy on test samples: last {percent(run.accuracy)}, best {percent(run.curve[best])} in round {best}"
        yield plot(run.curve, min(width, 80))
    if run.worst:
        yield ""
        yield _worst(run)
    if run.notes:
        yield ""
        yield from _notes(run)
    if run.state in ("interrupted", "unfinished"):
        yield ""
        yield f"`{run.resume}` continues it."


def run_lines(found: Sequence[Overview | Group], below: Path) -> list[str]:
    """Runs and comparisons, each in a line. Folders come last, so that a long name stays in one piece."""
    rows = [("state", "method", "data", "done", "accuracy", "age", "folder")]
    rows += [
        (
            each.state,
            *_numbers(each),
            age(each.changed),
            str(each.path.relative_to(below) if each.path != below else below),
        )
        for each in found
    ]
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    return [
        "  ".join(f"{cell:>{width}}" if place in (3, 4, 5) else f"{cell:{width}}"
                  for place, (cell, width) in enumerate(zip(row, widths, strict=True))).rstrip()
        for row in rows
    ]  # fmt: skip


def _numbers(each: Overview | Group) -> tuple[str, str, str, str]:
    """Method, data, how much is done, accuracy."""
    data = each.data or "–"
    if isinstance(each, Group):
        return "comparison", data, f"{each.finished}/{each.runs}", "–"
    return each.method or "–", data, f"{each.done}/{each.rounds or '?'}", percent(each.accuracy)


def _worst(run: Overview) -> Table:
    member = {"member": MEMBER} if any(MEMBER in client for client in run.worst) else {}
    shown = {"worst clients": "client", **member, "architecture": "architecture", "train samples": "train_samples",
             "test samples": "test_samples"}  # fmt: skip
    shares = {"accuracy": "accuracy_final"}
    if tells_more(run.summary):
        shares |= {"balanced": "balanced_accuracy_final", "largest class": "largest_class"}
    rows = [
        [
            *("–" if c[name] is None else str(c[name]) for name in shown.values()),
            *(percent(c.get(name)) for name in shares.values()),
        ]
        for c in run.worst
    ]
    return plain_table([*shown, *shares], rows)


def _notes(run: Overview) -> Iterator[str]:
    hidden = len(run.notes) - NOTES
    yield f"notes, the last {NOTES} of {len(run.notes)} (all are in events.jsonl)" if hidden > 0 else "notes"
    for number, note in run.notes[-NOTES:]:
        yield f"  round {number}: {note}"


def _rounds(run: Overview) -> str:
    return f"{run.done} of {run.rounds or 'an unknown number of'} rounds"


def _count(number: int | None, what: str) -> str:
    return "" if number is None else f"{number} {what}"
