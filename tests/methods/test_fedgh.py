"""FedGH, with numbers worked out by hand."""

import math

import pytest
import torch
from torch import Tensor, nn

from polyfed.errors import BadMessage, DivergedError
from polyfed.message import Message
from polyfed.methods.base import Reply
from polyfed.methods.parts.statistics import class_means
from polyfed.models import SplitNetwork
from tests import support
from tests.methods import parity


def means(client: int, labels: list[int], scale: float = 1.0) -> Reply:
    """A client whose mean feature of class c points along axis c."""
    return support.reply(client, {"prototypes": scale * torch.eye(support.FEATURES)[labels]}, labels=labels)


def zero_head(method) -> tuple[object, nn.Module]:
    server = support.new_server(method)
    head = server.modules["head"]
    for parameter in head.parameters():
        nn.init.zeros_(parameter)
    return server, head


def test_one_step_on_one_mean() -> None:
    """A zero head gives four classes ¼ each, so for class 1 the gradient of the logits is (¼, −¾, ¼, ¼).

    The mean is the first axis, so with learning rate 0.01 the first weight column and the bias become
    (−0.0025, 0.0075, −0.0025, −0.0025), and all other columns stay zero.
    """
    method = support.new_method("fedgh")
    server, head = zero_head(method)
    first_axis = torch.eye(support.FEATURES)[:1]
    method.aggregate(server, [support.reply(0, {"prototypes": first_axis}, labels=[1])])
    step = [-0.0025, 0.0075, -0.0025, -0.0025]
    assert head.weight[:, 0].tolist() == pytest.approx(step)
    assert head.bias.tolist() == pytest.approx(step)
    assert not head.weight[:, 1:].any()


def test_means_of_several_clients_share_a_mini_batch() -> None:
    """Classes 0 and 1 in one batch: gradients are averaged, so W[0, 0] = 0.01 · ¾ / 2 and b = (¼, ¼, −¼, −¼) / 100."""
    method = support.new_method({"name": "fedgh", "server_batch_size": 10})
    server, head = zero_head(method)
    method.aggregate(server, [means(0, [0]), means(1, [1])])
    assert head.weight[0, 0].item() == pytest.approx(0.00375)
    assert head.weight[1, 0].item() == pytest.approx(-0.00125)
    assert head.bias.tolist() == pytest.approx([0.0025, 0.0025, -0.0025, -0.0025])


def test_server_learns_to_tell_the_means_apart() -> None:
    """Guards against a head that is in no optimiser: it moves in the first round and classifies after some."""
    method = support.new_method({"name": "fedgh", "server_lr": 0.5})
    server = support.new_server(method)
    before = method.download(server, 0, None).tensors["model.head.weight"].clone()
    replies = [means(0, [0, 1], 5.0), means(1, [2, 3], 5.0)]
    method.aggregate(server, replies)
    assert not torch.equal(before, method.download(server, 0, None).tensors["model.head.weight"])
    for _ in range(30):
        method.aggregate(server, replies)
    assert server.modules["head"](5 * torch.eye(support.FEATURES)[:4]).argmax(1).tolist() == [0, 1, 2, 3]


def test_class_that_nobody_holds_is_only_pushed_down() -> None:
    method = support.new_method("fedgh")
    server, head = zero_head(method)
    method.aggregate(server, [means(0, [0, 2])])
    assert head.bias[3] < 0 and (head.weight[3] <= 0).all()


def test_round_without_any_class_leaves_the_head() -> None:
    method = support.new_method("fedgh")
    server = support.new_server(method)
    before = server.modules["head"].weight.clone()
    method.aggregate(server, [means(0, [])])
    assert torch.equal(before, server.modules["head"].weight)


def test_every_mean_is_a_step_of_its_own() -> None:
    """Twice the same mean of class 0, with one feature of 1; head all zero, learning rate 1: the bias of class 0.

    First step: p = ¼, so it moves by 1 − ¼ = ¾ and the others by −¼; the feature's weights move likewise. In the second
    step the logits are 2 · ¾ and 2 · −¼, which differ by 2: it moves by 1 − 1 / (1 + 3 e⁻²) more. One step on both
    means would have moved it by ¾ only.
    """
    method = support.new_method({"name": "fedgh", "server_lr": 1.0})
    server, head = zero_head(method)
    method.aggregate(server, [means(0, [0]), means(1, [0])])
    expected = 0.75 + 1 - 1 / (1 + 3 * math.exp(-2))
    assert head.bias[0].item() == pytest.approx(expected, abs=1e-6)


