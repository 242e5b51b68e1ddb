"""Runs that were begun: one in full, or a list of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from polyfed.cli.base import AsJson, out_console
from polyfed.report import runs as report
from polyfed.report.overview import Overview, find_runs, read_run


def show(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="the folder of a run, finished or not")],
    as_json: AsJson = False,
) -> None:
    """Show a run: result, curve, worst clients, notes."""
    run = read_run(path)
    if as_json:
        print(json.dumps(run.details(), indent=2))
        return
    for part in report.run_parts(run, out_console.width):
        out_console.print(part, soft_wrap=isinstance(part, str))


def list_runs(
    folder: Annotated[Path, typer.Argument(metavar="[FOLDER]", help="where to look for runs")] = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """List the runs and comparisons in a folder."""
    found = list(find_runs(folder))
    if as_json:
        print(json.dumps([each.to_dict() for each in found], indent=2))
    elif not found:
        out_console.print(f"There are no runs in '{folder}'.", soft_wrap=True)
    else:
        for line in report.run_lines(found, folder):
            out_console.print(line, soft_wrap=True)
        for each in found:
            if isinstance(each, Overview) and each.problem:
                out_console.print(f"{each.path}: {each.problem}", soft_wrap=True)
