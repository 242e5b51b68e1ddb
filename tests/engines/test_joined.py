"""Layers computed as one, against PyTorch's one after another; without a GPU our kernels are interpreted."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from polyfed.engines.stacked import chains, joined, layers
from polyfed.models import resolve

pytest.importorskip("triton")
from polyfed.engines.stacked import pooled_kernels
from tests.engines.test_layers import CLIENTS, DEVICE, SAMPLES, close, exact_products, random  # noqa: F401


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which layers were computed as one, with our kernels on this device."""
    found: list[str] = []
    original = layers.as_one

    def as_one(x: Tensor, given: Any) -> Tensor | None:
        result = original(x, given)
        found.append("+".join(type(layer).__name__ for layer in given) if result is not None else "apart")
        return result

    assert layers.trouble() is None
    monkeypatch.setattr(pooled_kernels, "SUMS", 1024)  # fewer programs to interpret
    monkeypatch.setattr(layers, "on_gpu", lambda x: True)
    monkeypatch.setitem(layers.SERVED, chains.joined, as_one)
    return found


def results(network: nn.Module, state: dict[str, Tensor], x: Tensor, *, stacked: bool) -> tuple[Tensor, ...]:
    """Results and all gradients of clients with these states, with the network's sequences as they are."""

    def loss(state: dict[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        if stacked:
            with layers.StackedLayers():
                y = functional_call(network, state, (x,))
        else:
            y = functional_call(network, state, (x,))
        return y.sin().sum(), y

    (of_state, of_x), y = vmap(grad(loss, (0, 1), has_aux=True))(state, x)
    return y, of_x, *of_state.values()


def compared(network: nn.Module, x: Tensor) -> None:
    """A network computes the same with its layers joined as without."""
    network = network.to(DEVICE)
    state = {name: random(CLIENTS, *value.shape) / 2 for name, value in network.state_dict().items()}
    expected = results(network, state, x, stacked=False)
    chains.join_layers(network)
    close(results(network, state, x, stacked=False), expected)
    close(results(network, state, x, stacked=True), expected)


@pytest.mark.parametrize(
    ("channels", "out", "kernel", "height", "width"),
    [
        (3, 16, (5, 5), 12, 12),
        (8, 20, (3, 3), 5, 6),
        (1, 6, (2, 4), 9, 8),
        (5, 33, (1, 1), 4, 5),
        (2, 4, (3, 2), 4, 3),
        (32, 64, (1, 1), 2, 2),
    ],
)
@pytest.mark.parametrize("order", ["pool first", "relu first", "no relu"])
def test_a_convolution_with_pooling(
    used: list[str], channels: int, out: int, kernel: tuple[int, int], height: int, width: int, order: str
) -> None:
    """With odd sides, whose last row or column belongs to no window, and with few filters, many, and any number."""
    others: list[nn.Module] = [nn.MaxPool2d(2)]
    if order != "no relu":
        others.insert(order == "pool first", nn.ReLU(inplace=True))
    bias = order != "relu first"
    compared(
        nn.Sequential(nn.Conv2d(channels, out, kernel, bias=bias), *others, nn.Flatten()),
        random(CLIENTS, SAMPLES, channels, height, width),
    )
    assert used == ["+".join(["Conv2d", *(type(layer).__name__ for layer in others)])]


def test_the_network_of_the_papers_is_joined_in_four_places(used: list[str]) -> None:
    network = resolve("cnn5")[0].build((1, 16, 16), classes=4).to(DEVICE)
    chains.join_layers(network)
    with layers.StackedLayers():
        network(random(SAMPLES, 1, 16, 16))
    assert used == ["Conv2d+MaxPool2d+ReLU"] * 2 + ["Linear+ReLU"] * 2


@pytest.mark.parametrize("trained", ["0.weight", "0.bias"])
@pytest.mark.parametrize(
    ("first", "second", "shape"), [(nn.Conv2d(2, 3, 2), nn.MaxPool2d(2), (2, 5, 5)), (nn.Linear(3, 4), nn.ReLU(), (3,))]
)
def test_a_layer_of_which_only_a_part_trains(
    used: list[str], first: nn.Module, second: nn.Module, shape: tuple[int, ...], trained: str
) -> None:
    """All clients have the same images, and the rest of the layer; so `vmap` does not see these as many."""
    network = nn.Sequential(first, second).to(DEVICE)
    rest, x = dict(network.state_dict()), random(SAMPLES, *shape)
    own = random(CLIENTS, *rest.pop(trained).shape)

    def loss(own: Tensor) -> Tensor:
        with layers.StackedLayers():
            return functional_call(network, {trained: own, **rest}, (x,)).sin().sum()

    expected = vmap(grad(loss))(own)
    chains.join_layers(network)
    close((vmap(grad(loss))(own),), (expected,))
    assert used != []
    assert "apart" not in used


def test_gradients_in_several_parts(used: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights' gradients are sums over parts of the windows, in several steps each, and over blocks of parts."""
    monkeypatch.setattr(pooled_kernels, "SUMS", 32)
    monkeypatch.setattr(pooled_kernels, "PROGRAMS", 60)
    monkeypatch.setattr(pooled_kernels, "PARTS", 2)
    monkeypatch.setattr(pooled_kernels, "_for_weights", lambda layer: pooled_kernels.Tiles(16, 16, 4, 1))
    compared(nn.Sequential(nn.Conv2d(3, 5, 3), nn.MaxPool2d(2), nn.ReLU()), random(CLIENTS, 5, 3, 12, 12))
    assert used == ["Conv2d+MaxPool2d+ReLU"]


@pytest.mark.parametrize("rows", [(SAMPLES,), (SAMPLES, 20)])
def test_a_linear_layer_with_relu(used: list[str], rows: tuple[int, ...]) -> None:
    """Of samples, or of several positions of each; more columns than a block has."""
    compared(nn.Sequential(nn.Linear(3, 140), nn.ReLU(), nn.Linear(140, 2)), random(CLIENTS, *rows, 3))
    assert used == ["Linear+ReLU"]


def test_a_linear_layer_of_very_many_rows_can_be_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU takes more than 65535 programs only along the first axis; a layer may be applied to every pixel."""
    linears, grids = joined._kernels("linear"), []

    class Launched:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            grids.append(grid)
            return lambda *_: None

    monkeypatch.setattr(linears, "_add_bias", Launched())
    linears.add_bias(torch.empty(2, 1, 64).expand(2, 5_000_000, 64), torch.zeros(2, 64), relu=False)
    ((first, *others),) = grids
    assert first * linears.ROWS * linears.COLUMNS >= 5_000_000 * 64
    assert max(others) < 65536


def test_the_gradient_of_a_linear_layer_with_relu_may_be_differentiated(used: list[str]) -> None:
    network = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 2)).to(DEVICE)
    state = {name: random(CLIENTS, *value.shape) for name, value in network.state_dict().items()}

    def length(state: dict[str, Tensor], x: Tensor) -> Tensor:
        def loss(state: dict[str, Tensor]) -> Tensor:
            with layers.StackedLayers():
                return functional_call(network, state, (x,)).sin().sum()

        return sum(part.square().sum() for part in grad(loss)(state).values())  # type: ignore[return-value]

    x = random(CLIENTS, SAMPLES, 5)
    expected = vmap(grad(length))(state, x)
    chains.join_layers(network)
    close(tuple(vmap(grad(length))(state, x).values()), tuple(expected.values()))
    assert used


@pytest.mark.parametrize("relu", [False, True])
def test_a_network_may_use_vmap_itself(used: list[str], relu: bool) -> None:
    """Inside and outside of a gradient: our kernels read memory, which a tensor of several levels does not have."""
    heads, x = (random(CLIENTS, 4, 5, 3), random(CLIENTS, 4, 5)), random(CLIENTS, SAMPLES, 3)

    def layer(weight: Tensor, bias: Tensor, x: Tensor, ours: bool) -> Tensor:
        y = layers.linear(x, weight, bias, relu) if ours else nn.functional.linear(x, weight, bias)
        assert y is not None
        return (y.relu() if relu else y).sin()

    def inside(weight: Tensor, bias: Tensor, x: Tensor, ours: bool) -> Tensor:
        return vmap(layer, (0, 0, None, None))(weight, bias, x, ours).sum()

    def outside(weight: Tensor, bias: Tensor, x: Tensor, ours: bool) -> tuple[Tensor, ...]:
        one = grad(lambda *given: layer(*given, ours).sum(), (0, 1, 2))
        return vmap(one, (0, 0, None))(weight, bias, x)  # type: ignore[no-any-return]

    for way in (grad(inside, (0, 1, 2)), outside):
        found, expected = (vmap(way, (0, 0, 0, None))(*heads, x, ours) for ours in (True, False))
        close(found, expected)


def test_the_first_of_equal_values_is_the_largest_and_nan_is_larger() -> None:
    x = torch.zeros(1, 4, 4, 1, device=DEVICE)
    x[0, 1, 2] = torch.nan
    x[0, 3, 3] = 1.0
    y, places = joined.Pooled.apply(x, torch.ones(1, 1, 1, 1, device=DEVICE), None, False)
    assert places.flatten()[[0, 2, 3]].tolist() == [0, 0, 3]
    assert y.flatten().isnan().tolist() == [False, True, False, False]


def test_relu_gives_no_gradient_to_zero_and_lets_nan_through() -> None:
    """As PyTorch's: a result of exactly zero has no gradient."""
    x = torch.tensor([[0.0, -1.0, 2.0, torch.nan]], device=DEVICE).view(1, 1, 4, 1).repeat(1, 2, 1, 1)
    x = x.repeat_interleave(2, 2)
    y, places = joined.Pooled.apply(x, torch.ones(1, 1, 1, 1, device=DEVICE), None, True)
    assert places.flatten()[:3].tolist() == [4, 4, 0]
    assert y.flatten()[:3].tolist() == [0.0, 0.0, 2.0]
    assert y.flatten()[3].isnan()
    linears = joined._kernels("linear")
    values = torch.tensor([[[0.0, -1.0, 2.0, torch.nan]]], device=DEVICE)
    result = linears.add_bias(values, torch.zeros(1, 4, device=DEVICE), relu=True)
    assert result.flatten()[:3].tolist() == [0.0, 0.0, 2.0]
    assert result.flatten()[3].isnan()
    before, total = linears.before_relu(torch.full_like(result, 3.0), result)
    assert before.flatten().tolist() == total.flatten().tolist() == [0.0, 0.0, 3.0, 3.0]


@pytest.mark.parametrize(
    "sequence",
    [
        [nn.Conv2d(3, 4, 3, padding=1), nn.MaxPool2d(2)],
        [nn.Conv2d(3, 4, 3, padding="same"), nn.MaxPool2d(2)],
        [nn.Conv2d(3, 4, 3, stride=2), nn.MaxPool2d(2)],
        [nn.Conv2d(3, 4, 2, dilation=2), nn.MaxPool2d(2)],
        [nn.Conv2d(3, 3, 3, groups=3), nn.MaxPool2d(2)],
        [nn.Conv2d(3, 4, 3), nn.MaxPool2d(3), nn.ReLU()],
        [nn.Conv2d(3, 4, 3), nn.MaxPool2d(2, stride=1), nn.ReLU()],
        [nn.Conv2d(3, 4, 3), nn.MaxPool2d(2, padding=1), nn.ReLU()],
        [nn.Conv2d(3, 4, 3), nn.MaxPool2d(2, dilation=2), nn.ReLU()],
        [nn.Conv2d(3, 4, 2), nn.MaxPool2d(2, ceil_mode=True)],
        [nn.Conv2d(3, 65, 2), nn.MaxPool2d(2)],
        [nn.Conv2d(3, 4, 3, padding_mode="circular", padding=1), nn.MaxPool2d(2)],
    ],
)
def test_other_layers_stay_apart(used: list[str], sequence: list[nn.Module]) -> None:
    compared(nn.Sequential(*sequence), random(CLIENTS, SAMPLES, 3, 8, 8))
    assert used == ["apart"]


@pytest.mark.parametrize("shape", [(0, 3, 8, 8), (3, 8, 8)])
def test_no_images_and_a_single_one_are_left_to_pytorch(used: list[str], shape: tuple[int, ...]) -> None:
    network, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2), nn.ReLU()).to(DEVICE), random(*shape)
    expected = network(x)
    chains.join_layers(network)
    with layers.StackedLayers():
        close((network(x),), (expected,))
    assert used == ["apart"]


def test_images_without_a_window_have_pytorchs_error(used: list[str]) -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2), nn.ReLU()).to(DEVICE)
    chains.join_layers(network)
    with layers.StackedLayers(), pytest.raises(RuntimeError, match="too small"):
        network(random(SAMPLES, 3, 3, 8))
    assert used == ["apart"]


