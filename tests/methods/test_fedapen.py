"""FedAPEN, with numbers worked out by hand."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from polyfed.data import ClientData
from polyfed.engines import SequentialEngine, VectorizedEngine
from polyfed.engines.client.batches import phase_samples
from polyfed.engines.client.round import train_phase
from polyfed.methods import fedapen
from polyfed.methods.base import Batch, ClientNetwork, Knowledge
from polyfed.methods.parts.distillation import kl_divergence
from polyfed.population import Population
from tests import support
from tests.methods import parity

FAR = -40.0
"""A logit that makes a class practically impossible."""


def fixed_client(clients: Population, lean: float = 0.0, participations: int = 2) -> ClientNetwork:
    """A client whose private network always says (1/2, 1/2, 0, 0) and whose shared one (3/4, 1/4, 0, 0)."""
    net = clients.new_network(0)
    with torch.no_grad():
        for head, first in ((net.model.head, 0.0), (net.shared.head, math.log(3))):
            head.weight.zero_()
            head.bias.copy_(torch.tensor([first, 0.0, FAR, FAR]))
        net.mixing.lean.fill_(lean)
        net.mixing.participations.fill_(participations)
    return net


def test_loss_has_labels_the_other_network_and_the_ensemble() -> None:
    """Private share 3/4: the ensemble's logits are (¼·ln 3, 0), its probability of class 0 is 0.568235.

    Label 0: private ln 2 + 0.130812 + 0.565220 = 1.389179, shared −ln ¾ + 0.143841 + 0.565220 = 0.996743.
    """
    clients = support.population("fedapen")
    x, _ = clients.dataset.batch(torch.tensor([0]))
    values = clients.method.loss(fixed_client(clients, lean=0.25), Batch(x, torch.tensor([0])))
    assert values.tolist() == pytest.approx([2.385922], abs=1e-5)


def test_no_gradient_crosses_between_the_networks() -> None:
    """Each network's gradient is that of its own three terms with the other network's logits as constants."""
    clients = support.population("fedapen")
    net = clients.new_network(0)
    with torch.no_grad():
        net.mixing.lean.fill_(0.2)
    x, y = clients.dataset.batch(torch.tensor([0, 40, 80]))
    together = clients.method.loss(net, Batch(x, y)).sum()
    for learner, other, share in ((net.model, net.shared, 0.7), (net.shared, net.model, 0.3)):
        own, constant = learner(x), other(x).detach()
        expected = (
            nn.functional.cross_entropy(own, y, reduction="sum")
            + kl_divergence(constant, own).sum()
            + nn.functional.cross_entropy(share * own + (1 - share) * constant, y, reduction="sum")
        )
        parameters = list(learner.parameters())
        found = torch.autograd.grad(together, parameters, retain_graph=True)
        for one, two in zip(found, torch.autograd.grad(expected, parameters), strict=True):
            torch.testing.assert_close(one, two)


def test_mixing_weight_follows_the_ensembles_gradient() -> None:
    """Equal shares: logits (½·ln 3, 0), probability 0.633975; gradient (0.633975 − 1)·(0 − ln 3) = 0.402120.

    One step with rate 0.001 on samples of class 0 leaves 0.5 − 0.000402 for the private network, which is the worse.
    """
    clients = support.population("fedapen")
    net = fixed_client(clients)
    x, _ = clients.dataset.batch(torch.tensor([0, 1]))
    clients.method.mixing_loss(net, Batch(x, torch.tensor([0, 0]))).mean().backward()
    assert float(net.mixing.lean.grad) == pytest.approx(0.402120, abs=1e-5)


@pytest.mark.parametrize("models", [(support.Wide,), (support.Normed,)])
def test_networks_are_frozen_while_the_mixing_weight_learns(models) -> None:
    clients = support.population("fedapen", models=models)
    net = fixed_client(clients)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    train_phase(clients, 0, net, clients.method.phases()[0], round=2)
    changed = {name for name, tensor in net.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {"mixing.lean"}


@pytest.mark.parametrize(("first", "expected"), [(3.0, 0.0), (-3.0, 1.0)])
def test_mixing_weight_stays_between_0_and_1(first: float, expected: float) -> None:
    """A huge rate drives it over the edge, to whichever network is right."""
    clients = support.population({"name": "fedapen", "mixing_lr": 100.0})
    net = fixed_client(clients)
    mixing = clients.method.phases()[0]
    labels = clients.dataset.labels[phase_samples(clients, 0, mixing)]
    assert len(set(labels.tolist())) == 1
    with torch.no_grad():
        net.model.head.bias.zero_()
        net.shared.head.bias.zero_()[labels[0]] = first
    train_phase(clients, 0, net, mixing, round=2)
    assert float(net.mixing.private_share) == expected


def test_mixing_weight_waits_for_the_first_average(tmp_path) -> None:
    """In its first participation a client has nothing to mix yet, and weight decay moves nothing either."""
    run = support.federation(
        tmp_path, {"name": "fedapen", "mixing_lr": 0.5}, rounds=2, training={"weight_decay": 0.1, "momentum": 0.9}
    )
    for number, learned in ((1, False), (2, True)):
        replies = run.engine.train(number, {client: run.download(client) for client in range(4)})
        run.method.aggregate(run.server, replies)
        leans = [float(run.engine.get_state(client)["mixing.lean"]) for client in range(4)]
        assert [lean != 0.0 for lean in leans] == [learned] * 4
        assert not any(name.startswith("mixing") for name in replies[0].message.tensors)


def test_participations_are_counted_by_the_client() -> None:
    clients = support.population("fedapen")
    state = dict(clients.new_network(0).state_dict())
    message = clients.method.download(support.new_server(clients.method), 0, None)
    for number in (1, 2, 3):  # a client that joins late counts from its own first round
        changed = clients.method.receive(state, message, Knowledge(torch.tensor([1, 1, 0, 0]), number + 10))
        assert int(changed["mixing.participations"]) == number
        assert changed.keys() - {"mixing.participations"} == message.tensors.keys()
        state |= changed


@pytest.mark.parametrize("share", [0.05, 0.1, 0.3, 0.49])
def test_parts_are_disjoint_and_together_all_samples(share: float) -> None:
    """Of up to 10 samples 5 % round to none, and the mixing weight stays; training always has some."""
    clients = support.population({"name": "fedapen", "mixing_samples": share})
    mixing, training, adapted = clients.method.phases()
    none = torch.zeros(0, dtype=torch.int64)
    for samples in range(1, 120):
        one = replace(clients, data=[ClientData(torch.arange(samples), none, none)])
        apart, rest = phase_samples(one, 0, mixing).tolist(), phase_samples(one, 0, training).tolist()
        assert sorted(apart + rest) == list(range(samples))
        assert phase_samples(one, 0, adapted).tolist() == apart
        assert len(rest) > 0
        if share == 0.05:
            assert (len(apart) > 0) == (samples > 10)


def test_a_client_with_few_samples_keeps_its_mixing_weight() -> None:
    clients = support.population("fedapen")
    none = torch.zeros(0, dtype=torch.int64)
    few = replace(clients, data=[ClientData(torch.arange(5), none, none)])
    net = fixed_client(few, lean=0.125)
    for phase in few.method.phases():
        train_phase(few, 0, net, phase, round=2)
    assert float(net.mixing.lean) == 0.125


@pytest.mark.parametrize("engine", [SequentialEngine, VectorizedEngine])
def test_a_run_notes_once_which_clients_set_no_sample_aside(tmp_path, engine) -> None:
    """Three clients have 10 training samples, of which 0.05 are none; the last has all others."""
    data = support.uneven_dataset(10, 10, 10, 30)
    _, notes, run = support.run(tmp_path, engine, "fedapen", dataset=data, partition="given", split="1:0")
    assert [len(own.train) for own in run.engine.population.data.values()] == [10, 10, 10, 30]
    assert [note for note in notes if "mixing" in note] == [
        "clients 0, 1 and 2: too few training samples to set one aside (mixing_samples), so the mixing weight stays at "
        "one half"
    ]


def test_nothing_is_noted_where_all_clients_set_samples_aside() -> None:
    assert not [note for note in support.population("fedapen").notes if "mixing" in note]
    more = support.population({"name": "fedapen", "mixing_samples": 0.01})
    assert [note for note in more.notes if "mixing" in note][0].startswith("clients 0, 1, 2 and 3: too few")


def test_mixing_samples_are_not_augmented() -> None:
    mixing, training, adapted = support.new_method("fedapen").phases()
    assert (mixing.augment, training.augment, adapted.augment) == (False, True, False)
    assert (mixing.epochs, mixing.lr) == (10, 1e-3)


@pytest.mark.parametrize("first", [3.0, -3.0])
def test_second_share_is_learned_after_training_and_changes_nothing_else(first: float) -> None:
    """It moves towards the network that is right on the samples set aside, already in a client's first round."""
    clients = support.population({"name": "fedapen", "mixing_lr": 0.1, "adapted_epochs": 3})
    net = fixed_client(clients, participations=1)
    _, _, adapted = clients.method.phases()
    labels = clients.dataset.labels[phase_samples(clients, 0, adapted)]
    with torch.no_grad():
        net.model.head.bias.zero_()
        net.shared.head.bias.zero_()[labels[0]] = first
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    train_phase(clients, 0, net, adapted, round=1)
    changed = {name for name, tensor in net.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {"adapted.lean"}
    assert (float(net.adapted.private_share) < 0.5) == (first > 0)


def test_second_share_leaves_the_first_rules_numbers(tmp_path) -> None:
    """With and without it, all other rules have the same accuracies and all weights the same bits."""
    runs = []
    for epochs in (0, 5):
        method = {"name": "fedapen", "mixing_lr": 0.1, "adapted_epochs": epochs}
        run = support.federation(tmp_path / str(epochs), method, rounds=3, participation=0.75)
        run.run()
        runs.append(run)
    without, beside = (run.folder.evaluations() for run in runs)
    assert set(beside.rule) - set(without.rule) == {"adapted"}
    kept = beside[beside.rule != "adapted"].reset_index(drop=True)
    assert kept.equals(without)
    for client in range(4):
        one, other = (run.engine.get_state(client) for run in runs)
        assert all(torch.equal(other[name], tensor) for name, tensor in one.items())
        assert other.keys() - one.keys() == {"adapted.lean"}


def test_prediction_is_the_ensemble() -> None:
    """Private share 3/4 of logits (0, 0, …) and (ln 3, 0, …): ¼·ln 3 = 0.274653 for class 0."""
    clients = support.population("fedapen")
    x, _ = clients.dataset.batch(torch.tensor([0]))
    scores = clients.method.predict(fixed_client(clients, lean=0.25), x)
    assert list(scores) == ["ensemble", "classifier", "shared", "adapted"]
    assert scores["adapted"][0, :2].tolist() == pytest.approx([0.549306, 0.0], abs=1e-6)  # equal shares: ½·ln 3
    assert scores["ensemble"][0, :2].tolist() == pytest.approx([0.274653, 0.0], abs=1e-6)
    assert scores["classifier"][0, :2].tolist() == [0.0, 0.0]
    assert scores["shared"][0, :2].tolist() == pytest.approx([1.098612, 0.0], abs=1e-6)


def test_aggregation_is_the_plain_mean() -> None:
    method = support.new_method("fedapen")
    server = support.new_server(method)
    tensors = method.download(server, 0, None).tensors
    replies = [
        support.reply(client, {name: torch.full_like(tensor, value) for name, tensor in tensors.items()})
        for client, value in enumerate((1.0, 5.0))
    ]
    method.aggregate(server, replies)
    assert all(bool((tensor == 3).all()) for tensor in server.state.values())


class Experienced(fedapen.Mixing):
    """The mixing weight of a client that has taken part before."""

    def __init__(self) -> None:
        super().__init__()
        self.participations.fill_(2)


def test_stacked_clients_agree_with_a_loop(monkeypatch) -> None:
    monkeypatch.setattr(fedapen, "Mixing", Experienced)
    for phase in (0, 1, 2):
        parity.assert_vmap_agrees(support.population("fedapen"), phase)


def test_engines_agree(tmp_path) -> None:
    parity.assert_engines_agree(tmp_path, {"name": "fedapen", "mixing_lr": 0.1})
    parity.assert_nothing_shared(tmp_path, "fedapen")


def test_learns(tmp_path) -> None:
    run = support.federation(tmp_path, "fedapen", rounds=6)
    assert run.run()["accuracy_final"] > 0.9


@pytest.mark.parametrize(("classes", "expected"), [(10, 670_058), (100, 715_148)])
def test_traffic_is_the_closed_form(tmp_path, classes: int, expected: int) -> None:
    assert support.traffic(tmp_path, "fedapen", classes) == (expected, expected)
