"""Which samples a client visits in which order, with every random draw for them: the same on all engines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from polyfed.data import Augmentation
from polyfed.message import State
from polyfed.methods.base import Batch, Phase
from polyfed.population import Population

AUGMENTATION = Augmentation()


@dataclass(frozen=True)
class Epoch:
    """One pass over a client's samples: their order, and draws that have one row per sample in that order."""

    samples: Tensor
    augmentations: tuple[State, ...] = ()
    """None, one, or two (for a second view of the same images)."""
    drawn: State = field(default_factory=dict)

    def batches(self, population: Population) -> Iterator[Batch]:
        """The pass in batches on the compute device."""
        device, size = population.device, population.training.batch_size
        for start in range(0, len(self.samples), size):
            rows = slice(start, start + size)
            x, y = population.dataset.batch(self.samples[rows], device)
            views = [augment(x, rows_of(draws, rows, device)) for draws in self.augmentations] or [x]
            drawn = rows_of(self.drawn, rows, device)
            yield Batch(views[0], y, view=views[1] if len(views) > 1 else None, drawn=drawn)


def new_epoch(population: Population, samples: Tensor, phase: Phase, generator: torch.Generator) -> Epoch:
    """Draw the next pass over these samples for a phase."""
    count = len(samples)
    order = samples.index_select(0, torch.randperm(count, generator=generator))
    views = phase.views if phase.views == 2 or (phase.augment and population.training.augment) else 0
    shape = population.task.input_shape
    augmentations = tuple(AUGMENTATION.draw(generator, count, shape) for _ in range(views))
    return Epoch(order, augmentations, phase.draw(generator, count) if phase.draw else {})


def epochs(population: Population, client: int, phase: Phase, round: int) -> Iterator[Epoch]:
    """All passes of a client in one phase of one round."""
    samples = phase_samples(population, client, phase)
    generator = population.generator(f"batches/{phase.name}", round, client)
    for _ in range(phase.epochs if len(samples) else 0):
        yield new_epoch(population, samples, phase, generator)


def batches(population: Population, client: int, phase: Phase, round: int) -> Iterator[Batch]:
    """All batches of a client in one phase of one round."""
    for epoch in epochs(population, client, phase, round):
        yield from epoch.batches(population)


def phase_samples(population: Population, client: int, phase: Phase) -> Tensor:
    """The training samples a phase sees: all, or a part of them that is the same in every round."""
    samples = population.data[client].train
    if phase.part == (0.0, 1.0):
        return samples
    shuffled = samples[torch.randperm(len(samples), generator=population.generator("parts", 0, client))]
    start, stop = phase.edges(len(samples))
    return shuffled[start:stop]


def visits(population: Population, client: int, phase: Phase) -> Tensor:
    """How often samples of each class are visited in a phase."""
    if phase.part == (0.0, 1.0):
        return phase.epochs * population.counts[client]
    labels = population.labels[phase_samples(population, client, phase)]
    return phase.epochs * torch.bincount(labels, minlength=population.task.classes)


def augment(x: Tensor, draws: State) -> Tensor:
    """The images after these draws of flip, erasing and crop."""
    return AUGMENTATION.apply(x, draws)


def rows_of(draws: State, rows: slice, device: torch.device) -> State:
    """These samples' rows of their draws."""
    return {name: tensor[rows].to(device) for name, tensor in draws.items()}
