"""FedORGP, with numbers worked out by hand."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from polyfed.errors import BadMessage, DivergedError
from polyfed.message import Message
from polyfed.methods.base import Batch, Reply
from polyfed.methods.fedorgp import orthogonality_loss
from polyfed.methods.parts.tools import ClassVectors, cosine
from tests import support
from tests.methods import parity


def on_axes(client: int, labels: list[int], scale: float = 1.0) -> Reply:
    """A client whose prototype of class c points along axis c."""
    return support.reply(client, {"prototypes": scale * torch.eye(support.FEATURES)[labels]}, labels=labels)


@pytest.mark.parametrize(("orthogonality", "expected"), [(1.0, 1.1), (10.0, 7.4), (0.0, 0.4)])
def test_loss_of_the_server_by_hand(orthogonality: float, expected: float) -> None:
    """A client prototype (3, 4) of class 0; global ones (1, 0), (0, 2), (−1, 0): cosines 0.6, 0.8, −0.6.

    1 − 0.6, and the mean of |0.8| and |−0.6| = 0.7: 0.4 + 0.7 = 1.1, or 0.4 + 7 = 7.4 with weight 10.
    """
    prototypes = torch.tensor([[1.0, 0.0], [0.0, 2.0], [-1.0, 0.0]])
    found = orthogonality_loss(prototypes, torch.tensor([[3.0, 4.0]]), torch.tensor([0]), 1.0, orthogonality)
    assert found.tolist() == pytest.approx([expected])


def test_gradient_of_the_server_by_hand() -> None:
    """The gradient of a cosine is what of (0.6, 0.8) is across the prototype, divided by its length.

    Of the three above: (0, 0.8), (0.6, 0) / 2 = (0.3, 0) and (0, 0.8). Their factors are −1, 10 / 2 and, because
    −0.6 is negative, −10 / 2: (0, −0.8), (1.5, 0), (0, −4).
    """
    prototypes = torch.tensor([[1.0, 0.0], [0.0, 2.0], [-1.0, 0.0]], requires_grad=True)
    orthogonality_loss(prototypes, torch.tensor([[3.0, 4.0]]), torch.tensor([0]), 1.0, 10.0).sum().backward()
    assert prototypes.grad is not None
    torch.testing.assert_close(prototypes.grad, torch.tensor([[0.0, -0.8], [1.5, 0.0], [0.0, -4.0]]))


def test_weight_of_similarity_scales_the_own_term_only() -> None:
    """Twice 0.4, plus 0.7."""
    prototypes = torch.tensor([[1.0, 0.0], [0.0, 2.0], [-1.0, 0.0]])
    found = orthogonality_loss(prototypes, torch.tensor([[3.0, 4.0]]), torch.tensor([0]), 2.0, 1.0)
    assert found.tolist() == pytest.approx([1.5])


def test_a_single_class_has_no_others() -> None:
    found = orthogonality_loss(torch.tensor([[1.0, 0.0]]), torch.tensor([[3.0, 4.0]]), torch.tensor([0]), 1.0, 10.0)
    assert found.tolist() == pytest.approx([0.4])


def test_cosine_and_its_gradient_by_hand() -> None:
    """f = (3, 4) and (1, 0): 1 − cos = 0.4. The gradient of the cosine is ((1, 0) − 0.6 · (0.6, 0.8)) / 5.

    That is (0.128, −0.096). A feature of zero has cosine zero and no gradient.
    """
    features = torch.tensor([[3.0, 4.0], [0.0, 0.0], [1e-30, 0.0]], requires_grad=True)
    away = 1 - cosine(features, torch.tensor([1.0, 0.0]))
    assert away.tolist() == pytest.approx([0.4, 1.0, 1.0])
    away.sum().backward()
    assert features.grad is not None
    torch.testing.assert_close(features.grad, torch.tensor([[-0.128, 0.096], [0.0, 0.0], [0.0, 0.0]]))


class Given(torch.nn.Module):
    """Features that a test chooses."""

    def __init__(self, features: Tensor) -> None:
        super().__init__()
        self.chosen = torch.nn.Parameter(features)

    def forward(self, x: Tensor) -> Tensor:
        return self.chosen


def client_loss(features: list[float], momentum: float = 0.0, **options: Any) -> tuple[Tensor, Tensor]:
    """What the prototype (1, 0, …) of the sample's class adds to cross entropy, and the gradient of that."""
    clients = support.population({"name": "fedorgp", **options}, training={"momentum": momentum})
    net = clients.new_network(0)
    x, y = clients.dataset.batch(torch.tensor([0]))
    net.model.extractor = Given(torch.tensor([features + [0.0] * (support.FEATURES - 2)]))
    plain = clients.method.loss(net, Batch(x, y))
    net.prototypes.vectors[y, 0] = 1.0
    net.prototypes.known[y] = True
    added = clients.method.loss(net, Batch(x, y)) - plain
    added.sum().backward()
    return added.detach(), net.model.extractor.chosen.grad[0, :2]


