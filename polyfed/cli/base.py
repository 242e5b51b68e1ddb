"""The application that all commands belong to, where they print, and what several of them share."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from polyfed.cli.lazy import Commands
from polyfed.report.console import plain_console

if TYPE_CHECKING:
    from polyfed.report.progress import QuietProgress
    from polyfed.server.watcher import Interrupted

app = typer.Typer(
    cls=Commands,
    help="Model-heterogeneous personalised federated learning.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
out_console = plain_console()
error_console = plain_console(stderr=True)

T = TypeVar("T")
AsJson = Annotated[bool, typer.Option("--json", help="print JSON for programs")]
Trust = Annotated[bool, typer.Option("--trust", help="import the code that the file names as package.module:name")]
Together = Annotated[
    int | None,
    typer.Option(
        metavar="NUMBER", help="runs whose clients train as one batch (default: on a GPU as many as fit, on a CPU 1)"
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="print only the run's folder")]


def complete_method(incomplete: str) -> list[str]:
    """The names of methods that begin like this, for the shell."""
    from polyfed.methods import METHODS

    return [name for name in METHODS if name.startswith(incomplete)]


def watch(
    quiet: bool, work: Callable[[QuietProgress], T], stopped: Callable[[QuietProgress], str], *, rounds: bool = True
) -> T:
    """Do the work with progress on the screen; Ctrl-C lets it stop in order, or at once with what `stopped` says.

    Without `rounds`, only notes are shown, on stderr.
    """
    from polyfed.report.progress import BarProgress, LineProgress, NoteProgress, QuietProgress
    from polyfed.server.watcher import Interrupted

    kind = BarProgress if out_console.is_terminal else LineProgress
    watcher = QuietProgress(out_console) if quiet else kind(out_console) if rounds else NoteProgress(error_console)
    try:
        with watcher.watching():
            return work(watcher)
    except Interrupted as error:
        raise _with_status(error, watcher) from error.__cause__
    except KeyboardInterrupt:
        raise _with_status(Interrupted(stopped(watcher)), watcher) from None


def _with_status(error: Interrupted, watcher: QuietProgress) -> Interrupted:
    if watcher.terminated:
        error.exit_status = 143  # as the shell says it
    return error


def show_list(as_json: bool, values: list[dict[str, Any]] | dict[str, Any], *shown: Any) -> None:
    """Print values for programs, or their tables for people."""
    if as_json:
        print(json.dumps(values, indent=2))
        return
    for table in shown:
        out_console.print(table)
        out_console.print()
