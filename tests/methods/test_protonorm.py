"""ProtoNorm, with numbers worked out by hand."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from polyfed.errors import BadMessage
from polyfed.message import Message
from polyfed.methods import protonorm
from polyfed.methods.base import Batch, Knowledge, Reply
from polyfed.methods.protonorm import repulsion, spread
from tests import support
from tests.methods import parity


def sent(client: int, vectors: list[list[float]], labels: list[int]) -> Reply:
    """A client's prototypes by their first values; the rest are zero."""
    padded = torch.zeros(len(vectors), support.FEATURES)
    for row, values in zip(padded, vectors, strict=True):
        row[: len(values)] = torch.tensor(values)
    return Reply(client, Message({"prototypes": padded}, {"labels": torch.tensor(labels, dtype=torch.int64)}))


def simplex(count: int) -> Tensor:
    """Unit vectors with the same angle between all pairs: the corners of a simplex."""
    centred = torch.eye(count, dtype=torch.float64) - 1 / count
    return centred / centred.norm(dim=1, keepdim=True)


def test_first_iteration_by_hand() -> None:
    """(1, 0) and (0, 1) are √2 apart: F = (1, −1) / 2, of length 0.707107.

    A step of 0.1 leads to (1.05, −0.05), at length one (0.998868, −0.047565); the other point is its mirror image.
    """
    points = torch.eye(2, dtype=torch.float64)
    force = repulsion(points)
    torch.testing.assert_close(force, torch.tensor([[0.5, -0.5], [-0.5, 0.5]]).double())
    assert force.norm(dim=1).tolist() == pytest.approx([math.sqrt(0.5)] * 2)
    expected = torch.tensor([[0.998868, -0.047565], [-0.047565, 0.998868]]).double()
    torch.testing.assert_close(spread(points, 1), expected, atol=1e-6, rtol=0)


def test_two_points_end_opposite_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """After 28 iterations, when the mean force has not changed ten times in a row; the force is then 1 / 2."""
    asked: list[Tensor] = []
    monkeypatch.setattr(protonorm, "repulsion", lambda points: asked.append(points) or repulsion(points))
    points = spread(torch.eye(2, dtype=torch.float64))
    assert len(asked) == 28
    assert float(points[0] @ points[1]) == pytest.approx(-1, abs=1e-6)
    assert repulsion(points).norm(dim=1).tolist() == pytest.approx([0.5, 0.5])


@pytest.mark.parametrize(("count", "force"), [(3, 1.0), (10, 4.5), (100, 49.5)])
def test_a_simplex_stays_as_it_is(count: int, force: float) -> None:
    """All others together push a corner straight outwards, with (C − 1) / 2."""
    points = simplex(count)
    assert repulsion(points).norm(dim=1).tolist() == pytest.approx([force] * count)
    torch.testing.assert_close(spread(points), points)


