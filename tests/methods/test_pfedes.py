"""pFedES, with numbers worked out by hand."""

import json
import math

import pytest
import torch
from torch import Tensor, nn

from polyfed.engines import SequentialEngine, VectorizedEngine
from polyfed.engines.client.round import train_phase
from polyfed.engines.client.workbench import state_of
from polyfed.errors import BadMessage, InputError
from polyfed.message import Message
from polyfed.methods.base import Batch, Knowledge
from polyfed.models import parameter_count
from tests import support
from tests.methods import parity

HERE = "tests.methods.test_pfedes"


class MeanPixel(nn.Module):
    """Logits (mean of all pixels, 0, 0, 0): losses can be worked out by hand."""

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        pixels = math.prod(input_shape)
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(pixels, 1))
        self.out = nn.Linear(1, classes)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.zero_()
            self.body[1].weight.fill_(1 / pixels)
            self.out.weight[0] = 1

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(self.body(x))
        return logits


class NormedProxy(nn.Sequential):
    """A user's own proxy extractor, with batch norm and dropout."""

    def __init__(self, channels: int) -> None:
        super().__init__(nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.Dropout(0.25))


class HalvingProxy(nn.Conv2d):
    def __init__(self, channels: int) -> None:
        super().__init__(channels, channels, 2, stride=2)


ready_proxy = nn.Conv2d(1, 1, 1)
a_number = 3


def flat_proxy() -> nn.Module:
    return nn.Flatten()


def no_parameters() -> nn.Module:
    return nn.ReLU()


def not_a_network() -> int:
    return a_number


def test_loss_weighs_enhanced_and_original_images() -> None:
    """Eq. 6 with mu = 0.1 on an image of ln 3 everywhere, label 0, logits (mean pixel, 0, 0, 0).

    Original: exp(ln 3) = 3 of a sum of 6, so ln 2. The proxy gives black images: 1 of 4, so ln 4 = 2 ln 2.
    Together 0.1 · 2 ln 2 + 0.9 · ln 2 = 1.1 ln 2; the proxy's own loss (Eq. 9) is 2 ln 2.
    """
    clients = support.population("pfedes", models=(MeanPixel,))
    net = clients.new_network(0)
    kill(net.proxy)
    batch = Batch(torch.full((2, 1, 6, 6), math.log(3)), torch.tensor([0, 0]))
    model, proxy = clients.method.phases()
    assert model.loss(net, batch).tolist() == pytest.approx([1.1 * math.log(2)] * 2)
    assert proxy.loss(net, batch).tolist() == pytest.approx([2 * math.log(2)] * 2)


@pytest.mark.parametrize("proxy", ["convolutions", f"{HERE}:NormedProxy"])
def test_what_is_frozen_stays_bit_by_bit(proxy: str) -> None:
    """Batch norm's statistics and weight decay included; what is trained does change."""
    training = {"momentum": 0.9, "weight_decay": 0.1}
    clients = support.population({"name": "pfedes", "proxy": proxy}, models=(support.Normed,), training=training)
    net = clients.new_network(0)
    for phase, frozen in zip(clients.method.phases(), ("proxy.", "model."), strict=True):
        before = {name: tensor.clone() for name, tensor in state_of(net).items()}
        train_phase(clients, 0, net, phase, 1)
        for name, tensor in state_of(net).items():
            assert torch.equal(tensor, before[name]) == name.startswith(frozen), name


def test_proxy_is_averaged_by_samples_of_the_participants() -> None:
    """Proxies of 1 and 5 with 1 and 3 samples: (1·1 + 3·5) / 4 = 4, although two more clients have samples too."""
    method = support.new_method("pfedes")
    server = support.new_server(method)
    ones = {name: torch.ones_like(tensor) for name, tensor in server.state.items()}
    fives = {name: 5 * tensor for name, tensor in ones.items()}
    method.aggregate(server, [support.reply(0, ones, samples=[1]), support.reply(3, fives, samples=[3])])
    assert all(torch.equal(tensor, torch.full_like(tensor, 4)) for tensor in server.state.values())
    assert ones["proxy.conv1.bias"].tolist() == [1.0] * 8  # the replies are left alone


@pytest.mark.parametrize(("epochs", "option", "expected"), [(10, None, 10), (1, None, 1), (10, 20, 20)])
def test_epochs_of_the_proxy(epochs: int, option: int | None, expected: int) -> None:
    method = support.new_method({"name": "pfedes", "proxy_epochs": option}, epochs=epochs)
    assert [phase.epochs for phase in method.phases()] == [epochs, expected]