def test_same_round_gives_the_same_head() -> None:
    """A step for every mean, so that the order counts: it follows from seed and round alone."""
    method = support.new_method({"name": "fedgh", "server_lr": 1.0, "server_epochs": 2})
    heads = []
    for round in (1, 1, 2):
        server = support.new_server(method, round)
        method.aggregate(server, [means(0, [0, 1], 3.0), means(1, [1, 2, 3], 2.0)])
        heads.append(server.modules["head"].weight)
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])


def test_head_that_diverges_is_an_error() -> None:
    method = support.new_method({"name": "fedgh", "server_epochs": 4, "server_lr": 1e36})
    with pytest.raises(DivergedError, match=r"server_lr=1e\+35"):
        method.aggregate(support.new_server(method), [means(0, [0, 1], 1e3)])


def test_clients_that_diverge_are_not_the_servers_fault() -> None:
    method = support.new_method({"name": "fedgh", "server_epochs": 4})
    with pytest.raises(DivergedError, match=r"clients sent values of up to 1.0e\+30.*\(--lr\)"):
        method.aggregate(support.new_server(method), [means(0, [0, 1], 1e30)])


def test_download_is_a_copy_of_the_head() -> None:
    method = support.new_method("fedgh")
    server = support.new_server(method)
    method.download(server, 0, None).tensors["model.head.weight"].zero_()
    assert server.modules["head"].weight.any()


def test_upload_holds_exact_means_of_seen_classes_only() -> None:
    """Class 2 has features 1 and 3, class 0 one of 10: means 10 and 2, not means of means of batches."""
    method = support.new_method("fedgh")
    features = torch.tensor([[1.0], [3.0], [10.0]]).expand(3, support.FEATURES)
    own = class_means(features, torch.tensor([2, 2, 0]), 4)
    message = method.upload(support.trained([1, 0, 2, 0], statistics=own))
    assert message.tensors["prototypes"][:, 0].tolist() == [10.0, 2.0]
    assert list(message.metadata) == ["labels"]
    method.check(message)


def test_unsound_replies_are_refused() -> None:
    method = support.new_method("fedgh")
    good = torch.ones(1, support.FEATURES)
    for tensors, labels, reason in (
        (good * math.inf, [0], "finite"),
        (good, [4], "outside"),
        (torch.ones(1, 3), [0], "shape"),
        (torch.ones(2, support.FEATURES), [1], "shape"),
    ):
        with pytest.raises(BadMessage, match=reason):
            method.check(Message({"prototypes": tensors}, {"labels": torch.tensor(labels)}))


class Deep(SplitNetwork):
    """A network whose head is more than one layer, with dropout."""

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        size = int(torch.tensor(input_shape).prod())
        extractor = nn.Sequential(nn.Flatten(), nn.Linear(size, support.FEATURES), nn.ReLU())
        head = nn.Sequential(nn.Linear(support.FEATURES, 5), nn.ReLU(), nn.Dropout(0.5), nn.Linear(5, classes))
        super().__init__(extractor, head, support.FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.extractor(x))
        return logits


def test_head_of_any_structure_is_trained(tmp_path) -> None:
    run = support.federation(tmp_path, "fedgh", models=(Deep,), rounds=1)
    before = {name: tensor.clone() for name, tensor in run.server.modules.state_dict().items()}
    run.run()
    after = run.server.modules.state_dict()
    assert list(after) == ["head.0.weight", "head.0.bias", "head.3.weight", "head.3.bias"]
    assert all(not torch.equal(before[name], after[name]) for name in after)


def test_head_of_a_run_is_trained_and_is_no_clients_own(tmp_path) -> None:
    run = support.federation(tmp_path, "fedgh", rounds=1)
    before = run.server.modules["head"].weight.clone()
    assert torch.equal(before, run.method.task.new_head().weight)
    run.run()
    after = run.server.modules["head"].weight
    assert not torch.equal(before, after)
    assert all(not torch.equal(after, run.engine.get_state(c)["model.head.weight"]) for c in range(4))


def test_stacked_clients_get_their_own_values() -> None:
    parity.assert_vmap_agrees(support.population("fedgh"))


def test_engines_agree(tmp_path) -> None:
    parity.assert_engines_agree(tmp_path, "fedgh")


def test_clients_share_no_storage(tmp_path) -> None:
    parity.assert_nothing_shared(tmp_path, "fedgh")


def test_it_learns(tmp_path) -> None:
    assert support.federation(tmp_path, "fedgh", rounds=8).run()["accuracy_best"] > 0.9


@pytest.mark.parametrize(("classes", "expected"), [(10, (1_000, 5_010)), (100, (5_000, 50_100))])
def test_traffic_is_the_closed_form(tmp_path, classes: int, expected: tuple[int, int]) -> None:
    assert support.traffic(tmp_path, "fedgh", classes) == expected
