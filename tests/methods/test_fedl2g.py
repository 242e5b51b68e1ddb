"""FedL2G, with numbers worked out by hand."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyfed.engines import SequentialEngine, VectorizedEngine
from polyfed.engines.client.batches import phase_samples
from polyfed.engines.client.flops import count_flops
from polyfed.engines.client.probing import ask, probe_samples
from polyfed.errors import BadMessage, InputError
from polyfed.message import Message, State
from polyfed.methods.base import Applied, Batch, ClientNetwork
from polyfed.methods.fedl2g import FedL2G, mean
from polyfed.models import SplitNetwork
from tests import support
from tests.engines.test_flops import CONV1, FC3, FORWARD, cifar_clients
from tests.methods import parity

LOGITS = {"name": "fedl2g", "guides": "logits"}


class Scaled(nn.Module):
    """One feature, the image's value times one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x.flatten(1)[:, :1]


def scaled_client(method: FedL2G) -> ClientNetwork:
    """Feature θ·x with θ = 1, logits (θ·x, 0), and 3 as the guide of class 0; the head is frozen."""
    head = nn.Linear(1, 2)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[1.0], [0.0]]))
        head.bias.zero_()
    head.requires_grad_(False)
    net = ClientNetwork(SplitNetwork(Scaled(), head, 1), method.client_modules(SplitNetwork(Scaled(), head, 1)))
    with torch.no_grad():
        net.guides.vectors[0] = 3.0
    return net.eval()


def two_classes(**settings: Any) -> FedL2G:
    """The method for clients with one feature and two classes, bound to lr 0.1."""

    def network(input_shape: tuple[int, ...], classes: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(36, 1), nn.Linear(1, classes))

    method = support.new_method(
        {"name": "fedl2g", **settings}, models=(network,), data=support.tiny_dataset(classes=2), classes_per_client=1,
        clients=2, lr=0.1,
    )  # fmt: skip
    assert isinstance(method, FedL2G)
    return method


def test_a_guides_gradient_is_that_of_the_quiz_after_a_step_on_the_study_batch() -> None:
    """Study x = 1 of class 0: softplus(−θ) + (θ − 3)² has gradient −0.268941 − 4, so θ' = 1 + 0.1·4.268941 = 1.426894.

    Quiz x = 2 of class 1: softplus(2·θ') = 2.909815, its gradient 2·sigmoid(2.853788) = 1.891028. The guide moves θ' by
    2·0.1 per unit: 0.378206.
    """
    method = two_classes()
    net = scaled_client(method)
    study, quiz = (
        Batch(torch.full((1, 1, 1, 1), value), torch.tensor([label])) for value, label in ((1.0, 0), (2.0, 1))
    )
    assert method.probe is not None
    found = ask(method.probe, net, study, quiz)
    assert found["gradients"].flatten().tolist() == pytest.approx([0.378206, 0.0], abs=1e-6)
    assert found["seen"].tolist() == [True, False]
    assert net.model.extractor.weight.item() == 1.0


def through_the_step(method: FedL2G, net: ClientNetwork, parameters: State, study: Batch, quiz: Batch) -> Tensor:
    """The same gradient as the paper has it: by differentiating through the step."""
    own = {name: tensor.clone().requires_grad_() for name, tensor in parameters.items()}
    guides = net.guides.vectors.clone().requires_grad_()
    lost = mean(Applied(net, method.loss).on({**own, "guides.vectors": guides})(study), study)
    steps = torch.autograd.grad(lost, list(own.values()), create_graph=True)
    moved = {name: t - method.training.lr * step for (name, t), step in zip(own.items(), steps, strict=True)}
    asked = Applied(net, lambda net, batch: nn.functional.cross_entropy(net(batch.x), batch.y)).on(moved)(quiz)
    return torch.autograd.grad(asked, guides)[0]


