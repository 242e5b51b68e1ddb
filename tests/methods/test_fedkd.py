"""FedKD, with numbers worked out by hand."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyfed.engines import SequentialEngine, VectorizedEngine
from polyfed.engines.base import LocalEngine
from polyfed.errors import BadMessage, DivergedError, InputError
from polyfed.message import Message
from polyfed.methods.base import Batch, Knowledge, Server
from polyfed.methods.fedkd import SMALLEST_LOSS, FedKD, as_received, version_of
from polyfed.methods.parts.network import ClientNetwork
from polyfed.methods.parts.tools import part_of
from tests import support
from tests.methods import parity

LN2, LN3 = math.log(2), math.log(3)
KNOWLEDGE = Knowledge(torch.tensor([1, 1, 0, 0]), 2)


class ThreeFeatures(nn.Module):
    """A network with fewer features than the others."""

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), 3), nn.ReLU())
        self.out = nn.Linear(3, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(self.body(x))
        return logits


def method(**options: float) -> FedKD:
    made = support.new_method({"name": "fedkd", **options})
    assert isinstance(made, FedKD)
    return made


def simple_client() -> tuple[FedKD, ClientNetwork, Tensor]:
    """The private network gives features 1 and logits 0, the shared one features 0 and logits (ln 3, 0, 0, 0)."""
    clients = support.population("fedkd")
    net = clients.new_network(0)
    for parameter in net.parameters():
        parameter.data.zero_()
    net.model.extractor.body[3].bias.data.fill_(1.0)
    net.shared.head.bias.data[0] = LN3
    assert isinstance(clients.method, FedKD)
    return clients.method, net, clients.dataset.batch(torch.tensor([0, 40]))[0]


def test_losses_by_hand() -> None:
    """p = ¼ each, q = (½, ⅙, ⅙, ⅙); labels 0 and 1, of which the second is padding.

    Cross entropies of label 0: ln 4 and ln 2, so s = 3 ln 2. KL(q‖p) = ½ ln 2 + ½ ln ⅔ = ½ ln 4/3,
    KL(p‖q) = ¼ ln ½ + ¾ ln 3/2. The features differ by 1 everywhere: mean square 1.
    """
    fedkd, net, x = simple_client()
    private, shared = fedkd.losses(net, Batch(x, torch.tensor([0, 1]), mask=torch.tensor([True, False])))
    s = 3 * LN2
    assert private.tolist()[0] == pytest.approx(2 * LN2 + (0.5 * math.log(4 / 3) + 1) / s, abs=1e-6)
    assert shared.tolist()[0] == pytest.approx(LN2 + (0.75 * math.log(1.5) - 0.25 * LN2 + 1) / s, abs=1e-6)


def test_distillation_is_divided_by_the_mean_task_loss_of_the_batch() -> None:
    """Without a mask label 1 counts too: its cross entropies are ln 4 and ln 6, so s = (3 ln 2 + 3 ln 2 + ln 3) / 2."""
    fedkd, net, x = simple_client()
    private, _ = fedkd.losses(net, Batch(x, torch.tensor([0, 1])))
    s = (6 * LN2 + LN3) / 2
    assert private.tolist() == pytest.approx([2 * LN2 + (0.5 * math.log(4 / 3) + 1) / s] * 2, abs=1e-6)


def test_the_divisor_is_not_differentiated() -> None:
    """For label 0 the head's bias gets (p − onehot) + (p − q) / s with s = 3 ln 2, and nothing from s itself."""
    fedkd, net, x = simple_client()
    fedkd.losses(net, Batch(x[:1], torch.tensor([0])))[0].sum().backward()
    s = 3 * LN2
    expected = [-0.75 - 0.25 / s] + [0.25 + (0.25 - 1 / 6) / s] * 3
    assert net.model.head.bias.grad.tolist() == pytest.approx(expected, abs=1e-6)


def test_neither_loss_reaches_the_other_network() -> None:
    clients = support.population("fedkd")
    assert isinstance(clients.method, FedKD)
    x, y = clients.dataset.batch(torch.arange(6))
    for which, own in ((0, ("model.",)), (1, ("shared.", "projection."))):
        net = clients.new_network(0)
        clients.method.losses(net, Batch(x, y))[which].mean().backward()
        for name, parameter in net.named_parameters():
            reached = parameter.grad is not None and bool(parameter.grad.any())
            assert reached == name.startswith(own), name


