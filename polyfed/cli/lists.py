"""What there is: methods, networks, datasets, settings; and how fast this machine is."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from polyfed.assemble import find_device
from polyfed.cli.base import AsJson, complete_method, error_console, out_console, show_list
from polyfed.compute import machine_name
from polyfed.methods import find_method
from polyfed.report import tables
from polyfed.report.progress import bench_line
from polyfed.starter import write_starter


def methods(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="show one method with its options", autocompletion=complete_method),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the methods, or show one. With its paper, its options and what clients send."""
    if name is None:
        show_list(as_json, tables.methods(), tables.methods_table())
        return
    method = tables.about_method(find_method(name))
    show_list(as_json, method, tables.method_table(method), tables.options_table(method))


def models(as_json: AsJson = False) -> None:
    """List the networks and groups of networks."""
    show_list(as_json, tables.networks(), tables.networks_table())


def datasets(as_json: AsJson = False) -> None:
    """List the datasets, and where they come from."""
    show_list(as_json, tables.datasets(), tables.datasets_table())


def config(as_json: AsJson = False) -> None:
    """List the settings of an experiment. With defaults and ranges."""
    show_list(as_json, tables.settings(), tables.settings_table())


def init(
    file: Annotated[Path, typer.Argument(metavar="FILE.yaml", help="a file that does not exist yet")],
    method: Annotated[str, typer.Option(metavar="TEXT", help="the method to start with")] = "fedproto",
) -> None:
    """Write an experiment to start from. It has every setting with a comment, and runs as it is."""
    write_starter(file, method)
    out_console.print(f"`polyfed run {file}` runs it.", soft_wrap=True)


def bench(
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    only: Annotated[str, typer.Option(help="letters of the cases to measure, such as abc; default: all that fit")] = "",
    engine: Annotated[str, typer.Option(help="the engine to measure")] = "auto",
    as_json: AsJson = False,
) -> None:
    """Measure how fast this machine is. Against the plain loop, measured in the same run."""
    from polyfed import bench as benchmark  # only this command needs it

    results = []
    with bench_line(error_console) as say:
        for result in benchmark.run_cases(device, only, engine, say):
            results.append(result)
            if not as_json:
                out_console.print(tables.measurement_line(result), soft_wrap=True)
    machine = machine_name(find_device(device))
    if as_json:
        print(json.dumps({"machine": machine, "cases": [asdict(result) for result in results]}, indent=2))
    else:
        out_console.print(tables.measurements_table(machine, results))
