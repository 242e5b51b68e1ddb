"""From a checked experiment to the objects that run it: data, networks, method, clients. Fails before round one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from polyfed.addresses import PYTHON
from polyfed.compute import physical_memory, set_precision
from polyfed.config import Experiment, experiment
from polyfed.data import (
    ClientData,
    Dataset,
    check_tested,
    chosen_test_set,
    describe_clients,
    describe_test_set,
    in_pieces,
    layout_hint,
    load_dataset,
    partition,
    too_many_clients,
)
from polyfed.devices import describe, new_devices
from polyfed.errors import InputError, clients_named
from polyfed.methods import find_method
from polyfed.methods.base import Method, Task, Training
from polyfed.models import (
    Architecture,
    Models,
    SplitNetwork,
    assign,
    default_auxiliary,
    default_features,
    default_group,
    resolve,
    smallest,
)
from polyfed.models.factories import FromInstance
from polyfed.models.libraries import FromLibrary
from polyfed.population import Population
from polyfed.profile import check_common, network_profile
from polyfed.rehearsal import rehearse
from polyfed.seeds import restored


@restored()  # the first networks, from which sizes are taken, are drawn from whatever the user's generators give
def assemble(config: Experiment, data: Dataset | None = None, models: Models | None = None) -> Population:
    """The clients of an experiment; `data` and `models` replace what its config only names."""
    device = find_device(config.device)
    set_precision(device, tf32=config.tf32)
    dataset = data or named_data(config)
    architectures = _architectures(config, models)
    _check_size(config, dataset)
    owned = dict(enumerate(assign(architectures, config.clients, how=config.assignment, seed=config.seed)))
    features = config.features or default_features(config.models)
    examples = example_networks(owned, dataset, config.training, features, config.match_features)
    chosen = find_method(str(config.method["name"]))
    profiles = {name: network_profile(name, example) for name, example in examples.items()}
    check_head_trains(chosen, owned[0].name, examples[owned[0].name])
    task = Task(
        input_shape=dataset.input_shape,
        classes=dataset.classes,
        rounds=config.rounds,
        seed=config.seed,
        architecture=owned[0],
        auxiliary=_auxiliary(config, models, architectures, dataset),
        feature_size=examples[owned[0].name].feature_size,
        features=features,
        match=config.match_features,
    )
    dataset, clients = dealt(config, dataset)
    check_tested(dataset, config.split, clients)
    method = chosen(chosen.Config(**config.options), task, config.training)
    check_common(method, {client: profiles[architecture.name] for client, architecture in owned.items()})
    check_scored(config, method)
    population = gathered(config, dataset, dict(enumerate(clients)), owned, method, device, examples)
    return replace(
        population,
        test_set=chosen_test_set(dataset, config.split, config.test_set),
        notes=[*_notes(config, dataset, clients), *population.notes],
        devices=None if config.devices is None else new_devices(config.devices, config.clients, config.seed),
    )


def example_networks(
    owned: Mapping[int, Architecture], dataset: Dataset, training: Training, features: int | None, match: str
) -> dict[str, SplitNetwork]:
    """A network of each architecture for these data; raises for what the networks or the training can't use."""
    distinct = {architecture.name: architecture for architecture in owned.values()}
    with layout_hint(dataset):
        examples = {
            name: architecture.build(dataset.input_shape, dataset.classes, features, match)
            for name, architecture in distinct.items()
        }
    if training.augment and len(dataset.input_shape) != 3:
        raise InputError(
            f"training.augment needs images, but samples of '{dataset.name}' have shape {dataset.input_shape}."
        )
    return examples


def gathered(
    config: Experiment,
    dataset: Dataset,
    data: Mapping[int, ClientData],
    owned: Mapping[int, Architecture],
    method: Method,
    device: torch.device,
    examples: Mapping[str, SplitNetwork],
) -> Population:
    """Clients with their data and networks, rehearsed; `examples` has a network of each architecture."""
    makers = {architecture.name: architecture for architecture in owned.values()}
    population = Population(
        dataset,
        data,
        owned,
        method,
        config.seed,
        device,
        {name: network_profile(name, example) for name, example in examples.items()},
        {name: _look(makers[name], example) for name, example in examples.items()},
        {name: example.head_name for name, example in examples.items()},
        own_start=config.start == "client",
        notes=[*(remark for example in examples.values() for remark in example.remarks), *_missed(method, data)],
    )
    return rehearse(population, examples)


