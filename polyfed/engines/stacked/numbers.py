"""Settings that differ between the clients of a cohort, because these belong to different runs: one value per client.

A method reads its settings as attributes, `self.config.weight`. While its loss runs for stacked clients, each setting
that differs is a tensor with one value, that of the client. These tensors are part of the stacked state, under names
that start with "number.".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from polyfed.message import State
from polyfed.methods.base import Method
from polyfed.methods.parts.network import Applied
from polyfed.sameness import is_cached

METHOD, TRAINING, RATE = "number.method.", "number.training.", "number.rate."
"""How the names start: of a setting of the method, a setting of the training, and the learning rate of a phase."""


def without_numbers(state: Mapping[str, Tensor]) -> State:
    """A state without such numbers."""
    return {name: tensor for name, tensor in state.items() if not name.startswith("number.")}


def numbers_of(state: Mapping[str, Tensor]) -> State:
    """Such numbers of a state alone."""
    return {name: tensor for name, tensor in state.items() if name.startswith("number.")}


@contextmanager
def numbered(method: Method, state: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside this context, the method's settings have the numbers of this state."""
    config, training = (_named(state, prefix) for prefix in (METHOD, TRAINING))
    if not config and not training:
        yield
        return
    before = dict(vars(method))
    for name in before:
        if is_cached(method, name):  # computed with other numbers
            delattr(method, name)
    method.config = method.config.model_copy(update=config)
    method.training = method.training.model_copy(update=training)
    try:
        yield
    finally:
        vars(method).clear()
        vars(method).update(before)


def on(applied: Applied, method: Method, state: Mapping[str, Tensor]) -> Callable[..., Any]:
    """The function, called with this state in its network and this state's numbers in the method's settings."""
    call = applied.on(without_numbers(state))

    def with_numbers(*arguments: object) -> Any:
        with numbered(method, state):
            return call(*arguments)

    return with_numbers


def _named(state: Mapping[str, Tensor], prefix: str) -> State:
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
