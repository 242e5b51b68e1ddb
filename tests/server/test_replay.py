"""Steps of the server's training as graphs: which are made, in which order, and how many graphs there are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from polyfed.methods.parts.tools import cross_entropy
from polyfed.server import replay, training
from polyfed.server.replay import Replayed, Spans, in_batches
from polyfed.server.training import Loss, classification_loss, eager, make_steps, sgd_step, train_on_vectors

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, where steps are captured")


class Recorded:
    """Steps that write down their rows, and whose loss is a row's number plus a hundred for each step before."""

    def __init__(self) -> None:
        self.rows: list[list[int]] = []

    def __call__(self, rows: Tensor, losses: Tensor) -> None:
        losses.copy_(rows + 100 * len(self.rows))
        self.rows.append(rows.tolist())


class Graph:
    """What stands for a graph without a GPU: it makes the steps of a span again."""

    made = 0
    replays = 0

    def __init__(self, span: replay._Span) -> None:
        self._span = span
        Graph.made += 1

    def replay(self) -> None:
        Graph.replays += 1
        self._span._take()

    def pool(self) -> None:
        return None


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay._Span, "_plain", replay._Span._take)
    monkeypatch.setattr(replay._Span, "_captured", lambda span: Graph(span))
    monkeypatch.setattr(Graph, "made", 0)
    monkeypatch.setattr(Graph, "replays", 0)


@pytest.mark.parametrize(
    ("samples", "size", "epochs", "graphs"),
    [
        (1000, 10, 5, 1),  # ten steps in a graph, nothing left
        (1000, 10, 1, 1),  # two steps in a graph
        (997, 10, 5, 2),  # nine full steps and a short one are left of an epoch
        (1000, 1, 1, 1),  # one epoch alone: twenty in a graph
        (1010, 10, 1, 1),  # what is left of the only epoch is not worth a graph
        (7, 3, 60, 2),  # an epoch shorter than a graph could be
        (2, 3, 200, 1),  # short batches only
        (4, 4, 2, 0),  # too few steps
    ],
)
def test_every_step_is_made_in_order(without_gpu: None, samples: int, size: int, epochs: int, graphs: int) -> None:
    generator = torch.Generator().manual_seed(0)
    orders = [torch.randperm(samples, generator=generator) for _ in range(epochs)]
    expected, actual = Recorded(), Recorded()
    training = Replayed(Spans(actual, size), samples=samples, epochs=epochs, notes=[])
    for order in orders:
        found = [torch.zeros(samples), torch.zeros(samples)]
        in_batches(expected, order, found[0], size)
        training.epoch(order, found[1])
        assert torch.equal(found[0], found[1])
    assert actual.rows == expected.rows
    assert Graph.made == graphs
    assert (Graph.replays > 0) == (graphs > 0)


def test_most_of_many_steps_are_replayed(without_gpu: None) -> None:
    """10 000 steps: four graphs of 25 steps in each of a hundred epochs, of which one is made without a graph."""
    training = Replayed(Spans(Recorded(), 10), samples=1000, epochs=100, notes=[])
    for _ in range(100):
        training.epoch(torch.arange(1000), torch.zeros(1000))
    assert (Graph.made, Graph.replays) == (1, 399)


