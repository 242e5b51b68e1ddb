"""pFedAFM, with numbers worked out by hand."""

import pytest
import torch
from torch import Tensor, nn

from polyfed.engines import SequentialEngine, VectorizedEngine
from polyfed.engines.client.flops import count_flops
from polyfed.engines.client.round import train_phase
from polyfed.engines.client.workbench import state_of
from polyfed.errors import BadMessage, InputError
from polyfed.message import Message
from polyfed.methods.base import Batch, ClientNetwork, Knowledge
from polyfed.population import Population
from tests import support
from tests.engines.test_flops import CONV1, FC3, FORWARD, cifar_clients
from tests.methods import parity
from tests.methods.test_fedmrl import Always


class TwoFeatures(nn.Module):
    """A network with two features and two classes."""

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(int(torch.tensor(input_shape).prod()), 2))
        self.out = nn.Linear(2, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(self.body(x))
        return logits


def one_class_each(lr: float, weight_lr: float, **training: float) -> Population:
    """Two clients with one of two classes each, whose samples all fit into one batch."""
    return support.population(
        {"name": "pfedafm", "weight_lr": weight_lr}, models=(TwoFeatures,), data=support.tiny_dataset(classes=2),
        clients=2, classes_per_client=1, batch_size=1000, lr=lr, training=training,
    )  # fmt: skip


def fixed_client(clients: Population) -> tuple[int, ClientNetwork]:
    """The owner of class 0: private features (2, 0), shared (0, 4), weights (1, 0.25), the identity as head."""
    client = next(client for client in (0, 1) if clients.counts[client][0])
    net = clients.new_network(client)
    net.model.extractor = Always(2.0, 0.0)
    net.received, net.shared = Always(0.0, 4.0), Always(0.0, 4.0)
    with torch.no_grad():
        net.model.head.weight.copy_(torch.eye(2))
        net.model.head.bias.zero_()
        net.mixing.away.copy_((torch.tensor([1.0, 0.25]) - 1) / net.mixing.scale)
    return client, net


@pytest.mark.parametrize(("lr", "weight_lr"), [(0.1, 0.1), (0.4, 0.1), (0.05, 0.1)])
def test_one_step_of_the_mixing_weights(lr: float, weight_lr: float) -> None:
    """Mixture (2, 3), so class 0 costs ln(1 + e) = 1.313262; its gradient of the logits is (−0.731059, 0.731059).

    Times private minus shared features, (2, −4): (−1.462117, −2.924234). A step of 0.1 gives (1.146, 0.542423), and 1
    is the largest. What the model's own learning rate is does not matter.
    """
    clients = one_class_each(lr, weight_lr)
    client, net = fixed_client(clients)
    x, y = clients.dataset.batch(torch.tensor([0]))
    scores = clients.method.predict(net, x)
    assert list(scores) == ["mixed", "classifier"]
    assert scores["mixed"][0].tolist() == pytest.approx([2.0, 3.0], abs=1e-6)
    assert scores["classifier"][0].tolist() == [2.0, 0.0]
    assert clients.method.loss(net, Batch(x, y)).tolist() == pytest.approx([1.313262], abs=1e-6)
    result = train_phase(clients, client, net, clients.method.phases()[0], 1)
    assert result.loss == pytest.approx(1.313262, abs=1e-6)
    assert net.mixing.private_weights.tolist() == pytest.approx([1.0, 0.542423], abs=1e-6)


@pytest.mark.parametrize("lr", [0.1, 0.4])
def test_clipping_the_model_leaves_the_mixing_weights_alone(lr: float) -> None:
    """They move as above, while a gradient of length 0.1 moves the head by 0.1 · lr."""
    clients = one_class_each(lr, 0.1, clip=0.1)
    client, net = fixed_client(clients)
    before = torch.cat([tensor.flatten() for tensor in net.model.head.parameters()]).clone()
    train_phase(clients, client, net, clients.method.phases()[0], 1)
    assert net.mixing.private_weights.tolist() == pytest.approx([1.0, 0.542423], abs=1e-6)
    after = torch.cat([tensor.flatten() for tensor in net.model.head.parameters()])
    assert float((after - before).norm()) == pytest.approx(0.1 * lr, rel=1e-4)


def test_weights_stay_between_zero_and_one() -> None:
    """Received features (4, −4) serve class 0 better than private (2, 0): a huge step leads to 0, not beyond."""
    clients = one_class_each(0.1, 1000.0)
    client, net = fixed_client(clients)
    net.received = Always(4.0, -4.0)
    train_phase(clients, client, net, clients.method.phases()[0], 1)
    assert net.mixing.private_weights.tolist() == pytest.approx([0.0, 0.0], abs=1e-6)


def test_shared_extractor_learns_under_the_private_head() -> None:
    """Shared features (0, 4) as logits: class 0 costs ln(1 + e⁴) = 4.018150, whatever the weights are."""
    clients = one_class_each(0.1, 0.1)
    _, net = fixed_client(clients)
    x, y = clients.dataset.batch(torch.tensor([0]))
    assert clients.method.phases()[1].loss(net, Batch(x, y)).tolist() == pytest.approx([4.018150], abs=1e-6)


def test_each_phase_moves_its_own_modules_only() -> None:
    clients = support.population("pfedafm")
    net = clients.new_network(0)
    with torch.no_grad():
        net.mixing.away -= 0.2  # at its bound it may rest
    for phase, moved in zip(clients.method.phases(), ({"model", "mixing"}, {"shared"}), strict=True):
        before = {name: tensor.clone() for name, tensor in state_of(net).items()}
        train_phase(clients, 0, net, phase, 1)
        changed = {name for name, tensor in state_of(net).items() if not torch.equal(tensor, before[name])}
        assert {name.split(".")[0] for name in changed} == moved


def test_a_client_starts_with_its_own_features_alone_and_predicts_with_what_it_received(tmp_path) -> None:
    """Before training the mixture is the private features; phase 2 leaves the copy that predicts as it was received."""
    run = support.federation(tmp_path, "pfedafm", rounds=1)
    people = run.engine.population
    net = people.new_network(0)
    x, _ = people.dataset.batch(torch.arange(0, 120, 10))
    assert torch.equal(net.mixing.private_weights, torch.ones(support.FEATURES))
    first = run.method.predict(net, x)
    assert torch.equal(first["mixed"], first["classifier"])
    sent = run.download(0)
    assert sent.tensors
    run.run()
    state = run.engine.get_state(0)
    for name, tensor in sent.tensors.items():
        assert torch.equal(state[name.replace("shared.", "received.", 1)], tensor)
        assert not torch.equal(state[name], tensor)
    weights = 1 + state["mixing.scale"] * state["mixing.away"]
    assert bool((weights < 1).any()) and bool((weights >= 0).all())


def test_another_learning_rate_in_the_middle_of_a_run_leaves_the_mixing_weights() -> None:
    """Weights 0.25 at scale 1; at lr 0.1 instead of 0.4 the scale doubles, and the distance halves."""
    before, after = one_class_each(0.4, 0.4), one_class_each(0.1, 0.4)
    _, net = fixed_client(before)
    message = Message(after.method.first_state())
    state = state_of(net)
    changed = after.method.receive(state, message, Knowledge(torch.tensor([1, 0]), 2))
    assert changed["mixing.scale"] == 2.0
    assert changed["mixing.away"].tolist() == pytest.approx([0.0, -0.375])
    same = before.method.receive(state, message, Knowledge(torch.tensor([1, 0]), 2))
    assert torch.equal(same["mixing.away"], state["mixing.away"])


def test_shared_extractor_is_the_mean_by_samples() -> None:
    """All weights 1 with 1 sample and 5 with 3: (1·1 + 3·5) / 4 = 4; the last client's weights would be 5."""
    method = support.new_method("pfedafm")
    server = support.new_server(method)
    ones = {name: torch.ones_like(tensor) for name, tensor in method.download(server, 0, None).tensors.items()}
    fives = {name: 5 * tensor for name, tensor in ones.items()}
    method.aggregate(server, [support.reply(0, ones, samples=[1]), support.reply(1, fives, samples=[3])])
    assert all(bool((tensor == 4).all()) for tensor in server.state.values())


def test_only_the_shared_extractor_travels(tmp_path) -> None:
    run = support.federation(tmp_path, "pfedafm", rounds=1)
    for reply in run.engine.train(1, {client: run.download(client) for client in range(4)}):
        assert reply.message.tensors.keys() == run.server.state.keys()
        assert all(name.startswith("shared.") and "out" not in name for name in reply.message.tensors)
        assert int(reply.message.metadata["samples"]) == run.engine.population.counts[reply.client].sum()


def test_clients_with_another_number_of_features_are_refused() -> None:
    with pytest.raises(InputError, match="features"):
        support.population("pfedafm", models=(support.Wide, TwoFeatures))


def test_unsound_replies_are_refused() -> None:
    method = support.new_method("pfedafm")
    good = dict(method.download(support.new_server(method), 0, None).tensors)
    name = next(iter(good))
    for tensors, metadata, reason in (
        ({**good, name: good[name] * torch.inf}, {"samples": torch.tensor([3])}, "finite"),
        ({**good, name: torch.zeros(9)}, {"samples": torch.tensor([3])}, "shape"),
        ({**good, "mixing.away": torch.zeros(6)}, {"samples": torch.tensor([3])}, "unexpected"),
        (good, {}, "lacks"),
    ):
        with pytest.raises(BadMessage, match=reason):
            method.check(Message(tensors, metadata))


@pytest.mark.parametrize("phase", [0, 1])
def test_stacked_clients_agree_with_a_loop(phase: int) -> None:
    parity.assert_vmap_agrees(support.population("pfedafm"), phase)


def test_engines_agree(tmp_path) -> None:
    parity.assert_engines_agree(tmp_path, "pfedafm")
    parity.assert_nothing_shared(tmp_path, "pfedafm")


def test_engines_agree_on_what_is_clipped(tmp_path) -> None:
    """The mixing weights of all clients after two rounds, in which their gradients are longer than the limit."""
    settings = {"rounds": 2, "training": {"clip": 0.01, "momentum": 0.5, "weight_decay": 0.01}}
    found = {}
    for engine in (SequentialEngine, VectorizedEngine):
        _, notes, run = support.run(tmp_path, engine, {"name": "pfedafm", "weight_lr": 1.0}, **settings)
        assert not [note for note in notes if "one after another" in note]
        found[engine] = torch.stack([run.engine.get_state(client)["mixing.away"] for client in range(4)])
    torch.testing.assert_close(found[SequentialEngine], found[VectorizedEngine], rtol=1e-4, atol=1e-6)
    scale = (1.0 / 0.1) ** 0.5
    assert float(found[SequentialEngine].norm(dim=1).max()) * scale > 0.05  # far more than the limit allows


def test_learns(tmp_path) -> None:
    run = support.federation(tmp_path, "pfedafm", rounds=12)
    assert run.run()["accuracy_final"] > 0.9


@pytest.mark.parametrize("classes", [10, 100])
def test_traffic_is_the_closed_form(tmp_path, classes: int) -> None:
    """CNN-5 with 500 features without its head, whatever the number of classes is."""
    assert support.traffic(tmp_path, "pfedafm", classes) == (665_048, 665_048)


def test_operations_are_counted_as_by_hand() -> None:
    """CNN-1 twice. Phase 1: a full step of the private one, and a forward pass of the received extractor.

    Phase 2: a full step of the shared extractor, and the frozen head's forward pass and its input's gradient.
    """
    clients = cifar_clients("pfedafm", auxiliary="cnn1")
    extractor = FORWARD - 2 * FC3
    assert count_flops(clients.new_network(0), clients.method).phases == {
        "model": 3 * FORWARD - 2 * CONV1 + extractor,
        "shared": 3 * extractor - 2 * CONV1 + 4 * FC3,
    }
