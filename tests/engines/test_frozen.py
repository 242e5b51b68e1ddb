"""What a user froze in a network, or left in evaluation mode, rests on every engine, and is not sent."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyfed import METHODS, InputError
from polyfed.engines import SequentialEngine, ThreadsEngine, VectorizedEngine
from polyfed.engines.client.flops import count_flops
from polyfed.engines.client.workbench import state_of
from polyfed.models.frozen import rest_of
from tests import support

ENGINES = (SequentialEngine, partial(ThreadsEngine, workers=2), VectorizedEngine)


class Frozen(support.Wide):
    """Its first linear layer is frozen."""

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__(input_shape, classes)
        self.body[1].requires_grad_(False)


class FrozenNorm(nn.Module):
    """A frozen convolution with batch norm that keeps its statistics, and another norm that trains or not."""

    def __init__(self, in_channels: int, classes: int, trained_norm: bool = True) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(in_channels, 4, 3), nn.BatchNorm2d(4)).requires_grad_(False).eval()
        self.norm = nn.BatchNorm2d(4) if trained_norm else nn.Identity()
        self.rest = nn.Sequential(nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, support.FEATURES))
        self.out = nn.Linear(support.FEATURES, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(self.rest(self.norm(self.stem(x))))
        return logits


def stem_only(in_channels: int, classes: int) -> nn.Module:
    return FrozenNorm(in_channels, classes, trained_norm=False)


def finished(tmp_path: Path, method: Any, engine: Any, **settings: Any) -> Any:
    run = support.federation(tmp_path, method, engine, **settings)
    run.run()
    return run


def resting(state: dict[str, Tensor], parts: tuple[str, ...]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in state.items() if any(part in name for part in parts)}


def assert_rest(run: Any, *parts: str) -> None:
    """The named parts are as they were at first, all others have moved."""
    for client in range(run.config.clients):
        first, last = state_of(run.engine.population.new_network(client)), run.engine.get_state(client)
        kept = resting(first, parts)
        assert kept
        for name, tensor in kept.items():
            assert torch.equal(last[name], tensor), name
        moved = [name for name in first if name.startswith("model.") and name not in kept]
        assert [name for name in moved if torch.equal(first[name], last[name])] == []


STRONG = {"training": {"momentum": 0.5, "weight_decay": 0.1, "clip": 0.5}}


@pytest.mark.parametrize("settings", [{}, STRONG], ids=["plain", "strong"])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("method", METHODS)
def test_frozen_parameters_rest_in_every_method(tmp_path: Path, method: str, engine: Any, settings: Any) -> None:
    run = finished(tmp_path, method, engine, models=(Frozen,), **settings)
    assert_rest(run, ".body.1.")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("models", [FrozenNorm, stem_only])
def test_batch_norm_in_evaluation_mode_keeps_its_statistics(tmp_path: Path, engine: Any, models: Any) -> None:
    run = finished(tmp_path, "fedavg", engine, models=(models,), lr=0.05)
    assert_rest(run, ".stem.")
    sent = run.method.upload(support.trained([1], run.engine.get_state(0))).tensors
    assert not [name for name in sent if ".stem." in name]
    assert any(name.endswith("norm.running_mean") for name in sent) == (models is FrozenNorm)


def test_engines_agree_on_networks_with_frozen_parts(tmp_path: Path) -> None:
    runs = [
        finished(tmp_path / str(number), "fml", engine, models=(Frozen, stem_only), **STRONG)
        for number, engine in enumerate(ENGINES)
    ]
    for run in runs[1:]:
        for client in range(4):
            for name, tensor in runs[0].engine.get_state(client).items():
                torch.testing.assert_close(run.engine.get_state(client)[name], tensor, rtol=1e-4, atol=1e-5)


def frozen_instance(eval_mode: bool) -> nn.Module:
    network = FrozenNorm(1, 4)
    return network.eval() if eval_mode else network


@pytest.mark.parametrize("eval_mode", [False, True])
def test_an_instance_is_respected_whatever_mode_it_was_left_in(tmp_path: Path, eval_mode: bool) -> None:
    """A network that was used for prediction trains again, but for the parts that are frozen."""
    run = finished(tmp_path, "fedavg", SequentialEngine, models=(frozen_instance(eval_mode),), lr=0.05)
    assert_rest(run, ".stem.")


def test_a_head_that_is_named_and_frozen_elsewhere(tmp_path: Path) -> None:
    network = Frozen((1, 6, 6), 4)
    network.out.bias.requires_grad_(False)
    run = finished(tmp_path, "lg-fedavg", SequentialEngine, models=(network,))
    assert_rest(run, ".body.1.", ".head.bias")
    assert run.folder.rounds().upload_floats.tolist() == [4 * support.FEATURES * 4] * 2


@pytest.mark.parametrize("method", ["fedavg", "fml", "fedapen", "fedkd", "fedmrl"])
def test_what_is_frozen_is_not_sent(tmp_path: Path, method: str) -> None:
    costs = ("upload_floats", "download_floats", "upload_bytes", "download_bytes")
    runs = [
        finished(tmp_path / str(number), method, SequentialEngine, models=(network,)).folder.rounds().iloc[0]
        for number, network in enumerate((support.Wide, Frozen))
    ]
    assert all(runs[1][cost] < runs[0][cost] for cost in costs)
    if method == "fedavg":
        assert runs[0].upload_floats - runs[1].upload_floats == 4 * (36 * 16 + 16)


@pytest.mark.parametrize("method", ["fedgh", "dc-pfl", "fedgen", "fedclassavg"])
def test_a_frozen_bias_of_the_head_stays_at_home(tmp_path: Path, method: str) -> None:
    network = support.Wide((1, 6, 6), 4)
    network.out.bias.requires_grad_(False)
    run = finished(tmp_path, method, SequentialEngine, models=(network,))
    assert_rest(run, ".head.bias")
    assert not [name for name in run.download(0).tensors if name.endswith("head.bias")]


def test_a_frozen_layer_costs_no_gradient_of_its_weights() -> None:
    usual, frozen = (
        count_flops(
            support.population("standalone", models=(network,)).new_network(0), support.new_method("standalone")
        )
        for network in (support.Wide, Frozen)
    )
    # Neither the first layer's weights need a gradient nor what comes out of it.
    assert usual.phases["model"] - frozen.phases["model"] == 2 * 36 * 16 + 2 * 16 * support.FEATURES


def test_a_network_without_anything_to_train_is_refused() -> None:
    network = support.Wide((1, 6, 6), 4).requires_grad_(False)
    words = r"clients 0, 1, 2 and 3 \(Wide\) would learn nothing in phase 'model', because all parameters of model are"
    with pytest.raises(InputError, match=words):
        support.population("standalone", models=(network,))


def test_a_loss_that_reaches_nothing_trainable_is_refused() -> None:
    network = support.Wide((1, 6, 6), 4).requires_grad_(False)
    network.spare = nn.Linear(3, 3)
    with pytest.raises(InputError, match="Wide would learn nothing in phase 'model', because all parameters that"):
        support.population("standalone", models=(network,))


@pytest.mark.parametrize("method", ["lg-fedavg", "fedclassavg", "fedgh", "dc-pfl", "fedgen", "fedssa"])
def test_a_frozen_head_can_not_be_shared(method: str) -> None:
    network = support.Wide((1, 6, 6), 4)
    network.out.requires_grad_(False)
    with pytest.raises(
        InputError, match=f"{method} shares the head of every client's network, but the head of Wide is fro"
    ):
        support.population(method, models=(network,))


def test_heads_that_differ_in_what_is_frozen_are_refused() -> None:
    network = support.Narrow((1, 6, 6), 4)
    network.out.bias.requires_grad_(False)
    words = r"the same parameters of the head frozen .* \(Wide\) have nothing frozen and .* have bias frozen"
    with pytest.raises(InputError, match=words):
        support.population("lg-fedavg", models=(support.Wide, network))
    with pytest.raises(
        InputError, match="fedssa shares whole rows of the head, but parts of that of Narrow are frozen"
    ):
        support.population("fedssa", models=(network,))


def test_evaluation_mode_of_a_whole_network_asks_for_nothing() -> None:
    network = support.Normed(1, 4).eval()
    assert rest_of(network).modules == frozenset()
    network.body[0].requires_grad_(False)
    network.body[1].requires_grad_(False)
    assert rest_of(network).modules == {"body.0", "body.1"}


def test_a_common_network_without_anything_to_send_is_refused() -> None:
    network = support.Narrow((1, 6, 6), 4).requires_grad_(False)
    with pytest.raises(InputError, match="fml sends a small common network, but all of it is frozen"):
        support.population("fml", models=(network,))


def test_networks_are_not_averaged_around_frozen_layers_that_differ() -> None:
    with pytest.raises(InputError, match="their frozen layers would differ, .*start=architecture"):
        support.population("fedavg", models=(Frozen,), start="client")
    support.population("fedavg", models=(support.Wide,), start="client")
