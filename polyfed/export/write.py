"""Write a client's model for use elsewhere: checked against the run's own predictions before anything is written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyfed import api
from polyfed.assemble import data_facts, dealt, named_data
from polyfed.data import Dataset
from polyfed.engines.client.workbench import state_of
from polyfed.errors import InputError, RunError
from polyfed.export.card import Blueprint, ModelCard, NetworkCard, RunCard, run_card
from polyfed.export.formats import FILES, Predictor, check_format, to_bytes
from polyfed.export.load import CARD, CHUNK, ClientModel, network_model, open_exported, read_run_card
from polyfed.export.readme import readme
from polyfed.export.rebuild import client_of_run
from polyfed.methods.base import Method
from polyfed.methods.parts.network import ClientNetwork
from polyfed.models import Models
from polyfed.records import RunFolder, disk
from polyfed.resuming import given_data, located
from polyfed.seeds import torch_generator
from polyfed.shapes import noise

TOLERANCE = 1e-5
"""How far probabilities of an exported model may be from the run's."""
RANDOM_SAMPLES = 32


@dataclass(frozen=True)
class Samples:
    """What an exported model is checked on."""

    raw: Tensor
    labels: Tensor | None
    described: str


def export_client(
    run: str | Path,
    client: int,
    out: str | Path,
    *,
    format: str = "safetensors",
    data: Any = None,
    models: Models | None = None,
    trust: bool = False,
) -> ModelCard:
    """Write one client's model into a new or empty folder: the model, `card.json` and `README.md`.

    `format` is `safetensors` (read by `polyfed.load_client`), `torch` (a `torch.export` program) or `onnx`; programs
    turn raw images into probabilities without polyfed. The exported model is compared with the run's on the client's
    test samples if the data are there (or given as `data`), otherwise on random ones; the card says which. Pass
    `models` again if they came from Python; `trust` allows polyfed to import the code that the run names.
    """
    check_format(format)
    folder, out = RunFolder.open(run), Path(out)
    check_free(out)
    given = None if data is None else given_data(folder.read_config(trust=trust), data)
    card = _run_card(folder, given, models, trust=trust)
    method, network = client_of_run(folder, card, client, models, trust=trust)
    samples = _samples(folder, card, client, given, trust=trust)
    row = folder.clients().set_index("client").loc[client]
    scored = (_number(row["accuracy_final"]), _number(row["test_samples"]))
    return write_model(out, card, client, method, network, samples, scored, format=format, models=models)


def write_model(
    out: Path,
    card: RunCard,
    client: int,
    method: Method,
    network: ClientNetwork,
    samples: Samples,
    scored: tuple[float | None, int | None],
    *,
    format: str = "safetensors",
    models: Models | None = None,
) -> ModelCard:
    """Write this network of a client, if it predicts the same after it was written; `scored` is what the card says.

    That is its accuracy in the run's last evaluation, and on how many test samples.
    """
    model = network_model(method, network, card.inputs, client)
    predictor, state = Predictor(method, network, card.inputs.example()), state_of(network)
    content = to_bytes(format, predictor, state, card.inputs.shape, f"client {client}")
    expected = _probabilities(model, samples.raw)
    exported = _describe(card, model, format, samples, expected, scored)
    again = open_exported(exported, format, content, models, trust=True, where="the exported model")
    difference = float((_probabilities(again, samples.raw) - expected).abs().max())
    if not difference <= TOLERANCE:
        raise RunError(
            f"the model of client {client} in the format {format} gives other probabilities than the run (by up to "
            f"{difference:.2g} on {samples.described}), so nothing was written: use --format safetensors."
        )
    _write(out, exported, content)
    return exported


def check_free(out: Path) -> None:
    """Raise unless it is a new or empty folder."""
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise InputError(f"'{out}' is not a folder: choose a new or empty one (--out).")
    if out.is_dir() and any(out.iterdir()):
        raise InputError(f"'{out}' is not empty, and nothing is overwritten: choose a new or empty folder (--out).")