def test_a_layer_that_others_watch_is_called_by_itself(used: list[str]) -> None:
    seen: list[int] = []
    network = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU()).to(DEVICE)
    network[0].register_forward_hook(lambda *_: seen.append(1))
    chains.join_layers(network)
    with layers.StackedLayers():
        network(random(SAMPLES, 3))
    assert (seen, used) == ([1], ["Linear+ReLU"])


def test_a_hook_on_all_modules_sees_every_layer(used: list[str]) -> None:
    seen: list[str] = []
    network = nn.Sequential(nn.Linear(3, 4), nn.ReLU()).to(DEVICE)
    chains.join_layers(network)
    hook = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module).__name__))
    with hook, layers.StackedLayers():
        network(random(SAMPLES, 3))
    assert (seen, used) == (["Linear", "ReLU", "Sequential"], [])


def test_a_layer_with_a_forward_of_its_own_is_called(used: list[str]) -> None:
    network = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU()).to(DEVICE)
    network[0].forward = lambda x: torch.full((len(x), 4), 7.0, device=DEVICE)
    network[3].forward = lambda x: x + 1
    x = random(SAMPLES, 3)
    expected = network(x)
    chains.join_layers(network)
    with layers.StackedLayers():
        close((network(x),), (expected,))
    assert used == []


