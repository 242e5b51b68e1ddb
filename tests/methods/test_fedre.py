"""FedRE, with numbers worked out by hand."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from polyfed.errors import BadMessage, DivergedError
from polyfed.message import Message
from polyfed.methods.base import Method, Reply, Server
from polyfed.methods.fedre import mixture_loss
from polyfed.methods.parts.statistics import class_means
from polyfed.seeds import torch_generator
from tests import support
from tests.methods import parity

MIXTURE, TARGET = torch.tensor([[0.5, 3.0]]), torch.tensor([[0.0, 0.25, 0.0, 0.75]])
"""Class 1 at (2, 0) with weight ¼ and class 3 at (0, 4) with weight ¾, of four classes."""


def mixture(client: int, labels: list[int], weights: list[float], vector: list[float]) -> Reply:
    padded = torch.tensor(vector + [0.0] * (support.FEATURES - len(vector)))
    return support.reply(client, {"mixture": padded, "weights": torch.tensor(weights)}, labels=labels)


def zero_head(method: Method) -> tuple[Server, nn.Module]:
    server = support.new_server(method)
    head = server.modules["head"]
    for parameter in head.parameters():
        nn.init.zeros_(parameter)
    return server, head


def drawing(monkeypatch: pytest.MonkeyPatch, numbers: list[float]) -> None:
    monkeypatch.setattr(torch, "rand", lambda size, generator: 1 - torch.tensor(numbers)[:size])


def uploaded(features: torch.Tensor, labels: list[int], generator: torch.Generator | None = None) -> Message:
    method = support.new_method("fedre")
    classes = torch.tensor(labels, dtype=torch.int64)
    own, counts = class_means(features, classes, 4), torch.bincount(classes, minlength=4).tolist()
    return method.upload(support.trained(counts, statistics=own, generator=generator or torch.Generator()))


def test_upload_mixes_class_means_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Class 1 has the mean (2, 0), class 3 (0, 4). Drawn 0.2 and 0.6 are weights ¼ and ¾: (0.5, 3).

    The numbers drawn for classes 0 and 2, which the client does not have, play no part.
    """
    drawing(monkeypatch, [0.9, 0.2, 0.1, 0.6])
    features = torch.zeros(3, support.FEATURES)
    features[:, :2] = torch.tensor([[1.0, 0.0], [3.0, 0.0], [0.0, 4.0]])
    message = uploaded(features, [1, 1, 3])
    assert message.tensors["mixture"].tolist() == pytest.approx([0.5, 3.0, 0.0, 0.0, 0.0, 0.0])
    assert message.tensors["weights"].tolist() == pytest.approx([0.25, 0.75])
    assert message.metadata["labels"].tolist() == [1, 3]
    assert list(message.metadata) == ["labels"]
    support.new_method("fedre").check(message)


def test_weights_come_from_the_clients_generator() -> None:
    """The same address, the same weights; another round or client, others. Classes have the numbers of their places."""
    features = torch.rand(4, support.FEATURES)

    def weights(labels: list[int], *address: int) -> list[float]:
        message = uploaded(features[: len(labels)], labels, torch_generator(0, "upload", *address))
        return message.tensors["weights"].tolist()

    first = weights([0, 1, 2, 3], 1, 0)
    assert first == weights([0, 1, 2, 3], 1, 0)
    assert first != weights([0, 1, 2, 3], 2, 0) != weights([0, 1, 2, 3], 1, 1)
    two = weights([1, 3], 1, 0)
    assert two[0] / two[1] == pytest.approx(first[1] / first[3], rel=1e-5)
    assert sum(first) == pytest.approx(1)


def test_one_class_is_sent_as_it_is() -> None:
    features = torch.tensor([[1.0], [3.0]]).expand(2, support.FEATURES)
    message = uploaded(features, [2, 2])
    assert message.tensors["mixture"].tolist() == [2.0] * support.FEATURES
    assert message.tensors["weights"].tolist() == [1.0]


def test_weights_are_finite_when_zero_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "rand", lambda size, generator: torch.zeros(size))
    assert uploaded(torch.ones(1, support.FEATURES), [2]).tensors["weights"].tolist() == [1.0]


def test_a_client_without_samples_is_left_out() -> None:
    method = support.new_method("fedre")
    empty = uploaded(torch.zeros(0, support.FEATURES), [])
    method.check(empty)
    server = support.new_server(method)
    before = server.modules["head"].weight.clone()
    method.aggregate(server, [Reply(0, empty)])
    assert torch.equal(before, server.modules["head"].weight)


@pytest.mark.parametrize(("logits", "expected"), [([0.0] * 4, math.log(4)), ([0.0, 1.0, 0.0, 2.0], 0.743812)])
def test_loss_of_mixed_labels_by_hand(logits: list[float], expected: float) -> None:
    """A zero head: ln 4. Logits (0, 1, 0, 2): ln(1 + e + 1 + e²) − (¼ · 1 + ¾ · 2) = 2.493812 − 1.75."""
    head = nn.Linear(2, 4)
    nn.init.zeros_(head.weight)
    head.bias.data = torch.tensor(logits)
    assert mixture_loss(head, MIXTURE, TARGET).tolist() == pytest.approx([expected], abs=1e-6)


