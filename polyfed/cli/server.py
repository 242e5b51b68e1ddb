"""The server of a real federation: `polyfed server …`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from polyfed.cli.base import Quiet, Trust, complete_method, out_console, watch
from polyfed.cli.keys import keys
from polyfed.cli.lazy import PlainCommand
from polyfed.deploy.templates import federation_text
from polyfed.errors import InputError
from polyfed.report import tables
from polyfed.starter import write_new

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None)


def init(
    file: Annotated[Path, typer.Argument(metavar="[FILE]", help="a file that does not exist yet")] = Path(
        "federation.yaml"
    ),
    name: Annotated[str, typer.Option(metavar="TEXT", help="the run's name")] = "federation-1",
    method: Annotated[
        str, typer.Option(metavar="TEXT", help="the method", autocompletion=complete_method)
    ] = "fedproto",
    members: Annotated[str, typer.Option(metavar="NAMES", help="the members, separated by commas")] = "amber,birch",
    classes: Annotated[str, typer.Option(metavar="NAMES", help="the classes, separated by commas")] = "cat,dog",
    shape: Annotated[
        str, typer.Option(metavar="SIZES", help="the shape of a sample, such as 3x32x32, or 12 for 12 columns")
    ] = "3x32x32",
) -> None:
    """Write the terms of a federation to start from. With a comment for every setting."""
    sizes = shape.replace("×", "x").split("x")
    if not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise InputError(f"--shape is '{shape}', but must be sizes with an x between them, such as 3x32x32.")
    content = federation_text(
        file.parent, name, method, _listed(members), _listed(classes), [int(size) for size in sizes]
    )
    write_new(file, content)
    out_console.print(
        f"Fill in the task and the members' public keys in {file}, then give it to every member.", soft_wrap=True
    )


def _listed(names: str) -> list[str]:
    return [name.strip() for name in names.split(",") if name.strip()]


def run(
    file: Annotated[Path, typer.Argument(metavar="[FILE]", help="the terms")] = Path("federation.yaml"),
    trust: Trust = False,
    quiet: Quiet = False,
) -> None:
    """Lead the run: listen for members, and ask them. The same command continues it after a crash."""
    from polyfed.deploy.serve import serve  # with Flower, which takes a second to import

    result = watch(quiet, lambda watcher: serve(file, watcher, trust=trust), lambda watcher: _stopped(file))
    if not quiet:
        out_console.print(tables.summary_table(result.summary()))
    out_console.print(str(result.path), soft_wrap=True)


def _stopped(file: Path) -> str:
    return f"stopped at once; `polyfed server run {file}` continues."


app.command("init", cls=PlainCommand)(init)
app.command("keys", cls=PlainCommand)(keys)
app.command("run", cls=PlainCommand)(run)
