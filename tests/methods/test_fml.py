"""FML and the network that travels, with numbers worked out by hand."""

import math

import pytest
import torch
from torch import Tensor

from polyfed.errors import BadMessage, InputError
from polyfed.message import Message
from polyfed.methods.base import Batch, ClientNetwork
from polyfed.methods.fml import mutual_loss
from polyfed.methods.parts.tools import part_of
from tests import support
from tests.methods import parity

FAR = -40.0
"""A logit that makes a class practically impossible."""


def with_logits(net: ClientNetwork, private: list[float], shared: list[float]) -> ClientNetwork:
    """The client with heads that give these logits whatever the image is."""
    with torch.no_grad():
        for head, logits in ((net.model.head, private), (net.shared.head, shared)):
            head.weight.zero_()
            head.bias.copy_(torch.tensor(logits))
    return net


def test_each_network_learns_from_labels_and_the_other() -> None:
    """Private probabilities (1/2, 1/2), shared (3/4, 1/4), weights 1/2.

    Label 0: private ½·ln 2 + ½·0.130812 = 0.411980, shared ½·(−ln ¾) + ½·0.143841 = 0.215762, together 0.627741.
    Label 1: private the same, shared ½·ln 4 + ½·0.143841 = 0.765068, together 1.177048.
    """
    clients = support.population("fml")
    net = with_logits(clients.new_network(0), [0, 0, FAR, FAR], [math.log(3), 0, FAR, FAR])
    x, _ = clients.dataset.batch(torch.tensor([0, 40]))
    values = clients.method.loss(net, Batch(x, torch.tensor([0, 1])))
    assert values.tolist() == pytest.approx([0.627741, 1.177048], abs=1e-5)


def test_weights_are_of_the_labels() -> None:
    """private_labels 1 and shared_labels 0: ln 2 for the private network, 0.143841 for the shared one."""
    clients = support.population({"name": "fml", "private_labels": 1.0, "shared_labels": 0.0})
    net = with_logits(clients.new_network(0), [0, 0, FAR, FAR], [math.log(3), 0, FAR, FAR])
    x, _ = clients.dataset.batch(torch.tensor([0]))
    assert clients.method.loss(net, Batch(x, torch.tensor([0]))).tolist() == pytest.approx([0.836988], abs=1e-5)


def test_options_outside_their_range_are_refused() -> None:
    with pytest.raises(InputError, match=r"private_labels.*at most 1"):
        support.new_method({"name": "fml", "private_labels": 1.5})


def test_no_gradient_crosses_between_the_networks() -> None:
    clients = support.population("fml")
    net = clients.new_network(0)
    x, y = clients.dataset.batch(torch.tensor([0, 40, 80]))
    for learner, teacher in ((net.model, net.shared), (net.shared, net.model)):
        loss = mutual_loss(learner(x), teacher(x), y, 0.5).sum()
        assert set(torch.autograd.grad(loss, list(teacher.parameters()), allow_unused=True, retain_graph=True)) == {
            None
        }
        assert any(bool(g.any()) for g in torch.autograd.grad(loss, list(learner.parameters())))
    # The method's one loss gives each network the gradient of its own.
    together = torch.autograd.grad(clients.method.loss(net, Batch(x, y)).sum(), list(net.model.parameters()))
    alone = torch.autograd.grad(mutual_loss(net(x), net.shared(x), y, 0.5).sum(), list(net.model.parameters()))
    for one, other in zip(together, alone, strict=True):
        torch.testing.assert_close(one, other)


def test_shared_network_is_the_plain_mean_of_the_participants() -> None:
    """Two clients with all weights 1 and 5: the mean is 3, and the replies' own tensors stay as they are."""
    method = support.new_method("fml")
    server = support.new_server(method)
    first, second = (full(method.download(server, 0, None).tensors, value) for value in (1.0, 5.0))
    method.aggregate(server, [support.reply(0, first), support.reply(1, second)])
    assert all(bool((tensor == 3).all()) for tensor in server.state.values())
    assert all(bool((tensor == 5).all()) for tensor in second.values())


