"""A step for stacked clients against torch.optim.SGD, client by client; without a GPU the kernel is interpreted."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from torch import Tensor, nn

from polyfed.engines.stacked import layers
from polyfed.engines.stacked.sgd import Rates, some, update

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WAYS = ["operations", pytest.param("kernels", marks=pytest.mark.skipif(not find_spec("triton"), reason="no Triton"))]
CLIENTS, ROUNDS = 3, 4
SHAPES = {"body.weight": (40, 60), "body.bias": (40,), "head.weight": (2, 40), "head.scale": ()}
"""The first is longer than a block of the kernel; one is a single number."""
GROUPS = [["body.weight", "body.bias"], ["head.weight", "head.scale"], []]


@pytest.fixture(params=WAYS, autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    assert layers.kernels() is not None or request.param == "operations"
    monkeypatch.setattr(layers, "on_gpu", lambda x: request.param == "kernels")


def own(number: float | Tensor | None, client: int) -> float | None:
    return float(number[client]) if isinstance(number, Tensor) else number


def expected(start: dict[str, Tensor], drawn: list[dict[str, Tensor]], rates: Rates, client: int) -> dict[str, Tensor]:
    """What PyTorch's optimiser makes of one client's weights; the last client has finished after two steps."""
    weights = {name: nn.Parameter(tensor[client].clone()) for name, tensor in start.items()}
    optimiser = torch.optim.SGD(
        weights.values(), own(rates.lr, client), own(rates.momentum, client), weight_decay=own(rates.decay, client) or 0
    )
    for gradients in drawn[:2] if client == CLIENTS - 1 else drawn:
        for name, weight in weights.items():
            weight.grad = gradients[name][client].clone()
        if (most := own(rates.clip, client)) is not None:
            for group in filter(None, GROUPS):
                nn.utils.clip_grad_norm_([weights[name] for name in group], most)
        optimiser.step()
    return {name: weight.detach() for name, weight in weights.items()}


def each(*numbers: float) -> Tensor:
    return torch.tensor(numbers, device=DEVICE)


@pytest.mark.parametrize(
    "rates",
    [
        Rates(0.1),
        Rates(0.1, clip=0.5),
        Rates(0.1, momentum=0.9, decay=0.01, clip=20.0),
        Rates(0.1, decay=0.01),
        Rates(each(0.1, 0.2, 0.3)),
        Rates(each(0.1, 0.2, 0.3), each(0.9, 0.0, 0.5), each(0.0, 0.1, 0.01), each(0.5, 50.0, 5.0)),
    ],
    ids=["plain", "clip", "all", "decay", "rates", "each"],
)
def test_a_step_is_torch_s_for_every_client(rates: Rates) -> None:
    generator = torch.Generator().manual_seed(1)
    new = {name: (CLIENTS, *shape) for name, shape in SHAPES.items()}
    start = {name: torch.randn(shape, generator=generator).to(DEVICE) for name, shape in new.items()}
    drawn = [
        {name: torch.randn(shape, generator=generator).to(DEVICE) for name, shape in new.items()} for _ in range(ROUNDS)
    ]
    trained = {name: tensor.clone() for name, tensor in start.items()}
    moments = {name: torch.zeros_like(tensor) for name, tensor in start.items()} if some(rates.momentum) else {}
    for number, gradients in enumerate(drawn):
        active = torch.tensor([True, True, number < 2], device=DEVICE)
        zeroed = {name: tensor.clone() for name, tensor in gradients.items()}
        for tensor in zeroed.values():
            tensor[-1] *= number < 2
        # Not all gradients lie in memory as their weights do.
        zeroed["body.weight"] = zeroed["body.weight"].mT.contiguous().mT
        update(trained, zeroed, moments, rates, GROUPS, active)
    for client in range(CLIENTS):
        for name, tensor in expected(start, drawn, rates, client).items():
            torch.testing.assert_close(trained[name][client], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_ruins_its_own_client_only(wrong: float) -> None:
    trained = {name: torch.ones(CLIENTS, *shape, device=DEVICE) for name, shape in SHAPES.items()}
    gradients = {name: torch.ones_like(tensor) for name, tensor in trained.items()}
    gradients["body.bias"][1, 3] = wrong
    update(trained, gradients, {}, Rates(0.1, clip=1.0), GROUPS, torch.ones(CLIENTS, dtype=torch.bool, device=DEVICE))
    assert not trained["body.bias"][1].isfinite().all()
    assert all(tensor[::2].isfinite().all() for tensor in trained.values())
    assert (trained["body.weight"][1].isnan().all()) == (wrong != wrong)  # as clip_grad_norm_ does it


@pytest.mark.parametrize(
    "odd", [torch.ones(CLIENTS, 0), torch.ones(CLIENTS, 2, dtype=torch.float64)], ids=["empty", "64"]
)
def test_what_the_kernel_does_not_take_is_updated_too(odd: Tensor) -> None:
    trained = {"odd": odd.to(DEVICE, copy=True), "plain": torch.ones(CLIENTS, 3, device=DEVICE)}
    gradients = {name: torch.ones_like(tensor) for name, tensor in trained.items()}
    update(trained, gradients, {}, Rates(0.5, clip=100.0), [["odd", "plain"]], torch.ones(CLIENTS, device=DEVICE) > 0)
    assert all((tensor == 0.5).all() for tensor in trained.values())


def test_more_tensors_than_a_launch_serves() -> None:
    """Twelve tensors that are clipped together, some longer than a block, and one that is not clipped."""
    sizes = (3, 1025, 1, 2, 4097, 5, 1024, 7, 8, 9, 10, 1100)
    generator = torch.Generator().manual_seed(2)
    start, gradients = (
        {f"{number}": torch.randn(2, size, generator=generator).to(DEVICE) for number, size in enumerate((*sizes, 6))}
        for _ in range(2)
    )
    trained = {name: tensor.clone() for name, tensor in start.items()}
    moments = {name: torch.zeros_like(tensor) for name, tensor in start.items()}
    group, active = [f"{number}" for number in range(len(sizes))], torch.tensor([True, True], device=DEVICE)
    update(trained, gradients, moments, Rates(0.1, momentum=0.9, clip=2.0), [group], active)
    lengths = torch.cat([gradients[name] for name in group], 1).norm(dim=1, keepdim=True)
    for name, tensor in trained.items():
        step = gradients[name] * (2 / lengths if name in group else 1.0)
        torch.testing.assert_close(tensor, start[name] - 0.1 * step, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(moments[name], step, rtol=1e-5, atol=1e-6)
