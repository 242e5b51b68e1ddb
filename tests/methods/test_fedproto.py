"""FedProto, with numbers worked out by hand."""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from polyfed.engines import SequentialEngine
from polyfed.errors import BadMessage, InputError
from polyfed.evaluation import Evaluation
from polyfed.message import Message, State
from polyfed.methods.base import Batch, Knowledge, Reply
from polyfed.methods.fedproto import FedProto
from polyfed.methods.parts.statistics import class_means
from polyfed.methods.parts.tools import distance
from tests import support
from tests.methods import parity


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


@pytest.mark.parametrize(("distance", "expected"), [("euclidean", 0.1 * 2.5), ("mse", 10.0 * 12.5 / support.FEATURES)])
def test_class_form_measures_class_means(distance: str, expected: float) -> None:
    """Two samples of class 0, whose mean feature is (3, 4, 0, …) from the prototype; one of class 1, which has none.

    The mean over the batch's two classes is (5 + 0) / 2, or (25 / K + 0) / 2 for the mean square, for every sample. A
    fourth, padded sample of class 0 would move the mean: it doesn't count.
    """
    clients = support.population({"name": "fedproto", "distance": distance, "penalty": "classes"})
    net = clients.new_network(0)
    x, y = clients.dataset.batch(torch.tensor([0, 1, 40, 7]))
    assert y.tolist() == [0, 0, 1, 0]
    mask = torch.tensor([True, True, True, False])
    plain = clients.method.loss(net, Batch(x, y, mask))
    net.prototypes.vectors[0] = net.features(x)[:2].detach().mean(0)
    net.prototypes.vectors[0, :2] += torch.tensor([3.0, 4.0])
    net.prototypes.known[0] = True
    difference = clients.method.loss(net, Batch(x, y, mask)) - plain
    assert difference.tolist() == pytest.approx([expected] * 4, abs=1e-5)
    alone = clients.method.loss(net, Batch(x[:3], y[:3])) - plain[:3]
    assert alone.tolist() == pytest.approx([expected] * 3, abs=1e-5)
    nothing = clients.method.loss(net, Batch(x, y, torch.zeros(4, dtype=torch.bool))) - plain
    assert nothing.tolist() == pytest.approx([0.0] * 4)


@pytest.mark.parametrize("penalty", ["samples", "classes"])
def test_distance_zero_has_a_finite_gradient(penalty: str) -> None:
    clients = support.population({"name": "fedproto", "penalty": penalty})
    net = clients.new_network(0)
    x, y = clients.dataset.batch(torch.tensor([0]))
    net.prototypes.vectors[int(y)] = net.features(x)[0].detach()
    net.prototypes.known[int(y)] = True
    clients.method.loss(net, Batch(x, y)).sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in net.parameters() if p.grad is not None)


def test_rounding_gives_no_direction() -> None:
    """The prototype of a class's only sample is its feature, but for the rounding of another batch: nothing to pull.

    A gradient of length 1 in the direction of rounding moved weights by up to 0.008, differently on each engine.
    """
    prototypes = torch.tensor([[3.0, 4.0], [3.0, 4.0]])
    features = torch.tensor([[3.0, 4.0 + 1e-6], [3.0, 4.01]], requires_grad=True)
    away = distance(features, prototypes)
    away.sum().backward()
    assert away.tolist() == pytest.approx([0.0, 0.01], abs=1e-5) and features.grad is not None
    assert features.grad[0].tolist() == [0.0, 0.0] and features.grad[1].tolist() == pytest.approx([0.0, 1.0])


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