def test_memory_that_is_short_is_freed_for_a_second_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first attempt leaves PyTorch what it keeps for reuse, and the second does not. A third is never made."""
    attempts: list[bool] = []

    @contextmanager
    def short(graph: object, *, small: bool, **options: object) -> Iterator[None]:
        attempts.append(small)
        if small or failing:
            raise torch.OutOfMemoryError("no room")
        yield

    monkeypatch.setattr(replay._Span, "_plain", replay._Span._take)
    monkeypatch.setattr(torch.cuda, "Stream", object)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Mock)
    monkeypatch.setattr(replay, "capturing", short)
    for failing in (False, True):
        attempts.clear()
        notes: list[str] = []
        training = Replayed(Spans(Recorded(), 5), samples=20, epochs=10, notes=notes)
        for _ in range(10):
            training.epoch(torch.arange(20), torch.zeros(20))
        assert attempts == [True, False]
        assert notes == ["the server's steps can't be captured on the GPU and take longer (no room)"] * failing


def test_a_thread_captures_only_after_steps_of_its_own(without_gpu: None) -> None:
    """Forty steps of one graph: three are made plainly in the first thread, and three again in another."""
    spans = Spans(Recorded(), 5)

    def epochs(number: int) -> int:
        training = Replayed(spans, samples=5, epochs=40, notes=[])
        for _ in range(number):
            training.epoch(torch.arange(5), torch.zeros(5))
        return Graph.made

    assert epochs(3) == 0
    with ThreadPoolExecutor(1) as other:
        assert other.submit(epochs, 3).result() == 0
        assert other.submit(epochs, 1).result() == 1
    assert epochs(1) == 1
    assert Graph.replays == 2


def test_the_least_recently_used_graph_is_dropped(without_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for two: three numbers of rows, of which the first is used again before the third comes."""
    monkeypatch.setattr(replay, "MOST_SPANS", 2)
    spans = Spans(Recorded(), 100)

    def rounds(samples: int) -> int:
        training = Replayed(spans, samples=samples, epochs=9, notes=[])
        for _ in range(9):
            training.epoch(torch.arange(samples), torch.zeros(samples))
        return Graph.made

    assert [rounds(samples) for samples in (5, 6, 5, 7, 5, 6)] == [1, 2, 2, 3, 3, 4]


