"""FedKD, with numbers worked out by hand."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyfed.errors import BadMessage, DivergedError
from polyfed.message import Message
from polyfed.methods.base import Batch, Knowledge
from polyfed.methods.fedkd import SMALLEST_LOSS, FedKD
from polyfed.methods.parts.network import ClientNetwork
from polyfed.methods.parts.tools import part_of
from tests import support
from tests.methods import parity

LN2, LN3 = math.log(2), math.log(3)


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


def test_server_averages_raw_and_factored_networks_alike() -> None:
    """One client sends ones in every matrix as factors, the other threes as they are: the mean is 2, of rank one."""
    fedkd = method()
    server = support.new_server(fedkd)
    like = {name: torch.ones_like(tensor) for name, tensor in fedkd._like.items()}
    ones = fedkd.upload(support.trained([1, 1, 0, 0], like))
    threes = Message({name: 3 * tensor for name, tensor in like.items()})
    assert any(name.endswith(".left") for name in ones.tensors)
    for message in (ones, threes):
        fedkd.check(message)
    fedkd.aggregate(server, [support.reply(0, dict(ones.tensors)), support.reply(1, dict(threes.tensors))])
    download = fedkd.download(server, 0, None)
    assert download.floats == ones.floats
    received = fedkd.receive(like, download, Knowledge(torch.tensor([1, 1, 0, 0]), 2))
    assert received.keys() == like.keys()
    for tensor in received.values():
        torch.testing.assert_close(tensor, torch.full_like(tensor, 2.0))


def test_first_download_is_the_clients_own_start() -> None:
    clients = support.population("fedkd")
    state = dict(clients.new_network(0).state_dict())
    message = clients.method.download(support.new_server(clients.method), 0, None)
    received = clients.method.receive(state, message, clients.knowledge(0, 1))
    for name, tensor in part_of(state, "shared").items():
        torch.testing.assert_close(received[name], tensor)


def test_diverged_network_is_sent_and_refused() -> None:
    fedkd = method()
    state = {name: torch.full_like(tensor, math.nan) for name, tensor in fedkd._like.items()}
    with pytest.raises(BadMessage, match="finite"):
        fedkd.check(fedkd.upload(support.trained([1, 1, 0, 0], state)))


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
def test_traffic_is_at_most_the_raw_network(tmp_path: Path, classes: int, raw: int) -> None:
    """New weights have a flat spectrum: at the usual energies nothing is worth factoring, and nothing costs more."""
    assert support.traffic(tmp_path, "fedkd", classes) == (raw, raw)


def test_less_energy_means_less_traffic(tmp_path: Path) -> None:
    """Round 1 keeps the share 0.45 of new weights; what is left of them is of low rank and is factored again."""
    up, down = support.traffic(tmp_path, {"name": "fedkd", "energy_start": 0.4, "energy_end": 0.5}, 10)
    assert 0 < up < 670_058 / 4
    assert 0 < down < 670_058 / 4


def test_losses_agree_under_vmap() -> None:
    parity.assert_vmap_agrees(support.population("fedkd"))


def test_engines_agree(tmp_path: Path) -> None:
    parity.assert_engines_agree(tmp_path, {"name": "fedkd", "energy_start": 0.6, "energy_end": 0.8})


def test_clients_share_no_storage(tmp_path: Path) -> None:
    parity.assert_nothing_shared(tmp_path, "fedkd")


def test_it_learns(tmp_path: Path) -> None:
    run = support.federation(tmp_path, "fedkd", rounds=10, lr=0.05, eval_every=10)
    assert run.run()["accuracy_final"] > 0.9
