"""Cross entropy and mean losses by our kernels, against PyTorch's; without a GPU they are interpreted (conftest.py)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional

from polyfed import losses
from polyfed.engines.stacked import entropy, layers, means

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CLIENTS, SAMPLES = 3, 5
INF, NAN = float("inf"), float("nan")
Loss = Callable[[Tensor, Tensor], Tensor]


@pytest.fixture(autouse=True)
def on_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert layers.kernels() is not None
    monkeypatch.setattr(layers, "on_gpu", lambda x: True)


def given(classes: int, scale: float = 1.0, samples: int = SAMPLES) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(classes)
    logits = scale * torch.randn(CLIENTS, samples, classes, generator=generator)
    return logits.to(DEVICE), torch.randint(classes, (CLIENTS, samples), generator=generator).to(DEVICE)


def served(loss: Loss, *args: Tensor) -> Tensor:
    """A loss inside a network's training."""
    with layers.StackedLayers():
        return loss(*args)


def outcome(loss: Loss, logits: Tensor, labels: Tensor, dims: tuple[Any, ...] = (0, 0)) -> tuple[Tensor, Tensor]:
    """Values, and the gradients of logits for uneven weights of the values."""

    def weighed(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        values = loss(logits, labels)
        return (values * torch.arange(1, len(values) + 1, device=DEVICE)).sum(), values

    of_logits, values = vmap(grad(weighed, has_aux=True), dims)(logits, labels)
    return values, of_logits


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Where each call of a kernel leaves its number of samples."""
    kernels, calls = entropy._kernels(), []
    for name in ("cross_entropy", "cross_entropy_gradient"):
        own = getattr(kernels, name)
        monkeypatch.setattr(kernels, name, lambda *a, own=own: calls.append(len(a[-2])) or own(*a))
    return calls


LOSSES: list[Loss] = [losses.cross_entropy, partial(functional.cross_entropy, reduction="none")]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("classes", "scale"), [(2, 1.0), (10, 1.0), (10, 1e4), (100, 30.0), (1000, 1.0)])
def test_values_and_gradients(monkeypatch: pytest.MonkeyPatch, loss: Loss, classes: int, scale: float) -> None:
    """One kernel for the values of all clients and one for their gradients, whatever the size of logits."""
    logits, labels = given(classes, scale, samples=70 if classes == 10 else SAMPLES)  # more than a program reads
    expected = outcome(loss, logits, labels)
    calls = counted(monkeypatch)
    actual = outcome(partial(served, loss), logits, labels)
    assert calls == [labels.numel()] * 2
    for own, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)


def test_numbers_by_hand() -> None:
    """Logits (0, ln 3) have shares 1/4 and 3/4: label 1 costs ln 4/3, with the gradient (1/4, −1/4)."""
    logits = torch.tensor([[0.0, 3.0]], device=DEVICE).clamp(min=1).log().requires_grad_()
    values = served(losses.cross_entropy, logits, torch.tensor([1], device=DEVICE))
    torch.testing.assert_close(values.exp(), torch.tensor([4 / 3], device=DEVICE))
    (of_logits,) = torch.autograd.grad(values.sum(), logits)
    torch.testing.assert_close(of_logits, torch.tensor([[0.25, -0.25]], device=DEVICE))


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(
    "row", [(NAN, 0, 0), (0, NAN, 0), (INF, 0, 0), (0, INF, 0), (-INF, 0, 0), (0, -INF, 0), (-INF, -INF, -INF)], ids=str
)
def test_what_is_not_finite_is_as_pytorch_has_it(loss: Loss, row: tuple[float, ...]) -> None:
    """In the place of the label or another; it does not change other samples."""
    logits, labels = given(3)
    logits[1, 2], labels[1, 2] = torch.tensor(row, device=DEVICE), 0
    actual, expected = (outcome(each, logits, labels) for each in (partial(served, loss), loss))
    for own, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_ignored_labels_cost_nothing_and_labels_that_are_no_class_are_no_number() -> None:
    logits, labels = given(4)
    torch_s = LOSSES[1]
    labels[0, 1] = labels[2, 3] = -100
    actual, expected = (outcome(each, logits, labels) for each in (partial(served, torch_s), torch_s))
    torch.testing.assert_close(actual, expected)
    assert actual[0][0, 1] == 0 and not actual[1][2, 3].any()
    labels[0, 1], labels[2, 3] = -1, 4
    for loss in LOSSES:
        values, of_logits = outcome(partial(served, loss), logits, labels)
        wrong = (labels < 0) | (labels > 3)
        assert torch.equal(values.isnan(), wrong) and torch.equal(of_logits.isnan().all(2), wrong)
    torch.testing.assert_close(
        served(partial(functional.cross_entropy, reduction="none", ignore_index=2), logits[1], labels[1]),
        functional.cross_entropy(logits[1], labels[1], reduction="none", ignore_index=2),
    )


def test_logits_that_lie_otherwise_and_labels_of_all_clients() -> None:
    logits, labels = given(7)
    for dims, own, common in (
        ((1, 0), logits.transpose(0, 1), labels),
        ((0, None), logits.mT.contiguous().mT, labels[0]),
    ):
        actual, expected = (outcome(each, own, common, dims) for each in (partial(served, LOSSES[0]), LOSSES[0]))
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_gradient_may_be_differentiated(loss: Loss, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step along the gradient does to the loss, for all clients; and a client without `vmap`."""
    logits, labels = given(4)
    calls = counted(monkeypatch)
    if loss is LOSSES[1]:
        labels[0, 1] = -100

    def after(loss: Loss, logits: Tensor, labels: Tensor) -> Tensor:
        step = grad(lambda x: loss(x, labels).square().sum())(logits)
        return loss(logits - 0.1 * step, labels).sum()

    actual, expected = (vmap(grad(partial(after, each)))(logits, labels) for each in (partial(served, loss), loss))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert labels.numel() in calls
    alone = logits[0].clone().requires_grad_()
    found = []
    for each in (partial(served, loss), loss):
        values = each(alone, labels[0]).sin()  # steep at zero, the loss of an ignored label
        (first,) = torch.autograd.grad(values.sum(), alone, create_graph=True)
        found.append(torch.autograd.grad((first * logits[1]).sum(), alone)[0])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(DEVICE == "cpu", reason="Triton's interpreter does not know bfloat16")
def test_bfloat16() -> None:
    """Values have 32 bits, gradients the bits of the logits."""
    logits, labels = given(10)
    logits = logits.bfloat16()
    values, of_logits = outcome(partial(served, LOSSES[0]), logits, labels)
    expected = outcome(LOSSES[0], logits, labels)
    assert (values.dtype, of_logits.dtype) == (torch.float32, torch.bfloat16)
    torch.testing.assert_close(values, expected[0])
    torch.testing.assert_close(of_logits, expected[1], rtol=1e-2, atol=1e-3)


def test_everything_else_is_left_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, labels = (tensor[0] for tensor in given(4))
    assert entropy.cross_entropy(logits.double(), labels) is None
    assert entropy.cross_entropy(logits, labels.int()) is None
    assert entropy.cross_entropy(logits, labels[:-1]) is None
    assert entropy.cross_entropy(logits[:0], labels[:0]) is None
    assert entropy.cross_entropy(logits[None], labels[None]) is None
    assert entropy.cross_entropy(torch.empty(SAMPLES, 2**14 + 1, device=DEVICE), labels) is None
    assert entropy.torch_cross_entropy(logits, labels) is None  # a mean
    none = partial(entropy.torch_cross_entropy, reduction="none")
    assert none(logits, labels) is not None
    assert none(logits, labels, weight=torch.ones(4)) is None
    assert none(logits, labels, label_smoothing=0.1) is None
    assert none(logits, labels, reduce=True) is None
    assert none(logits, logits.softmax(1)) is None  # shares of classes
    assert none(logits.bfloat16(), labels) is None
    monkeypatch.setattr(layers, "on_gpu", lambda x: False)
    calls = counted(monkeypatch)
    with layers.StackedLayers():
        losses.cross_entropy(logits, labels)
    assert not calls


MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]], dtype=torch.bool)
"""A full batch, a short one, and a client that has finished."""


