"""The command line: parses, calls the library, prints. A file per family of commands."""

from __future__ import annotations

import sys
import traceback
from typing import Annotated, NoReturn

import typer

from polyfed import __version__
from polyfed.cli.base import app, error_console, out_console
from polyfed.cli.lazy import add_commands
from polyfed.cli.usage import usage
from polyfed.errors import PolyfedError

__all__ = ["app", "main"]

add_commands(app)


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


def main() -> None:
    """Run the command line; errors are one sentence on standard error and an exit status."""
    debug = "--debug" in sys.argv[1:]  # wherever it stands
    try:
        arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
        status = app(arguments, prog_name="polyfed", standalone_mode=False)
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
        _end(usage(error), 2)
    if status == 130:  # newer versions of Typer turn Ctrl-C into a status
        _end("stopped.", 130)
    sys.exit(status if isinstance(status, int) else 0)


def _end(words: str, status: int) -> NoReturn:
    error_console.print(f"polyfed: {words}", soft_wrap=True)
    sys.exit(status)
