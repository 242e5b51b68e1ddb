"""FD, with numbers worked out by hand."""

import math

import pytest
import torch
from torch import nn

from polyfed.errors import BadMessage
from polyfed.message import Message
from polyfed.methods.base import Batch, Knowledge, Reply
from polyfed.methods.parts.statistics import class_means
from tests import support
from tests.methods import parity

SOMEONE = Knowledge(torch.tensor([1, 1, 0, 0]), 2)


def sent(client: int, **rows: float) -> Reply:
    """A client's reply with constant logits for some classes: `sent(0, c1=3.0)`."""
    labels = [int(name[1:]) for name in rows]
    logits = torch.tensor(list(rows.values())).view(-1, 1).expand(len(rows), 4)
    return support.reply(client, {"logits": logits}, labels=labels)


def received(method, server, client: int) -> dict[int, float]:
    """Class → the (constant) logits that a client would receive."""
    message = method.download(server, client, None)
    if not message.tensors:
        return {}
    rows = zip(message.metadata["labels"].tolist(), message.tensors["logits"], strict=True)
    return {label: row.unique().item() for label, row in rows}


def fixed_logits(clients, logits: list[float]):
    """A network that gives these logits for every image."""
    net = clients.new_network(0)
    nn.init.zeros_(net.model.head.weight)
    net.model.head.bias.data = torch.tensor(logits)
    return net


def test_squared_difference_to_the_mean_logits() -> None:
    """Logits (0, 0, 0, 0) against (1, 2, 3, 4): (1 + 4 + 9 + 16) / 4 = 7.5, weight 1; cross entropy ln 4.

    The second sample's class has no mean logits, so it has no second term.
    """
    clients = support.population("fd")
    net = fixed_logits(clients, [0.0] * 4)
    x, y = clients.dataset.batch(torch.tensor([0, 40]))
    net.targets.vectors[int(y[0])] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    net.targets.known[int(y[0])] = True
    values, tracked = clients.method.phases()[0].loss(net, Batch(x, y))
    assert values.tolist() == pytest.approx([math.log(4) + 7.5, math.log(4)])
    assert torch.equal(tracked, net(x))


def test_cross_entropy_with_soft_targets() -> None:
    """Mean logits (ln 3, 0, 0, 0) are probabilities (3, 1, 1, 1) / 6; logits (0, 0, 0, ln 5) are (1, 1, 1, 5) / 8.

    Cross entropy −Σ p ln q = ln 8 − (1/6)·ln 5, times the weight 2, after ln 8 for the label 0. Unknown class: nothing.
    """
    clients = support.population({"name": "fd", "loss": "soft-ce", "weight": 2.0})
    net = fixed_logits(clients, [0.0, 0.0, 0.0, math.log(5)])
    x, y = clients.dataset.batch(torch.tensor([0, 40]))
    assert y.tolist() == [0, 1]
    net.targets.vectors[0, 0] = math.log(3)
    net.targets.known[0] = True
    values, _ = clients.method.phases()[0].loss(net, Batch(x, y))
    assert values.tolist() == pytest.approx([math.log(8) + 2 * (math.log(8) - math.log(5) / 6), math.log(8)])


def test_mean_over_all_who_sent_the_class() -> None:
    """Class 1: (1 + 3) / 2 = 2; class 0 has one sender: its own 7. Everyone receives both."""
    method = support.new_method({"name": "fd", "mean": "all"})
    server = support.new_server(method)
    method.aggregate(server, [sent(0, c1=1.0), sent(1, c0=7.0, c1=3.0)])
    assert [received(method, server, client) for client in range(3)] == [{0: 7.0, 1: 2.0}] * 3


def test_leave_one_out_is_the_mean_over_the_others() -> None:
    """Class 1 was sent as 1, 3 and 8 by clients 0, 1, 2: they receive (3 + 8) / 2, (1 + 8) / 2, (1 + 3) / 2.

    Class 0 has one sender, client 1: it alone does not receive it. Client 3 sent nothing and receives the mean 4.
    """
    method = support.new_method("fd")
    server = support.new_server(method)
    method.aggregate(server, [sent(0, c1=1.0), sent(1, c0=7.0, c1=3.0), sent(2, c1=8.0)])
    assert received(method, server, 0) == {0: 7.0, 1: 5.5}
    assert received(method, server, 1) == {1: 4.5}
    assert received(method, server, 2) == {0: 7.0, 1: 2.0}
    assert received(method, server, 3) == {0: 7.0, 1: 4.0}
    method.aggregate(server, [sent(0, c2=1.0)])
    assert received(method, server, 0) == {}  # nobody else sent anything


@pytest.mark.parametrize("mean", ["all", "leave-one-out"])
def test_class_missing_this_round_is_forgotten(mean: str) -> None:
    clients = support.population({"name": "fd", "mean": mean})
    method, state = clients.method, dict(clients.new_network(0).state_dict())
    server = support.new_server(method)
    for replies, known in (
        ([], [False, False, False, False]),
        ([sent(1, c0=5.0, c2=6.0)], [True, False, True, False]),
        ([sent(1, c3=2.0)], [False, False, False, True]),
    ):
        method.aggregate(server, replies)
        state |= method.receive(state, method.download(server, 0, None), SOMEONE)
        assert state["targets.known"].tolist() == known
    assert state["targets.vectors"].tolist() == [[0.0] * 4] * 3 + [[2.0] * 4]
    assert not method.receive(state, Message(), SOMEONE)["targets.known"].any()


