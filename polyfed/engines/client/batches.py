"""Which samples a client visits in which order, with every random draw for them: the same on all engines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from polyfed.data import Augmentation
from polyfed.message import State
from polyfed.methods.base import Batch, Part, Phase, edges
from polyfed.population import Population

AUGMENTATION = Augmentation()
ENOUGH_FOR_NORM = 8
"""A last batch of so many samples is large enough for batch norm, however many a full one has."""
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


@dataclass(frozen=True)
class Numbers:
    """The random numbers behind a pass, or behind several of them, stacked."""

    order: Tensor
    augmentations: Mapping[str, State]
    drawn: State
    """What a phase's own `draw` gives."""

    @classmethod
    def new(cls, population: Population, count: int, phase: Phase, generator: torch.Generator) -> Numbers:
        """Those of the next pass over that many samples for a phase."""
        order = torch.randperm(count, generator=generator)
        purposes = [IMAGE] if phase.augment and population.training.augment else []
        purposes += VIEWS if phase.views == 2 else ()
        augmentations = {purpose: AUGMENTATION.numbers(generator, count) for purpose in purposes}
        return cls(order, augmentations, phase.draw(generator, count) if phase.draw else {})

    @classmethod
    def stacked(cls, passes: Sequence[Numbers]) -> Numbers:
        """Those of several passes, [passes, …]."""
        purposes = passes[0].augmentations
        return cls(
            torch.stack([own.order for own in passes]),
            {purpose: _stacked([own.augmentations[purpose] for own in passes]) for purpose in purposes},
            _stacked([own.drawn for own in passes]),
        )

    def epoch(self, population: Population, samples: Tensor) -> Epoch:
        """The pass over these samples."""
        shape = population.task.input_shape
        augmentations = {purpose: AUGMENTATION.draws_of(own, shape) for purpose, own in self.augmentations.items()}
        return Epoch(samples[self.order], augmentations, self.drawn)


def _stacked(states: Sequence[State]) -> State:
    return {name: torch.stack([state[name] for state in states]) for name in states[0]}


def drawn_for(phase: Phase) -> tuple[object, ...]:
    """What of a phase decides what is drawn for it; of a `draw` of its own only whether there is one."""
    return phase.name, phase.epochs, phase.part, phase.views, phase.augment, phase.draw is not None


def epochs(population: Population, client: int, phase: Phase, round: int) -> Iterator[Epoch]:
    """All passes of a client in one phase of one round."""
    samples = phase_samples(population, client, phase)
    for numbers in _numbers(population, client, phase, round, len(samples)):
        yield numbers.epoch(population, samples)


def all_epochs(population: Population, client: int, phase: Phase, round: int) -> Epoch | None:
    """The same as one, [passes, samples, …], or None if there are none; it takes less time than one after another."""
    samples = phase_samples(population, client, phase)
    numbers = list(_numbers(population, client, phase, round, len(samples)))
    return Numbers.stacked(numbers).epoch(population, samples) if numbers else None


def _numbers(population: Population, client: int, phase: Phase, round: int, count: int) -> Iterator[Numbers]:
    """The random numbers of a client's passes over that many samples."""
    generator = population.generator(f"batches/{phase.name}", round, client)
    for _ in range(phase.epochs if count else 0):
        yield Numbers.new(population, count, phase, generator)


def batches(population: Population, client: int, phase: Phase, round: int) -> Iterator[Batch]:
    """All batches of a client in one phase of one round."""
    for epoch in epochs(population, client, phase, round):
        yield from epoch.batches(population)


def fewest_for_norm(samples: int, size: int) -> int:
    """How many of that many samples a batch must have for batch norm to train on it, where a full batch has `size`.

    Where a channel has one position left, two samples become two signs, whatever their values, so gradients vanish or
    explode: one step on two or three images can ruin a ResNet. So a last batch is used if it is half full or has eight.
    An only batch is used in any case where there is something to compare: a client must learn from what it has.

    >>> [fewest_for_norm(1000, size) for size in (2, 4, 10, 64)], fewest_for_norm(10, 10)
    ([2, 2, 5, 8], 2)
    """
    return 2 if samples <= size else enough_for_norm(size)


def enough_for_norm(size: int) -> int:
    """From how many samples on a batch is safe for batch norm, where a full one has `size`."""
    return max(2, min(ENOUGH_FOR_NORM, (size + 1) // 2))


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
