"""Who draws the batches of cohorts: for a round, or for the next one while the GPU works on this one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property, partial

from polyfed.engines.stacked.plan import Plan, new_plan
from polyfed.engines.stacked.trial import Trial
from polyfed.population import Population

MOST_AHEAD = 5_000_000
"""Visits of samples that may be drawn ahead; with augmentation each needs some hundred bytes."""


class Drawer:
    """Draws all batches of a cohort, phase by phase."""

    def __init__(
        self, population: Population, trial: Trial, width: Callable[[int], int], size: Callable[[list[int]], int]
    ) -> None:
        """`width` is the number of samples in a batch of a client, `size` that of clients a cohort is padded to."""
        self._population, self._trial, self._width, self._size = population, trial, width, size
        self._ahead: dict[tuple[int, ...], list[Plan]] = {}
        """By round and clients, what was drawn during the previous round."""

    def plans(self, clients: list[int], round: int) -> list[Plan]:
        """The batches of these clients in a round, one plan for each phase."""
        return self._ahead.pop((round, *clients), None) or self._draw(clients, round)

    def draw_ahead(self, cohorts: Iterable[list[int]], round: int) -> None:
        """Draw the batches of these cohorts for the round after this one, if there is one and they are few enough."""
        self._ahead = {key: plans for key, plans in self._ahead.items() if key[0] >= round}
        if round < self._population.task.rounds and self._visits <= MOST_AHEAD:
            for clients in cohorts:
                self._ahead[round + 1, *clients] = self._draw(clients, round + 1)

    def clear(self) -> None:
        """Drop what was drawn ahead."""
        self._ahead.clear()

    @cached_property
    def _visits(self) -> int:
        """How many samples all clients together visit in a round."""
        epochs = sum(phase.epochs for phase in self._population.method.phases())
        return epochs * sum(len(own.train) for own in self._population.data.values())

    def _draw(self, clients: list[int], round: int) -> list[Plan]:
        found, width, size = self._trial.of(clients[0]), self._width(clients[0]), self._size(clients)
        draw = partial(new_plan, self._population, clients, width, size, round=round)
        return [
            draw(phase=phase, singles=phase.name not in found.normed, pads=not found.exact(size, phase))
            for phase in self._population.method.phases_in(round)
        ]