@pytest.mark.parametrize("guides", ["features", "logits"])
def test_no_second_derivative_is_needed(guides: str) -> None:
    clients = support.population({"name": "fedl2g", "guides": guides})
    method = clients.method
    assert isinstance(method, FedL2G) and method.probe is not None
    net = clients.new_network(0).eval()
    net.guides.vectors.normal_()
    study, quiz = (Batch(*clients.dataset.batch(torch.arange(*span))) for span in ((0, 120, 17), (5, 120, 23)))
    found = ask(method.probe, net, study, quiz)["gradients"]
    parameters = {name: parameter.detach() for name, parameter in net.model.named_parameters("model")}
    expected = through_the_step(method, net, parameters, study, quiz)
    assert float(expected.abs().max()) > 1e-4
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)


def test_padding_counts_for_nothing() -> None:
    clients = support.population("fedl2g")
    net = clients.new_network(0).eval()
    probe = clients.method.probe
    assert probe is not None
    x, y = clients.dataset.batch(torch.arange(0, 120, 20))
    alone = ask(probe, net, Batch(x[:4], y[:4]), Batch(x[4:], y[4:]))
    masks = torch.tensor([[True] * 4 + [False] * 2, [True] * 2 + [False] * 4])
    padded = ask(probe, net, Batch(x, y, masks[0]), Batch(x.roll(2, 0), y.roll(2), masks[1]))
    torch.testing.assert_close(padded["gradients"], alone["gradients"], rtol=1e-5, atol=1e-9)
    assert torch.equal(padded["seen"], alone["seen"])


def test_loss_adds_the_mean_squared_distance_from_the_guide() -> None:
    """Feature 1 and guide 3 of class 0: softplus(−1) + 4 = 4.313262; logits (1, 0) and guide (3, 3): + (4 + 9) / 2."""
    for guides, expected in (("features", 4.313262), ("logits", 6.813262)):
        method = two_classes(guides=guides)
        batch = Batch(torch.ones(1, 1, 1, 1), torch.tensor([0]))
        assert method.loss(scaled_client(method), batch).tolist() == pytest.approx([expected], abs=1e-6)


def replies() -> list[Any]:
    """One client sends class 0, another classes 0 and 2."""
    return [
        support.reply(0, {"gradients": torch.tensor([[2.0, 0.0]])}, labels=[0]),
        support.reply(1, {"gradients": torch.tensor([[0.0, 4.0], [6.0, 8.0]])}, labels=[0, 2]),
    ]


@pytest.mark.parametrize(("limit", "factor"), [(100.0, 1.0), (5.0, 0.487950)])
def test_guides_follow_the_mean_over_those_who_sent_the_class(limit: float, factor: float) -> None:
    """Means (1, 2), nothing, (6, 8), together of norm 10.246951; a limit of 5 shortens them by 0.487950."""

    def network(input_shape: tuple[int, ...], classes: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(36, 2), nn.Linear(2, classes))

    method = support.new_method(
        {"name": "fedl2g", "server_lr": 0.1, "server_clip": limit}, models=(network,),
        data=support.tiny_dataset(classes=3), clients=3, classes_per_client=1,
    )  # fmt: skip
    server = support.new_server(method)
    before = server.state["guides.vectors"].clone()
    for reply in replies():
        method.check(reply.message)
    method.aggregate(server, replies())
    moved = (before - server.state["guides.vectors"]) / factor
    assert moved.tolist() == [pytest.approx(row, abs=1e-6) for row in ([0.1, 0.2], [0.0, 0.0], [0.6, 0.8])]
    assert torch.equal(server.state["guides.vectors"][1], before[1])


def test_guides_start_as_normal_draws_and_are_sent_in_round_one() -> None:
    method = support.new_method(LOGITS, data=support.tiny_dataset(classes=4))
    vectors = method.download(support.new_server(method), 0, None).tensors["guides.vectors"]
    assert vectors.shape == (4, 4) and bool(vectors.any(1).all()) and bool((vectors < 0).any())
    other = support.new_method("fedl2g")
    assert other.download(support.new_server(other), 0, None).floats == 4 * support.FEATURES


