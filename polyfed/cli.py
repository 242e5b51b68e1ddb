"""The command line: parses, calls the library, prints."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from pydantic import BaseModel
from rich.console import Console

from polyfed import __version__, api
from polyfed.assemble import find_device
from polyfed.compute import machine_name
from polyfed.config import PRESETS, Experiment, describe_range, merged, parse_yaml, read_experiment
from polyfed.config import experiment as checked
from polyfed.errors import InputError, PolyfedError
from polyfed.federation import Interrupted, Watcher
from polyfed.methods.base import Training
from polyfed.records import RunFolder
from polyfed.report import tables
from polyfed.report.progress import BarProgress, LineProgress, QuietProgress

app = typer.Typer(
    help="Model-heterogeneous personalised federated learning.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
out_console = Console()
error_console = Console(stderr=True, highlight=False, soft_wrap=True)

AsJson = Annotated[bool, typer.Option("--json", help="print JSON for programs")]


def _option(name: str, model: type[BaseModel] = Experiment) -> Any:
    """An option documented by the experiment's own field; nothing given means: as the experiment says."""
    info, values = model.model_fields[name], describe_range(model, name)
    choices = f"; {values}" if values.startswith("one of") else ""
    default = "" if info.default is None else f" (default: {info.default})"
    return typer.Option(help=f"{info.description}{choices}{default}", show_default=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        out_console.print(__version__, highlight=False)
        raise typer.Exit


@app.callback()
def start(
    version: Annotated[
        bool, typer.Option("--version", help="print the version and stop", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Model-heterogeneous personalised federated learning."""


@app.command()
def run(
    method: Annotated[str, typer.Argument(metavar="METHOD|FILE.yaml", help="a method's name, or an experiment's file")],
    data: Annotated[str | None, _option("data")] = None,
    partition: Annotated[str | None, _option("partition")] = None,
    classes_per_client: Annotated[int | None, _option("classes_per_client")] = None,
    alpha: Annotated[float | None, _option("alpha")] = None,
    split: Annotated[str | None, _option("split")] = None,
    test_set: Annotated[str | None, _option("test_set")] = None,
    clients: Annotated[int | None, _option("clients")] = None,
    participation: Annotated[float | None, _option("participation")] = None,
    models: Annotated[str | None, _option("models")] = None,
    features: Annotated[int | None, _option("features")] = None,
    rounds: Annotated[int | None, _option("rounds")] = None,
    epochs: Annotated[int | None, _option("epochs", Training)] = None,
    batch_size: Annotated[int | None, _option("batch_size", Training)] = None,
    lr: Annotated[float | None, _option("lr", Training)] = None,
    preset: Annotated[str | None, typer.Option(help=f"training settings: {' or '.join(PRESETS)}")] = None,
    seed: Annotated[int | None, _option("seed")] = None,
    engine: Annotated[str | None, _option("engine")] = None,
    device: Annotated[str | None, _option("device")] = None,
    eval_every: Annotated[int | None, _option("eval_every")] = None,
    checkpoint_every: Annotated[int | None, _option("checkpoint_every")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="method.NAME, training.NAME or any setting")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="the run's folder; default: a new one under runs/")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="print only the run's folder")] = False,
) -> None:
    """Run one experiment: one method on one federation."""
    given = {
        "data": data, "partition": partition, "classes_per_client": classes_per_client, "alpha": alpha, "split": split,
        "test_set": test_set, "clients": clients, "participation": participation, "models": models,
        "features": features, "rounds": rounds,
        "epochs": epochs, "batch_size": batch_size, "lr": lr, "preset": preset, "seed": seed, "engine": engine,
        "device": device, "eval_every": eval_every, "checkpoint_every": checkpoint_every,
    }  # fmt: skip
    changes = {name: value for name, value in given.items() if value is not None}
    changes = merged(changes, parse_settings(settings or []))
    if method.endswith((".yaml", ".yml")):
        config = read_experiment(Path(method), **changes)
    elif (Path(method) / "config.yaml").is_file():
        raise InputError(
            f"'{method}' is the folder of a run: go on with it by `polyfed resume {method}`, or run it again by "
            f"`polyfed run {method}/config.yaml`."
        )
    else:
        config = checked(**merged({"method": method}, changes))
    folder = out or _new_folder(config)
    values = config.model_dump()
    _show(quiet, folder, lambda watcher: api.run(**values, out=folder, watcher=watcher))


@app.command()
def resume(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="the folder of an unfinished run")],
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="print only the run's folder")] = False,
) -> None:
    """Go on with an interrupted run."""
    if RunFolder.open(path).finished and not quiet:
        out_console.print("This run is already finished.")
    _show(quiet, path, lambda watcher: api.resume(path, watcher=watcher))


@app.command()
def methods(as_json: AsJson = False) -> None:
    """The methods, with their papers, what is shared, and their options."""
    _print(as_json, tables.methods(), tables.methods_table(), tables.method_options_table())


@app.command()
def models(as_json: AsJson = False) -> None:
    """The networks and groups of networks."""
    _print(as_json, tables.networks(), tables.networks_table())


@app.command()
def datasets(as_json: AsJson = False) -> None:
    """The datasets, and where each comes from."""
    _print(as_json, tables.datasets(), tables.datasets_table())


@app.command()
def bench(
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    only: Annotated[str, typer.Option(help="letters of the cases to measure, such as abc; default: all that fit")] = "",
    engine: Annotated[str, typer.Option(help="the engine to measure")] = "auto",
    as_json: AsJson = False,
) -> None:
    """How fast this machine runs federations, against the plain loop measured in the same run."""
    from polyfed import bench as benchmark  # only this command needs it

    results = []
    for result in benchmark.run_cases(device, only, engine):
        results.append(result)
        if not as_json:
            out_console.print(tables.measurement_line(result), highlight=False)
    machine = machine_name(find_device(device))
    if as_json:
        print(json.dumps({"machine": machine, "cases": [asdict(result) for result in results]}, indent=2))
    else:
        out_console.print(tables.measurements_table(machine, results))


def main() -> None:
    """Run the command line; errors are one sentence on standard error and an exit status."""
    try:
        app()
    except PolyfedError as error:
        error_console.print(f"polyfed: {error}", markup=False)
        sys.exit(130 if isinstance(error, Interrupted) else error.exit_status)


def _show(quiet: bool, folder: Path, work: Callable[[Watcher], api.Result]) -> None:
    kind = QuietProgress if quiet else BarProgress if out_console.is_terminal else LineProgress
    watcher = kind(out_console)
    try:
        with watcher.watching():
            result = work(watcher)
    except KeyboardInterrupt:
        raise Interrupted(f"stopped at once; `polyfed resume {folder}` goes on from the last checkpoint.") from None
    if not quiet:
        out_console.print(tables.summary_table(result.summary))
    out_console.print(str(folder), highlight=False, soft_wrap=True)


def parse_settings(pairs: list[str]) -> dict[str, Any]:
    """`method.weight=0.5` and the like as nested settings."""
    changes: dict[str, Any] = {}
    for pair in pairs:
        name, separator, text = pair.partition("=")
        if not separator or not name:
            raise InputError(f"--set takes NAME=VALUE, such as --set training.momentum=0.9, not '{pair}'.")
        group, _, inner = name.rpartition(".")
        if group not in ("", "method", "training"):
            raise InputError(f"--set knows method.NAME, training.NAME and plain settings, not '{name}'.")
        try:
            value = parse_yaml(text)
        except yaml.YAMLError:
            value = text
        key = inner.replace("-", "_")
        if group:
            changes.setdefault(group, {})[key] = value
        else:
            changes[key] = value
    return changes


def _new_folder(config: Experiment) -> Path:
    """A folder under runs/ that does not exist yet."""
    data = Path(config.data.partition(":")[2]).stem if ":" in config.data else config.data
    stem = f"{config.method['name']}-{data}-seed{config.seed}"
    number = 1
    while (path := Path("runs") / (stem if number == 1 else f"{stem}-{number}")).exists():
        number += 1
    return path


def _print(as_json: bool, values: list[dict[str, Any]], *shown: Any) -> None:
    if as_json:
        print(json.dumps(values, indent=2))
        return
    for table in shown:
        out_console.print(table)
        out_console.print()