def test_positive_directions_are_spread_until_the_mean_force_settles(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 random positive vectors have cosines near 0.75. The force hardly changes, so it stops after 11 + 10."""
    asked: list[Tensor] = []
    monkeypatch.setattr(protonorm, "repulsion", lambda points: asked.append(points) or repulsion(points))
    given = torch.rand(100, 500, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = spread(given / given.norm(dim=1, keepdim=True))
    assert len(asked) == 21
    cosines = (found @ found.T)[~torch.eye(100, dtype=torch.bool)]
    assert float(cosines.min()) > -0.2 and float(cosines.max()) < 0.2


def test_prototypes_are_means_moved_apart_and_lengthened() -> None:
    """Class 0 has the mean (3, 0) of two clients, class 1 (0, 2): opposite ends of the diagonal, 80 long."""
    method = support.new_method("protonorm")
    server = support.new_server(method)
    method.aggregate(server, [sent(0, [[1.0]], [0]), sent(1, [[5.0], [0.0, 2.0]], [0, 1])])
    assert server.state["means.vectors"][:2, :2].tolist() == [[3.0, 0.0], [0.0, 2.0]]
    end = 80 / math.sqrt(2)
    vectors = method.download(server, 0, None).tensors["prototypes"]
    torch.testing.assert_close(vectors[:, :2], torch.tensor([[end, -end], [-end, end]]), atol=0.02, rtol=0)
    assert not vectors[:, 2:].any()


def test_without_alignment_directions_stay() -> None:
    method = support.new_method({"name": "protonorm", "align": False, "scale": 10.0})
    server = support.new_server(method)
    method.aggregate(server, [sent(0, [[3.0, 4.0], [0.0, 2.0]], [1, 2])])
    message = method.download(server, 0, None)
    assert message.metadata["labels"].tolist() == [1, 2]
    assert message.tensors["prototypes"][:, :2].flatten().tolist() == pytest.approx([6.0, 8.0, 0.0, 10.0])


def test_class_missing_this_round_keeps_its_mean_and_still_repels() -> None:
    """Class 2 was uploaded once, along the first axis; a round later class 0 comes along the second: both move."""
    method = support.new_method({"name": "protonorm", "scale": 1.0})
    server = support.new_server(method)
    method.aggregate(server, [sent(0, [[7.0]], [2])])
    assert method.download(server, 0, None).tensors["prototypes"][0, :2].tolist() == pytest.approx([1.0, 0.0])
    method.aggregate(server, [sent(1, [[0.0, 1.0]], [0])])
    message = method.download(server, 0, None)
    assert message.metadata["labels"].tolist() == [0, 2]
    one, other = message.tensors["prototypes"]
    assert float(one @ other) == pytest.approx(-1, abs=1e-5)
    assert server.state["means.vectors"][2, 0] == 7.0


@pytest.mark.parametrize("vectors", [[[1.0], [2.0]], [[0.0], [1.0]], [[0.0], [0.0]]])
def test_equal_or_missing_directions_are_told_apart(vectors: list[list[float]]) -> None:
    """No force acts between equal directions, and zero has none: a little noise, the same in every repetition."""
    method = support.new_method("protonorm")
    found = []
    for _ in range(2):
        server = support.new_server(method)
        method.aggregate(server, [sent(0, vectors, [0, 3])])
        found.append(method.download(server, 0, None).tensors["prototypes"])
    assert torch.equal(found[0], found[1])
    assert found[0].norm(dim=1).tolist() == pytest.approx([80.0, 80.0], rel=1e-5)
    assert float(found[0][0] @ found[0][1]) < -6000  # nearly opposite: −80²


def test_noise_reaches_only_those_that_need_it() -> None:
    method = support.new_method({"name": "protonorm", "align": False, "scale": 1.0})
    server = support.new_server(method)
    method.aggregate(server, [sent(0, [[0.0], [3.0], [6.0]], [0, 1, 2])])
    vectors = method.download(server, 0, None).tensors["prototypes"]
    assert float(vectors[0].norm()) == pytest.approx(1.0)
    assert vectors[1:, 0].tolist() == [1.0, 1.0] and not vectors[1:, 1:].any()


def test_nothing_is_sent_before_the_first_prototypes() -> None:
    method = support.new_method("protonorm")
    server = support.new_server(method)
    assert method.download(server, 0, None).nbytes == 0
    method.aggregate(server, [sent(0, [], [])])
    assert method.download(server, 0, None).nbytes == 0


def added(momentum: float = 0.0, **options: object) -> float:
    """What a prototype that differs from the features by (3, 4, 0, …) adds to the loss; its mean square is 25 / K."""
    clients = support.population({"name": "protonorm", **options}, training={"momentum": momentum})
    net = clients.new_network(0)
    x, y = clients.dataset.batch(torch.tensor([0]))
    plain = clients.method.loss(net, Batch(x, y))
    away = torch.tensor([3.0, 4.0] + [0.0] * (support.FEATURES - 2))
    message = Message({"prototypes": net.features(x).detach() + away}, {"labels": y})
    for name, tensor in clients.method.receive(dict(net.state_dict()), message, Knowledge(torch.ones(4), 2)).items():
        net.get_buffer(name).copy_(tensor)
    return float(clients.method.loss(net, Batch(x, y)) - plain)


def test_clients_loss_adds_the_mean_square() -> None:
    """With weight 10. By default the weight is 0.1 divided by the tiny federation's learning rate of 0.1: 1.

    With momentum 0.75 it is a quarter of that.
    """
    assert added(weight=10.0) == pytest.approx(10 * 25 / support.FEATURES, rel=1e-5)
    assert added() == pytest.approx(25 / support.FEATURES, rel=1e-5)
    assert added(momentum=0.75) == pytest.approx(25 / 4 / support.FEATURES, rel=1e-5)


def test_mean_square_by_hand() -> None:
    """f = (3, 4) and the prototype 10 · (0.6, 0.8) = (6, 8): (9 + 16) / 2 = 12.5, with weight 10: 125."""
    clients = support.population({"name": "protonorm", "weight": 10.0})
    net = clients.new_network(0)
    net.prototypes.vectors = 10 * torch.tensor([[0.6, 0.8]])
    net.prototypes.known = torch.tensor([True])
    features = torch.tensor([[3.0, 4.0]])
    pulled = clients.method.pull(net, features, Batch(features, torch.tensor([0])))
    assert pulled.tolist() == pytest.approx([125.0])


def test_growing_to_the_prototypes_length_is_not_unusual_but_more_is() -> None:
    method = support.new_method("protonorm")
    sizes = [
        float(method.sized(sent(0, [[value]], [0]).message)["prototypes"].max()) for value in (0.5, 79.0, -8_001.0)
    ]
    assert sizes == [80.0, 80.0, 8_001.0]


def test_unsound_replies_are_refused() -> None:
    method = support.new_method("protonorm")
    with pytest.raises(BadMessage, match="finite"):
        method.check(sent(0, [[math.inf]], [0]).message)


def test_stacked_clients_get_their_own_values() -> None:
    parity.assert_vmap_agrees(support.population("protonorm"))


@pytest.mark.parametrize("align", [True, False])
def test_engines_agree(tmp_path: Path, align: bool) -> None:
    parity.assert_engines_agree(tmp_path, {"name": "protonorm", "align": align, "scale": 5.0}, participation=0.75)


def test_clients_share_no_storage(tmp_path: Path) -> None:
    parity.assert_nothing_shared(tmp_path, "protonorm")


def test_it_learns(tmp_path: Path) -> None:
    """Six features are few, and the tiny networks' are never negative: shorter prototypes than those of the code."""
    run = support.federation(tmp_path, {"name": "protonorm", "scale": 3.0}, rounds=8)
    assert run.run()["accuracy_best"] > 0.8  # of four classes, of which each client knows two


@pytest.mark.parametrize(("classes", "expected"), [(10, (1_000, 5_000)), (100, (5_000, 50_000))])
def test_traffic_is_the_closed_form(tmp_path: Path, classes: int, expected: tuple[int, int]) -> None:
    assert support.traffic(tmp_path, {"name": "protonorm", "weight": 0.01}, classes) == expected
