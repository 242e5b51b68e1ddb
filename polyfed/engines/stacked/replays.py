"""Passes without training as graphs on a GPU: captured once for a cohort's shape, then replayed for any of its clients.

A graph reads the states of a cohort from the stack on which captured steps train, and sample numbers from memory of its
own. Its results are copied at once, because the next replay overwrites them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from threading import Thread, current_thread
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from polyfed.compute import finish_gpu_work, first_cause
from polyfed.engines.stacked.captured import Stream, stepped
from polyfed.message import State

Work = Callable[[State, Tensor], object]
"""What a pass computes from stacked states and sample numbers [clients, samples]: tensors [clients, samples, …]."""
Key = tuple[str, Hashable, int, int]
"""Architecture, purpose, clients and samples of each."""
MOST_REPLAYS = 8
"""Replays for one pass; one over more samples keeps a GPU busy without a graph."""
KEPT_PASSES = 128
"""Captured passes that are kept; the least recently used is dropped first."""


class Replays:
    """The captured passes of an engine."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._kept: OrderedDict[Key, _Pass] = OrderedDict()
        self._failed: set[tuple[str, Hashable]] = set()
        """Architectures and purposes whose passes can't be captured."""

    def clear(self) -> None:
        """Drop all graphs; none of them may be running."""
        self._kept.clear()

    def found(self, key: Key, new: Callable[[], _Pass], state: State) -> _Pass | None:
        """The pass over these very tensors, a new one if there is none yet; None if it can't be captured."""
        if key[:2] in self._failed:
            return None
        if key not in self._kept or self._kept[key].state is not state:
            if key in self._kept or len(self._kept) >= KEPT_PASSES:
                self._drop(key if key in self._kept else next(iter(self._kept)))
            self._kept[key] = new()
        self._kept.move_to_end(key)
        return self._kept[key]

    def _drop(self, key: Key) -> None:
        if self._kept[key].captured:
            finish_gpu_work()
        del self._kept[key]

    def failed(self, key: Key, reason: str) -> None:
        """Let passes like this one be made without a graph from now on, and say so once."""
        if not self._failed:
            said = " ".join(reason.split())[:200]
            self._note(f"passes without training can't be captured on the GPU and take longer ({said})")
        self._failed.add(key[:2])
        for other in [other for other in self._kept if other[:2] == key[:2]]:
            self._drop(other)


@dataclass(frozen=True, eq=False)
class CohortReplays:
    """The captured passes of one architecture's cohorts of one size."""

    replays: Replays
    architecture: str
    state: State
    """The stacked states, in tensors that stay."""
    stream: Stream

    def over(
        self, purpose: Hashable, work: Work, rows: Tensor, numbers: State, most: int
    ) -> list[tuple[Tensor, object]] | None:
        """What a pass gives for these rows, in pieces of at most so many samples; None if it can't be captured.

        Passes of equal purposes compute the same.
        """
        size = len(next(iter(self.state.values())))
        columns = rows.shape[1]
        width = min(max(1, most // size), stepped(columns))
        if not 0 < columns <= MOST_REPLAYS * width:
            return None
        key = (self.architecture, purpose, size, width)
        one = self.replays.found(key, lambda: _Pass(self.state, rows.new_zeros(size, width), numbers), self.state)
        if one is None:
            return None
        try:
            return [(piece, one(work, piece, numbers, self.stream)) for piece in rows.split(width, 1)]
        except (CannotCapture, torch.OutOfMemoryError) as error:
            reason = str(error)
        self.replays.failed(key, reason)  # out here, the error no longer holds on to the memory of what failed
        return None


class CannotCapture(Exception):
    """Why a pass can't be captured."""


class _Pass:
    """One pass over always as many clients and samples: without a graph at first, then captured and replayed."""

    def __init__(self, state: State, rows: Tensor, numbers: State) -> None:
        self.state = state
        self._rows = rows
        self._numbers = {name: values.new_zeros(len(rows)) for name, values in numbers.items()}
        self._warm: WeakSet[Thread] = WeakSet()
        """Threads that have made the pass without a graph."""
        self._graph: Any = None
        self._outcome: Any = None

    @property
    def captured(self) -> bool:
        """Whether there is a graph."""
        return self._graph is not None

    def __call__(self, work: Work, rows: Tensor, numbers: State, stream: Stream) -> object:
        clients, samples = rows.shape
        self._rows[:clients, :samples].copy_(rows)  # the rest are samples too, of which nobody looks at the results
        for name, values in numbers.items():
            self._numbers[name][:clients].copy_(values)
        if self._graph is None and current_thread() not in self._warm:
            # Compiles, chooses and allocates, which a capture can't; of what it chooses, threads share nothing.
            found = self._take(work)
            self._warm.add(current_thread())
        else:
            if self._graph is None:
                self._graph, self._outcome = self._capture(work, stream)
            self._graph.replay()
            found = self._outcome
        return tree_map(lambda tensor: tensor[:clients, :samples].clone(), found)

    def _take(self, work: Work) -> object:
        return work(self.state | self._numbers, self._rows)

    def _capture(self, work: Work, stream: Stream) -> tuple[Any, object]:
        try:
            return capture(stream, lambda: self._take(work))
        except RuntimeError as error:
            raise CannotCapture(str(first_cause(error))) from None


def capture(stream: Stream, call: Callable[[], object]) -> tuple[Any, object]:
    """A graph of this call, and the memory to which its replays write the results."""
    with stream.capture() as graph:
        outcome = call()
    return graph, outcome
