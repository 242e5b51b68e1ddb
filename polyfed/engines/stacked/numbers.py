"""Numbers that differ between the clients of a cohort, because they belong to different runs: one value per client.

A method reads its settings as attributes, `self.config.weight`. While its loss runs for stacked clients, those that
differ are tensors of a single value, this client's. They travel with the stacked state, under names of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from polyfed.message import State
from polyfed.methods.base import Method
from polyfed.methods.parts.network import Applied

METHOD, TRAINING, RATE = "number.method.", "number.training.", "number.rate."
"""A number of the method's settings, one of the training, and the learning rate of a phase."""


def without_numbers(state: Mapping[str, Tensor]) -> State:
    """A state without such numbers."""
    return {name: tensor for name, tensor in state.items() if not name.startswith("number.")}


@contextmanager
def numbered(method: Method, state: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside, the method finds the numbers of this state in its settings."""
    config, training = (_named(state, prefix) for prefix in (METHOD, TRAINING))
    if not config and not training:
        yield
        return
    before = method.config, method.training
    method.config = method.config.model_copy(update=config)
    method.training = method.training.model_copy(update=training)
    try:
        yield
    finally:
        method.config, method.training = before


def on(applied: Applied, method: Method, state: Mapping[str, Tensor]) -> Callable[..., Any]:
    """The function with this state in its network, and this state's numbers in the method's settings."""
    call = applied.on(without_numbers(state))

    def with_numbers(*arguments: object) -> Any:
        with numbered(method, state):
            return call(*arguments)

    return with_numbers


def _named(state: Mapping[str, Tensor], prefix: str) -> State:
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
