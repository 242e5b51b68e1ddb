"""Who draws the batches of cohorts: for a round, or for the next one while the GPU works on this one.

What is drawn ahead belongs to one client, whatever cohort it will be in: its draws come from addresses of its own, so
they are the same whoever draws them, and when. What was not drawn ahead is drawn when it is needed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from threading import Thread, main_thread
from typing import TypeAlias

import torch

from polyfed.engines.client.batches import drawn_for
from polyfed.engines.client.phases import phases_in
from polyfed.engines.stacked.plan import ClientBatches, Plan, client_batches, plan_of
from polyfed.engines.stacked.trial import Finding, Trial
from polyfed.methods.base import Phase
from polyfed.population import Population

MOST_AHEAD = 5_000_000
"""Visits of samples in a round that may be drawn ahead; with augmentation or noise each needs some hundred bytes."""

Key: TypeAlias = tuple[object, ...]
"""A round, and all else that a client's batches in a phase depend on."""
Tasks: TypeAlias = deque[tuple[Future[ClientBatches], Callable[[], ClientBatches]]]
"""What is to be drawn, and how."""


class Drawer:
    """Draws all batches of a cohort, phase by phase."""

    def __init__(
        self,
        population: Population,
        trial: Trial,
        width: Callable[[int], int],
        size: Callable[[list[int]], int],
        note: Callable[[str], None],
    ) -> None:
        """`width` is the number of samples in a batch of a client, `size` that of clients a cohort is padded to.

        `note` tells the user.
        """
        self._population, self._trial, self._width, self._size = population, trial, width, size
        self._note = note
        self._expected: tuple[int, list[int]] = (0, [])
        """A round, and who will probably train in it."""
        self._ahead: dict[Key, Future[ClientBatches]] = {}
        self._thread: Thread | None = None
        """The last thread that draws ahead. It touches neither the GPU nor anything that others change."""
        self._refused = False
        """Whether there are too many threads already for another."""

    def plans(self, clients: list[int], round: int) -> list[Plan]:
        """The batches of these clients in a round, one plan for each phase."""
        found, width, size = self._trial.of(clients[0]), self._width(clients[0]), self._size(clients)
        plans = []
        for phase in phases_in(self._population.method, round):
            batches = [self._batches(client, phase, round, found) for client in clients]
            plans.append(plan_of(batches, width, size, pads=not found.exact(size, phase)))
        return plans

    def expect(self, round: int, clients: Iterable[int]) -> None:
        """These clients will probably train in that round."""
        self._expected = round, list(clients)

    def draw_ahead(self, round: int) -> None:
        """From now on a GPU works on this round: draw meanwhile for the next, if it is known who trains in it."""
        for key in [key for key in self._ahead if key[0] not in (round, round + 1)]:  # of clients that did not train
            self._ahead.pop(key).cancel()
        following, clients = self._expected
        on_cpu = self._population.device.type == "cpu"  # whose cores are busy with training
        if on_cpu or self._refused or following != round + 1:
            return
        self._expected = (0, [])
        # A user's `draw` may not be made for another thread, and may depend on what this round changes.
        ours = self._population.has_our_method
        phases = [phase for phase in phases_in(self._population.method, following) if ours or phase.draw is None]
        passes, left = sum(phase.epochs for phase in phases), MOST_AHEAD
        tasks: Tasks = deque()
        for client in clients:
            found = self._trial.known(client)
            if found is None or found.reason is not None:
                continue
            left -= passes * len(self._population.data[client].train)
            if left < 0:
                break
            for phase in phases:
                key, draw = self._task(client, phase, following, found)
                if key not in self._ahead:
                    self._ahead[key] = Future()
                    tasks.append((self._ahead[key], draw))
        if tasks:
            self._begin(tasks)

    def _begin(self, tasks: Tasks) -> None:
        """Let a thread draw; where none can be started, what nobody draws ahead is drawn when it is needed."""
        thread = Thread(target=_draw_all, args=(tasks, self._thread), name="polyfed-drawing", daemon=False)
        try:
            thread.start()
        except RuntimeError as error:  # a limit on processes counts threads
            self._refused = True
            self._note(f"batches are drawn when they are needed, not ahead ({error})")
            return
        self._thread = thread

    def clear(self) -> None:
        """Stop drawing ahead, and drop what was drawn."""
        self._expected = (0, [])
        while self._ahead:
            self._ahead.popitem()[1].cancel()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _batches(self, client: int, phase: Phase, round: int, found: Finding) -> ClientBatches:
        """A client's batches in a phase: those that were drawn ahead, or drawn now."""
        key, draw = self._task(client, phase, round, found)
        begun = self._ahead.pop(key, None)
        if begun is not None and not begun.cancel():  # one that has not begun is not waited for
            with suppress(Exception):  # what has failed fails again below, as if nobody had tried before
                return begun.result()
        return draw()

    def _task(self, client: int, phase: Phase, round: int, found: Finding) -> tuple[Key, Callable[[], ClientBatches]]:
        """What a client's batches in a phase depend on, and how to draw them."""
        width, normed = self._width(client), phase.name in found.normed
        draw = partial(client_batches, self._population, client, width, phase, round, normed=normed)
        return (round, client, width, normed, *drawn_for(phase)), draw


def _draw_all(tasks: Tasks, earlier: Thread | None) -> None:
    """Draw one after another, after what an earlier thread has to draw; what was cancelled is left out."""
    torch.get_num_threads()  # looking at it, a thread takes over the number of compute threads of its maker
    if earlier is not None:
        earlier.join()
    while tasks and main_thread().is_alive():  # when Python ends, nobody needs the rest
        batches, draw = tasks.popleft()
        if batches.set_running_or_notify_cancel():
            try:
                batches.set_result(draw())
            except BaseException as error:
                batches.set_exception(error)
