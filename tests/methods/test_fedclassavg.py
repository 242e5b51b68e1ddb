"""FedClassAvg, with numbers worked out by hand."""

import dataclasses
import math

import pytest
import torch
from torch import nn

from polyfed.data import Dataset
from polyfed.engines.client.batches import batches
from polyfed.engines.client.round import set_modes
from polyfed.errors import BadMessage, InputError
from polyfed.message import Message
from polyfed.methods.base import Batch, Knowledge
from polyfed.methods.fedclassavg import contrastive_loss, squared_distance, unit_length
from tests import support
from tests.methods import parity

CROSSED = torch.eye(2)
"""Two samples whose features are at right angles; both views of a sample are alike."""


def example_batch(clients, indices: list[int]) -> Batch:
    x, y = clients.dataset.batch(torch.tensor(indices))
    return Batch(x, y, views=parity.random_views(x, torch.Generator().manual_seed(5)))


@pytest.mark.parametrize(("temperature", "own"), [(1.0, math.e), (0.5, math.e**2)])
def test_contrastive_loss_of_two_classes(temperature: float, own: float) -> None:
    """An anchor's other view has similarity 1 and share e / (e + 1 + 1): ln(e + 2) − 1 = 0.5514; at ½ e becomes e²."""
    values = contrastive_loss(CROSSED, CROSSED, torch.tensor([0, 1]), None, temperature)
    assert values.tolist() == pytest.approx([math.log(own + 2) - math.log(own)] * 2)


def test_contrastive_loss_of_one_class() -> None:
    """All three partners are positive, with similarities 1, 0, 0: ln(e + 2) − (1 + 0 + 0) / 3 = 1.2181."""
    values = contrastive_loss(CROSSED, CROSSED, torch.tensor([3, 3]), None, 1.0)
    assert values.tolist() == pytest.approx([math.log(math.e + 2) - 1 / 3] * 2)
    assert values[0].item() == pytest.approx(1.2181, abs=1e-4)


def test_contrastive_loss_is_the_mean_over_both_anchors() -> None:
    """One sample of class 0 with views (1, 0) and (0, 1), one of class 1 with (1, 0) twice.

    Anchor (1, 0) of class 0: its positive has similarity 0, the two others 1: ln(1 + 2e).
    Anchor (0, 1) of class 0: all similarities are 0: ln 3. Mean: (1.8620 + 1.0986) / 2 = 1.4803.
    Anchors of class 1: positive 1; others 1 and 0: ln(2e + 1) − 1 = 0.8620.
    """
    first, second = torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    values = contrastive_loss(first, second, torch.tensor([0, 1]), None, 1.0)
    expected = [(math.log(1 + 2 * math.e) + math.log(3)) / 2, math.log(1 + 2 * math.e) - 1]
    assert values.tolist() == pytest.approx(expected)


def test_padding_is_no_partner() -> None:
    """With the second sample masked, the first has only its other view: −ln 1 = 0, whatever the padding holds."""
    mask = torch.tensor([True, False])
    for padding in (torch.tensor([0, 1]), torch.tensor([0, 0])):
        values = contrastive_loss(CROSSED, CROSSED, padding, mask, 1.0)
        assert values[0].item() == pytest.approx(0.0)
        assert torch.isfinite(values).all()


@pytest.mark.parametrize("normalise", [True, False])
def test_gradients_stay_finite_in_the_corners(normalise: bool) -> None:
    """Features of zero, features of a thousand at temperature 0.07, a batch of nothing but padding, a single sample."""
    corners = [(torch.zeros(3, 4), None), (1000 * torch.ones(3, 4), None), (torch.eye(3, 4), torch.zeros(3).bool())]
    for features, mask in [*corners, (torch.eye(1, 4), None)]:
        features.requires_grad_()
        views = unit_length(features) if normalise else features
        values = contrastive_loss(views, views, torch.zeros(len(features), dtype=torch.int64), mask, 0.07)
        (gradient,) = torch.autograd.grad(values.sum(), features)
        assert torch.isfinite(values).all() and torch.isfinite(gradient).all()


def test_proximal_term_is_half_the_squared_distance() -> None:
    """4·6 weights and 4 biases, each moved by ½: squared distance 28 / 4 = 7, half of it 3.5, with weight 0.1: 0.35."""
    clients = support.population("fedclassavg")
    net = clients.new_network(0)
    batch = example_batch(clients, [0, 40])
    before = clients.method.loss(net, batch)
    for parameter in net.received.parameters():
        parameter.data += 0.5
    assert squared_distance(net.model.head, net.received).item() == pytest.approx(7.0)
    assert (clients.method.loss(net, batch) - before).tolist() == pytest.approx([0.35, 0.35], abs=1e-5)


