"""FedTGP, with numbers worked out by hand."""

import math

import pytest
import torch

from polyfed.errors import BadMessage, DivergedError, InputError
from polyfed.message import Message
from polyfed.methods.base import Batch, Knowledge, Reply
from polyfed.methods.fedtgp import contrastive_loss
from polyfed.methods.parts.statistics import class_means
from tests import support
from tests.methods import parity

QUICK = {"name": "fedtgp", "server_epochs": 5}


def on_axes(client: int, labels: list[int], scale: float = 1.0) -> Reply:
    """A client whose prototype of class c points along axis c."""
    return support.reply(client, {"prototypes": scale * torch.eye(support.FEATURES)[labels]}, labels=labels)


def corners() -> tuple[torch.Tensor, torch.Tensor]:
    """Class centres A (0, 0), B (3, 0), C (0, 4); class 0 (A) is the mean of two clients' prototypes."""
    vectors = torch.zeros(4, support.FEATURES)
    vectors[:, :2] = torch.tensor([[-1.0, 2.0], [1.0, -2.0], [3.0, 0.0], [0.0, 4.0]])
    return vectors, torch.tensor([0, 0, 1, 3])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"margin": "max-pair"}, 5.0),
        ({"margin": "max-min"}, 4.0),
        ({"margin": "max-pair", "threshold": 4.5}, 4.5),
        ({"margin": "max-min", "threshold": 4.5}, 4.0),
        ({"margin": "fixed", "threshold": 7.0}, 7.0),
        ({"margin": "none"}, 0.0),
    ],
)
def test_margin_of_three_centres(options: dict, expected: float) -> None:
    """AB = 3, AC = 4, BC = 5: the largest is 5; the nearest neighbours are at 3, 3 and 4, of which 4 is the largest."""
    method = support.new_method({"name": "fedtgp", **options})
    assert float(method.margin(*corners())) == pytest.approx(expected)


@pytest.mark.parametrize("margin", ["max-pair", "max-min"])
def test_margin_of_a_single_class_is_the_threshold(margin: str) -> None:
    method = support.new_method({"name": "fedtgp", "margin": margin})
    assert float(method.margin(torch.ones(2, support.FEATURES), torch.tensor([2, 2]))) == 100.0
    server = support.new_server(method)
    method.aggregate(server, [on_axes(0, [2])])
    assert torch.isfinite(server.state["prototypes.vectors"]).all()


def test_loss_by_hand() -> None:
    """A client prototype at 0 of class 0; global prototypes at distance 1 (own) and 3.

    Without margin the logits are −1 and −3: log(1 + e⁻²) = 0.126928. With margin 2 they are −3 and −3: log 2.
    """
    prototypes, vector = torch.tensor([[1.0, 0.0], [0.0, 3.0]]), torch.zeros(1, 2)
    for margin, expected in ((0.0, math.log1p(math.exp(-2))), (2.0, math.log(2))):
        found = contrastive_loss(prototypes, vector, torch.tensor([0]), torch.tensor(margin))
        assert found.tolist() == pytest.approx([expected])


def test_one_step_without_the_network() -> None:
    """All four prototypes at distance 1 from the client's, so each class has probability ¼.

    The loss falls by ¾ per unit that the own prototype comes nearer and by ¼ per unit that another goes away: with
    learning rate 0.01 the own distance becomes 0.9925 and each other 1.0025, also of classes that nobody holds.
    """
    method = support.new_method({"name": "fedtgp", "margin": "none", "network": False, "server_epochs": 1})
    server = support.new_server(method)
    server.modules["prototypes"].vectors.data.copy_(torch.eye(4, support.FEATURES))
    method.aggregate(server, [support.reply(0, {"prototypes": torch.zeros(1, support.FEATURES)}, labels=[0])])
    sent = method.download(server, 0, None)
    assert sent.metadata["labels"].tolist() == [0, 1, 2, 3]
    expected = torch.diag(torch.tensor([0.9925, 1.0025, 1.0025, 1.0025]))
    torch.testing.assert_close(sent.tensors["prototypes"][:, :4], expected)
    assert not sent.tensors["prototypes"][:, 4:].any()


def test_gradient_is_finite_where_a_prototype_is_met() -> None:
    prototypes = torch.eye(4, support.FEATURES, requires_grad=True)
    contrastive_loss(prototypes, prototypes.detach()[:2], torch.tensor([0, 1]), torch.tensor(1.0)).sum().backward()
    assert prototypes.grad is not None and torch.isfinite(prototypes.grad).all()


