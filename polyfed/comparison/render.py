"""The table of a comparison for people: on the terminal, in Markdown, in LaTeX."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from rich.table import Table
from rich.text import Text

from polyfed.comparison.statistics import FEWEST_SEEDS
from polyfed.comparison.table import TARGETS, Question, column_of
from polyfed.metrics import METRICS, TITLES, Metric
from polyfed.report.summary import quantity

Row = Mapping[str, Any]
Show = Callable[[Row], str]
METHOD: dict[str, Show] = {"method": lambda row: str(row["method"])}
AMOUNTS = {
    "rounds_to_target": "rounds", "bytes_to_target": "bytes", "flops_to_target": "FLOPs",
    "simulated_seconds_to_target": "simulated seconds",
}  # fmt: skip


@dataclass(frozen=True)
class Sheet:
    """Some columns of the table at one point, as texts."""

    title: str
    header: list[str]
    rows: list[list[str]]
    bold: set[tuple[int, int]]
    """Cells that are clearly the best: row and column."""


def sheets(table: pd.DataFrame, swept: Sequence[str], question: Question) -> list[Sheet]:
    """A few sheets for every point: accuracies, differences, costs, and what it took to reach the target."""
    found = []
    groups = table.groupby(list(swept), sort=False) if swept else [((), table)]
    for point, frame in groups:
        values = point if isinstance(point, tuple) else (point,)
        where = "".join(f", {name} = {value}" for name, value in zip(swept, values, strict=True))
        rows: list[Row] = [{str(name): value for name, value in row.items()} for row in frame.to_dict("records")]
        metric = question.metric
        found.append(_sheet(f"{TITLES[metric]} in percent{where}", rows, _accuracies(frame, metric), mark=question))
        if _shows_beside(frame, metric):
            found.append(_sheet(f"beside {TITLES[metric]}, in percent{where}", rows, _beside(frame, metric)))
        if question.baseline is not None:
            title = f"compared with {question.baseline}, in percentage points{where}"
            found.append(_sheet(title, rows, _differences(frame, question.baseline)))
        found.append(_sheet(f"costs of a run{where}", rows, _costs(frame)))
        if question.target is not None:
            title = f"to reach {100 * question.target:g} %{where}"
            found.append(_sheet(title, rows, _to_target(frame)))
    return found


def legend(table: pd.DataFrame, question: Question, noise: float | None) -> list[str]:
    """What the columns are, in sentences."""
    rounds = {
        "final": "the last round",
        "best-validation": "the round best on validation",
        "best-test": "the best round",
    }
    counts = rounds[question.round]
    about = f"Differences, the worst decile and clients worse off are of {counts}."
    if question.round != "final":
        own = counts.replace("the", "its own", 1)
        about = f"Differences and the worst decile are of {counts}; whether a client is worse off, of {own}."
    lines = [f"Mean over clients, then mean ± sample standard deviation over seeds. {about}"]
    if _shows_beside(table, question.metric):
        lines.append(
            "Beside it are values of the last round. Largest class: the accuracy of always predicting the largest "
            "class of a client's test samples; an accuracy close to it says little."
        )
    lines += [f"Rules of prediction: {rules}."] if (rules := _rules(table)) else []
    if question.baseline is not None:
        lines.append(
            f"Differences from {question.baseline} are paired by seed, with Student's 95 % interval; p values are of "
            "the paired t test, corrected by Holm over the methods of a table."
        )
    if table["clearly_best"].any():
        lines.append(
            "Bold: the best mean, where the paired 95 % interval of its lead over the second best excludes zero."
        )
    elif len(table) > 1 and table["seeds"].min() >= FEWEST_SEEDS:
        lines.append(
            "Nothing is bold: no paired 95 % interval of the best method's lead over the second best excludes zero."
        )
    if noise is not None:
        lines.append(f"Noise floor: the same run done twice differed by {100 * noise:.2g} percentage points.")
    if question.target is not None:
        lines.append(
            f"Target: {TITLES[question.metric]} {100 * question.target:g} %; a number is missing where not every seed "
            "reached it."
        )
    return lines


def _rules(table: pd.DataFrame) -> str:
    """
    >>> _rules(pd.DataFrame({"method": ["a", "b", "c"], "rule": ["classifier", "classifier", "prototypes"]}))
    'classifier (a, b), prototypes (c)'
    """
    groups = table[table["rule"] != ""].groupby("rule", sort=False)["method"]
    return ", ".join(f"{rule} ({', '.join(dict.fromkeys(methods))})" for rule, methods in groups)


def terminal(sheet: Sheet) -> Table:
    """A table without lines, so that cells can be copied."""
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0), title=sheet.title)
    table.title_justify = "left"
    for position, name in enumerate(sheet.header):
        broken = "\n".join(name.rsplit(" ", 1))  # narrow enough for 80 columns
        table.add_column(broken, justify="right" if position else "left", no_wrap=not position, overflow="fold")
    for number, row in enumerate(sheet.rows):
        cells = enumerate(row)
        table.add_row(*(Text(cell, style="bold" if (number, place) in sheet.bold else "") for place, cell in cells))
    return table


def markdown(sheet: Sheet) -> str:
    """The sheet in Markdown."""
    rows = [
        [f"**{cell}**" if (number, place) in sheet.bold else cell for place, cell in enumerate(row)]
        for number, row in enumerate(sheet.rows)
    ]
    lines = [sheet.header, ["---"] + ["---:"] * (len(sheet.header) - 1), *rows]
    table = "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)
    return f"## {sheet.title[:1].upper()}{sheet.title[1:]}\n\n{table}\n"


def latex(sheet: Sheet) -> str:
    """The sheet as a tabular with the lines of booktabs."""
    rows = [
        [rf"\textbf{{{_tex(c)}}}" if (number, place) in sheet.bold else _tex(c) for place, c in enumerate(row)]
        for number, row in enumerate(sheet.rows)
    ]
    body = "".join(f"{' & '.join(row)} \\\\\n" for row in rows)
    header = " & ".join(_tex(name) for name in sheet.header)
    return (
        f"% {sheet.title}\n\\begin{{tabular}}{{l{'r' * (len(sheet.header) - 1)}}}\n\\toprule\n{header} \\\\\n"
        f"\\midrule\n{body}\\bottomrule\n\\end{{tabular}}\n"
    )


def _sheet(title: str, rows: Sequence[Row], columns: Mapping[str, Show], mark: Question | None = None) -> Sheet:
    texts = [[show(row) for show in columns.values()] for row in rows]
    marked = {"final": "final", "best-validation": "at best validation", "best-test": "best on test"}
    place = list(columns).index(marked[mark.round]) if mark else -1
    bold = {(number, place) for number, row in enumerate(rows) if mark and row["clearly_best"]}
    return Sheet(title, list(columns), texts, bold)


def _accuracies(frame: pd.DataFrame, metric: Metric) -> dict[str, Show]:
    columns: dict[str, Show] = {
        **METHOD,
        "seeds": lambda row: str(row["seeds"]),
        "final": _spread(column_of(metric, "final")),
        "at best validation": _spread(column_of(metric, "best-validation")),
    }
    best = column_of(metric, "best-test")
    if f"{best}_mean" in frame:
        columns["best on test"] = _spread(best)
    return {**columns, "worst decile": lambda row: _between(row, "worst_decile")}


def _shows_beside(frame: pd.DataFrame, metric: Metric) -> bool:
    return metric != "accuracy" or bool(frame["metrics_tell_more"].any())


def _beside(frame: pd.DataFrame, metric: Metric) -> dict[str, Show]:
    """The other metrics that are known, and what accuracy must be compared with."""
    known = [m for m in METRICS if m != metric and frame[f"{column_of(m, 'final')}_mean"].notna().any()]
    columns: dict[str, Show] = {TITLES[m]: _spread(column_of(m, "final")) for m in known}
    return {**METHOD, **columns, "largest class": lambda row: _percent(row["largest_class_mean"])}


def _differences(frame: pd.DataFrame, baseline: str) -> dict[str, Show]:
    columns: dict[str, Show] = {
        **METHOD,
        f"minus {baseline}": lambda row: _between(row, "difference", sign="+"),
        "p (Holm)": lambda row: _number(row["p_holm"], ".3f"),
    }
    if frame["p_wilcoxon"].notna().any():
        columns["p (Wilcoxon)"] = lambda row: _number(row["p_wilcoxon"], ".3f")
    return {**columns, "clients worse off": lambda row: _percent(row["clients_worse"], " %", digits=1)}


def _costs(frame: pd.DataFrame) -> dict[str, Show]:
    names = {
        "floats up": "upload_floats", "floats down": "download_floats", "bytes up": "upload_bytes",
        "bytes down": "download_bytes", "FLOPs": "flops", "seconds": "seconds",
        "simulated seconds": "simulated_seconds",
    }  # fmt: skip
    return {**METHOD, **{title: _amount(name) for title, name in names.items() if name in frame}}


def _to_target(frame: pd.DataFrame) -> dict[str, Show]:
    known = [name for name in TARGETS if frame[name].notna().any()]
    return {
        **METHOD,
        "seeds reaching it": lambda row: f"{row['seeds_reaching_target']:.0f} of {row['seeds']}",
        **{AMOUNTS[name]: _amount(name) for name in known},
    }


def _spread(name: str) -> Show:
    def show(row: Row) -> str:
        mean, std = row[f"{name}_mean"], row[f"{name}_std"]
        return _percent(mean) if math.isnan(std) else f"{_percent(mean)} ± {_percent(std)}"

    return show


def _between(row: Row, name: str, sign: str = "") -> str:
    mean, low, high = (row[f"{name}_{part}"] for part in ("mean", "low", "high"))
    if math.isnan(low):
        return _percent(mean, sign=sign)
    return f"{_percent(mean, sign=sign)} [{_percent(low, sign=sign)}, {_percent(high, sign=sign)}]"


def _amount(name: str) -> Show:
    def show(row: Row) -> str:
        value = row[name]
        return quantity(value).strip() if value >= 1000 else _number(value, ".4g")

    return show


def _percent(share: float, unit: str = "", sign: str = "", digits: int = 2) -> str:
    """
    >>> _percent(-0.00001), _percent(-0.00001, sign="+")
    ('0.00', '+0.00')
    """
    return "–" if math.isnan(share) else f"{100 * share:{sign}z.{digits}f}{unit}"


def _number(value: float, form: str) -> str:
    return "–" if math.isnan(value) else f"{value:{form}}"


def _tex(text: str) -> str:
    """
    >>> _tex("a_b 5 %")
    'a\\\\_b 5 \\\\%'
    """
    for character in "\\&%$#_{}":
        text = text.replace(character, r"\textbackslash " if character == "\\" else rf"\{character}")
    return text.replace("±", r"$\pm$").replace("–", "--")