@pytest.mark.parametrize("normalise", [True, False])
def test_loss_is_contrast_of_the_views_plus_cross_entropy_of_the_image(normalise: bool) -> None:
    """The head is the received one here, so the proximal term is zero."""
    clients = support.population({"name": "fedclassavg", "normalise": normalise, "temperature": 2.0})
    net = clients.new_network(0)
    batch = example_batch(clients, [0, 1, 40, 100])
    views = [net.features(view) for view in batch.views.unbind(1)]
    if normalise:
        views = [nn.functional.normalize(view) for view in views]
    contrast = contrastive_loss(views[0], views[1], batch.y, None, 2.0)
    classified = nn.functional.cross_entropy(net(batch.x), batch.y, reduction="none")
    torch.testing.assert_close(clients.method.loss(net, batch), contrast + classified)


@pytest.mark.parametrize("augment", [False, True])
def test_the_image_is_augmented_only_if_training_says_so(augment: bool) -> None:
    """The views are augmented in any case, each in its own way; the image is what every other method gets."""
    both = {}
    for name in ("fedclassavg", "lg-fedavg"):
        clients = support.population(name, training={"augment": augment})
        both[name] = next(batches(clients, 0, clients.method.phases()[0], round=1))
    batch = both["fedclassavg"]
    assert torch.equal(batch.x, both["lg-fedavg"].x)
    first, second = batch.views.unbind(1)
    assert not torch.equal(first, second)
    assert not torch.equal(first, batch.x) and not torch.equal(second, batch.x)
    assert both["lg-fedavg"].views is None


def test_received_head_is_kept_apart_from_the_trained_one() -> None:
    clients = support.population("fedclassavg")
    net = clients.new_network(0)
    message = Message({"model.head.weight": torch.ones(4, 6), "model.head.bias": torch.ones(4)})
    changed = clients.method.receive(dict(net.state_dict()), message, Knowledge(torch.tensor([1, 1, 0, 0]), 1))
    assert sorted(changed) == ["model.head.bias", "model.head.weight", "received.bias", "received.weight"]
    set_modes(net, clients.method.phases()[0])
    clients.method.loss(net, example_batch(clients, [0, 40])).mean().backward()
    assert all(parameter.grad is None for parameter in net.received.parameters())
    assert all(parameter.grad is not None for parameter in net.model.parameters())


def test_head_is_averaged_by_samples() -> None:
    """Heads of 1 and 5 from clients with 1 and 3 samples: (1·1 + 3·5) / 4 = 4, which is nobody's own."""
    method = support.new_method("fedclassavg")
    server = support.new_server(method)
    replies = [
        support.reply(client, {"model.head.weight": value * torch.ones(4, 6), "model.head.bias": value * torch.ones(4)},
                      samples=[samples])
        for client, value, samples in ((0, 1.0, 1), (1, 5.0, 3))
    ]  # fmt: skip
    method.aggregate(server, replies)
    assert server.state["model.head.weight"].unique().tolist() == [4.0]
    assert method.download(server, 0, None).tensors["model.head.bias"].tolist() == [4.0] * 4


def test_unsound_replies_are_refused() -> None:
    method = support.new_method("fedclassavg")
    weight, bias = torch.ones(4, 6), torch.ones(4)
    for tensors, samples, reason in (
        ({"model.head.weight": weight * math.nan, "model.head.bias": bias}, [1], "finite"),
        ({"model.head.weight": weight}, [1], "lacks"),
        ({"model.head.weight": weight, "model.head.bias": bias}, [0], "below 1"),
    ):
        with pytest.raises(BadMessage, match=reason):
            method.check(Message(tensors, {"samples": torch.tensor(samples)}))


def test_data_without_images_is_refused() -> None:
    method = support.new_method("fedclassavg")
    with pytest.raises(InputError, match="augmented views of an image.*lg-fedavg"):
        type(method)(method.config, dataclasses.replace(method.task, input_shape=(36,)), method.training)


def test_stacked_clients_get_their_own_values() -> None:
    parity.assert_vmap_agrees(support.population("fedclassavg"))


def test_engines_agree(tmp_path) -> None:
    parity.assert_engines_agree(tmp_path, "fedclassavg")


def test_clients_share_no_storage(tmp_path) -> None:
    parity.assert_nothing_shared(tmp_path, "fedclassavg")


def test_it_learns(tmp_path) -> None:
    """On images whose brightest colour tells the class: flips and crops would hide a bright corner."""
    generator = torch.Generator().manual_seed(7)
    labels = torch.arange(4).repeat_interleave(30)
    images = torch.randint(0, 120, (120, 4, 8, 8), generator=generator, dtype=torch.uint8)
    images[torch.arange(120), labels] += 130
    coloured = Dataset("coloured", images, labels, 4, (0.5,) * 4, (0.25,) * 4)
    run = support.federation(tmp_path, "fedclassavg", rounds=8, lr=0.05, dataset=coloured)
    assert run.run()["accuracy_final"] > 0.9


@pytest.mark.parametrize(("classes", "floats"), [(10, 5_010), (100, 50_100)])
def test_traffic_is_the_closed_form(tmp_path, classes: int, floats: int) -> None:
    assert support.traffic(tmp_path, "fedclassavg", classes) == (floats, floats)