def test_clients_loss_adds_the_turn_from_the_prototype() -> None:
    """With weight 100, 1 − 0.6 adds 40 and 100 times the gradient above; a feature of zero adds 100 and no gradient."""
    added, gradient = client_loss([3.0, 4.0], weight=100.0)
    assert added.tolist() == pytest.approx([40.0])
    assert gradient.tolist() == pytest.approx([-12.8, 9.6], abs=1e-4)
    added, gradient = client_loss([0.0, 0.0], weight=100.0)
    assert added.tolist() == pytest.approx([100.0])
    assert gradient.tolist() == pytest.approx([0.0, 0.0], abs=1e-6)


def test_the_default_weight_is_one_over_how_far_a_step_goes() -> None:
    """The tiny federation's learning rate is 0.1, so the weight is 10; at the paper's 0.01 it is 100.

    With momentum 0.75 a gradient moves a weight four times as far, so the weight is 2.5.
    """
    assert client_loss([3.0, 4.0])[0].tolist() == pytest.approx([4.0])
    assert client_loss([3.0, 4.0], momentum=0.75)[0].tolist() == pytest.approx([1.0])
    assert client_loss([3.0, 4.0], weight=0.0)[0].tolist() == pytest.approx([0.0])


def test_a_class_without_prototype_adds_nothing() -> None:
    clients = support.population("fedorgp")
    net = clients.new_network(0)
    x, y = clients.dataset.batch(torch.tensor([0, 1]))
    expected = torch.nn.functional.cross_entropy(net(x), y, reduction="none")
    torch.testing.assert_close(clients.method.loss(net, Batch(x, y)), expected)


def test_server_learns_directions() -> None:
    """Client prototypes at right angles, some uploaded twice and of different lengths: global ones take over both."""
    method = support.new_method({"name": "fedorgp", "server_lr": 0.1, "server_epochs": 300, "server_batch_size": 3})
    server = support.new_server(method)
    method.aggregate(server, [on_axes(0, [0, 1]), on_axes(1, [1, 2, 3], 5.0)])
    cosines = cosine(server.state["prototypes.vectors"][:, None], torch.eye(support.FEATURES)[:4])
    assert cosines.diag().min() > 0.95
    assert (cosines - cosines.diag().diag()).abs().max() < 0.1


def test_nothing_is_sent_before_the_first_prototypes_and_then_all() -> None:
    method = support.new_method("fedorgp")
    server = support.new_server(method)
    assert method.download(server, 0, None).nbytes == 0
    method.aggregate(server, [on_axes(0, [])])
    assert method.download(server, 0, None).nbytes == 0
    method.aggregate(server, [on_axes(0, [1])])
    sent = method.download(server, 0, None)
    assert sent.metadata["labels"].tolist() == [0, 1, 2, 3]
    torch.testing.assert_close(sent.tensors["prototypes"], server.modules["prototypes"]().detach())


