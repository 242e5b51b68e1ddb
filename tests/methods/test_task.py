"""What the common problem alone decides: the head that every side draws, with or without a client's network."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import polyfed
from polyfed.errors import InputError
from polyfed.methods.base import Method, Task
from polyfed.seeds import seeded
from tests import support

SHARE_HEADS = [name for name, method in polyfed.METHODS.items() if "head" in method.requires]


class Bare(support.Wide):
    """Its head has no bias."""

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__(input_shape, classes)
        self.out = nn.Linear(support.FEATURES, classes, bias=False)


class Trained(support.Wide):
    """Its head comes with weights that were not drawn."""

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__(input_shape, classes)
        nn.init.constant_(self.out.weight, 0.25)
        nn.init.constant_(self.out.bias, 0.5)


class Frozen(support.Wide):
    """The bias of its head does not train."""

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__(input_shape, classes)
        self.out.bias.requires_grad_(False)


def task(*models: Any) -> Task:
    return support.population("standalone", models=models).task


def test_a_linear_head_is_drawn_on_its_own_whatever_the_network() -> None:
    """A layer made under its own address, and not the head of either network."""
    with seeded(0, "initial", "head"):
        expected = nn.Linear(support.FEATURES, 4)
    tasks = [task(support.Wide), task(support.Narrow), replace(task(support.Wide), architecture=None)]
    for one in tasks:
        head = one.new_head().state_dict()
        assert all(torch.equal(tensor, head[name]) for name, tensor in expected.state_dict().items())


@pytest.mark.parametrize("network", [Bare, Trained, Frozen])
def test_another_kind_of_head_and_given_weights_are_kept(network: type[nn.Module]) -> None:
    one = task(network)
    own, head = one.new_model().head.state_dict(), one.new_head()
    assert own.keys() == head.state_dict().keys()
    assert all(torch.equal(tensor, own[name]) for name, tensor in head.state_dict().items())


def test_the_head_of_a_given_network_is_kept() -> None:
    given = support.Wide((1, 6, 6), 4)
    head = task(given).new_head()
    assert torch.equal(head.weight, given.out.weight)  # type: ignore[arg-type]


@pytest.mark.parametrize("method", SHARE_HEADS)
def test_a_server_that_knows_no_network_starts_and_sends_the_same(method: str) -> None:
    models = [support.Wide] if "network" in polyfed.METHODS[method].requires else [support.Wide, support.Narrow]
    known = support.population(method, models=models).method
    unknown: Method = type(known)(known.config, replace(known.task, architecture=None), known.training)
    one, other = (support.new_server(each).named_state() for each in (known, unknown))
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    assert known.schema() == unknown.schema()


def test_a_network_that_nobody_named_is_missed_in_a_sentence() -> None:
    known = support.population("fedavg", models=[support.Wide]).method
    unknown = type(known)(known.config, replace(known.task, architecture=None), known.training)
    with pytest.raises(InputError, match="network that all clients have in common is needed here, but none is known"):
        support.new_server(unknown)