@pytest.mark.parametrize("mean", ["all", "leave-one-out"])
def test_first_round_is_cross_entropy_alone(mean: str) -> None:
    clients = support.population({"name": "fd", "mean": mean})
    assert clients.method.download(support.new_server(clients.method), 0, None).nbytes == 0
    net = clients.new_network(0)
    x, y = clients.dataset.batch(torch.tensor([0, 40]))
    values, _ = clients.method.phases()[0].loss(net, Batch(x, y))
    torch.testing.assert_close(values, nn.functional.cross_entropy(net(x), y, reduction="none"))


def test_upload_holds_mean_logits_of_all_visits(tmp_path) -> None:
    """With a learning rate that changes nothing, two epochs of visits have the mean of the network's own logits."""
    run = support.federation(tmp_path, "fd", lr=1e-12, epochs=2, rounds=1)
    (reply,) = run.engine.train(1, {1: Message()})
    x, y = run.engine.population.dataset.batch(run.engine.population.data[1].train)
    own = class_means(run.engine.population.new_network(1)(x).detach(), y, 4)
    assert torch.equal(reply.message.metadata["labels"], own.labels)
    torch.testing.assert_close(reply.message.tensors["logits"], own.means)


def test_client_that_could_not_train_sends_no_class() -> None:
    method = support.new_method("fd")
    message = method.upload(support.trained([1, 0, 0, 0]))
    method.check(message)
    server = support.new_server(method)
    method.aggregate(server, [Reply(0, message), sent(1, c2=3.0)])
    assert received(method, server, 0) == {2: 3.0}


def test_unsound_replies_are_refused() -> None:
    method = support.new_method("fd")
    good = torch.ones(1, 4)
    for tensors, labels, reason in (
        (good * math.nan, [0], "finite"),
        (good, [4], "outside"),
        (torch.ones(1, 3), [0], "shape"),
        (torch.ones(2, 4), [1, 1], "ascending"),
    ):
        with pytest.raises(BadMessage, match=reason):
            method.check(Message({"logits": tensors}, {"labels": torch.tensor(labels)}))


@pytest.mark.parametrize("loss", ["mse", "soft-ce"])
def test_stacked_clients_get_their_own_values(loss: str) -> None:
    parity.assert_vmap_agrees(support.population({"name": "fd", "loss": loss}))


@pytest.mark.parametrize("mean", ["all", "leave-one-out"])
def test_engines_agree(tmp_path, mean: str) -> None:
    parity.assert_engines_agree(tmp_path, {"name": "fd", "mean": mean}, participation=0.5)


def test_clients_share_no_storage(tmp_path) -> None:
    parity.assert_nothing_shared(tmp_path, "fd")


@pytest.mark.parametrize("options", [{}, {"mean": "all"}, {"loss": "soft-ce"}])
def test_it_learns(tmp_path, options: dict[str, str]) -> None:
    # Logits that every client draws towards a mean of untrained ones grow slowly at first.
    assert support.federation(tmp_path, {"name": "fd", **options}, rounds=8).run()["accuracy_best"] > 0.9


@pytest.mark.parametrize(("classes", "own"), [(10, 2), (100, 10)])
def test_traffic_is_the_closed_form(tmp_path, classes: int, own: int) -> None:
    """Up C·|Cᵢ|, down C·C; with leave-one-out without the rows of the classes that only the client itself sent."""
    up, down = classes * own, classes * classes
    assert support.traffic(tmp_path / "all", {"name": "fd", "mean": "all"}, classes) == (up, down)
    assert support.traffic(tmp_path / "others", "fd", classes) == (up, down - up)


@pytest.mark.parametrize(("per_client", "expected"), [(1, 2), (2, 0)])
def test_single_owners_are_noted(tmp_path, per_client: int, expected: int) -> None:
    """Four clients with one of four classes each: nobody learns from others. It is said in the first and last round."""
    run = support.federation(tmp_path, "fd", classes_per_client=per_client, rounds=3)
    run.run()
    notes = [event for event in run.folder.events() if "trains every client alone" in str(event.get("note"))]
    assert [note["round"] for note in notes] == [1, 3][:expected]


def test_an_owner_that_comes_later_is_a_second_owner() -> None:
    """Client 1 sends class 0 in round 2, when client 0 is away: from then on nothing is to be noted."""
    method = support.new_method("fd", rounds=2)
    server = support.new_server(method)
    method.aggregate(server, [sent(0, c0=1.0, c2=1.0)])
    assert len(server.notes) == 1
    server.round = 2
    method.aggregate(server, [sent(1, c0=1.0, c1=1.0)])
    assert len(server.notes) == 1


def test_single_owners_train_as_if_alone(tmp_path) -> None:
    """With one owner per class, no weight of a client differs from Standalone's by a bit."""
    runs = [support.federation(tmp_path / name, name, classes_per_client=1, rounds=3) for name in ("fd", "standalone")]
    for run in runs:
        run.run()
    for client in range(4):
        fd, alone = (run.engine.get_state(client) for run in runs)
        assert all(torch.equal(fd[name], tensor) for name, tensor in alone.items())


def test_traffic_of_table_5_of_the_fedtgp_paper() -> None:
    """20 clients, C = 100, together 890 (client, class) pairs: Σ C·(|Cᵢ| + C) = 100·(890 + 2000) = 289 000 ≈ 0.29 M."""
    data = support.tiny_dataset()
    method = support.new_method(
        {"name": "fd", "mean": "all"}, data=type(data)("many", data.images, data.labels, 100, (0.5,), (0.25,))
    )
    sizes = [44] * 10 + [45] * 10
    held = [sorted((5 * client + i) % 100 for i in range(size)) for client, size in enumerate(sizes)]
    replies = [support.reply(i, {"logits": torch.ones(len(c), 100)}, labels=c) for i, c in enumerate(held)]
    server = support.new_server(method)
    method.aggregate(server, replies)
    up = sum(reply.message.floats for reply in replies)
    down = sum(method.download(server, client, None).floats for client in range(20))
    assert up + down == 289_000