def deal(config: Experiment, dataset: Dataset) -> list[ClientData]:
    """Which samples each client of an experiment owns."""
    if dataset.classes < 2:
        raise InputError(f"'{dataset.name}' has a single class: a classifier needs 2 or more to tell apart.")
    return partition(
        dataset,
        config.partition,
        config.clients,
        classes_per_client=config.classes_per_client,
        alpha=config.alpha,
        split=config.split,
        seed=config.seed,
        minimum=config.min_samples,
        test_set=config.test_set,
    )


def dealt(config: Experiment, dataset: Dataset) -> tuple[Dataset, list[ClientData]]:
    """The samples as clients see them, and who owns which; a table's constants come from all training samples."""
    clients = deal(config, dataset)
    return dataset.fitted(torch.cat([own.train for own in clients]).sort().values), clients


def facts(population: Population) -> dict[str, str]:
    """What a run starts with besides its settings, in words: data, partition, networks."""
    return {
        **data_facts(population.dataset, population.data.values()),
        **{f"the network {name}": f"one with hash {look}" for name, look in population.looks.items()},
        **({} if population.devices is None else {"the table of devices": describe(population.devices)}),
    }


def data_facts(dataset: Dataset, clients: Iterable[ClientData]) -> dict[str, str]:
    """The facts about data and partition.

    Samples of a table depend on the partition, so its rows stand for them: with other seeds they are the same.
    """
    dealt = hashlib.blake2b(digest_size=8)
    for own in clients:
        for part in (own.train, own.validation, own.test):
            dealt.update(len(part).to_bytes(8, "little") + part.numpy().tobytes())
    samples = {"images": dataset.images} if dataset.table is None else dataset.table.unfitted()
    data = _hash({**samples, "labels": dataset.labels}, values=True)
    return {
        "the data": f"{len(dataset)} samples of shape {dataset.input_shape} in {dataset.classes} classes (hash {data})",
        "the partition": f"one with hash {dealt.hexdigest()}",
    }


def _look(architecture: Architecture, example: SplitNetwork) -> str:
    """A hash of a network's layers, and of its weights if they were given rather than drawn.

    Other libraries' encoders have both, and so their architecture's name stands for them.
    """
    layers = "\n".join(f"{name} {type(layer).__name__}" for name, layer in example.named_modules())
    maker = architecture.maker
    values = isinstance(maker, FromInstance) or (isinstance(maker, FromLibrary) and maker.weights is not None)
    return _hash(example.state_dict(), values=values, layers=layers)


