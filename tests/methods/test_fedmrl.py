"""FedMRL, with numbers worked out by hand."""

import math

import pytest
import torch
from torch import Tensor, nn

from polyfed.assemble import assemble
from polyfed.config import experiment
from polyfed.errors import BadMessage, InputError
from polyfed.message import Message
from polyfed.methods.base import Batch, ClientNetwork, Knowledge
from polyfed.methods.parts.tools import part_of
from polyfed.population import Population
from tests import support
from tests.methods import parity

FAR = -40.0
"""A logit that makes a class practically impossible."""
SMALL = {"name": "fedmrl", "shared_features": 2}


class Always(nn.Module):
    """An extractor that gives the same features for every image."""

    def __init__(self, *features: float) -> None:
        super().__init__()
        self.register_buffer("features", torch.tensor(features))

    def forward(self, x: Tensor) -> Tensor:
        return self.features.expand(len(x), -1)


def fixed_client(clients: Population) -> ClientNetwork:
    """Shared features (1, 2), private (3, 0, 0, 0, 0, 0), fused to (2, 3, 0, 0, 0, 1).

    The shared head takes the first two entries as logits of classes 0 and 1; the private head takes the last one for
    class 0 and nothing for class 1.
    """
    net = clients.new_network(0)
    net.shared.extractor = Always(1.0, 2.0)
    net.model.extractor = Always(3.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    with torch.no_grad():
        for layer in (net.projector, net.shared.head, net.model.head):
            layer.weight.zero_()
            layer.bias.zero_()
        net.projector.weight[0, 1] = 1.0
        net.projector.weight[1, 2] = 1.0
        net.projector.bias[5] = 1.0
        net.shared.head.weight[:2] = torch.eye(2)
        net.model.head.weight[0, 5] = 1.0
        for head in (net.shared.head, net.model.head):
            head.bias[2:] = FAR
    return net


def test_heads_see_nested_parts_of_the_fused_representation() -> None:
    """Label 1: shared logits (2, 3) cost ln(1 + e⁻¹) = 0.313262, private (1, 0) ln(1 + e) = 1.313262: 1.626523."""
    clients = support.population(SMALL)
    net = fixed_client(clients)
    x, _ = clients.dataset.batch(torch.tensor([0]))
    scores = clients.method.predict(net, x)
    assert list(scores) == ["fused", "shared"]
    assert scores["fused"][0, :2].tolist() == [1.0, 0.0]
    assert scores["shared"][0, :2].tolist() == [2.0, 3.0]
    values = clients.method.loss(net, Batch(x, torch.tensor([1])))
    assert values.tolist() == pytest.approx([1.626523], abs=1e-5)


def test_one_step_trains_both_networks_and_the_projector() -> None:
    clients = support.population(SMALL)
    net = clients.new_network(0)
    x, y = clients.dataset.batch(torch.tensor([0, 40, 80]))
    clients.method.loss(net, Batch(x, y)).mean().backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in net.parameters())
    assert clients.method.phases()[0].trains == ("model", "shared", "projector")


def test_shared_network_is_the_mean_by_samples() -> None:
    """All weights 1 with 1 sample and 5 with 3: (1·1 + 3·5) / 4 = 4."""
    method = support.new_method(SMALL)
    server = support.new_server(method)
    tensors = method.download(server, 0, None).tensors
    replies = [
        support.reply(client, {name: torch.full_like(tensor, value) for name, tensor in tensors.items()}, samples=[n])
        for client, (value, n) in enumerate(((1.0, 1), (5.0, 3)))
    ]
    for reply in replies:
        method.check(reply.message)
    method.aggregate(server, replies)
    assert all(bool((tensor == 4).all()) for tensor in server.state.values())


def test_average_is_nobodys_network(tmp_path) -> None:
    """The released code sent references to one live network, so that its average was the last client's weights."""
    run = support.federation(tmp_path, SMALL, rounds=1)
    run.run()
    for client in range(4):
        own = part_of(run.engine.get_state(client), "shared")
        assert all(not torch.equal(own[name], run.server.state[name]) for name in own)