def test_a_sequence_is_still_called_as_before(used: list[str]) -> None:
    """Its argument has a name."""
    network = nn.Sequential(nn.Linear(3, 4), nn.ReLU()).to(DEVICE)
    x = random(SAMPLES, 3)
    expected = network(input=x)
    chains.join_layers(network)
    close((network(input=x),), (expected,))


def test_layers_of_a_sequence_that_are_called_one_by_one_are_not_joined(used: list[str]) -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2), nn.ReLU()).to(DEVICE)
    x = random(SAMPLES, 3, 8, 8)
    expected = network[0](x)
    chains.join_layers(network)
    with layers.StackedLayers():
        torch.testing.assert_close(network[0](x), expected, rtol=1e-4, atol=1e-4)
    assert used == []


def test_a_copy_of_a_network_uses_its_own_layers(used: list[str]) -> None:
    network = nn.Sequential(nn.Linear(3, 4), nn.ReLU()).to(DEVICE)
    chains.join_layers(network)
    other = deepcopy(network)
    with torch.no_grad():
        other[0].weight.zero_()
        other[0].bias.fill_(5.0)
    x = random(SAMPLES, 3)
    assert (other(x) == 5).all()
    assert not (network(x) == 5).any()


def test_what_follows_may_change_results_in_place(used: list[str]) -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2), nn.ELU(inplace=True), nn.Flatten())
    compared(network, random(CLIENTS, SAMPLES, 3, 6, 6))
    assert used == ["Conv2d+MaxPool2d"]


def test_results_may_be_viewed_in_another_shape(used: list[str]) -> None:
    """Channels come last in memory, which a network need not know."""

    class Viewed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2))

        def forward(self, x: Tensor) -> Tensor:
            y = self.layers(x)
            return y.view(len(y), -1).sin() + y.view_as(y.flatten(1))

    compared(Viewed(), random(CLIENTS, SAMPLES, 3, 6, 6))
    assert used == ["Conv2d+MaxPool2d"]


def test_one_client_without_vmap(used: list[str]) -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 5), nn.ReLU())
    network, x = network.to(DEVICE), random(SAMPLES, 3, 8, 8)
    expected = torch.autograd.grad(network(x).sin().sum(), list(network.parameters()))
    chains.join_layers(network)
    with layers.StackedLayers():
        own = torch.autograd.grad(network(x).sin().sum(), list(network.parameters()))
    close(own, expected)
    assert used == ["Conv2d+ReLU+MaxPool2d", "Linear+ReLU"]
