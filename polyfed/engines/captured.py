"""A cohort's step as one graph on the GPU, and the lane on which it runs; on a CPU, the step as it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from polyfed.compute import capturing
from polyfed.engines.cohort import PhaseStep, Plan
from polyfed.message import State


class Lane:
    """Where the cohorts of one architecture train: on a GPU, beside those of other architectures.

    A lane has a stream, so that small cohorts share the GPU instead of waiting for each other, and memory for what the
    steps captured on it compute on the way; one for all of them, because only one runs at a time.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pool = torch.cuda.graph_pool_handle() if self.stream else None

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Inside, work is queued on this lane, after all work that was queued outside before."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            yield

    def join(self) -> None:
        """Work that is queued outside from now on comes after all of this lane's."""
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)

    @contextmanager
    def capture(self) -> Iterator[torch.cuda.CUDAGraph]:
        """Inside, work on this lane goes into a graph instead of being done."""
        graph = torch.cuda.CUDAGraph()
        with capturing(graph, pool=self._pool, stream=self.stream):
            yield graph


class CapturedStep:
    """A cohort's step; in its lane on a GPU it is captured once and then replayed for every batch."""

    def __init__(self, step: PhaseStep, lane: Lane, most_steps: int) -> None:
        self.step = step
        self._lane = lane
        self._most_steps = most_steps
        self._inputs: State = {}
        self._number = torch.zeros(())
        self._graph: torch.cuda.CUDAGraph | None = None

    def run(self, plan: Plan) -> None:
        """Queue all steps of a plan, from a fresh optimiser state."""
        self.step.reset()
        if self._graph is None:
            done = self._first_steps(plan)
        else:
            done = 0
            self._load(plan)
        for _ in range(done, len(plan.rows)):
            assert self._graph is not None
            self._graph.replay()

    def _first_steps(self, plan: Plan) -> int:
        """Take all steps as they are, or on a GPU only the first, as a warm-up that counts, and capture the next."""
        self.step.set_modes()
        steps = len(plan.rows)
        worth = self._lane.stream is not None and steps > 1
        for number in range(1 if worth else steps):
            self.step(plan.at(number))
        if not worth:
            return steps
        self._inputs = {n: t.new_empty(self._most_steps, *t.shape[1:]) for n, t in plan.inputs.items()}
        self._number = torch.zeros(1, dtype=torch.int64, device=plan.rows.device)
        self._load(plan)
        self._number += 1
        with self._lane.capture() as graph:
            self.step({name: self._current(tensor) for name, tensor in self._inputs.items()})
            self._number += 1
        self._graph = graph
        return 1

    def _load(self, plan: Plan) -> None:
        """Put a plan where the graph looks for it, and begin with its first step."""
        for name, tensor in plan.inputs.items():
            self._inputs[name][: len(tensor)].copy_(tensor)
        self._number.zero_()

    def _current(self, tensor: Tensor) -> Tensor:
        return tensor.index_select(0, self._number)[0]
