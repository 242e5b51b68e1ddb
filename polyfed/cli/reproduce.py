"""Tables and figures of papers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast, get_args

import typer

from polyfed.cli.base import AsJson, Together, error_console, out_console, show_list, watch
from polyfed.errors import InputError, RunError, unknown_name
from polyfed.reproduce.recipes import SCALES, ScaleName, find_recipe

WIDEST = 100
"""Characters in a line of a table."""


def reproduce(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="a recipe, such as fedssa-table2")] = None,
    list_them: Annotated[bool, typer.Option("--list", help="list the recipes")] = False,
    scale: Annotated[
        str, typer.Option(metavar="TEXT", help="; ".join(f"{name}: {words}" for name, words in SCALES.items()))
    ] = "small",
    methods: Annotated[str | None, typer.Option(metavar="NAMES", help="some of its methods, with commas")] = None,
    settings: Annotated[
        str | None, typer.Option(metavar="NAMES", help="some of its settings, with commas, such as n100/cifar100")
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(metavar="NUMBERS", help="such as 0-2 (default: the paper's number of trials, else 0)")
    ] = None,
    jobs: Annotated[int, typer.Option(metavar="NUMBER", help="runs side by side")] = 1,
    together: Together = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:N")] = None,
    engine: Annotated[str | None, typer.Option(help="where clients train")] = None,
    data_folder: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="where datasets are (default: $POLYFED_DATA or ./data)")
    ] = None,
    out: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="where runs and tables go (default: runs/NAME-SCALE)")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="print only the folder")] = False,
    as_json: AsJson = False,
) -> None:
    """Repeat a table or a figure of a paper. And put our numbers beside the published ones."""
    from polyfed.report import reproductions  # only this command needs statistics, which take a while to import
    from polyfed.reproduce.run import reproduce as run_recipe

    if list_them:
        show_list(as_json, reproductions.recipe_list(), reproductions.recipes_table())
        return
    if name is None:
        raise InputError("reproduce needs the name of a recipe, such as fedssa-table2: --list shows all.")
    if scale not in get_args(ScaleName):
        raise unknown_name("scale", scale, SCALES)
    if out is not None and not out.strip():
        raise InputError("--out is empty: name a folder, or omit --out for one under runs/.")
    machine = {"device": device, "engine": engine, "data_folder": data_folder}
    folder = Path(out or f"runs/{find_recipe(name).name}-{scale}")
    done = watch(
        quiet,
        lambda watcher: run_recipe(
            name, folder, scale=cast(ScaleName, scale), methods=_names("--methods", methods),
            settings=_names("--settings", settings), seeds=seeds, jobs=jobs, together=together, watcher=watcher,
            tell=lambda line: None if quiet else error_console.print(line, soft_wrap=True),
            **{setting: value for setting, value in machine.items() if value is not None},
        ),
        lambda watcher: f"stopped; the same command continues in {folder}.",
        rounds=jobs == 1 and not as_json and out_console.is_terminal,
    )  # fmt: skip
    if as_json:
        print(done.table.to_json(orient="records", indent=2))
    elif not quiet:
        out_console.print(f"{done.recipe.paper.paper}, {done.recipe.entry.title}", style="bold")
        for setting, table in reproductions.reproduction_tables(done):
            out_console.print(f"\n{setting}", style="bold")
            out_console.print(table, width=max(out_console.width, WIDEST), crop=False)  # a number must not be cut
        out_console.print()
        for line in reproductions.remarks(done):
            out_console.print(line, soft_wrap=True)
    if not as_json:
        out_console.print(str(done.folder), soft_wrap=True)
    if done.failures:
        first, reason = next(iter(done.failures.items()))
        raise RunError(f"{len(done.failures)} of the runs failed, {first} for this reason: {reason}")


def _names(option: str, text: str | None) -> list[str] | None:
    """
    >>> _names("--methods", "standalone, fedssa")
    ['standalone', 'fedssa']
    """
    names = None if text is None else [name.strip().lower() for name in text.split(",") if name.strip()]
    if names == []:
        raise InputError(f"{option} is empty: give names, or omit it for all.")
    return names