def test_steps_are_captured_on_a_gpu_from_a_number_on_and_never_within_eager(
    without_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty steps in two epochs: three are made without a graph, 17 replayed. They write the last epoch's losses."""
    monkeypatch.setattr(training, "on_gpu", lambda tensor: True)
    orders, found = torch.arange(30).expand(2, -1), []
    for worth, within in ((20, nullcontext()), (21, nullcontext()), (20, eager())):
        step, losses, before = Recorded(), torch.zeros(30), Graph.replays
        with within:
            make_steps(step, orders, losses, size=3, worth=worth)
        found.append(Graph.replays - before)
        assert step.rows == [rows.tolist() for order in orders for rows in order.split(3)]
        assert torch.equal(losses, torch.arange(30) + 100.0 * (10 + torch.arange(30) // 3))
    assert found == [17, 0, 0]


def test_steps_that_cannot_be_captured_are_made_with_a_note(without_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = []

    def refused(*given: object, **options: object) -> None:
        attempts.append(given)
        raise RuntimeError("operation not permitted\nwhen stream is capturing")

    monkeypatch.undo()
    monkeypatch.setattr(replay._Span, "_plain", replay._Span._take)
    monkeypatch.setattr(replay, "_PLAIN_STEPS", 1)
    monkeypatch.setattr(torch.cuda, "Stream", object)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(replay, "capturing", refused)
    notes: list[str] = []
    step = Recorded()
    training = Replayed(Spans(step, 5), samples=10, epochs=100, notes=notes)
    for _ in range(100):
        training.epoch(torch.arange(10), torch.zeros(10))
    assert len(step.rows) == 200
    assert len(attempts) == 1
    assert notes == [
        "the server's steps can't be captured on the GPU and take longer "
        "(operation not permitted when stream is capturing)"
    ]


def test_a_batch_step_by_hand() -> None:
    """One weight w = 1, loss (w·x)²/2 of x = 1 and x = 3: the mean gradient is (1 + 9)/2 = 5, so w becomes 0.5."""
    module = nn.Linear(1, 1, bias=False)
    module.weight.data.fill_(1.0)
    vectors, losses = torch.tensor([[1.0], [7.0], [3.0]]), torch.zeros(2)

    def loss(net: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
        values: Tensor = net(x)[:, 0] ** 2 / 2
        return values

    sgd_step(module, vectors, torch.zeros(3, dtype=torch.int64), 0.1, loss)(torch.tensor([0, 2]), losses)
    assert float(module.weight.detach()) == pytest.approx(0.5)
    assert losses.tolist() == [0.5, 4.5]


@pytest.mark.parametrize("count", [1, 3, 16])
def test_a_linear_layer_s_step_is_that_of_autograd_bit_by_bit(count: int) -> None:
    torch.manual_seed(0)
    vectors, labels = torch.randn(40, 12), torch.randint(0, 5, (40,))
    quick = nn.Linear(12, 5)
    plain, first = deepcopy(quick), quick.bias.detach().clone()
    of_quick, of_plain = torch.empty(count), torch.empty(count)
    steps = (
        (sgd_step(quick, vectors, labels, 0.1), of_quick),
        (sgd_step(plain, vectors, labels, 0.1, classification_loss), of_plain),
    )
    for _ in range(20):
        rows = torch.randperm(40)[:count]
        for step, losses in steps:
            step(rows, losses)
        assert torch.equal(of_quick, of_plain)
    assert torch.equal(quick.weight, plain.weight)
    assert torch.equal(quick.bias, plain.bias)
    assert bool((quick.bias != first).all())
    assert quick.weight.requires_grad


def with_frozen_bias(layer: nn.Linear) -> nn.Linear:
    layer.bias.requires_grad_(False)
    return layer


def with_hook(layer: nn.Linear) -> nn.Linear:
    layer.register_forward_hook(lambda module, given, logits: 3 * logits)
    return layer


@pytest.mark.parametrize("changed", [with_frozen_bias, with_hook, nn.utils.weight_norm])
@pytest.mark.filterwarnings("ignore:.*weight_norm")
def test_a_linear_layer_that_is_not_plain_trains_as_it_is(changed: Callable[[nn.Linear], nn.Linear]) -> None:
    """One step from the same start: what torch.optim would make of its own parameters, and of no others."""
    torch.manual_seed(0)
    vectors, labels, rows = torch.randn(6, 4), torch.arange(6) % 3, torch.arange(6)
    layer = changed(nn.Linear(4, 3))
    start = {name: parameter.detach().clone() for name, parameter in layer.named_parameters()}
    cross_entropy(layer(vectors), labels).mean().backward()
    slopes = {name: parameter.grad for name, parameter in layer.named_parameters()}
    sgd_step(layer, vectors, labels, 0.5)(rows, torch.empty(6))
    for name, parameter in layer.named_parameters():
        slope = slopes[name]
        expected = start[name] if slope is None else start[name] - 0.5 * slope
        torch.testing.assert_close(parameter.detach(), expected)


def own_loss(module: nn.Module, vectors: Tensor, labels: Tensor) -> Tensor:
    return 2 * cross_entropy(module(vectors), labels)


@needs_gpu
@pytest.mark.parametrize("loss", [None, own_loss])
@pytest.mark.parametrize(("samples", "size", "epochs"), [(60, 5, 40), (58, 5, 40), (200, 1, 1)])
def test_captured_steps_are_those_of_the_loop(samples: int, size: int, epochs: int, loss: Loss | None) -> None:
    """By autograd: the weights, the mean loss of the last epoch and what is drawn afterwards."""
    torch.manual_seed(0)
    vectors, labels = torch.randn(samples, 8).cuda(), torch.arange(samples).cuda() % 4
    weights, means, states = [], [], []
    for captured in (True, False):
        torch.manual_seed(1)
        module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).cuda()
        generator, notes = torch.Generator().manual_seed(2), list[str]()
        settings = {
            "epochs": epochs,
            "batch_size": size,
            "lr": 0.1,
            "generator": generator,
            "notes": notes,
            "loss": loss,
        }
        if captured:
            means.append(train_on_vectors(module, vectors, labels, **settings))
        else:
            with eager():
                means.append(train_on_vectors(module, vectors, labels, **settings))
        assert notes == []
        assert all(parameter.grad is None for parameter in module.parameters())
        weights.append(nn.utils.parameters_to_vector(module.parameters()).detach())
        states.append(generator.get_state())
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-3, atol=1e-4)
    assert means[0] == pytest.approx(means[1], rel=1e-3)
    assert torch.equal(states[0], states[1])
