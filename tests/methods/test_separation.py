"""Steps of FedTGP's server by our kernels, against autograd; without a GPU they are interpreted (see conftest.py)."""

from __future__ import annotations

from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyfed import compute
from polyfed.methods.fedtgp import contrastive_loss
from polyfed.methods.parts import separation
from polyfed.methods.parts.trainable import TrainablePrototypes
from polyfed.server import training
from polyfed.server.replay import Step, in_batches
from polyfed.server.training import eager, sgd_step, train_on_vectors
from tests import support

triton = pytest.importorskip("triton")
if not torch.cuda.is_available() and tuple(map(int, triton.__version__.split(".")[:2])) < (3, 3):
    pytest.skip("this Triton's interpreter does not know loops of computed length", allow_module_level=True)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CLASSES, SIZE, VECTORS = 5, 10, 7
"""None of them fills a block; the classes are in two blocks, and so are the features that a program owns."""


@pytest.fixture(autouse=True)
def exact_products() -> Any:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


class Case:
    """Prototypes and vectors of three of five classes, and both ways to make a step on them."""

    def __init__(
        self, *, network: bool = True, margin: float = 1.5, dtype: torch.dtype = torch.float64, lr: float = 0.5
    ) -> None:
        torch.manual_seed(0)
        self.module = TrainablePrototypes(CLASSES, SIZE, network=network).to(DEVICE, dtype)
        self.vectors = torch.randn(VECTORS, SIZE).to(DEVICE, dtype)
        self.labels = torch.tensor([0, 2, 2, 3, 0, 3, 0], device=DEVICE)
        self.margin = torch.tensor(margin, device=DEVICE, dtype=dtype)
        self.lr = lr

    def loss(self, module: nn.Module, vectors: Tensor, labels: Tensor) -> Tensor:
        return contrastive_loss(module(), vectors, labels, self.margin)

    def fused(self, *given: Any) -> Step | None:
        return separation.separating_steps(*given, margin=self.margin, notes=[])

    def steps(self, fused: bool) -> tuple[Step, nn.Module]:
        module = deepcopy(self.module)
        if not fused:
            return sgd_step(module, self.vectors, self.labels, self.lr, self.loss), module
        step = self.fused(module, self.vectors, self.labels, self.lr)
        assert step is not None, "our kernels can't run"
        return step, module


