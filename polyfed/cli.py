"""The command line: parses, calls the library, prints."""

from __future__ import annotations

import itertools
import json
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
import yaml
from pydantic import BaseModel

from polyfed import __version__, api
from polyfed.addresses import trusting
from polyfed.assemble import find_device
from polyfed.compute import machine_name
from polyfed.config import (
    GROUPS,
    PRESETS,
    Experiment,
    describe_range,
    merged,
    named_by,
    normal_form,
    read_experiment,
    typed,
)
from polyfed.config import experiment as checked
from polyfed.errors import InputError, PolyfedError
from polyfed.methods.base import Training
from polyfed.records import RunFolder
from polyfed.report import tables
from polyfed.report.progress import BarProgress, LineProgress, QuietProgress, bench_line, plain_console
from polyfed.resuming import check_trusted
from polyfed.server.federation import Interrupted, Watcher
from polyfed.yaml_text import parse_yaml

app = typer.Typer(
    help="Model-heterogeneous personalised federated learning.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
out_console = plain_console()
error_console = plain_console(stderr=True)

TRUST = typer.Option("--trust", help="import the code that the file names as package.module:name")
NESTED = ", ".join(f"{group}.NAME" for group in ("method", *GROUPS))
AsJson = Annotated[bool, typer.Option("--json", help="print JSON for programs")]


def _option(name: str, model: type[BaseModel] = Experiment) -> Any:
    """An option documented by the experiment's own field; nothing given means: as the experiment says."""
    info, values = model.model_fields[name], describe_range(model, name)
    choices = f"; {values}" if values.startswith("one of") else ""
    metavar = "NUMBER" if values.startswith(("a number", "a whole number")) else "TEXT"
    text = f"{info.description}{choices} (default: {typed(info.default)})"
    return typer.Option(help=text, metavar=metavar, show_default=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        out_console.print(__version__)
        raise typer.Exit


@app.callback()
def start(
    version: Annotated[
        bool, typer.Option("--version", help="print the version and stop", callback=_print_version, is_eager=True)
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="print the whole traceback of an error; works with every command")
    ] = False,
) -> None:
    """Model-heterogeneous personalised federated learning."""


@app.command()
def run(
    method: Annotated[str, typer.Argument(metavar="METHOD|FILE.yaml", help="a method's name, or an experiment file")],
    data: Annotated[str | None, _option("data")] = None,
    partition: Annotated[str | None, _option("partition")] = None,
    classes_per_client: Annotated[str | None, _option("classes_per_client")] = None,
    alpha: Annotated[str | None, _option("alpha")] = None,
    split: Annotated[str | None, _option("split")] = None,
    test_set: Annotated[str | None, _option("test_set")] = None,
    clients: Annotated[str | None, _option("clients")] = None,
    participation: Annotated[str | None, _option("participation")] = None,
    models: Annotated[str | None, _option("models")] = None,
    features: Annotated[str | None, _option("features")] = None,
    rounds: Annotated[str | None, _option("rounds")] = None,
    epochs: Annotated[str | None, _option("epochs", Training)] = None,
    batch_size: Annotated[str | None, _option("batch_size", Training)] = None,
    lr: Annotated[str | None, _option("lr", Training)] = None,
    preset: Annotated[
        str | None, typer.Option(metavar="TEXT", help=f"training settings: {' or '.join(PRESETS)}")
    ] = None,
    seed: Annotated[str | None, _option("seed")] = None,
    engine: Annotated[str | None, _option("engine")] = None,
    device: Annotated[str | None, _option("device")] = None,
    eval_every: Annotated[str | None, _option("eval_every")] = None,
    checkpoint_every: Annotated[str | None, _option("checkpoint_every")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help=f"{NESTED} or any setting"),
    ] = None,
    out: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="the run's folder (default: a new one under runs/)")
    ] = None,
    trust: Annotated[bool, TRUST] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="print only the run's folder")] = False,
) -> None:
    """Run one experiment. That is one method on one federation."""
    given = {
        "data": data, "partition": partition, "classes_per_client": classes_per_client, "alpha": alpha, "split": split,
        "test_set": test_set, "clients": clients, "participation": participation, "models": models,
        "features": features, "rounds": rounds,
        "epochs": epochs, "batch_size": batch_size, "lr": lr, "preset": preset, "seed": seed, "engine": engine,
        "device": device, "eval_every": eval_every, "checkpoint_every": checkpoint_every,
    }  # fmt: skip
    # Numbers come as texts, so that they are checked with everything else, in the same words.
    changes = together(
        {name: _number(name, value) for name, value in given.items() if value is not None},
        parse_settings(settings or []),
    )
    from_file = method.endswith((".yaml", ".yml"))
    if from_file:
        config = read_experiment(Path(method), trust=trust, **changes)
        check_trusted(config, Path(method), trust=trust, given=changes)
    elif (Path(method) / "config.yaml").is_file():
        raise InputError(
            f"'{method}' is the folder of a run: go on with it by `polyfed resume {method}`, or run it again by "
            f"`polyfed run {method}/config.yaml`."
        )
    else:
        config = checked(**merged({"method": method}, changes))
    if out is not None and not out.strip():
        raise InputError("--out is empty: name the run's folder, or leave --out away for a new one under runs/.")
    values = config.model_dump()
    folder = Path(out) if out else NextFolder(config)
    with trusting(trust or not from_file, named_by(changes)):
        _show(quiet, lambda watcher: api.run(**values, out=folder, watcher=watcher))


