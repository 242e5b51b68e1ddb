"""All batches of a cohort in one phase as tables of one shape, so that every step does the same work.

A short batch is padded, unless a single client trains by PyTorch's own batch norm: that looks at all samples of a
batch, so each batch must have exactly its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from polyfed.compute import to_device
from polyfed.engines.client.batches import all_epochs, fewest_for_norm
from polyfed.message import State
from polyfed.methods.base import Phase
from polyfed.population import Population


@dataclass(frozen=True)
class Plan:
    """The batches of a cohort in one phase: [steps, clients, batch, …]."""

    inputs: State
    """By name: `rows`, sample numbers and then only −1; draws for them (`image.flip`, `drawn.noise`)."""
    active: list[int]
    """For each step, the number of clients up to the last one that has a batch."""
    samples: list[int]
    """For each step, the number of samples per client: a full batch, or fewer if nothing may be padded."""
    real: list[list[int]]
    """For each step, the number of samples of each client that are no padding."""
    left_out: list[Tensor]
    """For each client, the samples that are not visited, each as often as it would have been."""

    def on(self, device: torch.device) -> Plan:
        """The same with its inputs on the compute device."""
        return replace(self, inputs={name: to_device(tensor, device) for name, tensor in self.inputs.items()})

    def at(self, step: int) -> State:
        """The inputs of one step."""
        return {name: tensor[step, :, : self.samples[step]] for name, tensor in self.inputs.items()}


@dataclass(frozen=True)
class ClientBatches:
    """The batches of one client in one phase."""

    inputs: State
    """By the names of a plan's inputs, [batches, width, …]; empty without batches."""
    left_out: Tensor
    """The samples that are not visited."""


def new_plan(
    population: Population,
    clients: Sequence[int],
    width: int,
    size: int,
    phase: Phase,
    round: int,
    *,
    normed: bool = False,
    pads: bool = True,
) -> Plan:
    """All batches of these clients in a phase, padded to a common number of steps and to `size` clients.

    If they are `normed`, last batches that are too small for batch norm are left out. Without `pads`, for a single
    client, short batches stay as they are.
    """
    own = [client_batches(population, client, width, phase, round, normed=normed) for client in clients]
    return plan_of(own, width, size, pads=pads)


def client_batches(
    population: Population, client: int, width: int, phase: Phase, round: int, *, normed: bool = False
) -> ClientBatches:
    """All batches of one client in a phase; they depend on nobody else's."""
    epochs, nothing = all_epochs(population, client, population.phase(client, phase), round), torch.zeros(0).long()
    if epochs is None:
        return ClientBatches({}, nothing)
    draws = {"rows": epochs.samples} | {f"drawn.{name}": tensor for name, tensor in epochs.drawn.items()}
    for purpose, changes in epochs.augmentations.items():
        draws |= {f"{purpose}.{name}": tensor for name, tensor in changes.items()}
    table = {name: _in_batches(values, width, -1 if name == "rows" else 0) for name, values in draws.items()}
    if not normed:
        return ClientBatches(table, nothing)
    real = table["rows"] >= 0
    few = real.sum(1) < fewest_for_norm(epochs.samples.shape[1], population.training.batch_size)
    return ClientBatches({name: values[~few] for name, values in table.items()}, table["rows"][few[:, None] & real])


def plan_of(batches: Sequence[ClientBatches], width: int, size: int, *, pads: bool = True) -> Plan:
    """These clients' batches as one plan; `new_plan` says how."""
    tables = [own.inputs for own in batches]
    steps = max((len(table["rows"]) for table in tables if table), default=0)
    inputs: State = {"rows": torch.full((steps, size, width), -1)}
    for column, table in enumerate(tables):
        for name, values in table.items():
            if name not in inputs:
                inputs[name] = values.new_zeros(steps, size, *values.shape[1:])
            inputs[name][: len(values), column] = values
    filled = (inputs["rows"] >= 0).sum(2)
    active = ((filled > 0) * torch.arange(1, size + 1)).amax(1).tolist()
    samples = [width] * len(filled) if pads else filled.amax(1).tolist()
    return Plan(inputs, active, samples, filled.tolist(), [own.left_out for own in batches])


def _in_batches(values: Tensor, width: int, filler: int) -> Tensor:
    """Values of samples in several passes cut into batches [all batches, width, …], the last of a pass padded."""
    passes, count = values.shape[:2]
    missing = -count % width
    if missing:
        values = torch.cat([values, values.new_full((passes, missing, *values.shape[2:]), filler)], 1)
    return values.reshape(-1, width, *values.shape[2:])
