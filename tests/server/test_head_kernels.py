"""A head's steps by one kernel, against those by PyTorch's operations; without a GPU it is interpreted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from polyfed import compute
from polyfed.methods.base import Reply
from polyfed.methods.parts.statistics import class_covariances
from polyfed.server import training
from polyfed.server.kept import Kept
from polyfed.server.training import eager, train_on_vectors
from tests import support

triton = pytest.importorskip("triton")
if not torch.cuda.is_available() and tuple(map(int, triton.__version__.split(".")[:2])) < (3, 3):
    pytest.skip("this Triton's interpreter does not know loops of computed length", allow_module_level=True)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[nn.Module]]:
    """A few steps are worth a kernel; the layers that it trains are listed; products are exact."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    monkeypatch.setattr(training, "_is_gpu", lambda device: True)
    monkeypatch.setattr(training, "_WORTH_MOVING", 4)
    made: list[nn.Module] = []
    original = training._in_one_kernel
    monkeypatch.setattr(
        training, "_in_one_kernel", lambda layer, *given: (made.append(layer), original(layer, *given))[1]
    )
    yield made
    torch.set_float32_matmul_precision(before)


def train(
    layer: nn.Module, vectors: int, size: int, epochs: int, device: torch.device | None = DEVICE, lr: float = 0.5
) -> tuple[float, torch.Tensor]:
    """The mean loss of the last epoch, and all weights after it."""
    generator = torch.Generator().manual_seed(vectors)
    features = next(layer.parameters()).shape[1]
    x = torch.randn(vectors, features, generator=generator)
    y = torch.randint(2, (vectors,), generator=generator)
    loss = train_on_vectors(
        layer, x, y, epochs=epochs, batch_size=size, lr=lr, generator=generator, device=device, kept=Kept()
    )
    return loss, nn.utils.parameters_to_vector(layer.parameters()).detach()


def new_layer(features: int = 6, classes: int = 3, **options: Any) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(features, classes, **options)


@pytest.mark.parametrize(
    ("features", "classes", "vectors", "size", "epochs"),
    [(6, 3, 20, 5, 2), (70, 17, 23, 5, 2), (64, 16, 37, 20, 3), (33, 40, 9, 1, 1), (5, 3, 7, 64, 5)],
    ids=["small", "blocks", "full", "single", "one batch"],
)
def test_steps_are_those_of_the_operations(
    calls: list[Any], features: int, classes: int, vectors: int, size: int, epochs: int
) -> None:
    """With features and classes that fill blocks and that do not, and last batches that are short."""
    found = train(new_layer(features, classes), vectors, size, epochs)
    assert len(calls) == 1
    loss, weights = train(new_layer(features, classes), vectors, size, epochs, device=None)
    assert found[0] == pytest.approx(loss, rel=1e-5)
    torch.testing.assert_close(found[1], weights, rtol=1e-4, atol=1e-5)
    before = nn.utils.parameters_to_vector(new_layer(features, classes).parameters()).detach()
    assert float((weights - before).abs().max()) > 0.05
    assert len(calls) == 1


def test_what_the_caller_gave_stays() -> None:
    """Vectors and labels are read, not written; the layer keeps its memory."""
    layer, generator = new_layer(), torch.Generator().manual_seed(0)
    vectors, labels, place = torch.randn(20, 6), torch.arange(20) % 3, layer.weight.data_ptr()
    before = vectors.clone(), labels.clone()
    train_on_vectors(layer, vectors, labels, batch_size=5, generator=generator, device=DEVICE)
    assert torch.equal(vectors, before[0]) and torch.equal(labels, before[1])
    assert layer.weight.data_ptr() == place and layer.weight.device.type == "cpu"


def test_diverged_steps_are_seen() -> None:
    loss, weights = train(new_layer(), 20, 5, 3, lr=1e38)
    assert not torch.isfinite(weights).all() and not torch.isfinite(torch.tensor(loss))


def frozen() -> nn.Module:
    layer = new_layer()
    layer.bias.requires_grad_(False)
    return layer


@pytest.mark.parametrize(
    "layer",
    [
        lambda: nn.Sequential(new_layer()),
        lambda: new_layer(bias=False),
        lambda: new_layer(dtype=torch.float64),
        lambda: new_layer(classes=257),
        frozen,
    ],
    ids=["network", "no bias", "double", "many classes", "frozen"],
)
def test_other_modules_take_their_steps_one_by_one(calls: list[Any], layer: Any) -> None:
    module = layer()
    vectors = torch.randn(20, 6, dtype=next(module.parameters()).dtype)
    generator = torch.Generator().manual_seed(0)
    train_on_vectors(module, vectors, torch.arange(20) % 3, batch_size=5, generator=generator, device=DEVICE, lr=0.5)
    assert calls == []


def test_few_steps_large_batches_and_comparisons_stay_on_the_cpu(calls: list[Any]) -> None:
    train(new_layer(), 15, 5, 1)
    train(new_layer(), 600, 129, 1)
    with eager():
        train(new_layer(), 20, 5, 1)
    assert calls == []


def test_without_triton_the_cpu_makes_the_steps(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(f"no module named {name}")

    monkeypatch.setattr(training, "working_kernels", compute.working_kernels.__wrapped__)  # whatever was found before
    monkeypatch.setattr("polyfed.compute.import_module", missing)
    found, expected = train(new_layer(), 20, 5, 2), train(new_layer(), 20, 5, 2, device=None)
    assert found[0] == expected[0] and torch.equal(found[1], expected[1])
    assert calls == []


def test_dc_pfl_calibrates_its_head_by_the_kernel(calls: list[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    """1000 virtual features make ten steps of a hundred; the head is then that of the CPU."""
    samples = torch.randn(9, support.FEATURES, generator=torch.Generator().manual_seed(0))
    own = class_covariances(samples, torch.arange(9) % 3, 4)
    heads = []
    for worth in (10, 11):
        monkeypatch.setattr(training, "_WORTH_MOVING", worth)
        method = support.new_method({"name": "dc-pfl", "calibration_batch_size": 100})
        message, server = method.upload(support.trained([3, 3, 3, 0], statistics=own)), support.new_server(method)
        server.device = DEVICE
        method.aggregate(server, [Reply(0, message)])
        heads.append(server.modules["head"])
    assert calls == heads[:1]
    torch.testing.assert_close(heads[0].state_dict(), heads[1].state_dict(), rtol=1e-4, atol=1e-5)
