"""FedProto, with numbers worked out by hand."""

import math

import pytest
import torch

from polyfed.errors import BadMessage
from polyfed.message import Message
from polyfed.methods.base import Batch, Knowledge
from polyfed.methods.parts.statistics import class_means
from tests import support


def test_global_prototype_is_the_mean_of_its_holders() -> None:
    """Two clients hold class 1 with prototypes 1 and 3: the mean is 2, not 1 as with the paper's double division.

    Weighted by 1 and 3 samples it is (1·1 + 3·3) / 4 = 2.5. Class 0 has one holder: its own prototype.
    """
    ones = torch.ones(1, support.FEATURES)
    first = support.reply(0, {"prototypes": ones}, labels=[1], counts=[1])
    second = support.reply(1, {"prototypes": torch.cat([7 * ones, 3 * ones])}, labels=[0, 1], counts=[5, 3])
    for mean, expected in (("plain", 2.0), ("samples", 2.5)):
        method = support.new_method({"name": "fedproto", "mean": mean})
        server = support.new_server(method)
        method.aggregate(server, [first, second])
        assert server.state["prototypes.vectors"][1].tolist() == [expected] * support.FEATURES
        assert server.state["prototypes.vectors"][0].tolist() == [7.0] * support.FEATURES
        assert server.state["prototypes.known"].tolist() == [True, True, False, False]


def test_class_missing_this_round_keeps_its_prototype() -> None:
    method = support.new_method("fedproto")
    server = support.new_server(method)
    ones = torch.ones(1, support.FEATURES)
    method.aggregate(server, [support.reply(0, {"prototypes": 5 * ones}, labels=[2])])
    method.aggregate(server, [support.reply(1, {"prototypes": ones}, labels=[0])])
    message = method.download(server, 0, None)
    assert message.metadata["labels"].tolist() == [0, 2]
    assert message.tensors["prototypes"][:, 0].tolist() == [1.0, 5.0]


def test_nothing_is_sent_before_the_first_prototypes() -> None:
    method = support.new_method("fedproto")
    assert method.download(support.new_server(method), 0, None).nbytes == 0


@pytest.mark.parametrize(("distance", "expected"), [("euclidean", 0.1 * 5.0), ("mse", 10.0 * 25 / support.FEATURES)])
def test_loss_adds_the_distance_to_the_known_prototype(distance: str, expected: float) -> None:
    """A prototype away from the features by (3, 4, 0, …): Euclid 5, mean square 25 / K; default weights .1 and 10."""
    clients = support.population({"name": "fedproto", "distance": distance})
    net = clients.new_network(0)
    x, y = clients.dataset.batch(torch.tensor([0, 40]))
    away = torch.zeros(support.FEATURES)
    away[:2] = torch.tensor([3.0, 4.0])
    plain = clients.method.loss(net, Batch(x, y))
    net.prototypes.vectors[int(y[0])] = net.features(x)[0].detach() + away
    net.prototypes.known[int(y[0])] = True
    difference = clients.method.loss(net, Batch(x, y)) - plain
    assert difference.tolist() == pytest.approx([expected, 0.0], abs=1e-5)


def test_distance_zero_has_a_finite_gradient() -> None:
    clients = support.population("fedproto")
    net = clients.new_network(0)
    x, y = clients.dataset.batch(torch.tensor([0]))
    net.prototypes.vectors[int(y)] = net.features(x)[0].detach()
    net.prototypes.known[int(y)] = True
    clients.method.loss(net, Batch(x, y)).sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in net.parameters() if p.grad is not None)


def test_prediction_takes_the_nearest_known_prototype() -> None:
    clients = support.population("fedproto")
    net = clients.new_network(0)
    x, _ = clients.dataset.batch(torch.tensor([0, 1]))
    before = clients.method.predict(net, x)
    assert torch.equal(before["prototypes"], before["classifier"])  # nothing received yet
    net.prototypes.vectors[3] = net.features(x)[0].detach() + 0.01
    net.prototypes.vectors[1] = net.features(x)[0].detach() + 9.0
    net.prototypes.known[[1, 3]] = True
    scores = clients.method.predict(net, x)["prototypes"]
    assert scores[0].argmax() == 3
    assert scores[0, 0] == -math.inf


def test_upload_holds_exact_means_of_seen_classes_only() -> None:
    method = support.new_method("fedproto")
    features = torch.tensor([[1.0], [3.0], [10.0]]).expand(3, support.FEATURES)
    own = class_means(features, torch.tensor([2, 2, 0]), 4)
    message = method.upload(support.trained([1, 0, 2, 0], statistics=own))
    assert message.tensors["prototypes"][:, 0].tolist() == [10.0, 2.0]
    assert message.metadata["labels"].tolist() == [0, 2]
    assert "counts" not in message.metadata  # class counts stay at home unless the mean needs them
    method.check(message)


def test_replies_with_unsound_prototypes_are_refused() -> None:
    method = support.new_method("fedproto")
    good = torch.ones(1, support.FEATURES)
    for tensors, labels, reason in (
        (good * math.nan, [0], "finite"),
        (good, [4], "outside"),
        (torch.ones(1, 3), [0], "shape"),
        (torch.ones(2, support.FEATURES), [1, 1], "rising"),
    ):
        with pytest.raises(BadMessage, match=reason):
            method.check(Message({"prototypes": tensors}, {"labels": torch.tensor(labels)}))


def test_received_prototypes_are_kept_as_copies() -> None:
    clients = support.population("fedproto")
    state = dict(clients.new_network(0).state_dict())
    message = Message({"prototypes": torch.ones(1, support.FEATURES)}, {"labels": torch.tensor([2])})
    changed = clients.method.receive(state, message, Knowledge(torch.tensor([1, 0, 1, 0]), 1))
    message.tensors["prototypes"].zero_()
    assert changed["prototypes.vectors"][2].tolist() == [1.0] * support.FEATURES
    assert changed["prototypes.known"].tolist() == [False, False, True, False]


@pytest.mark.parametrize(("classes", "expected"), [(10, (1_000, 5_000)), (100, (5_000, 50_000))])
def test_traffic_is_the_closed_form(tmp_path, classes: int, expected: tuple[int, int]) -> None:
    assert support.traffic(tmp_path, "fedproto", classes) == expected