class Linear(nn.Module):
    """Two features straight from the pixels, which nothing keeps small."""

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(36, 2))
        self.out = nn.Linear(2, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(self.body(x))
        return logits


def test_two_features_that_run_away_stop_the_run(tmp_path: Path) -> None:
    """Clients of one class are soon sure; the mean over two features then throws each farther with every step."""
    settings: dict[str, Any] = {"models": (Linear,), "classes_per_client": 1, "rounds": 12}
    with pytest.raises(DivergedError, match="loss of client .* (has grown to|is no longer).*training.clip=10"):
        support.federation(tmp_path / "one", "fedkd", **settings).run()
    clipped = support.federation(tmp_path / "two", "fedkd", **settings, training={"clip": 10.0})
    clipped.run()
    assert clipped.folder.rounds().loss_mean.max() < 1000


def test_sure_networks_do_not_divide_by_zero() -> None:
    """Both networks give label 0 a logit of 1000, so s = 0; the features' distance 1 is weighted by 1 / 0.01."""
    fedkd, net, x = simple_client()
    net.model.head.bias.data[0] = net.shared.head.bias.data[0] = 1000.0
    values = fedkd.loss(net, Batch(x[:1], torch.tensor([0])))
    assert values.tolist() == pytest.approx([2 / SMALLEST_LOSS])
    values.sum().backward()
    assert all(bool(torch.isfinite(p.grad).all()) for p in net.parameters() if p.grad is not None)


def test_energy_rises_evenly() -> None:
    fedkd = support.new_method("fedkd", rounds=4)
    assert isinstance(fedkd, FedKD)
    assert [fedkd.energy(t) for t in (0, 1, 2, 4)] == pytest.approx([0.95, 0.9575, 0.965, 0.98])


def test_features_of_another_size_are_projected(tmp_path: Path) -> None:
    """The smallest network, with 3 features, is shared; clients with 6 and with 3 features each project it."""
    clients = support.population("fedkd", models=(support.Wide, ThreeFeatures))
    shapes = [tuple(clients.new_network(client).projection.weight.shape) for client in (0, 1)]
    assert shapes == [(support.FEATURES, 3), (3, 3)]
    run = support.federation(tmp_path, "fedkd", models=(support.Wide, ThreeFeatures))
    run.run()
    assert not any("projection" in name for name in run.server.state)


def held_by(fedkd: FedKD, value: float, version: int = 0) -> dict[str, Tensor]:
    """The shared network of a client, trained and as received: the same value everywhere."""
    state = {name: torch.full_like(tensor, value) for name, tensor in fedkd._like.items()}
    received = {as_received(name): tensor.clone() for name, tensor in state.items()}
    return {**state, **received, "received.version": torch.tensor([version])}


def by_client(fedkd: FedKD, trained_to: float, received: float = 0.0) -> Message:
    """The upload of a client that changed every weight of the shared network from one value to another."""
    state = held_by(fedkd, received)
    state |= {name: torch.full_like(tensor, trained_to) for name, tensor in fedkd._like.items()}
    return fedkd.upload(support.trained([1, 1, 0, 0], state))


def started(fedkd: FedKD, value: float = 10.0) -> Server:
    """A server whose first version has the same value everywhere."""
    server = support.new_server(fedkd)
    first = {name: torch.full_like(tensor, value) for name, tensor in fedkd._like.items()}
    server.state |= {**first, "version": version_of(first)}
    return server


def everywhere(state: Mapping[str, Tensor], fedkd: FedKD) -> set[float]:
    return {value for name in fedkd._like for value in state[name].flatten().tolist()}


def test_server_adds_the_mean_change() -> None:
    """The version is 10. One client goes to 11 and sends ones of rank one, another to 13 and sends threes as they are.

    Matrices: 10 + (1 + 3) / 2 = 12; vectors travel as values: (11 + 13) / 2 = 12.
    """
    fedkd = method()
    server = started(fedkd)
    ones = by_client(fedkd, 11.0, received=10.0)
    threes = Message({n: torch.full_like(t, 3.0 if t.dim() > 1 else 13.0) for n, t in fedkd._like.items()})
    assert any(name.endswith(".left") for name in ones.tensors)
    for message in (ones, threes):
        fedkd.check(message)
    fedkd.aggregate(server, [support.reply(0, dict(ones.tensors)), support.reply(1, dict(threes.tensors))])
    assert everywhere(server.state, fedkd) == {12.0}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_server_with_a_gpu_factors_there_and_keeps_its_state_on_the_cpu() -> None:
    fedkd, found = method(), []
    sent = {name: torch.randn(t.shape).abs() for name, t in fedkd._like.items()}
    for device in ("cuda", "cpu"):
        server = started(fedkd)
        server.device = torch.device(device)
        fedkd.aggregate(server, [support.reply(0, sent)])
        assert all(not tensor.is_cuda for tensor in server.state.values())
        found.append({name: server.state[name] for name in fedkd._like})
    for name, tensor in found[0].items():
        torch.testing.assert_close(tensor, found[1][name], rtol=1e-4, atol=1e-5)


def test_changes_are_downloaded_by_those_who_hold_the_version_before() -> None:
    """Clients 0 and 1 got version 10; only the reply of 0 was fused. It gets the change 1 to 11; others get 11."""
    fedkd = method()
    server = started(fedkd)
    first = fedkd.download(server, 0, None)
    assert first.floats == sum(tensor.numel() for tensor in fedkd._like.values())
    state = held_by(fedkd, 0.0)
    state |= fedkd.receive(state, first, KNOWLEDGE)
    fedkd.aggregate(server, [support.reply(0, dict(by_client(fedkd, 11.0, received=10.0).tensors))])
    to_holder, to_refused = fedkd.download(server, 0, None), fedkd.download(server, 1, None)
    assert to_holder.floats < first.floats == to_refused.floats
    newer = fedkd.receive(state, to_holder, KNOWLEDGE)
    assert newer.keys() == state.keys()
    for received in (newer, fedkd.receive(state, to_refused, KNOWLEDGE)):
        assert everywhere(received, fedkd) == {11.0}
        assert torch.equal(received["received.version"], server.state["version"])
    assert everywhere(state | newer, fedkd) == {float(newer[as_received(name)].mean()) for name in fedkd._like}


def test_who_missed_a_version_gets_the_network() -> None:
    """Client 0 takes part in rounds 1 and 3, client 1 in all: client 0 holds version 1, and version 2 is before 3."""
    fedkd = method()
    server = started(fedkd)
    fedkd.aggregate(server, [support.reply(c, dict(by_client(fedkd, 11.0, 10.0).tensors)) for c in (0, 1)])
    fedkd.aggregate(server, [support.reply(1, dict(by_client(fedkd, 12.0, 11.0).tensors))])
    assert ["base" in fedkd.download(server, client, None).metadata for client in (0, 1)] == [False, True]


def test_changes_that_arrive_twice_are_applied_once() -> None:
    """A round without enough replies leaves the server where it was, and the next one sends the same changes."""
    fedkd = method()
    server = started(fedkd)
    state = held_by(fedkd, 0.0)
    state |= fedkd.receive(state, fedkd.download(server, 0, None), KNOWLEDGE)
    fedkd.aggregate(server, [support.reply(0, dict(by_client(fedkd, 11.0, received=10.0).tensors))])
    for _ in range(2):
        state |= fedkd.receive(state, fedkd.download(server, 0, None), KNOWLEDGE)
        assert everywhere(state, fedkd) == {11.0}
        state |= {name: torch.full_like(tensor, 99.0) for name, tensor in fedkd._like.items()}  # it trains on


def test_a_client_with_a_lost_state_refuses_changes_and_recovers() -> None:
    fedkd = method()
    server = started(fedkd)
    reply = support.reply(0, dict(by_client(fedkd, 11.0, received=10.0).tensors))
    fedkd.aggregate(server, [reply])
    lost = held_by(fedkd, 0.0)
    with pytest.raises(InputError, match="does not hold.*next download brings the network itself"):
        fedkd.receive(lost, fedkd.download(server, 0, None), KNOWLEDGE)
    fedkd.aggregate(server, [replace(reply, client=1)])  # the round goes on without it
    recovered = fedkd.receive(lost, fedkd.download(server, 0, None), KNOWLEDGE)
    assert torch.equal(recovered["received.version"], server.state["version"])


@pytest.mark.parametrize("engine", [SequentialEngine, VectorizedEngine])
def test_what_clients_hold_is_what_the_server_sent(tmp_path: Path, engine: type[LocalEngine]) -> None:
    """Half of the clients take part in each of six rounds, so both kinds of download occur, and both are exact."""
    run = support.federation(tmp_path, "fedkd", engine, rounds=6, participation=0.5)
    kinds = set()
    asked = run.download
    run.download = lambda client: kinds.add("base" in (m := asked(client)).metadata) or m  # type: ignore[method-assign]
    run.run()
    assert kinds == {True, False}
    fedkd = run.method
    assert isinstance(fedkd, FedKD)
    for client in range(4):
        state = run.engine.get_state(client)
        held = version_of({name: state[as_received(name)] for name in fedkd._like})
        assert torch.equal(held, state["received.version"])


def test_first_download_is_the_clients_own_start() -> None:
    clients = support.population("fedkd")
    state = dict(clients.new_network(0).state_dict())
    message = clients.method.download(support.new_server(clients.method), 0, None)
    received = clients.method.receive(state, message, clients.knowledge(0, 1))
    for name, tensor in part_of(state, "shared").items():
        torch.testing.assert_close(received[name], tensor)


def test_diverged_network_is_sent_and_refused() -> None:
    fedkd = method()
    with pytest.raises(BadMessage, match="finite"):
        fedkd.check(by_client(fedkd, math.nan))


def test_mean_is_of_all_clients(tmp_path: Path) -> None:
    """The server ends with the mean of the clients' shared networks, and not with the last one."""
    run = support.federation(tmp_path, {"name": "fedkd", "energy_start": 1.0, "energy_end": 1.0}, rounds=1)
    run.run()
    states = [run.engine.get_state(client) for client in range(4)]
    for name in ("shared.extractor.body.1.weight", "shared.head.bias"):
        mean = torch.stack([state[name] for state in states]).mean(0)
        torch.testing.assert_close(run.server.state[name], mean)
        assert not torch.allclose(run.server.state[name], states[-1][name])


def test_batch_norm_and_partial_participation(tmp_path: Path) -> None:
    """The forms of tensors may change from round to round; statistics of batch norm travel unchanged."""
    options = {"name": "fedkd", "energy_start": 0.3, "energy_end": 1.0}
    run = support.federation(tmp_path, options, models=(support.Normed,), rounds=3, participation=0.5)
    run.run()
    assert not any("num_batches" in name for name in run.server.state)
    assert run.folder.rounds().upload_floats.nunique() > 1


@pytest.mark.parametrize(("classes", "raw"), [(10, 670_058), (100, 715_148)])
def test_changes_cost_a_small_part_of_the_network(tmp_path: Path, classes: int, raw: int) -> None:
    """What one epoch changed is of low rank; all weights, whose spectrum is flat, would travel as they are."""
    up, down = support.traffic(tmp_path, "fedkd", classes)
    assert 0 < up < 0.03 * raw
    assert 0 < down < 0.04 * raw


def test_less_energy_means_less_traffic(tmp_path: Path) -> None:
    costs = []
    for energy in (0.4, 0.95):
        options = {"name": "fedkd", "energy_start": energy, "energy_end": energy}
        costs.append(support.traffic(tmp_path / str(energy), options, 10))
    assert costs[0][0] < costs[1][0]
    assert costs[0][1] < costs[1][1]


def test_losses_agree_under_vmap() -> None:
    parity.assert_vmap_agrees(support.population("fedkd"))


def test_engines_agree(tmp_path: Path) -> None:
    parity.assert_engines_agree(tmp_path, {"name": "fedkd", "energy_start": 0.6, "energy_end": 0.8})


def test_clients_share_no_storage(tmp_path: Path) -> None:
    parity.assert_nothing_shared(tmp_path, "fedkd")


def test_it_learns(tmp_path: Path) -> None:
    run = support.federation(tmp_path, "fedkd", rounds=10, lr=0.05, eval_every=10)
    assert run.run()["accuracy_final"] > 0.9
