"""What passes over the samples of a cohort need in every round: made once and kept on the device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from polyfed.compute import to_device
from polyfed.engines.client.batches import visits
from polyfed.evaluation import PARTS
from polyfed.methods.base import Phase
from polyfed.population import Population

MOST_KEPT = 1 << 22
"""Samples in the tables that are kept; each takes some tens of bytes on the device."""

SOME = 64
"""Samples of a client that a method looks at for its remarks."""


def padded_rows(samples: Sequence[Tensor]) -> Tensor:
    """Sample numbers of several clients as one table, −1 where a client has fewer."""
    return pad_sequence(list(samples), batch_first=True, padding_value=-1)


class Tables:
    """The tables of an engine's cohorts."""

    def __init__(self, population: Population) -> None:
        self._population = population
        self._kept: dict[tuple[int, ...], Table] = {}
        self._samples = 0

    def of(self, clients: Sequence[int]) -> Table:
        """The table of these clients, in this order."""
        key = tuple(clients)
        if key not in self._kept:
            table = Table(self._population, clients)
            if self._samples + table.samples > MOST_KEPT:
                self.clear()
            self._kept[key] = table
            self._samples += table.samples
        return self._kept[key]

    def clear(self) -> None:
        """Drop all of them."""
        self._kept.clear()
        self._samples = 0


class Table:
    """The samples of some clients, in this order; each part is made when it is first needed."""

    def __init__(self, population: Population, clients: Sequence[int]) -> None:
        self._population, self._clients = population, tuple(clients)
        self._data = [population.data[client] for client in clients]
        self._visits: dict[tuple[object, ...], Tensor] = {}
        self.samples = sum(len(part) for own in self._data for part in own.parts)

    @cached_property
    def trained(self) -> Tensor:
        """Training samples, on the device."""
        return to_device(padded_rows([own.train for own in self._data]), self._population.device)

    @cached_property
    def some(self) -> Tensor:
        """As many training samples of each client, on the device; one with fewer repeats them."""
        rows = [own.train[torch.arange(SOME) % len(own.train)] for own in self._data]
        return to_device(torch.stack(rows), self._population.device)

    @cached_property
    def tested(self) -> Tensor:
        """Test and validation samples, on the device; `widths` says where one part ends."""
        return to_device(torch.cat(self._parts, 1), self._population.device)

    @cached_property
    def widths(self) -> list[int]:
        """Columns of each part of `tested`."""
        return [part.shape[1] for part in self._parts]

    @cached_property
    def true(self) -> Tensor:
        """The classes of `tested`, −1 for padding."""
        return torch.where(self.tested >= 0, self._population.dataset.labels[self.tested.clamp(min=0)], -1)

    @cached_property
    def counts(self) -> Tensor:
        """Training samples per class [clients, classes], on the CPU."""
        return torch.stack([self._population.counts[client] for client in self._clients])

    @cached_property
    def seen(self) -> list[int]:
        """How many classes each client has."""
        found: list[int] = (self.counts > 0).sum(1).tolist()
        return found

    @cached_property
    def groups(self) -> Tensor:
        """For each of `trained`, one after another, its client and class as one number; padding has the last one."""
        rows, classes = self.trained, self._population.task.classes
        owner = torch.arange(len(rows), device=rows.device)[:, None]
        group = owner * classes + self._population.dataset.labels[rows.clamp(min=0)]
        return torch.where(rows >= 0, group, len(rows) * classes).flatten()

    @cached_property
    def holdings(self) -> tuple[Tensor, Tensor]:
        """The `groups` that occur, in ascending order, and their numbers of samples; on the CPU."""
        counts = self.counts.flatten()
        held = counts.nonzero().flatten()
        return held, counts[held]

    @cached_property
    def divisors(self) -> tuple[Tensor, Tensor]:
        """The same on the device, with the numbers as a column."""
        held, counts = self.holdings
        return to_device(held, self._population.device), to_device(counts[:, None], self._population.device)

    @cached_property
    def ordered(self) -> tuple[Tensor, Tensor]:
        """Where the samples of each of the `holdings` are in `groups`, one after another, and which of them has each.

        Both on the device.
        """
        counts = self.holdings[1]
        places = torch.arange(len(counts)).repeat_interleave(counts)
        return self.groups.argsort(stable=True)[: len(places)], to_device(places, self._population.device)

    def visits(self, phase: Phase) -> Tensor:
        """How often samples of each class are visited in a phase that leaves none out: [clients, classes]."""
        key = phase.epochs, phase.part
        if key not in self._visits:
            self._visits[key] = torch.stack([visits(self._population, client, phase) for client in self._clients])
        return self._visits[key]

    @cached_property
    def _parts(self) -> list[Tensor]:
        return [padded_rows([getattr(own, part) for own in self._data]) for part in PARTS]
