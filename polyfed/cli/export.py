"""A client's model elsewhere: write it, predict with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from polyfed.cli.base import AsJson, Trust, out_console
from polyfed.errors import InputError
from polyfed.export.card import ModelCard
from polyfed.server.scores import percent

Format = Annotated[str, typer.Option(help="safetensors (for polyfed), or a program: torch (torch.export) or onnx")]
_CLIENT: Any = typer.Option(metavar="NUMBER", help="the client, counted from 0")


def export(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="the folder of a finished run")],
    client: Annotated[str, _CLIENT],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="a new or empty folder for the model")],
    format: Format = "safetensors",
    trust: Trust = False,
) -> None:
    """Write one client's model for use elsewhere. With its preprocessing, class names and a card."""
    from polyfed.export.write import export_client  # only this command needs it

    show_exported(export_client(path, _number(client), out, format=format, trust=trust), out)


def show_exported(card: ModelCard, out: Path) -> None:
    """Say what was written, and what is left to do."""
    out_console.print(f"The exported model gives the run's predictions on {card.checked_on}.", soft_wrap=True)
    if card.accuracy_exported is not None:
        out_console.print(f"It predicts {percent(card.accuracy_exported)} of these correctly.")
    out_console.print(f"Fill in the licence and what it must not be used for: {out / 'README.md'}", soft_wrap=True)
    out_console.print(str(out), soft_wrap=True)


def predict(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="an exported model, or a run with --client")],
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="pictures, npz archives or tables")],
    client: Annotated[str | None, _CLIENT] = None,
    resize: Annotated[bool, typer.Option("--resize", help="resize pictures to the size that the model needs")] = False,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Predict the classes of files with a client's model. Prints a line per sample."""
    from polyfed.export.files import read_samples
    from polyfed.export.load import load_client

    loaded = load_client(model, None if client is None else _number(client), trust=trust)
    samples = [read_samples(file, loaded.inputs, resize=resize) for file in files]
    rows: list[dict[str, Any]] = []
    for each in samples:
        for number, values in enumerate(loaded.predict_many(each.batch)):
            rows.append({"file": each.file, "row": None if each.is_picture else number, **values})
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    for found in rows:
        where = found["file"] if found["row"] is None else f"{found['file']}[{found['row']}]"
        out_console.print(f"{where}  {found['class']}  {percent(found['probability'])}", soft_wrap=True)


def _number(text: str) -> int:
    if not text.isdecimal():
        raise InputError(f"--client is '{text}', but must be a whole number, counted from 0.")
    return int(text)