def assert_modules_agree(actual: nn.Module, expected: nn.Module, **tolerance: float) -> None:
    assert {name for name, _ in actual.named_parameters()} == {name for name, _ in expected.named_parameters()}
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(
            actual.get_parameter(name), parameter, **tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("network", [True, False])
@pytest.mark.parametrize("margin", [0.0, 1.5, 100.0])
@pytest.mark.parametrize("rows", [[3], [6, 0, 1, 5], list(range(VECTORS))])
@pytest.mark.parametrize("many", [CLASSES, CLASSES + 1])
def test_a_step_is_that_of_autograd(
    monkeypatch: pytest.MonkeyPatch, network: bool, margin: float, rows: list[int], many: int
) -> None:
    """In 64 bits, with learning rate ½: all parameters move, by half of their gradients; the losses agree too.

    With layers as products of matrices, and by our kernels.
    """
    monkeypatch.setattr(separation, "MANY", many)
    case, chosen = Case(network=network, margin=margin), torch.tensor(rows, device=DEVICE)
    found = []
    for fused in (True, False):
        step, module = case.steps(fused)
        losses = case.vectors.new_empty(len(rows))
        step(chosen, losses)
        found.append((module, losses))
    assert_modules_agree(found[0][0], found[1][0], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-10, atol=1e-12)
    for name, parameter in found[1][0].named_parameters():
        moved = (parameter - case.module.get_parameter(name)).detach().abs().max()
        assert float(moved) > 1e-6, name


def test_a_vector_on_its_prototype_pulls_nothing() -> None:
    """The distance is zero there, and so is its gradient; other classes are still pushed away."""
    case = Case(network=False)
    case.vectors[1] = case.module.vectors.detach()[2]
    for fused in (True, False):
        step, module = case.steps(fused)
        step(torch.tensor([1], device=DEVICE), case.vectors.new_empty(1))
        assert torch.equal(module.get_parameter("vectors")[2], case.module.vectors[2])
        assert bool((module.get_parameter("vectors")[[0, 1, 3, 4]] != case.module.vectors[[0, 1, 3, 4]]).any(1).all())


@pytest.mark.parametrize(("network", "many"), [(True, CLASSES), (True, CLASSES + 1), (False, 1)])
def test_epochs_with_a_short_last_batch(monkeypatch: pytest.MonkeyPatch, network: bool, many: int) -> None:
    """Six epochs of batches of 3, 3 and 1; the losses of the last epoch are those of autograd."""
    monkeypatch.setattr(separation, "MANY", many)
    case, found = Case(network=network, dtype=torch.float32, lr=0.1), []
    for fused in (True, False):
        step, module = case.steps(fused)
        losses, generator = case.vectors.new_empty(VECTORS), torch.Generator().manual_seed(1)
        for _ in range(6):
            in_batches(step, torch.randperm(VECTORS, generator=generator).to(DEVICE), losses, 3)
        found.append((module, losses))
    assert_modules_agree(found[0][0], found[1][0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-4, atol=1e-5)


def test_more_features_than_a_block_and_samples_than_a_block() -> None:
    """Of the kernels for distances and gradients, which look at some features and 16 samples at a time."""
    torch.manual_seed(0)
    size, module = 70, TrainablePrototypes(3, 70).to(DEVICE, torch.float64)
    vectors, labels = torch.randn(20, size).to(DEVICE, torch.float64), torch.arange(20, device=DEVICE) % 3
    case = Case()
    case.module, case.vectors, case.labels = module, vectors, labels
    kernels = compute.working_kernels("polyfed.methods.parts.prototype_kernels", separation._trial)[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "ENTRIES", 64)
        modules = []
        for fused in (True, False):
            step, trained = case.steps(fused)
            step(torch.arange(20, device=DEVICE), vectors.new_empty(20))
            modules.append(trained)
    assert_modules_agree(modules[0], modules[1], rtol=1e-10, atol=1e-12)


def test_training_uses_the_kernels_on_a_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not within `eager`; the mean loss, the weights and the generator are as without them."""
    case, found = Case(dtype=torch.float32, lr=0.1), []
    calls: list[Step | None] = []

    def fused(*given: Any) -> Step | None:
        calls.append(case.fused(*given))
        return calls[-1]

    def train() -> None:
        module, generator = deepcopy(case.module), torch.Generator().manual_seed(3)
        mean = train_on_vectors(
            module, case.vectors, case.labels, loss=case.loss, epochs=4, batch_size=2, lr=case.lr, generator=generator,
            fused=fused,
        )  # fmt: skip
        found.append((module, mean, generator.get_state()))

    monkeypatch.setattr(training, "on_gpu", lambda vectors: True)
    train()
    assert len(calls) == 1 and calls[0] is not None
    with eager():
        train()
    monkeypatch.setattr(training, "on_gpu", lambda vectors: False)
    train()
    assert len(calls) == 1
    drawn = torch.Generator().manual_seed(3)
    for _ in range(4):
        torch.randperm(VECTORS, generator=drawn)
    for module, mean, state in found:
        assert_modules_agree(module, found[2][0], rtol=1e-4, atol=1e-5)
        assert mean == pytest.approx(found[2][1], rel=1e-4)
        assert torch.equal(state, drawn.get_state())


@pytest.mark.parametrize(
    "options", [{}, {"margin": "max-min"}, {"margin": "fixed", "threshold": 3.0}, {"margin": "none"}]
)
def test_fedtgp_gives_its_margin_to_the_kernels(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    method = support.new_method({"name": "fedtgp", "server_epochs": 3, "server_lr": 0.3, **options})
    tensors = {"prototypes": 3 * torch.randn(3, support.FEATURES)}
    replies = [support.reply(0, tensors, labels=[0, 1, 3])]
    sent = []
    for kernels in (True, False):
        monkeypatch.setattr(training, "on_gpu", lambda vectors, kernels=kernels: kernels)
        server = support.new_server(method)
        server.device = torch.device(DEVICE)
        method.aggregate(server, replies)
        assert server.notes == []
        sent.append(method.download(server, 0, None))
    assert sent[0].metadata["labels"].tolist() == [0, 1, 2, 3]
    torch.testing.assert_close(sent[0].tensors["prototypes"], sent[1].tensors["prototypes"], rtol=1e-4, atol=1e-5)


def test_without_triton_autograd_does_it_and_a_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> Any:
        raise RuntimeError("Failed to find\nC compiler")

    monkeypatch.setattr(compute, "import_module", broken)
    monkeypatch.setattr(separation, "working_kernels", compute.working_kernels.__wrapped__)
    monkeypatch.setattr(training, "on_gpu", lambda vectors: True)
    method = support.new_method({"name": "fedtgp", "server_epochs": 2})
    server, plain = support.new_server(method), support.new_server(method)
    replies = [support.reply(0, {"prototypes": torch.eye(support.FEATURES)[:2]}, labels=[0, 1])]
    method.aggregate(server, replies)
    assert len(server.notes) == 1 and "(Failed to find C compiler)" in server.notes[0]
    with eager():
        method.aggregate(plain, replies)
    assert torch.equal(server.state["prototypes.vectors"], plain.state["prototypes.vectors"])


def test_too_many_features_are_left_to_autograd() -> None:
    """Without a note: nothing is missing that a user could add."""
    notes: list[str] = []
    make = partial(separation.separating_steps, margin=torch.tensor(1.0), notes=notes)
    for classes, size, served in ((2, 2049, False), (1025, 2, False), (2, 2, True)):
        module = TrainablePrototypes(classes, size, network=False).to(DEVICE)
        found = make(module, torch.zeros(1, size, device=DEVICE), torch.zeros(1, dtype=torch.int64, device=DEVICE), 0.1)
        assert (found is not None) == served
    assert notes == []


def test_a_trial_of_the_kernels_draws_nothing() -> None:
    compute.working_kernels.cache_clear()
    before = torch.get_rng_state()
    assert compute.working_kernels("polyfed.methods.parts.prototype_kernels", separation._trial)[1] is None
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, where steps are captured")
@pytest.mark.parametrize("network", [True, False])
@pytest.mark.parametrize(("classes", "vectors"), [(10, 203), (100, 40)])
def test_captured_steps_at_the_papers_size(network: bool, classes: int, vectors: int) -> None:
    """500 features and about a thousand steps, with a short last batch or without; some classes have no vector.

    With a larger learning rate prototypes reach their only vector, where a distance has no slope: then even autograd
    differs by 1e-3 between 32 and 64 bits.
    """
    torch.manual_seed(0)
    case, found = Case(dtype=torch.float32, lr=0.001, margin=5.0), []
    case.module = TrainablePrototypes(classes, 500, network=network).cuda()
    case.vectors = torch.rand(vectors, 500).cuda()
    case.labels = torch.arange(vectors).cuda() % (classes - 1)
    epochs, notes = 1000 // -(-vectors // 10), list[str]()
    for loop in (True, False):
        module, generator = deepcopy(case.module), torch.Generator().manual_seed(3)
        with eager() if loop else nullcontext():
            mean = train_on_vectors(
                module, case.vectors, case.labels, loss=case.loss, epochs=epochs, batch_size=10, lr=case.lr,
                generator=generator, fused=case.fused, notes=notes,
            )  # fmt: skip
        found.append((module, mean, generator.get_state()))
    assert notes == []
    assert_modules_agree(found[1][0], found[0][0], rtol=1e-3, atol=1e-4)
    assert found[1][1] == pytest.approx(found[0][1], rel=1e-4)
    assert torch.equal(found[1][2], found[0][2])
