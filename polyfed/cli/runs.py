"""One run: begin it, continue it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from polyfed import api
from polyfed.addresses import trusting
from polyfed.cli.base import Quiet, Trust, complete_method, out_console, watch
from polyfed.cli.options import as_number, experiment_options, parse_settings
from polyfed.config import Experiment, merged, named_by, read_experiment
from polyfed.config import experiment as checked
from polyfed.data import parse_address
from polyfed.errors import InputError
from polyfed.ranges import typed
from polyfed.records import RunFolder, disk
from polyfed.report import tables
from polyfed.report.progress import QuietProgress
from polyfed.resuming import check_trusted
from polyfed.server.federation import Watcher


@experiment_options()
def run(
    method: Annotated[
        str,
        typer.Argument(
            metavar="METHOD|FILE.yaml", help="a method's name, or an experiment file", autocompletion=complete_method
        ),
    ],
    changes: dict[str, Any],
    out: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="the run's folder (default: a new one under runs/)")
    ] = None,
    trust: Trust = False,
    quiet: Quiet = False,
) -> None:
    """Run one experiment. That is one method on one federation."""
    from_file = method.endswith((".yaml", ".yml"))
    if from_file:
        config = read_experiment(Path(method), trust=trust, **changes)
        check_trusted(config, Path(method), trust=trust, given=changes)
    elif (Path(method) / "config.yaml").is_file():
        raise InputError(
            f"'{method}' is the folder of a run: continue it with `polyfed resume {method}`, or run it again with "
            f"`polyfed run {method}/config.yaml`."
        )
    else:
        chosen = changes.get("method", method)
        named = chosen.get("name", method) if isinstance(chosen, dict) else chosen
        if named != method:
            raise InputError(f"the method is {method} as an argument and {typed(named)} by --set: keep one of them.")
        config = checked(**merged({"method": method}, changes))
    if out is not None and not out.strip():
        raise InputError("--out is empty: name the run's folder, or omit --out for a new one under runs/.")
    values = config.given
    folder = Path(out) if out else NextFolder(config)
    with trusting(trust or not from_file, named_by(changes)):
        _show(quiet, lambda watcher: api.run(**values, out=folder, watcher=watcher))


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
    trust: Trust = False,
    quiet: Quiet = False,
) -> None:
    """Continue an interrupted run. Or extend a finished one."""
    only_read = RunFolder.open(path).finished and rounds is None and from_round is None and not settings
    if only_read and not quiet:
        out_console.print("This run is already finished.")
    changes = parse_settings(settings or [])
    last = None if rounds is None else as_number("rounds", rounds)
    back_to = None if from_round is None else as_number("rounds", from_round)
    _show(
        quiet,
        lambda watcher: api.resume(
            path, watcher=watcher, rounds=last, from_round=back_to, settings=changes, repair=repair, trust=trust
        ),
    )


def _show(quiet: bool, work: Callable[[Watcher], api.Result]) -> None:
    result = watch(quiet, work, _stopped)
    if not quiet:
        out_console.print(tables.summary_table(result.summary))
    out_console.print(str(result.folder.path), soft_wrap=True)


def _stopped(watcher: QuietProgress) -> str:
    again = f"; `polyfed resume {watcher.folder}` continues from the last checkpoint" if watcher.folder else ""
    return f"stopped {'at once' if watcher.folder else 'before the run began'}{again}."


class NextFolder:
    """Names a new folder under runs/ when the run begins; no other process gets the same one."""

    def __init__(self, config: Experiment) -> None:
        address = parse_address(config.data)
        data = config.data if address is None else address.name
        self._stem = disk.file_name(f"{config.method['name']}-{data}-seed{config.seed}")

    def __call__(self) -> Path:
        for number in itertools.count(1):
            path = Path("runs") / (self._stem if number == 1 else f"{self._stem}-{number}")
            with suppress(FileExistsError):
                path.mkdir(parents=True)
                break
        return path