def _run_card(folder: RunFolder, data: Dataset | None, models: Models | None, *, trust: bool) -> RunCard:
    """The run's own card, or for one that an older polyfed wrote, one from its data and networks."""
    if folder.card() is not None or not folder.has_models:
        return read_run_card(folder)
    population = api.resume(folder.path, data=data, models=models, trust=trust, progress=False).population
    return run_card(folder.read_config(trust=trust), population)


def _samples(folder: RunFolder, card: RunCard, client: int, data: Dataset | None, *, trust: bool) -> Samples:
    """The client's test samples if the run's data are there, otherwise random ones."""
    config = located(folder.read_config(trust=trust), folder.began_in)
    try:
        dataset, parts = dealt(config, data or named_data(config))
        folder.check_facts(data_facts(dataset, parts), complete=False)
    except InputError:
        if data is not None:  # what the user gives is used or refused
            raise
        return random_samples(card, client, "the run's data are not here")
    own = parts[client].test
    if len(own) == 0:
        return random_samples(card, client, "this client has no test samples")
    return samples_of(dataset, own, client)


def samples_of(dataset: Dataset, own: Tensor, client: int) -> Samples:
    """These samples of a client."""
    described = f"the {len(own)} test samples of client {client}"
    return Samples(dataset.images[own].cpu(), dataset.labels[own].cpu(), described)


def random_samples(card: RunCard, client: int, why: str) -> Samples:
    """Samples for a check where there are no real ones; `why` is for the card."""
    generator, shape = torch_generator(card.seed, "export", client), card.inputs.input_shape
    if card.inputs.pixels:
        raw = torch.randint(0, 256, (RANDOM_SAMPLES, *shape), generator=generator, dtype=torch.uint8)
    else:
        raw = noise(RANDOM_SAMPLES, shape, generator)
    return Samples(raw, None, f"{RANDOM_SAMPLES} random samples, because {why}")


def _probabilities(model: ClientModel, raw: Tensor) -> Tensor:
    return torch.cat([model.predict_batch(part).probabilities for part in raw.split(CHUNK)])


def _describe(
    card: RunCard,
    model: ClientModel,
    format: str,
    samples: Samples,
    expected: Tensor,
    scored: tuple[float | None, int | None],
) -> ModelCard:
    name = card.clients[model.client].network
    right = None if samples.labels is None else float((expected.argmax(1) == samples.labels).float().mean())
    assert model.network is not None
    blueprint = {field: getattr(card, field) for field in Blueprint.model_fields}
    return ModelCard(
        **{**blueprint, "networks": _needed(card, name)},
        file=FILES[format],
        network=name,
        client=model.client,
        rule=model.rule,
        layers=_layers(model.network, card.networks[name].head_name),
        accuracy=scored[0],
        test_samples=scored[1],
        accuracy_exported=right,
        checked_on=samples.described,
    )


def _needed(card: RunCard, name: str) -> dict[str, NetworkCard]:
    return {each: card.networks[each] for each in dict.fromkeys((name, card.common or name, card.auxiliary))}


def _layers(network: ClientNetwork, head_name: str) -> dict[str, str]:
    """What the private model's tensors are called in the network that was split."""
    if not head_name:
        return {}
    body, head = "model.extractor.", "model.head."
    names = {name: f"{head_name}.{name.removeprefix(head)}" for name in state_of(network) if name.startswith(head)}
    return {name: name.removeprefix(body) for name in state_of(network) if name.startswith(body)} | names


def _number(value: Any) -> Any:
    return None if value != value else value


def _write(out: Path, card: ModelCard, content: bytes) -> None:
    """The card comes last: a folder without it is not a model."""
    try:
        disk.make_folder(out)
        disk.write(out / card.file, content)
        disk.write(out / "README.md", readme(card))
        disk.write(out / CARD, card.model_dump_json(indent=1) + "\n")
    except OSError as error:
        raise InputError(f"can't write to '{out}': {error.strerror}; choose another folder (--out).") from error
