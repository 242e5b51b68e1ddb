"""The server of a real federation: `polyfed server …`."""

from __future__ import annotations

import typer

from polyfed.cli.keys import keys

app = typer.Typer(help="Coordinate a real federation: its terms, its keys, its server.", no_args_is_help=True)
app.command("keys")(keys)