def test_one_step_on_one_mixture() -> None:
    """A zero head gives ¼ each, so the gradient of the logits is (¼, 0, ¼, −½); learning rate 0.1, vector (0.5, 3)."""
    method = support.new_method({"name": "fedre", "server_lr": 0.1})
    server, head = zero_head(method)
    method.aggregate(server, [mixture(0, [1, 3], [0.25, 0.75], [0.5, 3.0])])
    assert head.bias.tolist() == pytest.approx([-0.025, 0.0, -0.025, 0.05])
    assert head.weight[3, :2].tolist() == pytest.approx([0.025, 0.15])
    assert head.weight[0, :2].tolist() == pytest.approx([-0.0125, -0.075])
    assert head.weight[1, :2].tolist() == pytest.approx([0.0, 0.0])
    assert not head.weight[:, 2:].any()


def test_losses_of_a_batch_are_added_up() -> None:
    """Twice the same mixture in one batch is twice the step, not the same."""
    method = support.new_method({"name": "fedre", "server_lr": 0.1})
    server, head = zero_head(method)
    method.aggregate(server, [mixture(client, [1, 3], [0.25, 0.75], [0.5, 3.0]) for client in range(2)])
    assert head.bias.tolist() == pytest.approx([-0.05, 0.0, -0.05, 0.1])


def test_a_small_batch_is_a_step_of_its_own() -> None:
    method = support.new_method({"name": "fedre", "server_lr": 0.1, "server_batch_size": 1})
    server, head = zero_head(method)
    method.aggregate(server, [mixture(client, [1, 3], [0.25, 0.75], [0.5, 3.0]) for client in range(2)])
    assert 0.05 < head.bias[3].item() < 0.1  # the second step starts from a better head


def test_same_round_gives_the_same_head() -> None:
    method = support.new_method({"name": "fedre", "server_lr": 0.5, "server_batch_size": 1})
    heads = []
    for round in (1, 1, 2):
        server = support.new_server(method, round)
        replies = [mixture(c, [c, 3], [0.4, 0.6], [float(c), 2.0 - c, 1.0]) for c in range(3)]
        method.aggregate(server, replies)
        heads.append(server.modules["head"].weight)
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])


@pytest.mark.parametrize(
    ("weights", "reason"),
    [
        ([0.5, 0.4], "'weights' sum to 0.9, not 1"),
        ([1.5, -0.5], "negative weight"),
        ([1.0], "shape"),
        ([math.nan, 0.5], "finite"),
    ],
)
def test_unsound_weights_are_refused(weights: list[float], reason: str) -> None:
    method = support.new_method("fedre")
    with pytest.raises(BadMessage, match=reason):
        method.check(mixture(0, [1, 3], weights, [1.0]).message)


def test_weights_that_are_only_rounded_are_accepted() -> None:
    support.new_method("fedre").check(mixture(0, [1, 3], [0.50004, 0.5], [1.0]).message)


def test_head_that_diverges_is_an_error() -> None:
    method = support.new_method({"name": "fedre", "server_epochs": 4, "server_lr": 1e38})
    with pytest.raises(DivergedError, match=r"server_lr=1e\+37"):
        method.aggregate(support.new_server(method), [mixture(0, [0, 1], [0.5, 0.5], [1e3])])


def test_clients_receive_the_servers_head(tmp_path: Path) -> None:
    """From the first round on, and as a copy: no client's training reaches the server's head."""
    run = support.federation(tmp_path, "fedre", rounds=1)
    before = run.server.modules["head"].weight.clone()
    sent = run.download(0).tensors["model.head.weight"]
    assert torch.equal(sent, before)
    sent.zero_()
    assert torch.equal(run.server.modules["head"].weight, before)
    run.run()
    assert not torch.equal(run.server.modules["head"].weight, before)


def test_a_client_mixes_anew_in_every_round(tmp_path: Path) -> None:
    run = support.federation(tmp_path, "fedre")
    weights = []
    for round in (1, 2, 2):
        replies = run.engine.train(round, {client: run.download(client) for client in range(2)})
        weights.append([reply.message.tensors["weights"] for reply in replies])
    assert not torch.equal(weights[0][0], weights[1][0])
    assert not torch.equal(weights[0][0], weights[0][1])
    assert torch.equal(weights[1][0], weights[2][0])


def test_stacked_clients_get_their_own_values() -> None:
    parity.assert_vmap_agrees(support.population("fedre"))


def test_engines_agree(tmp_path: Path) -> None:
    parity.assert_engines_agree(tmp_path, {"name": "fedre", "server_batch_size": 2}, participation=0.75)


def test_clients_share_no_storage(tmp_path: Path) -> None:
    parity.assert_nothing_shared(tmp_path, "fedre")


def test_it_learns(tmp_path: Path) -> None:
    assert support.federation(tmp_path, "fedre", rounds=8).run()["accuracy_best"] > 0.9


@pytest.mark.parametrize(("classes", "expected"), [(10, (502, 5_010)), (100, (510, 50_100))])
def test_traffic_is_the_closed_form(tmp_path: Path, classes: int, expected: tuple[int, int]) -> None:
    assert support.traffic(tmp_path, "fedre", classes) == expected
