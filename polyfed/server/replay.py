"""A server's training steps on a GPU, captured as graphs: launching small kernels takes longer than running them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import cached_property
from threading import Thread, current_thread

import torch
from torch import Tensor

from polyfed.compute import capturing, finish_gpu_work, first_cause

Step = Callable[[Tensor, Tensor], None]
"""A step on the vectors in these rows (the first tensor); writes their losses into the second tensor."""
MOST_STEPS = 25
"""Steps in a graph: enough that replaying costs almost nothing, and few enough to be captured quickly."""
MOST_SPANS = 16
"""Graphs of one step that are kept; the least recently used is dropped first. One round uses two."""
_PLAIN_STEPS = 3
"""Steps without a graph that a capture needs before it: they compile kernels, choose algorithms, allocate memory."""
_WORTH = 3
"""From this many replays, capturing costs less than it saves."""


def in_batches(step: Step, rows: Tensor, losses: Tensor, size: int) -> None:
    """Steps on these rows, one batch after another."""
    for chunk, values in zip(rows.split(size), losses.split(size), strict=True):
        step(chunk, values)


class Side:
    """The stream on which steps are made before they are captured, and captured.

    One for all of a server's steps: cuBLAS keeps memory for each stream that it sees.
    """

    @cached_property
    def stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream()


class Spans:
    """All graphs of one step, with batches of one size: one for each number of rows."""

    def __init__(self, step: Step, size: int, side: Side | None = None) -> None:
        self.size = size
        self._step = step
        self._side = side or Side()
        self._kept: OrderedDict[int, _Span] = OrderedDict()

    @property
    def captured(self) -> bool:
        """Whether there is a graph."""
        return any(span.graph is not None for span in self._kept.values())

    def of(self, rows: int, uses: int, notes: list[str]) -> _Span:
        """Steps on this many rows, for so many uses now; later ones find the same."""
        if rows not in self._kept:
            while len(self._kept) >= MOST_SPANS:
                self._drop()
            self._kept[rows] = _Span(self._step, self.size, self._side)
        self._kept.move_to_end(rows)
        graphs = (span.graph for span in reversed(self._kept.values()) if span.graph is not None)
        self._kept[rows].begin(uses, notes, next(graphs, None))
        return self._kept[rows]

    def _drop(self) -> None:
        if self._kept[next(iter(self._kept))].graph is not None:
            finish_gpu_work()
        self._kept.popitem(last=False)


class Replayed:
    """Epochs of steps. One graph holds several full batches; the rest of an epoch, with a short batch, has its own."""

    def __init__(self, spans: Spans, *, samples: int, epochs: int, notes: list[str]) -> None:
        size = spans.size
        full, steps = samples // size, epochs * -(-samples // size)
        # A graph that is replayed less than fifty times would cost more than it saves by being long.
        count = max(1, min(MOST_STEPS, steps // 50, full))
        self._width = count * size
        self._cut = full // count * self._width
        # The rest has fewer rows than the body, so these are two.
        self._body = spans.of(self._width, epochs * (full // count), notes) if self._cut else None
        self._rest = spans.of(samples - self._cut, epochs, notes) if self._cut < samples else None

    def epoch(self, order: Tensor, losses: Tensor) -> None:
        """Queue the steps of an epoch on rows in this order."""
        cut = self._cut
        if self._body is not None:
            for rows, values in zip(order[:cut].split(self._width), losses[:cut].split(self._width), strict=True):
                self._body(rows, values)
        if self._rest is not None:
            self._rest(order[cut:], losses[cut:])


class _Span:
    """Some steps, always with the same number of vectors: without a graph at first, then captured and replayed.

    Rows are copied into a buffer that the graph reads, and losses out of one that it writes, because a graph always
    uses the same memory.
    """

    def __init__(self, step: Step, size: int, side: Side) -> None:
        self.graph: torch.cuda.CUDAGraph | None = None
        self._step = step
        self._size = size
        self._side = side
        self._plain_steps = 0
        self._thread: Thread | None = None
        """The one that has made these."""
        self._failed = False
        self._rows = self._losses = torch.empty(0)

    def begin(self, uses: int, notes: list[str], other: torch.cuda.CUDAGraph | None) -> None:
        """Be ready for so many uses. A graph that is captured now shares the memory of the other one.

        Only one of them runs at a time, and none leaves anything there.
        """
        self._uses = uses
        self._notes = notes
        self._other = other  # itself: PyTorch does not let anyone share the memory of a graph that is gone

    def __call__(self, rows: Tensor, losses: Tensor) -> None:
        if len(self._rows) == 0:
            self._rows, self._losses = torch.empty_like(rows), torch.empty_like(losses)
        self._rows.copy_(rows)
        if self.graph is None and self._warm and self._uses >= _WORTH and not self._failed:
            self.graph = self._captured()
        if self.graph is not None:
            self.graph.replay()
        else:
            self._plain()
            self._count_plain()
        losses.copy_(self._losses)
        self._uses -= 1

    @property
    def _warm(self) -> bool:
        """Whether this thread has made enough steps: of what libraries choose and keep, threads share nothing."""
        return self._plain_steps >= _PLAIN_STEPS and self._thread is current_thread()

    def _count_plain(self) -> None:
        if self._thread is not current_thread():
            self._thread, self._plain_steps = current_thread(), 0
        self._plain_steps += -(-len(self._rows) // self._size)

    def _take(self) -> None:
        in_batches(self._step, self._rows, self._losses, self._size)

    def _plain(self) -> None:
        """Make the steps on a separate stream, as PyTorch requires before a capture."""
        side, current = self._side.stream, torch.cuda.current_stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            self._take()
        current.wait_stream(side)

    def _captured(self) -> torch.cuda.CUDAGraph | None:
        other, self._other = self._other, None
        for small in (True, False):
            graph = torch.cuda.CUDAGraph()
            try:
                pool = None if other is None else other.pool()
                with capturing(graph, stream=self._side.stream, pool=pool, small=small):
                    self._take()
                return graph
            except RuntimeError as error:  # nothing was done, so the steps can still be made one by one
                cause = first_cause(error)
                if small and isinstance(cause, torch.OutOfMemoryError):
                    continue  # perhaps not if PyTorch gives back what it keeps for reuse
                reason = " ".join(str(cause).split())[:200]
            break
        self._failed = True
        self._notes.append(f"the server's steps can't be captured on the GPU and take longer ({reason})")
        return None
