"""Which samples a client visits in which order, with every random draw for them: the same on all engines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from polyfed.data import Augmentation
from polyfed.message import State
from polyfed.methods.base import Batch, Part, Phase, edges
from polyfed.population import Population

AUGMENTATION = Augmentation()
IMAGE, VIEWS = "image", ("first", "second")
"""What the draws of an augmentation are for: the image that a batch holds, or a view of it beside it."""


@dataclass(frozen=True)
class Epoch:
    """One pass over a client's samples: their order, and draws that have one row per sample in that order."""

    samples: Tensor
    augmentations: Mapping[str, State] = field(default_factory=dict)
    """By what they are for; what is not augmented has none."""
    drawn: State = field(default_factory=dict)

    def batches(self, population: Population) -> Iterator[Batch]:
        """The pass in batches on the compute device."""
        device, size = population.device, population.training.batch_size
        for start in range(0, len(self.samples), size):
            rows = slice(start, start + size)
            x, y = population.dataset.batch(self.samples[rows], device)
            draws = {purpose: rows_of(drawn, rows, device) for purpose, drawn in self.augmentations.items()}
            images, views = augmented(x, draws)
            yield Batch(images, y, views=views, drawn=rows_of(self.drawn, rows, device))


def new_epoch(population: Population, samples: Tensor, phase: Phase, generator: torch.Generator) -> Epoch:
    """Draw the next pass over these samples for a phase."""
    count = len(samples)
    order = samples.index_select(0, torch.randperm(count, generator=generator))
    purposes = [IMAGE] if phase.augment and population.training.augment else []
    purposes += VIEWS if phase.views == 2 else ()
    shape = population.task.input_shape
    augmentations = {purpose: AUGMENTATION.draw(generator, count, shape) for purpose in purposes}
    return Epoch(order, augmentations, phase.draw(generator, count) if phase.draw else {})


def drawn_for(phase: Phase) -> tuple[object, ...]:
    """What of a phase decides what is drawn for it, beside a `draw` of its own."""
    return phase.name, phase.epochs, phase.part, phase.views, phase.augment


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
    return part_samples(population, client, phase.part)


def part_samples(population: Population, client: int, part: Part) -> Tensor:
    """A part of the client's training samples, the same in every round."""
    samples = population.data[client].train
    if part == (0.0, 1.0):
        return samples
    shuffled = samples[torch.randperm(len(samples), generator=population.generator("parts", 0, client))]
    start, stop = edges(part, len(samples))
    return shuffled[start:stop]


def visits(population: Population, client: int, phase: Phase) -> Tensor:
    """How often samples of each class are visited in a phase."""
    if phase.part == (0.0, 1.0):
        return phase.epochs * population.counts[client]
    labels = population.labels[phase_samples(population, client, phase)]
    return phase.epochs * torch.bincount(labels, minlength=population.task.classes)


def augmented(x: Tensor, draws: Mapping[str, State]) -> tuple[Tensor, Tensor | None]:
    """The images that a batch holds, and two views of each, [batch, 2, …], where there are draws for them."""
    images = AUGMENTATION.apply(x, draws[IMAGE]) if IMAGE in draws else x
    if VIEWS[0] not in draws:
        return images, None
    return images, torch.stack([AUGMENTATION.apply(x, draws[view]) for view in VIEWS], 1)


def rows_of(draws: State, rows: slice, device: torch.device) -> State:
    """These samples' rows of their draws."""
    return {name: tensor[rows].to(device) for name, tensor in draws.items()}
