"""A cohort's step as one graph on the GPU, and the stream on which it runs; on a CPU, the step as it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from polyfed.compute import capturing, first_cause
from polyfed.engines.stacked.plan import Plan
from polyfed.engines.stacked.step import PhaseStep
from polyfed.errors import InputError
from polyfed.message import State

WORTH_A_SHAPE = 20
"""From this many steps of a smaller cohort, capturing them costs less than making them with all clients."""


TABLE = "table"
"""The name of the tensor with everything that is a whole number for each sample: sample numbers, draws of images."""


class Stream:
    """Where the cohorts of one architecture train: on a GPU, beside those of other architectures.

    It has a CUDA stream, so that small cohorts share the GPU instead of waiting for each other, and memory for what the
    steps captured on it compute on the way; one for all of them, because only one runs at a time.
    """

    def __init__(self, device: torch.device) -> None:
        self.cuda = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pool = torch.cuda.graph_pool_handle() if self.cuda else None

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Inside, work is queued on this stream, after all work that was queued outside before."""
        if self.cuda is None:
            yield
            return
        self.cuda.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.cuda):
            yield

    def join(self) -> None:
        """Work that is queued outside from now on comes after all of this stream's."""
        if self.cuda is not None:
            torch.cuda.current_stream().wait_stream(self.cuda)

    @contextmanager
    def capture(self) -> Iterator[torch.cuda.CUDAGraph]:
        """Inside, work on this stream goes into a graph instead of being done."""
        graph = torch.cuda.CUDAGraph()
        with capturing(graph, pool=self._pool, stream=self.cuda):
            yield graph


class CapturedStep:
    """A cohort's step; on its stream on a GPU it is captured once and then replayed for every batch.

    Clients come in the order of their samples, so those that have finished are the last ones; when half of the cohort
    has finished, only the other half makes further steps. A short batch that may not be padded is not worth a graph:
    such a step is made without one.
    """

    def __init__(self, step: PhaseStep, stream: Stream, most_steps: int) -> None:
        self.step = step
        self._stream = stream
        self._most_steps = most_steps
        self._parts = {len(step.total): step}
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._asked: Counter[int] = Counter()
        self._prepared = False
        self._inputs: State = {}
        self._names: list[str] = []
        self._number = torch.zeros(1, dtype=torch.int64, device=step.total.device)

    @property
    def captured(self) -> bool:
        """Whether there is a graph."""
        return bool(self._graphs)

    def queued(self, plan: Plan, generators: Callable[[], Sequence[torch.Generator]] = tuple) -> Iterator[None]:
        """Queue all steps of a plan, one at a time, from a fresh optimiser state, on this cohort's stream.

        `generators` are the clients' own, for dropout.
        """
        self.step.reset()
        if not plan.active:
            return
        if not self._prepared:
            self.step.prepare(plan.at(0))
            self._prepared = True
        self._load(plan)
        width = plan.inputs["rows"].shape[2]
        drops = generators() if self.step.masks.calls else ()
        for active, samples, real in zip(plan.active, plan.samples, plan.real, strict=True):
            count = self._count(active)
            masks = self.step.masks.draw(drops, real, samples, stay=samples == width)
            if samples == width and count in self._graphs:
                self._graphs[count].replay()
            else:
                self.step.set_modes()
                self._take(count, samples, masks)  # a warm-up that counts
                if samples == width and self._stream.cuda is not None:
                    self._graphs[count] = self._capture(count, samples, masks)
            yield

    def _capture(self, count: int, samples: int, masks: State) -> torch.cuda.CUDAGraph:
        try:
            with self._stream.capture() as graph:
                self._take(count, samples, masks)
            return graph
        except RuntimeError as error:
            problem = reason(error)
        raise problem  # out here, it does not hold on to the memory of what failed

    def _load(self, plan: Plan) -> None:
        """Put a plan where the steps look for it, and start with its first step."""
        known = dict(plan.inputs)
        # Whole numbers of samples lie in one tensor, from which a step reads its part at once.
        self._names = [name for name in known if not name.startswith("drawn.")]
        known[TABLE] = torch.stack([known.pop(name).long() for name in self._names], 1)
        for name, tensor in known.items():
            if name not in self._inputs:
                self._inputs[name] = tensor.new_empty(self._most_steps, *tensor.shape[1:])
            self._inputs[name][: len(tensor)].copy_(tensor)
        self._number.zero_()

    def _take(self, count: int, samples: int, masks: State) -> None:
        """The next step, for the first clients; it reads its own number from memory, so a graph of it can too."""
        chosen = {name: tensor.index_select(0, self._number)[0] for name, tensor in self._inputs.items()}
        chosen |= dict(zip(self._names, chosen.pop(TABLE), strict=True))
        inputs = {name: tensor[:count, :samples] for name, tensor in chosen.items()}
        self._parts[count](inputs | {name: mask[:count] for name, mask in masks.items()})
        self._number += 1

    def _count(self, active: int) -> int:
        """How many clients make a step in which this many have a batch."""
        full = len(self.step.total)
        count = bucket(active, full)
        if count in self._parts:
            return count
        self._asked[count] += 1
        worth = self._stream.cuda is None or self._asked[count] > WORTH_A_SHAPE
        if not worth:
            return full
        self._parts[count] = self.step.leading(count)
        return count


def reason(error: RuntimeError) -> Exception:
    """Why a step could not be captured: too little memory, or something in the network."""
    first = first_cause(error)
    if isinstance(first, torch.OutOfMemoryError):
        return torch.OutOfMemoryError(str(first))
    said = " ".join(str(first).split())[:200]
    return InputError(
        f"a step of training can't be captured on the GPU ({said}): use --engine sequential, or let the network make "
        "its constants as buffers when it is built."
    )


def bucket(active: int, full: int) -> int:
    """All clients, or half of them, or half of those …: the least that is enough.

    >>> [bucket(active, 10) for active in (10, 6, 5, 3, 1)]
    [10, 10, 5, 3, 1]
    """
    while active <= -(-full // 2) < full:
        full = -(-full // 2)
    return full


def stepped(count: int, parts: int = 2) -> int:
    """The least that is enough of few numbers, so many from one power of two to the next.

    >>> [stepped(count) for count in (1, 5, 9, 13, 769)]
    [1, 6, 12, 16, 1024]
    >>> [stepped(count, 4) for count in (1, 5, 9, 13, 769)]
    [1, 5, 10, 14, 896]
    """
    unit = max(1, (1 << (count - 1).bit_length()) // (2 * parts))
    return -(-count // unit) * unit