def test_only_uploaded_classes_are_sent_if_asked() -> None:
    method = support.new_method({"name": "fedorgp", "broadcast": "uploaded"})
    server = support.new_server(method)
    method.aggregate(server, [on_axes(0, [0])])
    method.aggregate(server, [on_axes(1, [2])])
    assert method.download(server, 0, None).metadata["labels"].tolist() == [0, 2]


def test_a_class_that_nobody_uploads_is_only_turned_away() -> None:
    """In one step on class 0, the similarity weighs nothing for the others: their |cosine| to its prototype falls."""
    method = support.new_method({"name": "fedorgp", "server_lr": 0.05, "server_epochs": 20})
    server = support.new_server(method)
    axis = torch.eye(support.FEATURES)[0]
    before = cosine(server.modules["prototypes"]().detach(), axis)
    method.aggregate(server, [on_axes(0, [0])])
    after = cosine(server.state["prototypes.vectors"], axis)
    assert after[0] > before[0]
    assert after[1:].abs().mean() < before[1:].abs().mean()


def test_prediction_is_by_the_classifier_then_by_the_direction() -> None:
    """The feature's own direction, very long, is its nearest prototype by cosine; a short one elsewhere is not."""
    clients = support.population("fedorgp")
    net = clients.new_network(0)
    x, _ = clients.dataset.batch(torch.tensor([0]))
    before = clients.method.predict(net, x)
    assert list(before) == ["classifier", "prototypes", "own-prototypes"]
    assert torch.equal(before["prototypes"], before["classifier"])  # nothing received yet
    feature = net.features(x)[0].detach()
    net.prototypes.vectors[:] = feature * torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0, 0.0])
    net.prototypes.vectors[2] = 1000 * feature
    net.prototypes.known[:3] = True
    scores = clients.method.predict(net, x)["prototypes"][0]
    assert scores.argmax() == 2 and scores[3] == -torch.inf


def test_prototypes_that_diverge_are_an_error() -> None:
    method = support.new_method({"name": "fedorgp", "server_epochs": 40, "server_lr": 1e30})
    with pytest.raises(DivergedError, match=r"server_lr=1e\+29"):
        method.aggregate(support.new_server(method), [on_axes(0, [0, 1])])


def test_unsound_replies_are_refused() -> None:
    method = support.new_method("fedorgp")
    with pytest.raises(BadMessage, match="finite"):
        method.check(
            Message({"prototypes": torch.full((1, support.FEATURES), torch.nan)}, {"labels": torch.tensor([0])})
        )


def test_stacked_clients_get_their_own_values() -> None:
    parity.assert_vmap_agrees(support.population("fedorgp"))


def test_engines_agree(tmp_path: Path) -> None:
    parity.assert_engines_agree(tmp_path, {"name": "fedorgp", "broadcast": "uploaded"}, participation=0.75)


def test_clients_share_no_storage(tmp_path: Path) -> None:
    parity.assert_nothing_shared(tmp_path, "fedorgp")


def test_it_learns(tmp_path: Path) -> None:
    assert support.federation(tmp_path, "fedorgp", rounds=8).run()["accuracy_best"] > 0.9


@pytest.mark.parametrize(("classes", "expected"), [(10, (1_000, 5_000)), (100, (5_000, 50_000))])
def test_traffic_is_the_closed_form(tmp_path: Path, classes: int, expected: tuple[int, int]) -> None:
    assert support.traffic(tmp_path, "fedorgp", classes) == expected


def test_features_without_a_direction_are_equally_far_from_all_prototypes() -> None:
    """Prototypes have length one up to rounding, which would decide differently in each engine."""
    held = ClassVectors(6, 5)
    held.vectors[:] = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    held.vectors[4] = 0  # as far as nothing
    held.known[:5] = True
    scores = held.closeness(torch.zeros(2, 5), directions=True)
    assert scores.tolist() == [[-1, -1, -1, -1, 0, -math.inf]] * 2
