"""Batch norm of stacked clients against PyTorch's, client by client; without a GPU its kernels are interpreted."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional

from polyfed.engines.stacked import layers, norms
from polyfed.engines.stacked.norms import MaskedNorms, OtherRows
from tests import support

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WAYS = ["operations", pytest.param("kernels", marks=pytest.mark.skipif(not find_spec("triton"), reason="no Triton"))]
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]], dtype=torch.bool)
"""A full batch, two short ones, and a client that has finished."""


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    layers.kernels()
    monkeypatch.setattr(layers, "on_gpu", lambda x: request.param == "kernels")
    return str(request.param)


def stacked_state(norm: nn.Module) -> dict[str, Tensor]:
    """Four clients' weights and statistics, all different."""
    generator = torch.Generator().manual_seed(3)
    state = {}
    for name, tensor in norm.state_dict().items():
        if tensor.is_floating_point():
            state[name] = torch.rand(len(MASK), *tensor.shape, generator=generator).to(DEVICE) + 0.5
        else:
            state[name] = torch.arange(len(MASK)).to(DEVICE)
    return state


def train_stacked(norm: nn.Module, state: dict[str, Tensor], x: Tensor, dim: int = 0) -> tuple[Tensor, ...]:
    """Results and gradients of all clients; running statistics change in `state`."""
    trained = {name: state[name] for name, _ in norm.named_parameters()}
    buffers = {name: state[name] for name, _ in norm.named_buffers()}

    def loss(own: dict[str, Tensor], x: Tensor, rest: dict[str, Tensor], mask: Tensor) -> Any:
        class Wrapped(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.norm = norm

            def forward(self, x: Tensor) -> Tensor:
                with MaskedNorms(self, mask | ~mask.any(), mask.any()):
                    y: Tensor = self.norm(x)
                return y

        y = functional_call(Wrapped(), {f"norm.{n}": t for n, t in {**own, **rest}.items()}, (x,))
        weighed = torch.where(mask.view(-1, *(1,) * (y.dim() - 1)), y.sin(), 0.0)
        return weighed.sum(), y

    gradient = vmap(grad(loss, (0, 1), has_aux=True), (0, dim, 0, 0))
    (of_weights, of_x), y = gradient(trained, x, buffers, MASK.to(DEVICE))
    return y, of_x, *of_weights.values()


def train_alone(norm: nn.Module, state: dict[str, Tensor], x: Tensor) -> tuple[Tensor, ...]:
    """The same for one client's real samples, by PyTorch."""
    norm.load_state_dict(state)
    x = x.clone().requires_grad_()
    y = norm(x)
    return y, *torch.autograd.grad(y.sin().sum(), [x, *norm.parameters()])


SHAPES = {
    "images": (nn.BatchNorm2d, (3, 4, 2)),
    "vectors": (nn.BatchNorm1d, (3,)),
    "one pixel": (nn.BatchNorm2d, (3, 1, 1)),
    "sequences": (nn.BatchNorm1d, (3, 6)),
}


@pytest.mark.parametrize("options", [{}, {"momentum": 0.3, "eps": 0.1}, {"affine": False}], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_each_client_has_the_numbers_of_its_real_samples(way: str, shape: str, options: dict[str, Any]) -> None:
    kind, inner = SHAPES[shape]
    norm = kind(3, **options).to(DEVICE)
    x = torch.randn(len(MASK), 5, *inner, generator=torch.Generator().manual_seed(5)).to(DEVICE) * 2 + 7
    state = stacked_state(norm)
    before = {name: tensor.clone() for name, tensor in state.items()}
    y, of_x, *of_weights = train_stacked(norm, state, x)
    for client, mask in enumerate(MASK.to(DEVICE)):
        own = {name: tensor[client] for name, tensor in before.items()}
        if mask.any():
            expected = train_alone(norm, own, x[client, mask])
            own = norm.state_dict()
            actual = (y[client, mask], of_x[client, mask], *(each[client] for each in of_weights))
            for one, other in zip(actual, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
        assert (of_x[client, ~mask] == 0).all() and of_x.isfinite().all()
        for name in before.keys() - dict(norm.named_parameters()).keys():
            torch.testing.assert_close(state[name][client], own[name], rtol=1e-5, atol=1e-5)
            assert mask.any() or torch.equal(state[name][client], before[name][client])


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (0, 2, 1, 3, 4), (1, 0, 2, 3, 4), (0, 1, 3, 4, 2)])
def test_images_may_lie_in_any_order(way: str, order: tuple[int, ...]) -> None:
    """Clients, samples, channels, H, W; as products of matrices, grouped convolutions or others leave them."""
    norm = nn.BatchNorm2d(3).to(DEVICE)
    x = torch.randn(len(MASK), 5, 3, 4, 2, generator=torch.Generator().manual_seed(5)).to(DEVICE)
    back = [order.index(dim) for dim in range(5)]
    state, other = stacked_state(norm), stacked_state(norm)
    moved = x.permute(order).contiguous().permute(back)
    for one, two in zip(train_stacked(norm, state, moved), train_stacked(norm, other, x), strict=True):
        torch.testing.assert_close(one, two)
    torch.testing.assert_close(state, other)


def test_many_values_are_added_up_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = pytest.importorskip("polyfed.engines.stacked.norm_kernels")
    monkeypatch.setattr(kernels, "LARGEST_BLOCK", 16)
    x, mask = torch.randn(4, 5, 3, 7, 3).to(DEVICE), (MASK | ~MASK.any(1, keepdim=True)).to(DEVICE)
    weight, bias, gradient = (torch.randn(size).to(DEVICE) for size in ((4, 3), (4, 3), x.shape))
    found = kernels.normalise(x, mask, weight, bias, 1e-5)
    for one, other in zip(found, norms.normalise(x, mask, weight, bias, 1e-5), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    given = gradient, x, mask, weight, *found[1:], 1e-5
    for one, other in zip(kernels.gradients(*given), norms.gradients(*given), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_large_mean_costs_no_precision(way: str) -> None:
    """Values of 10 000 ± 1: the variance is not a difference of large squares."""
    norm = nn.BatchNorm2d(3).to(DEVICE)
    x = torch.randn(len(MASK), 5, 3, 4, 2, generator=torch.Generator().manual_seed(5)).to(DEVICE) + 10_000
    state = stacked_state(norm)
    own = {name: tensor[0].clone() for name, tensor in state.items()}
    y = train_stacked(norm, state, x)[0]
    torch.testing.assert_close(y[0], train_alone(norm, own, x[0])[0], rtol=1e-2, atol=1e-2)


def test_layers_of_a_network_may_differ(way: str) -> None:
    """In their momentum, and in the number of pixels, by which a variance is corrected."""
    norm = nn.Sequential(nn.BatchNorm2d(3), nn.AvgPool2d(2), nn.BatchNorm2d(3), nn.BatchNorm2d(3, momentum=0.5))
    x = torch.randn(len(MASK), 5, 3, 4, 2, generator=torch.Generator().manual_seed(5)).to(DEVICE)
    state = stacked_state(norm.to(DEVICE))
    before = {name: tensor.clone() for name, tensor in state.items()}
    train_stacked(norm, state, x)
    for client, mask in enumerate(MASK[:-1]):
        train_alone(norm, {name: tensor[client] for name, tensor in before.items()}, x[client, mask])
        for name, buffer in norm.named_buffers():
            torch.testing.assert_close(state[name][client], buffer, rtol=1e-4, atol=1e-4)


def test_a_result_that_gets_no_gradient(way: str) -> None:
    """A function after it may give none, which is zero."""
    norm = nn.Sequential(nn.BatchNorm1d(3), support.Cut()).to(DEVICE)
    x = torch.randn(len(MASK), 5, 3).to(DEVICE)
    _, *found = train_stacked(norm, stacked_state(norm), x)
    assert len(found) == 3 and not any(gradient.any() for gradient in found)


def test_other_rows_than_samples_are_refused() -> None:
    with (
        MaskedNorms(nn.Identity(), torch.ones(3) > 0, torch.tensor(True)),
        pytest.raises(OtherRows, match="6 rows for 3"),
    ):
        functional.batch_norm(torch.randn(6, 2), torch.zeros(2), torch.ones(2), training=True)


@pytest.mark.parametrize("scaled", [True, False])
def test_at_rest_running_statistics_are_used_and_stay(scaled: bool) -> None:
    x, mean, variance, weight, bias = torch.randn(5, 3, 2, 2), *(torch.rand(3) + 0.5 for _ in range(4))
    given = (mean, variance, *((weight, bias) if scaled else (None, None)))
    expected = functional.batch_norm(x, *given)
    with MaskedNorms(nn.Identity(), torch.ones(5) > 0, torch.tensor(False)):
        torch.testing.assert_close(functional.batch_norm(x, *given), expected)
    torch.testing.assert_close(layers.batch_norm(x, *given), expected)
    assert layers.batch_norm(x, None, None, training=True) is None