def test_learning_rate_of_the_proxy() -> None:
    """Step 2 with ten times the rate changes the proxy ten times as much, and step 1 not at all."""
    changes = []
    for rate in (None, 0.01):
        clients = support.population({"name": "pfedes", "proxy_lr": rate}, lr=0.001, batch_size=1000)
        net = clients.new_network(0)
        model, proxy = clients.method.phases()
        assert model.lr is None
        before = net.proxy.conv2.weight.detach().clone()
        train_phase(clients, 0, net, proxy, 1)
        changes.append(net.proxy.conv2.weight.detach() - before)
    torch.testing.assert_close(changes[1], 10 * changes[0], rtol=1e-3, atol=1e-6)


def test_joint_training_is_one_step_of_both_on_the_models_loss() -> None:
    """One full batch: the model and the proxy move by minus the rate times their gradients of Eq. 6."""
    clients = support.population({"name": "pfedes", "joint": True}, lr=0.1, batch_size=1000)
    (phase,) = clients.method.phases()
    net, other = clients.new_network(0), clients.new_network(0)
    clients.method.model_loss(other, Batch(*clients.dataset.batch(clients.data[0].train))).mean().backward()
    train_phase(clients, 0, net, phase, 1)
    for name in ("model.head.weight", "proxy.conv1.weight"):
        gradient = other.get_parameter(name).grad
        assert gradient is not None and gradient.any()
        expected = other.get_parameter(name).detach() - 0.1 * gradient
        torch.testing.assert_close(net.get_parameter(name).detach(), expected)
    for option in ({"proxy_lr": 0.1}, {"proxy_epochs": 2}):
        with pytest.raises(InputError, match="joint is true: leave out proxy_lr and proxy_epochs"):
            support.new_method({"name": "pfedes", "joint": True, **option})


@pytest.mark.parametrize("weight", [0, 0.51])
def test_weight_is_above_0_and_at_most_a_half(weight: float) -> None:
    with pytest.raises(InputError, match="greater than 0 and at most 0.5"):
        support.new_method({"name": "pfedes", "weight": weight})


def test_prediction_uses_the_original_image_alone() -> None:
    clients = support.population("pfedes")
    net = clients.new_network(0).eval()
    x, _ = clients.dataset.batch(torch.arange(5))
    before = clients.method.predict(net, x)
    kill(net.proxy)
    assert list(before) == ["classifier"]
    assert torch.equal(clients.method.predict(net, x)["classifier"], before["classifier"])
    assert torch.equal(before["classifier"], net.model(x))


@pytest.mark.parametrize(("channels", "parameters"), [(1, 153), (3, 443)])
def test_proxy_is_as_small_as_the_paper_says(channels: int, parameters: int) -> None:
    method = support.new_method("pfedes", data=support.tiny_dataset(channels=channels))
    assert method.download(support.new_server(method), 0, None).floats == parameters
    assert parameter_count(method.new_proxy()) == parameters


def test_client_trains_what_it_received_and_uploads_it() -> None:
    clients = support.population("pfedes")
    server = support.new_server(clients.method)
    state = state_of(clients.new_network(0))
    changed = clients.method.receive(state, clients.method.download(server, 0, None), Knowledge(torch.tensor([3]), 1))
    assert set(changed) == {name for name in state if name.startswith("proxy.")}
    message = clients.method.upload(support.trained([2, 0, 1, 0], {**state, **changed}))
    assert {name: t.tolist() for name, t in message.tensors.items()} == {n: t.tolist() for n, t in server.state.items()}
    assert message.metadata["samples"].tolist() == [3]
    clients.method.check(message)


def test_dead_proxy_is_an_event_of_the_run(tmp_path) -> None:
    run = support.federation(tmp_path, "pfedes", rounds=1)
    remarks = run.method.inspect(run.engine.population.new_network(0), Batch(torch.ones(1, 1, 6, 6), torch.tensor([0])))
    assert not any(remarks.values())
    run.server.state["proxy.conv2.bias"].fill_(-100)
    run.run()
    events = [json.loads(line) for line in (run.folder.path / "events.jsonl").read_text().splitlines()]
    (note,) = (event for event in events if event["event"] == "note")
    assert "clients 0, 1, 2 and 3: the proxy extractor gives only zeros" in note["note"]
    assert note["clients"] == [0, 1, 2, 3]


