"""Dropout in a cohort: each client's masks come from its own generator, as in the plain loop, but before the step.

A step that is captured as a graph, or runs under `vmap`, can't draw from one generator per client. So the calls of
dropout layers are counted once, with the shapes of their masks. Before every step the masks are drawn in the order of
the calls, for each client's real samples alone, and the layers are given them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest

import torch
from torch import Tensor, nn

from polyfed.message import State
from polyfed.models import SeededDropout

PREFIX = "dropout."
"""What the names of masks among a step's inputs begin with."""
CHANGED = "its dropout layers are not called in the same way for every batch"


@dataclass(frozen=True)
class Call:
    """One call of a dropout layer in a step: its rate, and the mask it needs."""

    rate: float
    shape: tuple[int, ...]
    """For one sample."""
    axis: int | None
    """Along which samples lie in the mask; None if it has no samples, such as one for a weight."""

    def mask(self, samples: int) -> tuple[int, ...]:
        """The mask's shape for this many samples."""
        return tuple(side * samples if axis == self.axis else side for axis, side in enumerate(self.shape))

    def part(self, mask: Tensor, samples: int) -> Tensor:
        """The part of a longer batch's mask that belongs to its first samples."""
        return mask if self.axis is None else mask.narrow(self.axis, 0, self.shape[self.axis] * samples)

    def fill(self, mask: Tensor, samples: int, generator: torch.Generator) -> None:
        """Draw for the first samples what the loop would draw for a batch of them."""
        part = self.part(mask, samples)
        if part.is_contiguous():
            part.uniform_(generator=generator)
        else:
            part.copy_(torch.rand(part.shape, generator=generator, device=generator.device))


def dropout_layers(network: nn.Module) -> list[SeededDropout]:
    return [module for module in network.modules() if isinstance(module, SeededDropout)]


def find_calls(layers: Sequence[SeededDropout], samples: int, loss: Callable[[int], object]) -> list[Call]:
    """The calls in a step, from a loss of that many samples and of one more; `loss` is asked for both."""
    fewer, more = (_recorded(layers, partial(loss, count)) for count in (samples, samples + 1))
    return [_call(*pair, samples) for pair in zip_longest(fewer, more)]


Seen = tuple[float, tuple[int, ...]]


def _recorded(layers: Sequence[SeededDropout], work: Callable[[], object]) -> list[Seen]:
    seen: list[Seen] = []

    def ones(rate: float, shape: tuple[int, ...]) -> Tensor:
        seen.append((rate, shape))
        return torch.ones(shape)

    with _given(layers, ones):
        work()
    return seen


def _call(fewer: Seen | None, more: Seen | None, samples: int) -> Call:
    if fewer is None or more is None or fewer[0] != more[0] or len(fewer[1]) != len(more[1]):
        raise RuntimeError(CHANGED)
    (rate, shape), (_, longer) = fewer, more
    axes = [axis for axis, (one, two) in enumerate(zip(shape, longer, strict=True)) if one != two]
    if not axes:
        return Call(rate, shape, None)
    each = longer[axes[0]] - shape[axes[0]]
    if len(axes) > 1 or shape[axes[0]] != each * samples:
        raise RuntimeError(f"its dropout masks of shape {shape} do not grow with the number of samples")
    return Call(rate, (*shape[: axes[0]], each, *shape[axes[0] + 1 :]), axes[0])


class Masks:
    """A cohort's masks for one step. What stays in memory is a byte per value, whatever the number of steps."""

    def __init__(self, calls: Sequence[Call], clients: int, device: torch.device) -> None:
        self.calls = calls
        self._clients = clients
        self._device = device
        self._kept: State = {}

    def draw(
        self, generators: Sequence[torch.Generator], samples: Sequence[int], width: int, *, stay: bool = False
    ) -> State:
        """The masks of the next step, by name: [clients, …] for batches of `width` of which `samples` are real.

        A client without a generator or without samples keeps everything. `stay`: always in the same memory, where a
        captured step finds them.
        """
        drawn: State = {}
        for name, call in self._named():
            values = torch.ones(self._clients, *call.mask(width), device=self._device)
            for own, generator, count in zip(values, generators, samples, strict=False):
                if count:
                    call.fill(own, count, generator)
            drawn[name] = torch.ge(values, call.rate, out=self._kept.get(name) if stay else None)
        if stay:
            self._kept = drawn
        return drawn

    def trial(self, samples: int, width: int) -> tuple[State, State]:
        """Masks of one client that drop half of everything, for a short batch and for the same batch padded."""
        generator = torch.Generator().manual_seed(0)
        short, padded = dict[str, Tensor](), dict[str, Tensor]()
        for name, call in self._named():
            short[name] = torch.rand(call.mask(samples), generator=generator).to(self._device) >= 0.5
            padded[name] = torch.ones(call.mask(width), dtype=torch.bool, device=self._device)
            call.part(padded[name], samples).copy_(short[name])
        return short, padded

    def _named(self) -> Iterator[tuple[str, Call]]:
        return ((f"{PREFIX}{number}", call) for number, call in enumerate(self.calls))


@contextmanager
def masked(layers: Sequence[SeededDropout], batch: State) -> Iterator[None]:
    """Inside, dropout layers use the masks among a step's inputs, one for each call; without any they draw."""
    masks = [tensor for name, tensor in batch.items() if name.startswith(PREFIX)]
    if not masks:
        yield
        return
    left = iter(masks)

    def next_one(rate: float, shape: tuple[int, ...]) -> Tensor:
        mask = next(left, None)
        if mask is None or mask.shape != shape:
            raise RuntimeError(CHANGED)
        return mask

    with _given(layers, next_one):
        yield
    if next(left, None) is not None:
        raise RuntimeError(CHANGED)


@contextmanager
def _given(layers: Sequence[SeededDropout], mask: Callable[[float, tuple[int, ...]], Tensor]) -> Iterator[None]:
    for layer in layers:
        layer.given = mask
    try:
        yield
    finally:
        for layer in layers:
            layer.given = None