def test_projector_is_personal_and_lasts(tmp_path) -> None:
    """It is trained, differs between clients, never travels, and a download leaves it alone."""
    run = support.federation(tmp_path, SMALL, models=(support.Wide,), rounds=1)
    first = run.engine.population.new_network(0).projector.weight
    downloads = {client: run.download(client) for client in range(4)}
    replies = run.engine.train(1, downloads)
    kept = [run.engine.get_state(client)["projector.weight"].clone() for client in range(4)]
    assert not torch.equal(kept[0], first)
    assert not torch.equal(kept[0], kept[1])
    for reply in replies:
        assert reply.message.tensors.keys() == run.server.state.keys()
        assert all(name.startswith("shared.") for name in reply.message.tensors)
    run.method.aggregate(run.server, replies)
    changed = run.method.receive(
        run.engine.get_state(0), run.download(0), Knowledge(run.engine.population.counts[0], 2)
    )
    assert changed.keys() == run.server.state.keys()


def test_number_of_shared_features() -> None:
    """None: 6 // 4 = 1. A projector from 2 + 6 to 6 features otherwise; 6 only on request, and more can't be nested."""
    own = support.population("fedmrl").new_network(0)
    assert (own.shared.feature_size, own.projector.in_features, own.projector.out_features) == (1, 7, 6)
    small = support.population(SMALL).new_network(0)
    assert (small.shared.feature_size, small.projector.in_features, small.projector.out_features) == (2, 8, 6)
    assert support.population({"name": "fedmrl", "shared_features": 6}).new_network(0).shared.feature_size == 6
    with pytest.raises(InputError, match=r"7 features.*only 6.*less than 6, or to 6"):
        support.population({"name": "fedmrl", "shared_features": 7}).new_network(0)


@pytest.mark.parametrize(("models", "features"), [("cnn1", 125), ("cnn", 128), ("resnet4", 16)])
def test_default_number_of_shared_features(models: str, features: int) -> None:
    """A quarter of 500, 512 and 64 features, but at most 128."""
    config = experiment(method="fedmrl", models=models, data="python:tiny", device="cpu", clients=2, partition="iid")
    assert assemble(config, support.tiny_dataset(side=32)).method.shared_network().feature_size == features


def test_a_client_in_which_nothing_would_nest_is_refused() -> None:
    """A quarter of the first client's 6 features is 1, and a client with one feature has no room for more."""

    def single(input_shape: tuple[int, ...], classes: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), 1), nn.ReLU(), nn.Linear(1, classes))

    with pytest.raises(InputError, match="only 1: set method.shared_features to less than 1, or to 1"):
        support.population("fedmrl", models=(support.Wide, single))
    support.population({"name": "fedmrl", "shared_features": 1}, models=(support.Wide, single))


def test_private_networks_may_differ_in_features(tmp_path) -> None:
    def slim(input_shape: tuple[int, ...], classes: int) -> nn.Module:
        size = math.prod(input_shape)
        return nn.Sequential(nn.Flatten(), nn.Linear(size, 3), nn.ReLU(), nn.Linear(3, classes))

    run = support.federation(tmp_path, SMALL, models=(support.Wide, slim), rounds=1)
    run.run()
    shapes = {tuple(run.engine.get_state(client)["projector.weight"].shape) for client in range(4)}
    assert shapes == {(6, 8), (3, 5)}


def test_unsound_replies_are_refused() -> None:
    method = support.new_method(SMALL)
    good = dict(method.download(support.new_server(method), 0, None).tensors)
    bias, three = "shared.head.bias", torch.tensor([3])
    for tensors, metadata, reason in (
        ({**good, bias: good[bias] * math.inf}, {"samples": three}, "finite"),
        ({**good, bias: torch.zeros(9)}, {"samples": three}, "shape"),
        (good, {"samples": 0 * three}, "below 1"),
        (good, {}, "lacks"),
    ):
        with pytest.raises(BadMessage, match=reason):
            method.check(Message(tensors, metadata))


def test_stacked_clients_agree_with_a_loop() -> None:
    parity.assert_vmap_agrees(support.population(SMALL))


def test_engines_agree(tmp_path) -> None:
    parity.assert_engines_agree(tmp_path, SMALL)
    parity.assert_nothing_shared(tmp_path, SMALL)


def test_learns(tmp_path) -> None:
    run = support.federation(tmp_path, "fedmrl", rounds=12)
    assert run.run()["accuracy_final"] > 0.9


@pytest.mark.parametrize(("classes", "expected"), [(10, 666_308), (100, 677_648)])
def test_traffic_is_the_closed_form(tmp_path, classes: int, expected: int) -> None:
    """CNN-5 with 125 features instead of 500, so its head has 375 · C weights less than 670 058 and 715 148."""
    assert support.traffic(tmp_path, "fedmrl", classes) == (expected, expected)