@pytest.mark.parametrize("engine", [SequentialEngine, VectorizedEngine])
def test_dead_channel_is_an_event_of_the_run(tmp_path, engine) -> None:
    """Of three channels the second gives only zeros: it is named, and nobody says that the whole proxy is dead."""
    run = support.federation(tmp_path, "pfedes", engine, rounds=1, dataset=support.tiny_dataset(channels=3))
    run.server.state["proxy.conv2.bias"].copy_(torch.tensor([1.0, -100.0, 1.0]))
    run.run()
    notes = [event["note"] for event in run.folder.events() if event["event"] == "note"]
    assert [note for note in notes if "zeros" in note] == [
        "clients 0, 1, 2 and 3: channel 1 of the proxy extractor's images is only zeros; activation=none avoids that"
    ]


@pytest.mark.parametrize(("activation", "expected"), [("none", -1), (None, -1), ("tanh", math.tanh(-1)), ("relu", 0)])
def test_other_activations_give_negative_values_too(activation: str | None, expected: float) -> None:
    proxy = support.new_method({"name": "pfedes", "activation": activation}).new_proxy()
    kill(proxy, bias=-1)
    assert proxy(torch.zeros(1, 1, 6, 6)).unique().tolist() == pytest.approx([expected])


def test_own_proxy_travels_instead(tmp_path) -> None:
    """3x3 convolution with bias and batch norm on one channel: 9 + 1 weights, 2 of the norm and its 2 statistics."""
    run = support.federation(tmp_path, {"name": "pfedes", "proxy": f"{HERE}:NormedProxy"}, rounds=2)
    run.run()
    assert run.folder.rounds().upload_floats.tolist() == [4 * 14, 4 * 14]
    assert support.new_method({"name": "pfedes", "proxy": f"{HERE}:ready_proxy"}).new_proxy() is not ready_proxy


@pytest.mark.parametrize(
    ("proxy", "reason"),
    [
        (f"{HERE}:HalvingProxy", r"shape it gets, \(1, 6, 6\), but it gives \(1, 3, 3\)"),
        (f"{HERE}:flat_proxy", r"\(36,\)"),
        (f"{HERE}:no_parameters", "no parameters"),
        (f"{HERE}:not_a_network", "must return a network"),
        (f"{HERE}:a_number", "type int"),
        (f"{HERE}:NormedProxi", "NormedProxy"),
        ("nowhere:Proxy", "can't be imported"),
        ("convolution", "package.module:name"),
    ],
)
def test_unfit_proxies_are_refused_before_round_one(proxy: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        support.population({"name": "pfedes", "proxy": proxy})


def test_replies_with_unsound_proxies_are_refused() -> None:
    method = support.new_method("pfedes")
    good = dict(support.new_server(method).state)
    samples = {"samples": torch.tensor([1])}
    method.check(Message(good, samples))
    for changes, metadata, reason in (
        ({"proxy.conv1.bias": torch.full((8,), math.nan)}, samples, "finite"),
        ({"proxy.conv1.bias": torch.ones(7)}, samples, "shape"),
        ({"model.head.bias": torch.ones(4)}, samples, "unexpected"),
        ({}, {"samples": torch.tensor([0])}, "below 1"),
        ({}, {}, "lacks"),
    ):
        with pytest.raises(BadMessage, match=reason):
            method.check(Message({**good, **changes}, metadata))


@pytest.mark.parametrize("options", [{"proxy_lr": 0.01}, {"proxy": f"{HERE}:NormedProxy"}, {"joint": True}])
def test_engines_agree(tmp_path, options: dict) -> None:
    parity.assert_engines_agree(tmp_path, {"name": "pfedes", **options}, participation=0.75)


@pytest.mark.parametrize("phase", [0, 1])
def test_losses_agree_under_vmap(phase: int) -> None:
    parity.assert_vmap_agrees(support.population("pfedes"), phase)
    if phase == 0:
        parity.assert_vmap_agrees(support.population({"name": "pfedes", "joint": True}))


def test_clients_share_no_storage(tmp_path) -> None:
    parity.assert_nothing_shared(tmp_path, "pfedes")


@pytest.mark.parametrize("classes", [10, 100])
def test_traffic_is_the_closed_form(tmp_path, classes: int) -> None:
    assert support.traffic(tmp_path, "pfedes", classes) == (443, 443)


def test_it_learns(tmp_path) -> None:
    assert support.federation(tmp_path, "pfedes", rounds=4, epochs=3).run()["accuracy_final"] > 0.9


def kill(proxy: nn.Module, bias: float = -100.0) -> None:
    """Let the last convolution ignore the image; ReLU turns its bias into zeros."""
    with torch.no_grad():
        proxy.conv2.weight.zero_()
        proxy.conv2.bias.fill_(bias)