@pytest.mark.parametrize(("guides", "lr"), [("features", 100.0), ("logits", 0.1)])
def test_the_servers_learning_rate_depends_on_what_is_guided(guides: str, lr: float) -> None:
    method = support.new_method({"name": "fedl2g", "guides": guides})
    assert isinstance(method, FedL2G)
    server = support.new_server(method)
    before = server.state["guides.vectors"].clone()
    method.aggregate(server, [support.reply(0, {"gradients": torch.full((1, method.size), 0.01)}, labels=[1])])
    assert (before - server.state["guides.vectors"])[1].tolist() == pytest.approx([0.01 * lr] * method.size, rel=1e-3)


@pytest.mark.parametrize("engine", [SequentialEngine, VectorizedEngine])
def test_networks_rest_during_warm_up_while_the_guides_learn(tmp_path, engine: Any) -> None:
    """Two of four rounds; with a loss of zero, weight decay and batch norm would still move."""
    method = {"name": "fedl2g", "warmup": 2}
    training = {"weight_decay": 0.1, "momentum": 0.9}
    run = support.federation(tmp_path / "run", method, engine, rounds=4, training=training, models=(support.Normed,))
    first = {name: tensor.clone() for name, tensor in run.engine.get_state(0).items() if name.startswith("model.")}
    guides = run.server.state["guides.vectors"].clone()
    for round in (1, 2):
        run.server.round = round
        answers = run.engine.train(round, {client: run.download(client) for client in range(4)})
        assert all(answer.loss != answer.loss and answer.flops > 0 for answer in answers)
        run.method.aggregate(run.server, answers)
        assert all(torch.equal(run.engine.get_state(0)[name], tensor) for name, tensor in first.items())
        assert not torch.equal(run.server.state["guides.vectors"], guides)
    later = run.engine.train(3, {client: run.download(client) for client in range(4)})
    assert all(answer.loss > 0 for answer in later)
    assert later[0].flops > answers[0].flops
    assert any(not torch.equal(run.engine.get_state(0)[name], tensor) for name, tensor in first.items())


def test_a_whole_run_of_warm_up_is_refused() -> None:
    with pytest.raises(InputError, match=r"method.warmup = 2 rounds.*only 2: set method.warmup to less"):
        support.new_method({"name": "fedl2g", "warmup": 2}, rounds=2)


@pytest.mark.parametrize(("rounds", "warmup"), [(2, 0), (30, 7), (200, 50), (1000, 50)])
def test_warm_up_is_at_most_a_quarter_unless_it_is_set(rounds: int, warmup: int) -> None:
    usual = support.new_method("fedl2g", rounds=rounds)
    given = support.new_method({"name": "fedl2g", "warmup": 1}, rounds=rounds)
    assert usual.phases()[0].first_round == warmup + 1 and usual.depends_on_rounds
    assert given.phases()[0].first_round == 2 and not given.depends_on_rounds


def test_quiz_samples_are_never_trained_on() -> None:
    """A tenth of the samples for the quiz, and a study batch of eight of the others, drawn anew in every round."""
    clients = support.population("fedl2g")
    every = set(clients.data[0].train.tolist())
    trained = set(phase_samples(clients, 0, clients.method.phases()[0]).tolist())
    drawn = [[set(rows.tolist()) for rows in probe_samples(clients, 0, round)] for round in (3, 3, 4)]
    (study, quiz), again, later = drawn
    assert again == [study, quiz]
    assert len(quiz) == round(0.1 * len(every)) > 0 and len(study) == 8
    assert quiz | trained == every and not quiz & trained and study < trained
    assert later[1] == quiz and later[0] != study


def test_a_client_without_quiz_samples_sends_nothing_and_trains(tmp_path) -> None:
    """With 5 training samples a tenth is none."""
    dataset = support.tiny_dataset(per_class=4)
    for engine in (SequentialEngine, VectorizedEngine):
        run = support.federation(
            tmp_path / engine.__name__, "fedl2g", engine, dataset=dataset, rounds=1, classes_per_client=1
        )
        assert max(len(own.train) for own in run.engine.population.data.values()) <= 5
        answers = run.engine.train(1, {client: run.download(client) for client in range(4)})
        for answer in answers:
            run.method.check(answer.message)
            assert answer.message.floats == 0 and answer.loss > 0
        before = run.server.state["guides.vectors"].clone()
        run.method.aggregate(run.server, answers)
        assert torch.equal(run.server.state["guides.vectors"], before)


