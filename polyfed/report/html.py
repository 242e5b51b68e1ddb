"""Small pieces of HTML: everything that comes from a run is escaped here."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from html import escape
from typing import Any

import pandas as pd

MOST_ROWS = 300
"""A longer table would make the page slow; it is cut, and says so."""


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[Any]],
    caption: str,
    *,
    bold: Collection[tuple[int, int]] = (),
    sortable: bool = False,
    most: int = MOST_ROWS,
) -> str:
    """A real table; the first column names its rows."""
    cut = f" The first {most} of {len(rows)} rows." if len(rows) > most else ""
    body = "".join(_row(number, row, bold) for number, row in enumerate(rows[:most]))
    head = "".join(
        f'<th scope="col" aria-sort="none"><button type="button">{escape(name)}</button></th>'
        if sortable
        else f'<th scope="col">{escape(name)}</th>'
        for name in header
    )
    kind = ' class="sortable"' if sortable else ""
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table{kind}>'
        f"<caption>{escape(caption + cut)}</caption>"
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def frame(found: pd.DataFrame, caption: str, *, sortable: bool = False, most: int = MOST_ROWS) -> str:
    """A data frame as a table."""
    return table([str(name) for name in found], found.to_numpy(object).tolist(), caption, sortable=sortable, most=most)


def paragraph(text: str) -> str:
    """A paragraph."""
    return f"<p>{escape(text)}</p>"


def listed(lines: Sequence[str]) -> str:
    """A list of sentences; nothing if there are none."""
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>" if lines else ""


def details(summary: str, content: str) -> str:
    """What is shown only on request; on paper it stays closed."""
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"


def code(lines: Sequence[str]) -> str:
    """Text to copy."""
    return f'<pre tabindex="0"><code>{escape(chr(10).join(lines))}</code></pre>'


def data(value: Any) -> str:
    """JSON that can stand in a script element, whatever its texts say."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def _row(number: int, row: Sequence[Any], bold: Collection[tuple[int, int]]) -> str:
    cells = []
    for place, value in enumerate(row):
        text = f"<strong>{_shown(value)}</strong>" if (number, place) in bold else _shown(value)
        cells.append(f'<th scope="row">{text}</th>' if place == 0 else f"<td>{text}</td>")
    return f"<tr>{''.join(cells)}</tr>"


def _shown(value: Any) -> str:
    """
    >>> _shown(0.123456), _shown(float("nan")), _shown("<a>"), _shown(12)
    ('0.1235', '–', '&lt;a&gt;', '12')
    """
    if value is None or value != value:
        return "–"
    if isinstance(value, float):
        return f"{value:.0f}" if value.is_integer() and abs(value) < 1e15 else f"{value:.4g}"
    return escape(str(value))