def full(tensors: dict[str, Tensor], value: float) -> dict[str, Tensor]:
    return {name: torch.full_like(tensor, value) for name, tensor in tensors.items()}


def test_batch_norm_statistics_travel_and_counters_stay(tmp_path) -> None:
    run = support.federation(tmp_path, "fml", models=(support.Normed,), rounds=1)
    before = {name: tensor.clone() for name, tensor in run.server.state.items()}
    replies = run.engine.train(1, {client: run.download(client) for client in range(4)})
    statistics = "shared.extractor.body.1.running_mean"
    for reply in replies:
        run.method.check(reply.message)
        assert statistics in reply.message.tensors
        assert not any("num_batches_tracked" in name for name in reply.message.tensors)
    run.method.aggregate(run.server, replies)
    mean = torch.stack([reply.message.tensors[statistics] for reply in replies]).mean(0)
    torch.testing.assert_close(run.server.state[statistics], mean)
    assert not torch.equal(run.server.state[statistics], before[statistics])
    assert int(run.engine.get_state(0)["shared.extractor.body.1.num_batches_tracked"]) > 0


def test_average_is_nobodys_network(tmp_path) -> None:
    run = support.federation(tmp_path, "fml", rounds=1)
    run.run()
    for client in range(4):
        own = part_of(run.engine.get_state(client), "shared")
        assert all(not torch.equal(own[name], run.server.state[name]) for name in own)


def test_server_and_clients_start_from_the_same_shared_network() -> None:
    clients = support.population("fml", start="client")
    server = support.new_server(clients.method)
    for client in range(4):
        own = part_of(clients.new_network(client).state_dict(), "shared")
        assert own.keys() == server.state.keys()
        assert all(torch.equal(own[name], server.state[name]) for name in own)


def test_auxiliary_can_be_chosen() -> None:
    clients = support.population("fml", auxiliary="tests.support:Wide")
    assert clients.new_network(1).shared.extractor.body[1].out_features == 16
    assert clients.new_network(1).model.extractor.body[1].out_features == 8


def test_unsound_replies_are_refused() -> None:
    method = support.new_method("fml")
    good = dict(method.download(support.new_server(method), 0, None).tensors)
    method.check(Message(good))
    bias = "shared.head.bias"
    for tensors, metadata, reason in (
        ({**good, bias: good[bias] * math.nan}, {}, "finite"),
        ({**good, bias: torch.zeros(9)}, {}, "shape"),
        ({name: tensor for name, tensor in good.items() if name != bias}, {}, "lacks"),
        ({**good, "model.head.bias": good[bias]}, {}, "unexpected"),
        (good, {"samples": torch.tensor([3])}, "unexpected"),  # not needed for a plain mean, so it stays at home
    ):
        with pytest.raises(BadMessage, match=reason):
            method.check(Message(tensors, metadata))


def test_prediction_is_the_private_network() -> None:
    clients = support.population("fml")
    net = clients.new_network(0)
    x, _ = clients.dataset.batch(torch.tensor([0, 40]))
    assert torch.equal(clients.method.predict(net, x)["classifier"], net.model(x))


def test_stacked_clients_agree_with_a_loop() -> None:
    parity.assert_vmap_agrees(support.population("fml"))


def test_engines_agree(tmp_path) -> None:
    parity.assert_engines_agree(tmp_path, "fml")
    parity.assert_nothing_shared(tmp_path, "fml")


def test_learns(tmp_path) -> None:
    run = support.federation(tmp_path, "fml", rounds=6)
    assert run.run()["accuracy_final"] > 0.9


@pytest.mark.parametrize(("classes", "expected"), [(10, 670_058), (100, 715_148)])
def test_traffic_is_the_closed_form(tmp_path, classes: int, expected: int) -> None:
    assert support.traffic(tmp_path, "fml", classes) == (expected, expected)