def averages(values: Tensor, way: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, Tensor, Tensor]:
    monkeypatch.setattr(layers, "on_gpu", lambda x: way == "kernels")
    shown = MASK | ~MASK.any(1, keepdim=True)
    of_values, (average, total) = vmap(grad(_average, has_aux=True))(values, MASK.to(DEVICE), shown.to(DEVICE))
    return average, total, of_values


def _average(values: Tensor, mask: Tensor, shown: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    average, total = means.mean(values, mask, shown)
    return 3 * average, (average, total)


@pytest.mark.parametrize("way", ["kernels", "operations"])
def test_means_of_real_samples(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """1 … 5 add up to 15, 6 and 7 to 13; each of n real samples gets an n-th of the gradient, 3. The same alone."""
    values = torch.arange(1.0, 16.0, device=DEVICE).view(MASK.shape)
    average, total, of_values = averages(values, way, monkeypatch)
    assert average.tolist() == [3.0, 6.5, 0.0] and total.tolist() == [15.0, 13.0, 0.0]
    expected = [[3 / 5] * 5, [1.5, 1.5, 0, 0, 0], [0] * 5]
    torch.testing.assert_close(of_values, torch.tensor(expected, device=DEVICE))
    own = MASK[1].to(DEVICE)
    alone, (average, total) = grad(_average, has_aux=True)(values[1], own, own)
    assert torch.equal(alone, of_values[1]) and (float(average), float(total)) == (6.5, 13.0)


@pytest.mark.parametrize("way", ["kernels", "operations"])
@pytest.mark.parametrize("wrong", [NAN, INF])
def test_only_real_losses_that_are_not_finite_show(way: str, wrong: float, monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.ones(MASK.shape, device=DEVICE)
    values[0, 3] = values[1, 2] = values[2, 0] = wrong
    average, total, of_values = averages(values, way, monkeypatch)
    for found in (average, total):
        assert found.isfinite().tolist() == [False, True, True]
    assert torch.equal(of_values, averages(torch.ones_like(values), way, monkeypatch)[2])


def test_other_numbers_are_averaged_by_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.ones(MASK.shape, device=DEVICE, dtype=torch.float64)
    average, total, of_values = averages(values, "kernels", monkeypatch)
    assert average.dtype == total.dtype == of_values.dtype == torch.float64 and average.tolist() == [1, 1, 0]