@pytest.mark.parametrize("network", [True, False])
def test_server_separates_well_separated_prototypes(network: bool) -> None:
    """Client prototypes 14 apart, margin 2: the loss tends to zero, and the global prototypes come near them."""
    method = support.new_method(
        {
            "name": "fedtgp",
            "margin": "fixed",
            "threshold": 2.0,
            "server_lr": 1.0,
            "server_epochs": 300,
            "network": network,
        }
    )
    server = support.new_server(method)
    replies = [on_axes(0, [0, 1], 10.0), on_axes(1, [1, 2, 3], 11.0)]
    method.aggregate(server, replies)
    vectors = torch.cat([reply.message.tensors["prototypes"] for reply in replies])
    labels = torch.cat([reply.message.metadata["labels"] for reply in replies])
    prototypes = server.state["prototypes.vectors"]
    assert not prototypes.requires_grad
    assert float(contrastive_loss(prototypes, vectors, labels, torch.tensor(2.0)).max()) < 0.02
    distances = torch.cdist(vectors, prototypes)
    assert distances.argmin(1).tolist() == labels.tolist()
    assert float(distances.amin(1).max()) < 7


def test_training_goes_on_where_the_last_round_stopped() -> None:
    method = support.new_method(QUICK)
    server = support.new_server(method)
    before = server.modules["prototypes"].vectors.detach().clone()
    method.aggregate(server, [on_axes(0, [0, 1])])
    first = server.state["prototypes.vectors"].clone()
    server.round = 2
    method.aggregate(server, [on_axes(1, [2])])
    assert not torch.equal(before, server.modules["prototypes"].vectors)
    assert not torch.equal(first, server.state["prototypes.vectors"])
    torch.testing.assert_close(server.state["prototypes.vectors"], server.modules["prototypes"]().detach())


def test_same_round_gives_the_same_prototypes() -> None:
    """Batches of two of five client prototypes, so that order and a last batch of one count."""
    method = support.new_method({"name": "fedtgp", "server_batch_size": 2, "server_epochs": 3, "server_lr": 0.5})
    found = []
    for round in (1, 1, 2):
        server = support.new_server(method, round)
        method.aggregate(server, [on_axes(0, [0, 1], 3.0), on_axes(1, [1, 2, 3], 2.0)])
        found.append(server.state["prototypes.vectors"])
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, where steps are captured as a graph")
def test_server_on_a_gpu_gives_the_same_prototypes() -> None:
    """Batches of 3 of 5, so that an epoch has a captured step and a plain one; two rounds."""
    method = support.new_method({"name": "fedtgp", "server_batch_size": 3, "server_epochs": 120, "server_lr": 0.1})
    found = []
    for device in ("cpu", "cuda"):
        server = support.new_server(method)
        server.device = torch.device(device)
        for server.round in (1, 2):
            method.aggregate(server, [on_axes(0, [0, 1], 3.0), on_axes(1, [1, 2, 3], 4.0)])
        found.append(server.state["prototypes.vectors"])
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)


def test_compute_threads_are_left_as_they_were() -> None:
    before = torch.get_num_threads()
    method = support.new_method(QUICK)
    torch.set_num_threads(2)
    try:
        method.aggregate(support.new_server(method), [on_axes(0, [0, 1])])
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_only_uploaded_classes_are_sent_if_asked() -> None:
    method = support.new_method({**QUICK, "broadcast": "uploaded"})
    server = support.new_server(method)
    method.aggregate(server, [on_axes(0, [0])])
    assert method.download(server, 0, None).metadata["labels"].tolist() == [0]
    first = method.download(server, 0, None).tensors["prototypes"].clone()
    method.aggregate(server, [on_axes(1, [2])])
    second = method.download(server, 0, None)
    assert second.metadata["labels"].tolist() == [0, 2]
    assert not torch.equal(first[0], second.tensors["prototypes"][0])  # it is trained on, though nobody sent it again


def test_nothing_is_sent_before_the_first_prototypes() -> None:
    method = support.new_method("fedtgp")
    server = support.new_server(method)
    assert method.download(server, 0, None).nbytes == 0
    method.aggregate(server, [on_axes(0, [])])
    assert method.download(server, 0, None).nbytes == 0


def test_untrained_prototypes_are_sent_in_round_1_if_asked() -> None:
    method = support.new_method({**QUICK, "send_untrained": True})
    server = support.new_server(method)
    sent = method.download(server, 0, None)
    assert sent.metadata["labels"].tolist() == [0, 1, 2, 3]
    assert torch.equal(sent.tensors["prototypes"], server.modules["prototypes"]())
    assert not sent.tensors["prototypes"].requires_grad
    method.aggregate(server, [on_axes(0, [0])])
    assert not torch.equal(method.download(server, 0, None).tensors["prototypes"], sent.tensors["prototypes"])
    with pytest.raises(InputError, match="send_untrained.*'uploaded': leave out one"):
        support.new_method({**QUICK, "send_untrained": True, "broadcast": "uploaded"})