@app.command()
def resume(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="the folder of a run")],
    rounds: Annotated[
        str | None, typer.Option(metavar="NUMBER", help="continue to that many rounds, even if the run is finished")
    ] = None,
    from_round: Annotated[
        str | None, typer.Option("--from", metavar="ROUND", help="go back to the checkpoint of a round; 0: start again")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="method.NAME or training.NAME from now on")
    ] = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="restart clients whose states are lost from their initial weights")
    ] = False,
    trust: Annotated[bool, TRUST] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="print only the run's folder")] = False,
) -> None:
    """Continue an interrupted run. Or extend a finished one."""
    if RunFolder.open(path).finished and rounds is None and not quiet:
        out_console.print("This run is already finished.")
    changes = parse_settings(settings or [])
    number = None if rounds is None else _number("rounds", rounds)
    back_to = None if from_round is None else _number("rounds", from_round)
    _show(
        quiet,
        lambda watcher: api.resume(
            path, watcher=watcher, rounds=number, from_round=back_to, settings=changes, repair=repair, trust=trust
        ),
    )


@app.command()
def methods(as_json: AsJson = False) -> None:
    """List the methods and their options. With their papers, and what clients share."""
    _print(as_json, tables.methods(), tables.methods_table(), tables.method_options_table())


@app.command()
def models(as_json: AsJson = False) -> None:
    """List the networks and groups of networks."""
    _print(as_json, tables.networks(), tables.networks_table())


@app.command()
def datasets(as_json: AsJson = False) -> None:
    """List the datasets, and where they come from."""
    _print(as_json, tables.datasets(), tables.datasets_table())


@app.command()
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


def main() -> None:
    """Run the command line; errors are one sentence on standard error and an exit status."""
    debug = "--debug" in sys.argv[1:]  # wherever it stands
    try:
        status = app([argument for argument in sys.argv[1:] if argument != "--debug"], standalone_mode=False)
    except PolyfedError as error:
        if debug:
            traceback.print_exception(error)
        _end(str(error), error.exit_status)
    except (KeyboardInterrupt, typer.Abort):
        _end("stopped.", 130)
    except Exception as error:
        # Typer's own errors, of unknown options and the like, are known by this method, wherever they are defined.
        if not hasattr(error, "format_message"):
            raise
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()  # type: ignore[attr-defined]
            sys.exit(2)
        _end(_usage(error), 2)
    if status == 130:  # newer versions of Typer turn Ctrl-C into a status
        _end("stopped.", 130)
    sys.exit(status if isinstance(status, int) else 0)


