"""Steps that are taken as soon as a gradient is there: the numbers of torch.optim.SGD, bit by bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from polyfed.engines.client import sgd as module
from polyfed.engines.client.sgd import sgd
from polyfed.errors import RunError
from polyfed.methods.base import Training
from tests import support


class Tied(nn.Module):
    """One matrix is used twice, and one parameter not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.out, self.unused = nn.Linear(5, 5), nn.Linear(5, 2), nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(self.twice(self.twice(x).tanh()))
        return logits


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("decay", [0.0, 0.01])
@pytest.mark.parametrize("clip", [None, 0.01])
def test_the_numbers_of_torch_s_sgd(momentum: float, decay: float, clip: float | None) -> None:
    torch.manual_seed(0)
    network, other = Tied(), Tied()
    other.load_state_dict(network.state_dict())
    optimiser = torch.optim.SGD(other.parameters(), 0.1, momentum, weight_decay=decay)
    parameters = [*network.parameters()]
    with sgd(
        parameters, 0.1, Training(momentum=momentum, weight_decay=decay, clip=clip), [parameters], early=True
    ) as step:
        for x in torch.randn(5, 4, 5):
            network(x).square().mean().backward()
            step()
            assert all(parameter.grad is None for parameter in parameters)
            optimiser.zero_grad()
            other(x).square().mean().backward()
            if clip:
                nn.utils.clip_grad_norm_(other.parameters(), clip)
            optimiser.step()
    for one, two in zip(network.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
    network(torch.randn(4, 5)).mean().backward()
    assert network.out.weight.grad is not None  # outside, gradients stay


@pytest.mark.parametrize("clip", [None, 1e9])
def test_a_parameter_of_two_trained_modules_takes_one_step(clip: float | None) -> None:
    layer = nn.Linear(1, 1, bias=False)
    before = layer.weight.item()
    with sgd([layer.weight] * 2, 0.1, Training(clip=clip), [[layer.weight], [layer.weight]], early=True) as step:
        layer(torch.ones(1, 1)).sum().backward()
        step()
    assert layer.weight.item() == pytest.approx(before - 0.1)


@pytest.mark.parametrize("method", ["fedproto", "fedapen", "fedkd", "pfedes"])
def test_runs_with_early_steps_and_without(tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {
        "rounds": 2, "training": {"momentum": 0.9, "weight_decay": 1e-3}, "models": ("cnn5",),
        "dataset": support.tiny_dataset(side=28),
    }  # fmt: skip
    runs = [support.federation(tmp_path / "early", method, **settings)]
    runs[0].run()
    monkeypatch.setattr(module, "_early_steps", None)
    with pytest.raises(RunError, match="not callable"):  # so the first run took them
        support.federation(tmp_path / "broken", method, **settings).run()
    settings["training"]["clip"] = 1e9
    runs.append(support.federation(tmp_path / "late", method, **settings))
    runs[1].run()
    for client in range(runs[0].config.clients):
        one, two = (run.engine.get_state(client) for run in runs)
        assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_loss_that_needs_a_parameter_after_its_step_is_told_what_to_do() -> None:
    network = Tied()
    with pytest.raises(RunError, match="clone"), sgd(network.parameters(), 0.1, Training(), [], early=True):
        hidden = network.twice(torch.randn(4, 5))
        late = hidden @ network.out.weight.detach().T
        (late.mean() + network.out(hidden.detach()).mean()).backward()
    assert not network.out.weight._post_accumulate_grad_hooks


def test_gradients_that_come_in_parts_are_no_silent_error() -> None:
    layer = nn.Linear(5, 5)
    x = torch.randn(4, 5, requires_grad=True)
    with (
        pytest.raises(RunError, match="use_reentrant=False"),
        sgd(layer.parameters(), 0.1, Training(), [], early=True),
    ):
        once = checkpoint(layer, x, use_reentrant=True)
        checkpoint(layer, once, use_reentrant=True).mean().backward()
    with sgd(layer.parameters(), 0.1, Training(), [], early=True) as step:
        for _ in range(2):
            once = checkpoint(layer, x, use_reentrant=False)
            checkpoint(layer, once, use_reentrant=False).mean().backward()
            step()


class BehindTheBack(support.Wide):
    """Uses a trained parameter through `.data`, which autograd does not watch."""

    def forward(self, x: Tensor) -> Tensor:
        flatten, first, relu, second, _ = self.body
        hidden = relu(first(flatten(x)))
        logits: Tensor = self.out(relu(hidden @ second.weight.data.T + second(hidden)))
        return logits


def test_code_that_uses_parameters_behind_autograds_back_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With early steps the head would have moved before the gradient of the body is taken through its `.data`."""
    settings: dict[str, Any] = {"models": (BehindTheBack,), "rounds": 2, "lr": 0.5}
    one = support.federation(tmp_path / "one", "standalone", **settings)
    late = support.federation(tmp_path / "late", "standalone", **settings, training={"clip": 1e9})
    monkeypatch.setattr("polyfed.population.Population.is_ours", lambda self, client: True)
    wrong = support.federation(tmp_path / "wrong", "standalone", **settings)
    wrong.run()
    monkeypatch.undo()
    one.run(), late.run()
    states = [run.engine.states.get_state(0) for run in (one, late, wrong)]  # type: ignore[union-attr]
    name = next(key for key in states[0] if key.endswith("1.weight"))
    assert torch.equal(states[0][name], states[1][name])
    assert not torch.equal(states[0][name], states[2][name])  # so the test sees a difference
