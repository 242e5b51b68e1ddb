"""A trial before round one: every kind of network computes each phase's loss on two samples, and predicts.

What would fail in the middle of a run, or silently train nothing, is reported before the run starts. The trial also
shows which networks draw from global generators.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from polyfed.compute import compute_threads
from polyfed.engines.client.batches import enough_for_norm
from polyfed.engines.client.phases import phases_in
from polyfed.engines.client.probing import ask
from polyfed.engines.client.round import batch_norm_trains, set_modes
from polyfed.errors import InputError, PolyfedError, clients_named, first_line, user_place
from polyfed.methods.base import Batch, Phase
from polyfed.methods.parts.averaged import Averaged
from polyfed.methods.parts.network import ClientNetwork
from polyfed.models import SplitNetwork, set_generator
from polyfed.models.frozen import rest_of
from polyfed.population import Population
from polyfed.seeds import watched


def rehearse(population: Population, models: Mapping[str, SplitNetwork]) -> Population:
    """The same population, knowing which networks draw from global generators, with notes on what may go wrong.

    `models` has a network of each architecture, whose state is lost. Raises an `InputError` for what can't be trained.
    """
    owners: dict[str, list[int]] = {}
    for client, architecture in population.architectures.items():
        owners.setdefault(architecture.name, []).append(client)
    _check_anything_travels(population)
    for round in range(1, population.task.rounds + 1):
        phases_in(population.method, round)  # raises for a change from round to round that engines can't follow
    drawing, notes = set(), list(population.notes)
    for name, clients in owners.items():
        model = models[name]
        network = ClientNetwork(model, population.method.client_modules(model))
        set_generator(network, torch.Generator().manual_seed(0))  # what polyfed draws is seeded anyway
        for phase in population.method.phases():
            _check_anything_trains(network, phase, name, clients)
            notes += _check_batches(population, network, phase, name, clients)
        with watched() as draws, compute_threads(1):  # two samples are too little work for several
            _try(population, network, name)
            if draws():
                drawing.add(name)
    return replace(population, draws=frozenset(drawing), notes=notes)


def _check_anything_travels(population: Population) -> None:
    method = population.method
    if not isinstance(method, Averaged):
        return
    if not method.first_state():
        raise InputError(
            f"{method.name} sends {method.sends}, but all of it is frozen: leave some of its parameters trainable "
            "(requires_grad=True), or name another network (--set auxiliary=NAME for the small common one)."
        )
    if population.own_start and method.module == "model" and rest_of(population.task.new_model()).parameters:
        raise InputError(
            f"{method.name} averages networks, but their frozen layers would differ, because every client starts from "
            "its own weights: let all start from the same ones (--set start=architecture)."
        )


def _check_anything_trains(network: ClientNetwork, phase: Phase, name: str, clients: list[int]) -> None:
    if not any(set_modes(network, phase).values()):
        raise InputError(
            f"{clients_named(clients)} ({name}) would learn nothing in phase '{phase.name}', because all parameters of "
            f"{' and '.join(phase.trains)} are frozen: leave some of them trainable (requires_grad=True)."
        )


def _check_batches(
    population: Population, network: ClientNetwork, phase: Phase, name: str, clients: list[int]
) -> list[str]:
    """Batch norm can't train on one sample; a client that never has two in a batch would never take a step.

    Returns a note if some clients have few samples in their only batch.
    """
    set_modes(network, phase)
    if not batch_norm_trains(network):
        return []
    norm = f"({name}) would never take a step in phase '{phase.name}', because batch norm needs two samples in a batch"
    if population.training.batch_size == 1:
        raise InputError(f"{clients_named(clients)} {norm}: use a batch size of at least 2 (--batch-size 2).")
    samples = {client: phase.edges(len(population.data[client].train)) for client in clients}
    alone = [client for client, (start, stop) in samples.items() if stop - start == 1]
    if alone:
        has = "has" if len(alone) == 1 else "each have"
        raise InputError(
            f"{clients_named(alone)} {norm} and {has} one sample to train on: ask for more samples per client "
            "(--set min_samples=4), use fewer clients, or use networks without batch norm."
        )
    enough = enough_for_norm(population.training.batch_size)
    few = [client for client, (start, stop) in samples.items() if 0 < stop - start < enough]
    if not few:
        return []
    has = "has" if len(few) == 1 else "each have"
    return [
        f"{clients_named(few)} ({name}) {has} fewer than {enough} samples to train on in phase '{phase.name}', and "
        "batch norm of so few can ruin a deep network: ask for more samples per client (--set min_samples=16), use "
        "fewer clients, or use networks without batch norm"
    ]


def _try(population: Population, network: ClientNetwork, name: str) -> None:
    """Every phase's loss, without a step, and a prediction."""
    method, dataset = population.method, population.dataset
    x, y = dataset.batch(torch.tensor([0, len(dataset) - 1]))
    hooks = [
        module.extractor.register_forward_hook(_features_only)
        for module in network.modules()
        if isinstance(module, SplitNetwork)
    ]
    mode = ""
    try:
        for phase in method.phases():
            mode = f"training (phase '{phase.name}')"
            set_modes(network, phase)
            drawn = phase.draw(torch.Generator().manual_seed(0), len(y)) if phase.draw else {}
            views = torch.stack([x, x], 1) if phase.views == 2 else None
            outcome = phase.loss(network, Batch(x, y, views=views, drawn=drawn))
            values = outcome[0] if isinstance(outcome, tuple) else outcome
            if not values.requires_grad:
                raise InputError(
                    f"{name} would learn nothing in phase '{phase.name}', because all parameters that its loss depends "
                    "on are frozen: leave some of them trainable (requires_grad=True)."
                )
        mode = "evaluation"
        network.eval()
        with torch.no_grad():
            method.predict(network, x)
            if method.collect is not None:
                method.collect.of(network, x)
            if method.probe is not None:
                mode = "the probe after training"
                ask(method.probe, network, Batch(x, y), Batch(x, y))
    except _NotFeatures as error:
        raise InputError(
            f"{name} gives a value of type {error} in training mode, but it must give one tensor of logits there too: "
            "switch its auxiliary outputs off (for torchvision's networks, aux_logits=False)."
        ) from error
    except PolyfedError:
        raise
    except Exception as error:
        raise InputError(
            f"{name} fails in {mode} with {method.name}: {first_line(error)}{user_place(error)}."
        ) from error
    finally:
        for hook in hooks:
            hook.remove()


class _NotFeatures(Exception):
    """An extractor gave something other than features; the message is its type."""


def _features_only(module: nn.Module, inputs: object, output: object) -> None:
    if not isinstance(output, Tensor):
        raise _NotFeatures(type(output).__name__)
