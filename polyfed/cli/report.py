"""Reports of runs and comparisons."""

from __future__ import annotations

from typing import Annotated

import typer

from polyfed.cli.base import Trust, out_console
from polyfed.errors import InputError


def report(
    folders: Annotated[list[str], typer.Argument(metavar="RUN|COMPARISON...", help="folders of runs and comparisons")],
    out: Annotated[
        str | None, typer.Option("--out", "-o", metavar="FILE", help="the page to write (default: report.html)")
    ] = None,
    figures: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="write every figure as PDF, PNG and SVG, and tables as LaTeX")
    ] = None,
    baseline: Annotated[
        str, typer.Option(metavar="METHOD", help="the method that the others are compared with")
    ] = "standalone",
    trust: Trust = False,
) -> None:
    """Show runs and comparisons on one HTML page. It needs no network; with --figures, for a paper."""
    from polyfed.report import data, page  # only this command needs Altair and statistics, which take a while to import

    for option, value in (("--out", out), ("--figures", figures)):
        if value is not None and not value.strip():
            raise InputError(f"{option} is empty: give it a name, or omit it.")
    material = data.read(*folders, baseline=baseline)
    if figures is not None:
        page.write_figures(material, figures, trust=trust)
        out_console.print(figures, soft_wrap=True)
    if figures is None or out is not None:
        page.write_report(material, out or "report.html", trust=trust)
        out_console.print(out or "report.html", soft_wrap=True)