@pytest.mark.parametrize("engine", [SequentialEngine, VectorizedEngine])
def test_a_run_notes_once_which_clients_send_nothing(tmp_path, engine: Any) -> None:
    data = support.uneven_dataset(5, 20, 6, 20)
    _, notes, _ = support.run(tmp_path, engine, "fedl2g", dataset=data, partition="given", split="1:0")
    assert [note for note in notes if "quiz" in note] == [
        "client 0: too few training samples for a quiz, so nothing is sent"
    ]


def test_unsound_replies_are_refused() -> None:
    method = support.new_method("fedl2g")
    row = torch.zeros(1, 6)
    for tensors, labels, reason in (
        ({"gradients": row * torch.nan}, [0], "finite"),
        ({"gradients": torch.zeros(1, 5)}, [0], "shape"),
        ({"gradients": row}, [4], "outside"),
        ({"gradients": row}, [0, 1], "shape"),
        ({}, [0], "lacks"),
    ):
        with pytest.raises(BadMessage, match=reason):
            method.check(Message(tensors, {"labels": torch.tensor(labels)}))


@pytest.mark.parametrize("method", ["fedl2g", LOGITS], ids=["features", "logits"])
def test_stacked_clients_agree_with_a_loop(method: Any) -> None:
    parity.assert_vmap_agrees(support.population(method))


@pytest.mark.parametrize("method", ["fedl2g", LOGITS], ids=["features", "logits"])
def test_engines_agree(tmp_path, method: Any) -> None:
    parity.assert_engines_agree(tmp_path, method)
    parity.assert_nothing_shared(tmp_path, method)


@pytest.mark.parametrize("method", [{"name": "fedl2g"}, LOGITS], ids=["features", "logits"])
def test_learns(tmp_path, method: Any) -> None:
    """The server's default learning rates are for hundreds of features; the fewer, the larger the gradients are."""
    run = support.federation(tmp_path, {**method, "server_lr": 1.0}, rounds=24)
    assert run.run()["accuracy_final"] > 0.9


def test_only_the_features_need_the_same_number() -> None:
    def slim(input_shape: tuple[int, ...], classes: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(36, 3), nn.ReLU(), nn.Linear(3, classes))

    with pytest.raises(InputError, match="features"):
        support.population("fedl2g", models=(support.Wide, slim))
    support.population(LOGITS, models=(support.Wide, slim))


@pytest.mark.parametrize(
    ("method", "classes", "expected"),
    [
        ("fedl2g", 10, (1_000, 5_000)),
        ("fedl2g", 100, (5_000, 50_000)),
        (LOGITS, 10, (20, 100)),
        (LOGITS, 100, (1_000, 10_000)),
    ],
)
def test_traffic_is_the_closed_form(tmp_path, method: Any, classes: int, expected: tuple[int, int]) -> None:
    """K = 500; 2 of 10 or 10 of 100 classes each. A study batch need not hold all of a client's classes."""
    up, down = support.traffic(tmp_path, method, classes)
    assert down == expected[1]
    assert 0 < up <= expected[0]


def test_operations_of_the_probe_are_counted_as_by_hand() -> None:
    """Study: a full step, and the features' derivative along a direction: a forward pass and two more.

    The gradient of the guides is a product of a sample's class with K = 500 numbers. Quiz: a full step.
    """
    clients = cifar_clients("fedl2g")
    flops = count_flops(clients.new_network(0), clients.method)
    step, extractor = 3 * FORWARD - 2 * CONV1, FORWARD - 2 * FC3
    assert flops.phases == {"model": step}
    assert flops.probe == (step + 3 * extractor + 2 * 10 * 500, step)
    assert flops.of_round({"model": 10}, 12, (4, 2)) == 10 * step + 4 * flops.probe[0] + 2 * step
