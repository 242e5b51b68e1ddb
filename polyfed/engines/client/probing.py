"""A method's question to a client after training, about two small batches of its samples: which ones, and how asked."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.func import jvp
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from polyfed.engines.client.batches import part_samples
from polyfed.engines.client.workbench import state_of
from polyfed.message import State
from polyfed.methods.base import Batch, Probe
from polyfed.methods.parts.network import ClientNetwork
from polyfed.population import Population

_ONE_AT_A_TIME = threading.Lock()
"""PyTorch counts the levels of forward mode for all threads together, so two at once would get in each other's way."""


class ForwardMode(TorchFunctionMode):
    """Inside, attention is computed by its formula: the fused kernels for it can't be differentiated forwards.

    A mode of this thread alone, unlike PyTorch's own switches, so that other clients train on as before. It also keeps
    layers of PyTorch's transformers from their fused form in evaluation.
    """

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is functional.scaled_dot_product_attention:
            return torch.ops.aten._scaled_dot_product_attention_math(*args, **kwargs)[0]
        if function is functional.multi_head_attention_forward:
            # It calls the function above, but out of this mode's sight; asked for its weights, it uses the formula.
            result, weights = function(*args, **{**kwargs, "need_weights": True})
            return result, weights if kwargs.get("need_weights", True) else None
        return function(*args, **kwargs)


def probe(population: Population, client: int, net: ClientNetwork, round: int) -> State | None:
    """What the method's probe finds; None if there is none, or the client has too few samples."""
    wanted = population.method.probe
    study, quiz = probe_samples(population, client, round)
    if wanted is None or not len(study):
        return None
    return ask(wanted, net, *(Batch(*population.dataset.batch(rows, population.device)) for rows in (study, quiz)))


def ask(wanted: Probe, net: ClientNetwork, study: Batch, quiz: Batch) -> State:
    """What a probe finds with the network as it is, which is in evaluation mode."""
    own, modules = state_of(net), tuple(f"{module}." for module in wanted.trains)
    names = [name for name, _ in net.named_parameters() if name.startswith(modules) and name not in net.rest.parameters]
    _load_rules()
    with _ONE_AT_A_TIME, ForwardMode():
        return wanted.of(net, {name: own[name] for name in names}, study, quiz)


@cache
def _load_rules() -> None:
    """Let PyTorch compile its rules for forward mode, which it does with a warning that is not for users."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        jvp(torch.neg, (torch.zeros(()),), (torch.ones(()),))


def probe_samples(population: Population, client: int, round: int) -> tuple[Tensor, Tensor]:
    """The numbers of a client's study and quiz samples in a round; none if one of the two would be empty."""
    wanted, none = population.method.probe, torch.zeros(0, dtype=torch.int64)
    sizes = probe_sizes(population, client)
    if wanted is None or not any(sizes):
        return none, none
    study, quiz = (part_samples(population, client, part) for part in (wanted.study, wanted.quiz))
    order = torch.randperm(len(study), generator=population.generator("probe", round, client))
    return study[order[: sizes[0]]], quiz[: sizes[1]]


def probe_sizes(population: Population, client: int) -> tuple[int, int]:
    """How many study and quiz samples a client has."""
    wanted = population.method.probe
    return (0, 0) if wanted is None else wanted.sizes(len(population.data[client].train))