def test_untrained_prototypes_have_a_term_in_the_first_loss(tmp_path) -> None:
    """Clients are pulled towards them from round 1 on; the classifier's loss then has a second term."""
    losses = []
    for sent in (False, True):
        run = support.federation(tmp_path / str(sent), {**QUICK, "send_untrained": sent}, rounds=1)
        run.run()
        losses.append(float(run.folder.rounds().loss_mean[0]))
        assert int(run.folder.rounds().download_floats[0]) == (4 * 4 * support.FEATURES if sent else 0)
    assert losses[1] > losses[0]


def test_upload_tells_no_class_counts() -> None:
    method = support.new_method("fedtgp")
    features = torch.tensor([[1.0], [3.0], [10.0]]).expand(3, support.FEATURES)
    own = class_means(features, torch.tensor([2, 2, 0]), 4)
    message = method.upload(support.trained([1, 0, 2, 0], statistics=own))
    assert list(message.metadata) == ["labels"]
    assert message.tensors["prototypes"][:, 0].tolist() == [10.0, 2.0]
    method.check(message)
    with pytest.raises(BadMessage, match="unexpected"):
        method.check(Message(message.tensors, {**message.metadata, "counts": own.counts}))


@pytest.mark.parametrize(("distance", "expected"), [("euclidean", 0.1 * 5.0), ("mse", 10.0 * 25 / support.FEATURES)])
def test_client_loss_adds_the_distance_to_the_prototype(distance: str, expected: float) -> None:
    """With a prototype that differs from the features by (3, 4, 0, …)."""
    clients = support.population({"name": "fedtgp", "distance": distance})
    net = clients.new_network(0)
    x, y = clients.dataset.batch(torch.tensor([0]))
    plain = clients.method.loss(net, Batch(x, y))
    away = torch.tensor([3.0, 4.0] + [0.0] * (support.FEATURES - 2))
    message = Message({"prototypes": net.features(x).detach() + away}, {"labels": y})
    changed = clients.method.receive(dict(net.state_dict()), message, Knowledge(torch.ones(4), 2))
    for name, tensor in changed.items():
        net.get_buffer(name).copy_(tensor)
    assert (clients.method.loss(net, Batch(x, y)) - plain).tolist() == pytest.approx([expected], abs=1e-5)


def test_prediction_is_by_the_nearest_prototype_and_by_the_classifier() -> None:
    clients = support.population("fedtgp")
    net = clients.new_network(0)
    x, _ = clients.dataset.batch(torch.tensor([0, 1]))
    before = clients.method.predict(net, x)
    assert list(before) == ["prototypes", "classifier", "own-prototypes"]
    assert torch.equal(before["prototypes"], before["classifier"])  # nothing received yet
    net.prototypes.vectors += 9.0
    net.prototypes.vectors[2] = net.features(x)[0].detach()
    net.prototypes.known[:] = True
    assert clients.method.predict(net, x)["prototypes"][0].argmax() == 2


def test_prototypes_that_diverge_are_an_error() -> None:
    method = support.new_method({"name": "fedtgp", "server_epochs": 40, "server_lr": 1e12})
    with pytest.raises(DivergedError, match=r"server_lr=1e\+11"):
        method.aggregate(support.new_server(method), [on_axes(0, [0, 1], 10.0)])


def test_clients_that_diverge_are_not_the_servers_fault() -> None:
    method = support.new_method("fedtgp")
    with pytest.raises(DivergedError, match=r"clients sent values of up to 1.0e\+30.*\(--lr\)") as caught:
        method.aggregate(support.new_server(method), [on_axes(0, [0, 1], 1e30)])
    assert "server_lr" not in str(caught.value)


def test_stacked_clients_get_their_own_values() -> None:
    parity.assert_vmap_agrees(support.population(QUICK))


@pytest.mark.parametrize("options", [{}, {"send_untrained": True, "penalty": "classes"}])
def test_engines_agree(tmp_path, options: dict) -> None:
    parity.assert_engines_agree(tmp_path, {**QUICK, **options}, participation=0.75)


def test_clients_share_no_storage(tmp_path) -> None:
    parity.assert_nothing_shared(tmp_path, QUICK)


def test_it_learns(tmp_path) -> None:
    run = support.federation(tmp_path, {"name": "fedtgp", "server_epochs": 20, "server_lr": 0.3}, rounds=6, lr=0.3)
    run.run()
    table = run.folder.evaluations()
    last = table[(table["round"] == 6) & (table["part"] == "test")].set_index("rule")["accuracy_mean"]
    assert list(last.index) == ["prototypes", "classifier", "own-prototypes"]
    assert last["prototypes"] > 0.8  # of four classes, of which each client knows two
    assert last["classifier"] > 0.9
    assert last["own-prototypes"] >= last["prototypes"]  # among fewer classes, and the right one is always there


@pytest.mark.parametrize(("classes", "expected"), [(10, (1_000, 5_000)), (100, (5_000, 50_000))])
def test_traffic_is_the_closed_form(tmp_path, classes: int, expected: tuple[int, int]) -> None:
    assert support.traffic(tmp_path, {"name": "fedtgp", "server_epochs": 1}, classes) == expected