def _end(words: str, status: int) -> NoReturn:
    error_console.print(f"polyfed: {words}", soft_wrap=True)
    sys.exit(status)


def _usage(error: Any) -> str:
    """What Typer says is wrong with a command line, in the voice of all other errors."""
    words = " ".join(error.format_message().split()).rstrip(".")
    command = error.ctx.command_path if getattr(error, "ctx", None) else "polyfed"
    return f"{words[:1].lower()}{words[1:]}; `{command} --help` tells what there is."


def _show(quiet: bool, work: Callable[[Watcher], api.Result]) -> None:
    kind = QuietProgress if quiet else BarProgress if out_console.is_terminal else LineProgress
    watcher = kind(out_console)
    try:
        with watcher.watching():
            result = work(watcher)
    except Interrupted as error:
        if watcher.terminated:
            error.exit_status = 143  # as the shell says it
        raise
    except KeyboardInterrupt:
        again = f"; `polyfed resume {watcher.folder}` continues from the last checkpoint" if watcher.folder else ""
        stopped = Interrupted(f"stopped {'at once' if watcher.folder else 'before the run began'}{again}.")
        if watcher.terminated:
            stopped.exit_status = 143
        raise stopped from None
    if not quiet:
        out_console.print(tables.summary_table(result.summary))
    out_console.print(str(result.folder.path), soft_wrap=True)


def _number(name: str, text: str) -> Any:
    """The value of an option: a number if the setting is one and the text too."""
    model = Experiment if name in Experiment.model_fields else Training
    if name not in model.model_fields or not describe_range(model, name).startswith(("a number", "a whole number")):
        return text
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def together(options: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """What options and --set say; neither wins if they disagree. A preset is what the others are laid over."""
    presets = [{"preset": given["preset"]} for given in (options, settings) if "preset" in given]
    before, after = (
        normal_form({name: value for name, value in given.items() if name != "preset"}) for given in (options, settings)
    )
    for said, also in ((before, after), *((before[group], after[group]) for group in GROUPS)):
        for name in said.keys() & also.keys() - GROUPS.keys():
            if said[name] != also[name]:
                raise InputError(
                    f"{name} is {typed(said[name])} as an option and {typed(also[name])} by --set: keep one of them."
                )
    return merged(merged(presets[-1] if presets else {}, before), after)


def parse_settings(pairs: list[str]) -> dict[str, Any]:
    """`method.weight=0.5` and the like as nested settings."""
    changes: dict[str, Any] = {}
    for pair in pairs:
        name, separator, text = pair.partition("=")
        if not separator or not name:
            raise InputError(f"--set takes NAME=VALUE, such as --set training.momentum=0.9, not '{pair}'.")
        group, _, inner = name.rpartition(".")
        if group not in ("", "method", *GROUPS):
            raise InputError(f"--set knows {NESTED} and plain settings, not '{name}'.")
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


class NextFolder:
    """Names a new folder under runs/ when the run begins; no other process gets the same one."""

    def __init__(self, config: Experiment) -> None:
        data = Path(config.data.partition(":")[2]).stem if ":" in config.data else config.data
        self._stem = f"{config.method['name']}-{data}-seed{config.seed}"

    def __call__(self) -> Path:
        for number in itertools.count(1):
            path = Path("runs") / (self._stem if number == 1 else f"{self._stem}-{number}")
            with suppress(FileExistsError):
                path.mkdir(parents=True)
                break
        return path


def _print(as_json: bool, values: list[dict[str, Any]], *shown: Any) -> None:
    if as_json:
        print(json.dumps(values, indent=2))
        return
    for table in shown:
        out_console.print(table)
        out_console.print()
