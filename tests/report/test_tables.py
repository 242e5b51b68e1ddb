"""Tables and help on a terminal of 80 columns: whole words, nothing cut off, values as a user would type them."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

import polyfed
from polyfed.bench import CASES, Measurement
from polyfed.report import reproductions, tables
from polyfed.tuning.records import Trial, Tuned

SUMMARY = {
    "method": "fedclassavg", "rounds": 100, "accuracy_final": 0.9, "accuracy_at_best_validation": None,
    "best_validation_round": 0, "accuracy_best": 0.91, "best_round": 93, "upload_floats": 999e9, "upload_bytes": 999e9,
    "download_floats": 999e9, "download_bytes": 999e9, "flops": 999e15, "seconds": 12345.6, "test_set": "pooled",
}  # fmt: skip
MEASURED = [
    Measurement(case.name, case.method, "vectorized", 12.3456, 123456, 0.123, 123.4, 99 * 10**9, 123.456, 12.3)
    for case in CASES
]
METHODS = tables.methods()
TUNED = Tuned(
    "fedclassavg",
    Trial("fedclassavg", 11, {"training.weight_decay": 0.000123456789, "method.temperature": 0.123456789}, "done", 0.9),
    20,
    Path("best-fedclassavg.yaml"),
)


def text_of(table: Table) -> str:
    text = io.StringIO()
    Console(file=text, width=80, markup=False, emoji=False).print(table)
    return text.getvalue()


@pytest.mark.parametrize(
    "table",
    [
        tables.methods_table(),
        *(tables.method_table(method) for method in METHODS),
        *(tables.options_table(method) for method in METHODS),
        tables.settings_table(),
        tables.networks_table(),
        tables.datasets_table(),
        tables.summary_table(SUMMARY),
        tables.measurements_table("some machine", MEASURED),
        tables.tuned_table([TUNED]),
        reproductions.recipes_table(),
    ],
)
def test_words_stay_whole_at_80_columns(table: Table) -> None:
    shown = text_of(table)
    assert max(len(line) for line in shown.splitlines()) <= 80
    cells = [str(cell) for column in table.columns for cell in column.cells]
    wanted = {word for cell in cells for word in cell.split()}
    assert wanted <= set(shown.split())
    for name in table.columns[0].cells:  # the first column is what people copy
        assert str(name).split()[0] in shown


def test_methods_are_listed_in_a_line_each() -> None:
    lines = text_of(tables.methods_table()).splitlines()
    assert [line.split()[0] for line in lines[1 : len(METHODS) + 1]] == list(polyfed.METHODS)
    assert len(lines) <= len(METHODS) + 4


def test_defaults_are_written_as_a_user_would_type_them() -> None:
    listed = [tables.settings_table(), *(tables.options_table(method) for method in METHODS if method["options"])]
    defaults = {str(cell) for table in listed for cell in table.columns[1].cells}
    assert {"none", "true", "false"} <= defaults and not {"None", "True", "False"} & defaults


@pytest.mark.parametrize(
    "command",
    [
        [], ["run"], ["resume"], ["show"], ["list"], ["compare"], ["methods"], ["models"], ["datasets"], ["config"],
        ["init"], ["bench"],
    ],
)  # fmt: skip
def test_help_fits_80_columns(command: list[str]) -> None:
    from typer.testing import CliRunner

    from polyfed.cli import app

    ended = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"})
    assert ended.exit_code == 0
    assert max(len(line) for line in ended.output.splitlines()) <= 80 and "…" not in ended.output
    if command == ["run"]:
        words = " ".join(ended.output.replace("│", " ").split())
        for text in ("--classes-per-client", "--checkpoint-every", "package.module:factory", "(default: none)"):
            assert text in words
