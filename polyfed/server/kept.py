"""What a server keeps on a GPU from round to round: its captured steps, and the memory that they read.

A graph always uses the same memory. So what changes from round to round (received vectors, a margin, a learning rate)
is copied to where the graph looks for it, and what is trained stays where it is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from polyfed.compute import finish_gpu_work
from polyfed.message import State
from polyfed.server.replay import Side, Spans, Step

MOST_KEPT = 4
"""Kinds of steps that are kept, such as those with one number of heads; the least recently used is dropped first."""
SPARE = 4
"""Memory for rows has room for one part in so many more than there are now, because their number changes."""


@dataclass(frozen=True, eq=False)
class KeptSteps:
    """A step, the memory from which it reads what is new in a round, and its graphs."""

    memory: State
    step: Step
    spans: Spans

    def fits(self, given: Mapping[str, Tensor]) -> bool:
        """Whether there is room for these tensors, which differ from those before in their number of rows alone."""
        return all(len(tensor) <= len(self.memory[name]) for name, tensor in given.items() if tensor.dim())


class Kept:
    """The captured steps of one server."""

    def __init__(self) -> None:
        self._steps: OrderedDict[Hashable, KeptSteps] = OrderedDict()
        self._side = Side()

    def steps(
        self,
        purpose: Hashable,
        trained: nn.Module,
        given: Mapping[str, Tensor],
        new: Callable[[State], Step],
        *,
        size: int,
        rows: Collection[str] = (),
    ) -> KeptSteps:
        """Steps on a round's tensors, copied to memory that stays; `new` makes the step that reads them there.

        `purpose` tells apart steps that compute something else, also by numbers in Python. `trained` is what they
        change, on the device where they are made. Only the tensors named in `rows` may differ in length from those of
        an earlier round; their memory may then be longer than they are.
        """
        key = (purpose, size, _places(trained), tuple((n, _shape(t, n in rows), t.dtype) for n, t in given.items()))
        found = self._steps.get(key)
        if found is not None and found.fits(given):
            self._steps.move_to_end(key)
            _fill(found.memory, given)
            return found
        if found is not None:
            self._drop(key)
        while len(self._steps) >= MOST_KEPT:
            self._drop(next(iter(self._steps)))
        device = next(trained.parameters()).device
        memory = {name: _room(tensor, device, name in rows) for name, tensor in given.items()}
        _fill(memory, given)  # before the step is made, which may look at a number in it
        step = new(memory)
        self._steps[key] = KeptSteps(memory, step, Spans(step, size, self._side))
        return self._steps[key]

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, work on the GPU neither waits for what is queued there outside, nor that for it."""
        with torch.cuda.stream(self._side.stream) if torch.cuda.is_available() else nullcontext():
            yield

    def close(self) -> None:
        """Drop everything, when the run ends."""
        with suppress(RuntimeError):  # a GPU that has failed; whoever used it has said so
            while self._steps:
                self._drop(next(iter(self._steps)))
        self._steps.clear()

    def _drop(self, key: Hashable) -> None:
        if self._steps[key].spans.captured:
            finish_gpu_work()
        del self._steps[key]


def _fill(memory: State, given: Mapping[str, Tensor]) -> None:
    """Put a round's tensors where the step looks for them, without waiting."""
    for name, tensor in given.items():
        place = memory[name][: len(tensor)] if tensor.dim() else memory[name]
        place.copy_(tensor, non_blocking=tensor.device.type == "cpu")


def _places(module: nn.Module) -> tuple[int, ...]:
    """Where a module's tensors lie in memory: what a graph changes, whatever they are called."""
    return tuple(tensor.data_ptr() for tensor in (*module.parameters(), *module.buffers()))


def _shape(tensor: Tensor, is_rows: bool) -> tuple[int, ...]:
    return tuple(tensor.shape[1:] if is_rows else tensor.shape)


def _room(tensor: Tensor, device: torch.device, is_rows: bool) -> Tensor:
    """Memory for a tensor, and for some more rows if their number changes."""
    if not is_rows:
        return torch.empty_like(tensor, device=device, memory_format=torch.contiguous_format)
    count = len(tensor)
    return torch.zeros(count + count // SPARE, *tensor.shape[1:], dtype=tensor.dtype, device=device)