def test_own_prototypes_are_those_of_the_clients_classes() -> None:
    """The nearest prototype is that of class 1, but the client has classes 0 and 3, of which 3 is nearer.

    Without a prototype of an own class the classifier predicts.
    """
    clients = support.population("fedproto")
    net = clients.new_network(0)
    x, _ = clients.dataset.batch(torch.tensor([0]))
    changed = clients.method.receive(dict(net.state_dict()), Message(), Knowledge(torch.tensor([2, 0, 0, 5]), 1))
    assert {name: tensor.tolist() for name, tensor in changed.items()} == {"prototypes.own": [True, False, False, True]}
    net.prototypes.own.copy_(changed["prototypes.own"])
    for label, away in ((0, 3.0), (1, 0.01), (2, 5.0), (3, 2.0)):
        net.prototypes.vectors[label] = net.features(x)[0].detach() + away
    net.prototypes.known[1] = True
    scores = clients.method.predict(net, x)
    assert torch.equal(scores["own-prototypes"], scores["classifier"])
    net.prototypes.known[:] = True
    scores = clients.method.predict(net, x)
    assert list(scores) == ["prototypes", "classifier", "own-prototypes"]
    assert scores["prototypes"].argmax() == 1
    assert scores["own-prototypes"].argmax() == 3
    assert scores["own-prototypes"][0, [1, 2]].tolist() == [-math.inf] * 2


@pytest.mark.parametrize("participation", [0.5, 1.0])
def test_clients_that_sit_out_are_scored_with_the_rounds_prototypes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, participation: float
) -> None:
    """Otherwise they would be scored with prototypes from when they last took part. Classifiers are not touched."""
    tables = []
    for fresh in (("prototypes",), ()):
        monkeypatch.setattr(FedProto, "kept_fresh", fresh)
        settings = {"participation": participation, "clients": 6, "rounds": 6, "lr": 0.3, "seed": 1}
        run = support.federation(tmp_path / str(len(fresh)), "fedproto", Asked, **settings)
        run.run()
        tables.append(run.folder.evaluations().set_index(["rule", "part", "round"]).accuracy_mean)
        costs = run.folder.rounds().download_floats
        for number, (trained, scored) in run.engine.asked.items() if fresh and participation < 1 else ():
            assert sorted({*trained, *scored}) == list(range(6)) and len(scored) == 3
            expected, *_ = trained.values()
            for message in scored.values():
                assert message.tensors.keys() == expected.tensors.keys()
                assert all(torch.equal(message.tensors[name], tensor) for name, tensor in expected.tensors.items())
            assert costs[number - 1] == sum(message.floats for message in trained.values())
    new, old = tables
    assert new.loc["classifier"].equals(old.loc["classifier"])
    assert new.loc["prototypes"].equals(old.loc["prototypes"]) == (participation == 1)


class Asked(SequentialEngine):
    """Remembers what it was given to train and to evaluate with, round by round."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.asked: dict[int, tuple[Mapping[int, Message], Mapping[int, Message]]] = {}

    def train(self, round: int, downloads: Mapping[int, Message], *rest: Any, **settings: Any) -> list[Reply]:
        self.asked[round] = downloads, self.asked.get(round, ({}, {}))[1]
        return super().train(round, downloads, *rest, **settings)

    def evaluate(
        self, clients: Iterable[int], round: int, downloads: Mapping[int, Message] | None = None
    ) -> dict[int, Evaluation]:
        if downloads:
            self.asked[round] = {}, downloads
        return super().evaluate(clients, round, downloads)


class Careless(FedProto):
    """Its download changes the head too, so it must not name anything as kept fresh."""

    name = "careless"

    def receive(self, state: Mapping[str, Tensor], message: Message, client: Knowledge) -> State:
        return {**super().receive(state, message, client), "model.head.bias": torch.zeros(4)}


def test_what_is_kept_fresh_is_all_that_is_received(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"careless names prototypes.*receive changes model.head.bias too"):
        support.federation(tmp_path, Careless).run()


@pytest.mark.parametrize("options", [{}, {"penalty": "classes"}, {"penalty": "classes", "distance": "mse"}])
def test_stacked_clients_get_their_own_values(options: dict[str, str]) -> None:
    parity.assert_vmap_agrees(support.population({"name": "fedproto", **options}))


def test_engines_agree(tmp_path: Path) -> None:
    parity.assert_engines_agree(tmp_path, {"name": "fedproto", "penalty": "classes"}, participation=0.5)


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
        (torch.ones(2, support.FEATURES), [1, 1], "ascending"),
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
