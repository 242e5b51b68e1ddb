"""A head's steps by one kernel, against those by PyTorch's operations; without a GPU it is interpreted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyfed import compute
from polyfed.methods.base import Reply
from polyfed.methods.parts.statistics import class_covariances
from polyfed.server import heads
from polyfed.server.kept import Kept
from polyfed.server.training import eager, train_on_vectors
from tests import support

triton = pytest.importorskip("triton")
if not torch.cuda.is_available() and tuple(map(int, triton.__version__.split(".")[:2])) < (3, 3):
    pytest.skip("this Triton's interpreter does not know loops of computed length", allow_module_level=True)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
IS_GPU = heads._is_gpu


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[nn.Module]]:
    """A few steps are worth a kernel, and every device is one; the layers that it trains are listed.

    Products are exact.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    monkeypatch.setattr(heads, "_is_gpu", lambda device: True)
    monkeypatch.setattr(heads, "WORTH_MOVING", 4)
    made: list[nn.Module] = []
    train = heads._train
    monkeypatch.setattr(heads, "_train", lambda *given: (made.append(given[1]), train(*given))[1])
    yield made
    torch.set_float32_matmul_precision(before)


def steps(
    layer: nn.Module, vectors: int, size: int, epochs: int, device: torch.device | None = DEVICE, **more: Any
) -> tuple[float, Tensor]:
    """The mean loss of the last epoch, and all weights after it."""
    generator = torch.Generator().manual_seed(vectors)
    weight = next(layer.parameters())
    x = more.pop("scale", 1) * torch.randn(vectors, weight.shape[1], generator=generator, dtype=weight.dtype)
    y = torch.randint(min(weight.shape[0], 3), (vectors,), generator=generator)
    options = {"lr": 0.5, "kept": Kept(), **more}
    loss = train_on_vectors(layer, x, y, epochs=epochs, batch_size=size, generator=generator, device=device, **options)
    return loss, nn.utils.parameters_to_vector(layer.parameters()).detach()


def new_layer(features: int = 6, classes: int = 3, kind: type[nn.Linear] = nn.Linear, **options: Any) -> nn.Linear:
    torch.manual_seed(0)
    return kind(features, classes, **options)


@pytest.mark.parametrize(
    ("features", "classes", "vectors", "size", "epochs"),
    [(6, 3, 20, 5, 2), (70, 17, 23, 5, 2), (64, 16, 37, 20, 3), (33, 40, 9, 1, 1), (5, 3, 7, 64, 5)],
    ids=["small", "blocks", "full", "single", "one batch"],
)
def test_steps_are_those_of_the_operations(
    calls: list[Any], features: int, classes: int, vectors: int, size: int, epochs: int
) -> None:
    """With features and classes that fill blocks and that do not, and last batches that are short."""
    found = steps(new_layer(features, classes), vectors, size, epochs)
    assert len(calls) == 1
    loss, weights = steps(new_layer(features, classes), vectors, size, epochs, device=None)
    assert found[0] == pytest.approx(loss, rel=1e-5)
    torch.testing.assert_close(found[1], weights, rtol=1e-4, atol=1e-5)
    before = nn.utils.parameters_to_vector(new_layer(features, classes).parameters()).detach()
    assert float((weights - before).abs().max()) > 0.05
    assert len(calls) == 1


@pytest.mark.skipif(DEVICE.type == "cpu", reason="a CPU has no threads that could meet, and no rounded products")
@pytest.mark.parametrize(("precision", "apart"), [("highest", 1e-4), ("high", 1e-2)])
def test_many_steps_of_many_threads_agree(precision: str, apart: float) -> None:
    torch.set_float32_matmul_precision(precision)
    _, found = steps(new_layer(500, 100), 1000, 64, 100, lr=0.01)
    _, expected = steps(new_layer(500, 100), 1000, 64, 100, lr=0.01, device=None)
    assert float((found - expected).norm() / expected.norm()) < apart


def test_large_logits_have_finite_losses() -> None:
    """They differ by hundreds, and e to that power is no float."""
    found, expected = (steps(new_layer(), 20, 5, 2, device, scale=300.0) for device in (DEVICE, None))
    assert found[0] == pytest.approx(expected[0], rel=1e-5) and expected[0] > 1
    torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-3)


def test_what_the_caller_gave_stays() -> None:
    """Vectors and labels are read, not written; the layer keeps its memory."""
    layer, generator = new_layer(), torch.Generator().manual_seed(0)
    vectors, labels, place = torch.randn(20, 6), torch.arange(20) % 3, layer.weight.data_ptr()
    before = vectors.clone(), labels.clone()
    train_on_vectors(layer, vectors, labels, batch_size=5, generator=generator, device=DEVICE)
    assert torch.equal(vectors, before[0]) and torch.equal(labels, before[1])
    assert layer.weight.data_ptr() == place and layer.weight.device.type == "cpu"


def test_the_order_of_what_is_given_in_memory_does_not_matter(calls: list[nn.Module]) -> None:
    vectors, labels, weights = torch.randn(6, 20).t(), torch.arange(40)[::2] % 3, []
    for device in (DEVICE, None):
        layer, generator = new_layer(), torch.Generator().manual_seed(0)
        layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())
        train_on_vectors(layer, vectors, labels, batch_size=5, generator=generator, device=device, lr=0.5)
        weights.append(layer.weight.detach())
    assert len(calls) == 1
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-4, atol=1e-5)