def _hash(tensors: Mapping[str, Tensor], *, values: bool, layers: str = "") -> str:
    found = hashlib.blake2b(layers.encode(), digest_size=8)
    for name, tensor in tensors.items():
        found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        if values:
            for piece in in_pieces(tensor.detach()) if tensor.ndim else [tensor.detach()]:
                found.update(piece.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


def _notes(config: Experiment, dataset: Dataset, clients: list[ClientData]) -> list[str]:
    about = describe_test_set(dataset, config.split, config.test_set, clients)
    return [describe_clients(dataset), *about] if config.partition in ("natural", "given") else about


def _missed(method: Method, data: Mapping[int, ClientData]) -> list[str]:
    """What clients have too few samples for, one note for all of whom the same is true."""
    found: dict[str, list[int]] = {}
    for client, own in data.items():
        found.setdefault(method.misses(len(own.train)), []).append(client)
    return [f"{clients_named(clients)}: {words}" for words, clients in found.items() if words]


def _check_size(config: Experiment, dataset: Dataset) -> None:
    """Refuse what no machine can build, or this one can't, before trying."""
    if config.clients > len(dataset):
        raise too_many_clients(config.clients, len(dataset), dataset)
    if config.features is None:
        return
    # A head's weights when it is built, the client's own copy, and their gradient.
    needed, there = 3 * 4 * config.features * dataset.classes, physical_memory()
    if needed > there:
        most = there // (3 * 4 * dataset.classes)
        raise InputError(
            f"features is {config.features}, but heads with that many features for {dataset.classes} classes need "
            f"{needed / 1e9:.0f} GB, more than this machine has: use fewer (at most {most}; 64 to 2048 are usual)."
        )


def check_scored(config: Experiment, method: Method) -> None:
    """Refuse to score clients right after a download where they predict with what training makes of it."""
    if method.predicts_after_training and config.evaluate == "after-download":
        raise InputError(
            f"evaluate is 'after-download', but with these options clients of {method.name} predict with networks that "
            "they fine-tune after a download: leave it at 'after-training'."
        )


def check_head_trains(method: type[Method], name: str, network: SplitNetwork) -> None:
    """Refuse a frozen head where the method shares it."""
    if "head" in method.requires and not any(parameter.requires_grad for parameter in network.head.parameters()):
        raise InputError(
            f"{method.name} shares the head of every client's network, but the head of {name} is frozen: leave its "
            "parameters trainable (requires_grad=True), or use a method that shares something else."
        )


def find_device(name: str) -> torch.device:
    """The compute device of that name; `auto` is a GPU if there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        if device.type not in ("cpu", "cuda"):
            raise RuntimeError(f"can't compute on {device.type}")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(
            f"device is '{name}', which this machine does not have; use cpu, or leave it on auto."
        ) from error
    return device


@contextmanager
def data_kept() -> Iterator[None]:
    """Inside, data that several experiments name are loaded once, and all of them have the same tensors."""
    outer = _kept.get()
    token = _kept.set({} if outer is None else outer)
    try:
        yield
    finally:
        _kept.reset(token)


_kept: ContextVar[dict[tuple[str | None, ...], Dataset] | None] = ContextVar("kept data", default=None)


def named_data(config: Experiment) -> Dataset:
    """The dataset that an experiment names."""
    if config.data.startswith(PYTHON):
        raise InputError(
            f"the data '{config.data.removeprefix(PYTHON)}' came from Python; pass it again: "
            "polyfed.resume(run, data=…)."
        )
    names = (config.data, config.data_folder, config.label, config.client, config.image)
    key, kept = tuple(None if name is None else str(name) for name in names), _kept.get()
    if kept is not None and key in kept:
        return kept[key]
    found = load_dataset(config.data, config.data_folder, label=config.label, client=config.client, image=config.image)
    if kept is not None:
        kept[key] = found
    return found


def settled(config: Experiment, dataset: Dataset) -> Experiment:
    """The experiment with what follows from its data, where the user left it open.

    Data that say whose they are decide on the partition and the clients; the kind of samples decides on the networks. A
    number of clients that contradicts the data is refused when samples are dealt.
    """
    chosen, changes = config.model_fields_set, dict[str, Any]()
    if "models" not in chosen:
        changes["models"] = default_group(dataset.input_shape)
    if dataset.clients and (config.partition in ("natural", "given") or "partition" not in chosen):
        changes["partition"] = config.partition if "partition" in chosen else "natural"
        changes["clients"] = config.clients if "clients" in chosen else dataset.clients
    return experiment(**{**config.model_dump(), **changes}) if changes else config


def _architectures(config: Experiment, models: Models | None) -> list[Architecture]:
    if models is None and config.models.startswith(PYTHON):
        raise InputError(
            f"the networks '{config.models.removeprefix(PYTHON)}' came from Python; pass them again: "
            "polyfed.resume(run, models=…)."
        )
    return resolve(config.models if models is None else models, config.head)


def _auxiliary(
    config: Experiment, models: Models | None, architectures: Sequence[Architecture], dataset: Dataset
) -> Architecture:
    name = config.auxiliary or default_auxiliary(config.models if models is None else models)
    if name is not None:
        found = resolve(name)[0]
        return next((own for own in architectures if own.name == found.name), found)  # one with its head known
    return smallest(architectures, dataset.input_shape, dataset.classes)
