"""A run's result in a few rows, and as HTML for a notebook."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from polyfed.metrics import FURTHER, TITLES
from polyfed.server.scores import percent


def summary_rows(summary: Mapping[str, Any]) -> list[list[str]]:
    """Accuracy, communication, computation, time: what, how much, and its round or unit."""
    rows = [
        ["accuracy, final", percent(summary["accuracy_final"]), f"round {summary['rounds']}"],
        [
            "accuracy at the round best on validation",
            percent(summary["accuracy_at_best_validation"]),
            f"round {summary['best_validation_round']}"
            if summary["best_validation_round"]
            else "no validation samples",
        ],
        ["accuracy, best on test", percent(summary["accuracy_best"]), _best_round(summary)],
        *_beside_accuracy(summary),
        *_test_set(summary.get("test_set", "none")),
        ["communication, up", quantity(summary["upload_floats"]), f"floats, {quantity(summary['upload_bytes'])}B"],
        [
            "communication, down",
            quantity(summary["download_floats"]),
            f"floats, {quantity(summary['download_bytes'])}B",
        ],
        *([["computation of the clients", quantity(summary["flops"]), "FLOPs"]] if summary["flops"] else []),
        ["time for training and server", f"{summary['seconds']:.1f}", "seconds"],
    ]
    if "simulated_seconds" in summary:
        rows.append(["simulated time of all rounds", f"{summary['simulated_seconds']:.1f}", "seconds"])
    return rows


def _best_round(summary: Mapping[str, Any]) -> str:
    return "" if percent(summary["accuracy_best"]) == percent(None) else f"round {summary['best_round']}"


def _beside_accuracy(summary: Mapping[str, Any]) -> list[list[str]]:
    """Where classes are two or imbalanced, what else to look at; runs of earlier versions have recorded nothing."""
    if not tells_more(summary):
        return []
    notes = {"auc": "50 % is chance"}
    found = [(f"{TITLES[each]}, final", summary.get(f"{each}_final"), notes.get(each, "")) for each in FURTHER]
    found.insert(0, ("always predicting the largest class", summary.get("largest_class_mean"), "for comparison"))
    return [[what, percent(value), note] for what, value, note in found if value is not None and value == value]


def tells_more(summary: Mapping[str, Any]) -> bool:
    """Whether metrics beside accuracy say more than accuracy: there are two classes, or they are imbalanced."""
    return bool(summary.get("imbalanced")) or summary.get("classes") == 2


def _test_set(choice: str) -> list[list[str]]:
    """A row on the test set that came with the data, if there is one."""
    words = {"apart": "for testing only", "pooled": "with training samples"}
    return [["test set of the data", choice, words[choice]]] if choice in words else []


def result_html(summary: Mapping[str, Any], folder: Path) -> str:
    """A small table. What a user named may contain anything, so all of it is escaped."""
    rows = "".join(
        f"<tr><td style='text-align: left'>{escape(what)}</td><td>{escape(value)}</td>"
        f"<td style='text-align: left'>{escape(unit)}</td></tr>"
        for what, value, unit in summary_rows(summary)
    )
    return (
        f"<table><caption style='text-align: left'>{escape(str(summary['method']))}, in {escape(str(folder))}</caption>"
        f"{rows}</table>"
    )


def quantity(number: float) -> str:
    """
    >>> quantity(2_621_558), quantity(886)
    ('2.62 M', '886 ')
    """
    for limit, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.2f} {unit}"
    return f"{number:.0f} "