def test_diverged_steps_are_seen() -> None:
    loss, weights = steps(new_layer(), 20, 5, 3, lr=1e38, scale=1000.0)
    assert not torch.isfinite(weights).all() and not torch.isfinite(torch.tensor(loss))


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def frozen() -> nn.Module:
    layer = new_layer()
    layer.bias.requires_grad_(False)
    return layer


def hooked() -> nn.Module:
    layer = new_layer()
    layer.register_forward_hook(lambda module, given, found: 2 * found)
    return layer


@pytest.mark.parametrize(
    "layer",
    [
        lambda: nn.Sequential(new_layer()),
        lambda: new_layer(kind=Doubled),
        lambda: new_layer(bias=False),
        lambda: new_layer(dtype=torch.float64),
        lambda: new_layer(classes=257),
        lambda: new_layer(features=200_000, classes=20),
        frozen,
        hooked,
    ],
    ids=["network", "subclass", "no bias", "double", "many classes", "much work", "frozen", "hooked"],
)
def test_other_modules_take_their_steps_one_by_one(calls: list[Any], layer: Any) -> None:
    """Without a word: for them it is not slower than it could be."""
    notes: list[str] = []
    found, expected = steps(layer(), 20, 5, 1, notes=notes), steps(layer(), 20, 5, 1, device=None)
    assert calls == [] and notes == [] and found[0] == expected[0] and torch.equal(found[1], expected[1])


def test_few_steps_large_batches_comparisons_and_other_losses_stay_on_the_cpu(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps(new_layer(), 15, 5, 1)
    steps(new_layer(), 600, 129, 1)
    with eager():
        steps(new_layer(), 20, 5, 1)
    steps(new_layer(), 20, 5, 1, loss=lambda module, x, y: module(x).square().sum(1), lr=0.01)
    monkeypatch.setattr(heads, "_is_gpu", IS_GPU)
    steps(new_layer(), 20, 5, 1, device=torch.device("cpu"))
    assert calls == []


def test_without_triton_the_cpu_makes_the_steps(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(f"no module named {name}")

    monkeypatch.setattr(heads, "working_kernels", compute.working_kernels.__wrapped__)  # whatever was found before
    monkeypatch.setattr("polyfed.compute.import_module", missing)
    notes: list[str] = []
    found, expected = steps(new_layer(), 20, 5, 2, notes=notes), steps(new_layer(), 20, 5, 2, device=None)
    assert found[0] == expected[0] and torch.equal(found[1], expected[1])
    assert calls == [] and len(notes) == 1 and "no module named polyfed.server.head_kernels" in notes[0]


def test_what_does_not_fit_into_the_gpu_is_trained_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the numbers that it would have had there at once."""

    def too_large(*given: Any) -> None:
        raise RuntimeError("out of resource: shared memory")

    monkeypatch.setattr(heads, "_train", too_large)
    notes: list[str] = []
    found, expected = steps(new_layer(), 20, 5, 2, notes=notes), steps(new_layer(), 20, 5, 2, device=None)
    assert found[0] == expected[0] and torch.equal(found[1], expected[1])
    assert notes == [
        "the server's head is trained on the CPU, which takes longer than our kernel on the GPU (out of resource: "
        "shared memory)"
    ]


def test_dc_pfl_calibrates_its_head_by_the_kernel(calls: list[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    """1000 virtual features make ten steps of a hundred; the head is then that of the CPU."""
    samples = torch.randn(9, support.FEATURES, generator=torch.Generator().manual_seed(0))
    own = class_covariances(samples, torch.arange(9) % 3, 4)
    trained, aside = [], Kept.aside
    sides: list[Kept] = []
    monkeypatch.setattr(Kept, "aside", lambda kept: (sides.append(kept), aside(kept))[1])
    for worth in (10, 11):
        monkeypatch.setattr(heads, "WORTH_MOVING", worth)
        method = support.new_method({"name": "dc-pfl", "calibration_batch_size": 100})
        message, server = method.upload(support.trained([3, 3, 3, 0], statistics=own)), support.new_server(method)
        server.device = DEVICE
        method.aggregate(server, [Reply(0, message)])
        trained.append(server.modules["head"])
        assert sides == ([server.kept] if worth == 10 else sides)
    assert calls == trained[:1] and len(sides) == 1
    torch.testing.assert_close(trained[0].state_dict(), trained[1].state_dict(), rtol=1e-4, atol=1e-5)


def test_dc_pfl_s_server_says_why_its_head_is_trained_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(*given: Any) -> None:
        raise RuntimeError("out of resource")

    monkeypatch.setattr(heads, "_train", too_large)
    monkeypatch.setattr(heads, "WORTH_MOVING", 10)
    own = class_covariances(torch.randn(9, support.FEATURES), torch.arange(9) % 3, 4)
    method = support.new_method({"name": "dc-pfl"})
    message, server = method.upload(support.trained([3, 3, 3, 0], statistics=own)), support.new_server(method)
    server.device = DEVICE
    method.aggregate(server, [Reply(0, message)])
    assert len([note for note in server.notes if "the server's head is trained on the CPU" in note]) == 1
