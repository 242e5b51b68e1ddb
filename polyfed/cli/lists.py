"""What there is: methods, networks, datasets; and how fast this machine is."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from polyfed.assemble import find_device
from polyfed.cli.base import AsJson, error_console, out_console, show_list
from polyfed.compute import machine_name
from polyfed.report import tables
from polyfed.report.progress import bench_line


def methods(as_json: AsJson = False) -> None:
    """List the methods and their options. With their papers, and what clients send."""
    show_list(as_json, tables.methods(), tables.methods_table(), tables.method_options_table())


def models(as_json: AsJson = False) -> None:
    """List the networks and groups of networks."""
    show_list(as_json, tables.networks(), tables.networks_table())


def datasets(as_json: AsJson = False) -> None:
    """List the datasets, and where they come from."""
    show_list(as_json, tables.datasets(), tables.datasets_table())


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
