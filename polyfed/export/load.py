"""A client's model to predict with, from the run's folder or from an exported one: raw images in, class names out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from polyfed.errors import InputError, first_line
from polyfed.export.card import Inputs, ModelCard, RunCard, parse_card
from polyfed.export.formats import FILES, Program, check_onnx, open_program
from polyfed.export.rebuild import client_of_run, filled, rebuilt
from polyfed.methods.base import Method
from polyfed.methods.parts.network import ClientNetwork
from polyfed.models import Models
from polyfed.predictions import Prediction, as_batch, named, prediction
from polyfed.records import RunFolder, disk

CARD = "card.json"
CHUNK = 256


@dataclass(frozen=True, eq=False)
class ClientModel:
    """One client's model with its preprocessing, its class names and the method's own rule of prediction."""

    client: int
    inputs: Inputs
    rule: str
    """The rule of prediction: `classifier`, `prototypes`, `ensemble`, `fused` or another of the method's."""
    network: ClientNetwork | None = field(repr=False)
    """The private model (`network.model`) and the method's modules beside it; None for a compiled program."""
    _answer: Callable[[Tensor], Prediction] = field(repr=False)

    def predict(self, x: Any) -> Prediction:
        """What it predicts for one image or many, by the method's own rule: classes, names, probabilities.

        Images are raw (`uint8`, pictures), or floats that are normalised as in training; rows of a table are a frame
        with its columns. A compiled program accepts only what it was exported for: raw pixels, rows of the table, or
        the floats that the run trained on.
        """
        return self.predict_batch(as_batch(x, self.inputs.example()))

    def predict_batch(self, batch: Tensor) -> Prediction:
        """The same for samples in the model's layout, those of a table prepared: what `as_batch` makes."""
        with torch.no_grad():
            return self._answer(batch)

    def predict_many(self, batch: Tensor) -> Iterator[dict[str, Any]]:
        """What it predicts for each sample of a batch, as plain values; large batches are predicted in parts."""
        names = self.inputs.class_names or tuple(str(label) for label in range(self.inputs.classes))
        for part in batch.split(CHUNK):
            found = self.predict_batch(part)
            for label, row in zip(found.classes.tolist(), found.probabilities.tolist(), strict=True):
                probabilities = dict(zip(names, row, strict=True))
                yield {"class": names[label], "label": label, "probability": row[label], "probabilities": probabilities}


def network_model(method: Method, network: ClientNetwork, inputs: Inputs, client: int) -> ClientModel:
    """A model that computes with PyTorch modules."""
    dataset = inputs.example()

    def answer(batch: Tensor) -> Prediction:
        return prediction(next(iter(method.predict(network, dataset.normalise(batch)).values())), dataset)

    with torch.no_grad():
        rule = next(iter(method.predict(network, dataset.normalise(dataset.images))))
    return ClientModel(client, inputs, rule, network, answer)


def program_model(program: Program, inputs: Inputs, client: int, rule: str) -> ClientModel:
    """A model that is a compiled program."""
    dataset = inputs.example()

    def answer(batch: Tensor) -> Prediction:
        if inputs.pixels and batch.dtype != torch.uint8:
            raise InputError("an exported program normalises images itself: give raw pixels (uint8), not floats.")
        probabilities = program(batch)
        if probabilities.shape != (len(batch), inputs.classes):
            raise InputError("the program does not fit its card.json: it has another number of classes.")
        return named(probabilities.argmax(1), probabilities, dataset)

    return ClientModel(client, inputs, rule, None, answer)


def load_client(
    path: str | Path, client: int | None = None, *, models: Models | None = None, trust: bool = False
) -> ClientModel:
    """A client's model from a finished run's folder, or one that `polyfed export` wrote; no data are needed.

    `client` is its number, counted from 0; an exported model has only one. Networks of polyfed are rebuilt from their
    names. `trust` allows polyfed to import the code that the folder names (`package.module:name`), and to open
    PyTorch programs (.pt2), which can run code. `models` are the networks that were passed to `polyfed.run` in Python.

    >>> load_client("runs/fedproto-digits-seed0", 3).predict(images).names             # doctest: +SKIP
    """
    path = Path(path)
    if path.is_file() or (not (path / "run.json").exists() and (path / CARD).exists()):
        return load_exported(path, client, models, trust=trust)
    if not (path / "run.json").exists():
        raise InputError(f"'{path}' holds neither a run nor an exported model: it has no run.json and no {CARD}.")
    folder = RunFolder.open(path)
    if client is None:
        raise InputError(f"'{path}' is a run with several clients: say which one, counted from 0 (--client 0).")
    if not isinstance(client, int) or isinstance(client, bool):
        raise InputError(f"the client is {client!r}, but must be a whole number, counted from 0.")
    card = read_run_card(folder)
    return network_model(*client_of_run(folder, card, client, models, trust=trust), card.inputs, client)


def read_run_card(folder: RunFolder) -> RunCard:
    """The card of a finished run; a run without one is refused."""
    content = folder.card()
    if content is None:
        raise InputError(
            f"the run in '{folder.path}' has no models/{CARD}, because an older polyfed wrote it or its clients keep "
            "their own models: a run of the former kind is read together with its data, by polyfed.resume."
        )
    return parse_card(RunCard, content, f"'{folder.path / 'models' / CARD}'")


def load_exported(path: Path, client: int | None, models: Models | None, *, trust: bool) -> ClientModel:
    """A model from an exported folder, or from its file with its card beside it."""
    folder = path.parent if path.is_file() else path
    content = disk.read(folder / CARD)
    if content is None:
        raise InputError(f"there is no {CARD} beside '{path}': give a folder that polyfed export wrote.")
    card = parse_card(ModelCard, content, f"'{folder / CARD}'")
    if client is not None and client != card.client:
        raise InputError(f"'{path}' is the model of client {card.client}, not of client {client}.")
    kind = next((kind for kind, name in FILES.items() if name == card.file), None)
    data = disk.read(folder / card.file) if kind else None
    if kind is None or data is None or (path.is_file() and path.name not in (card.file, CARD)):
        raise InputError(f"'{path}' is not the model that '{folder / CARD}' describes ('{card.file}'): restore it.")
    return open_exported(card, kind, data, models, trust=trust, where=f"'{folder / card.file}'")


def open_exported(
    card: ModelCard, kind: str, data: bytes, models: Models | None, *, trust: bool, where: str
) -> ClientModel:
    """A model from the content of its file."""
    if kind == "safetensors":
        try:
            state = load(data)
        except (SafetensorError, ValueError, KeyError) as error:
            raise InputError(f"{where} is damaged ({first_line(error)}): restore it.") from error
        method, network = rebuilt(card, card.network, models, trust=trust, where=where)
        return network_model(method, filled(network, state, where), card.inputs, card.client)
    if kind == "torch" and not trust:
        raise InputError(
            f"{where} is a PyTorch program, which can run any code when it is opened: if you trust it, say so with "
            "--trust (in Python with trust=True), or export the model as safetensors."
        )
    if kind == "onnx":
        check_onnx()
    try:
        program = open_program(kind, data)
    except Exception as error:  # of the library that reads the format
        raise InputError(f"{where} can't be opened ({first_line(error)}): restore it.") from error
    return program_model(program, card.inputs, card.client, card.rule)
