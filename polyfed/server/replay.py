"""A server's training steps on a GPU, captured as graphs: launching small kernels takes longer than running them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from polyfed.compute import capturing

Step = Callable[[Tensor, Tensor], None]
"""A step on the vectors in these rows (the first tensor); writes their losses into the second tensor."""
MOST_STEPS = 25
"""Steps in a graph: enough that replaying costs almost nothing, and few enough to be captured quickly."""
_PLAIN_STEPS = 3
"""Steps without a graph that a capture needs before it: they compile kernels, choose algorithms, allocate memory."""
_WORTH = 3
"""From this many replays, capturing costs less than it saves."""


def in_batches(step: Step, rows: Tensor, losses: Tensor, size: int) -> None:
    """Steps on these rows, one batch after another."""
    for chunk, values in zip(rows.split(size), losses.split(size), strict=True):
        step(chunk, values)


class Replayed:
    """Epochs of steps. One graph holds several full batches; the rest of an epoch, with a short batch, has its own."""

    def __init__(self, step: Step, *, samples: int, size: int, epochs: int, notes: list[str]) -> None:
        full, steps = samples // size, epochs * -(-samples // size)
        # A graph that is replayed less than fifty times would cost more than it saves by being long.
        count = max(1, min(MOST_STEPS, steps // 50, full))
        self._width = count * size
        self._cut = full // count * self._width
        self._body = _Span(step, size, epochs * (full // count), notes)
        self._rest = _Span(step, size, epochs, notes)

    def epoch(self, order: Tensor, losses: Tensor) -> None:
        """Queue the steps of an epoch on rows in this order."""
        cut = self._cut
        if cut:
            for rows, values in zip(order[:cut].split(self._width), losses[:cut].split(self._width), strict=True):
                self._body(rows, values)
        if cut < len(order):
            self._rest(order[cut:], losses[cut:])


class _Span:
    """Some steps, always with the same number of vectors: without a graph at first, then captured and replayed.

    Rows are copied into a buffer that the graph reads, and losses out of one that it writes, because a graph always
    uses the same memory.
    """

    def __init__(self, step: Step, size: int, uses: int, notes: list[str]) -> None:
        self._step = step
        self._size = size
        self._uses = uses
        self._notes = notes
        self._plain_steps = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._failed = False
        self._side: torch.cuda.Stream | None = None
        self._rows = self._losses = torch.empty(0)

    def __call__(self, rows: Tensor, losses: Tensor) -> None:
        if len(self._rows) == 0:
            self._rows, self._losses = torch.empty_like(rows), torch.empty_like(losses)
        self._rows.copy_(rows)
        if self._graph is None and self._plain_steps >= _PLAIN_STEPS and self._uses >= _WORTH and not self._failed:
            self._graph = self._captured()
        if self._graph is not None:
            self._graph.replay()
        else:
            self._plain()
        losses.copy_(self._losses)
        self._uses -= 1

    def _take(self) -> None:
        in_batches(self._step, self._rows, self._losses, self._size)

    def _plain(self) -> None:
        """Make the steps on a separate stream, as PyTorch requires before a capture."""
        self._side = side = self._side or torch.cuda.Stream()  # one for all: cuBLAS keeps memory for each that it sees
        current = torch.cuda.current_stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            self._take()
        current.wait_stream(side)
        self._plain_steps += -(-len(self._rows) // self._size)

    def _captured(self) -> torch.cuda.CUDAGraph | None:
        graph = torch.cuda.CUDAGraph()
        try:
            with capturing(graph):
                self._take()
        except RuntimeError as error:  # nothing was done, so the steps can still be made one by one
            self._failed = True
            reason = " ".join(str(error).split())[:200]
            self._notes.append(f"the server's steps can't be captured on the GPU and take longer ({reason})")
            return None
        return graph
