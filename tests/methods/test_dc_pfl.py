"""DC-PFL, with numbers worked out by hand. The Gaussians' own mathematics is in test_gaussians.py."""

import pytest
import torch
from torch import Tensor, nn

from polyfed.errors import BadMessage, DivergedError, InputError
from polyfed.message import Message
from polyfed.methods.base import Batch, Knowledge, Method, Reply, Server
from polyfed.methods.dc_pfl import DCPFL
from polyfed.methods.parts.gaussians import Gaussians
from polyfed.methods.parts.statistics import class_covariances
from polyfed.models import SplitNetwork
from tests import support
from tests.methods import parity

SIZE = support.FEATURES
TRIANGLE = SIZE * (SIZE + 1) // 2
WITHOUT_CALIBRATION = {"name": "dc-pfl", "calibrate": False}


def points(client: int, labels: list[int], counts: list[int] | None = None, scale: float = 1.0) -> Reply:
    """A client whose samples of class c all lie on the same point, on axis c."""
    tensors = {"means": scale * torch.eye(SIZE)[labels], "covariances": torch.zeros(len(labels), TRIANGLE)}
    return support.reply(client, tensors, labels=labels, counts=counts or [1] * len(labels))


def virtual_features(method: Method, sent: Gaussians) -> tuple[Tensor, Tensor]:
    assert isinstance(method, DCPFL)
    return method._virtual_features(sent, method._noise(support.new_server(method), sent.labels, sent.counts))


def without_covariances(reply: Reply) -> Reply:
    return Reply(reply.client, Message({"means": reply.message.tensors["means"]}, reply.message.metadata))


def zero_head(method: Method) -> tuple[Server, nn.Linear]:
    server = support.new_server(method)
    head = server.modules["head"]
    assert isinstance(head, nn.Linear)
    for parameter in head.parameters():
        nn.init.zeros_(parameter)
    return server, head


def test_head_takes_one_step_on_each_clients_means() -> None:
    """A zero head gives four classes ¼ each. Client 0's mean of class 1 lies on axis 1: with learning rate 0.01 the
    bias and weight column 1 become b = (−0.0025, 0.0075, −0.0025, −0.0025).

    Client 1 then steps from there: for its mean of class 0, on axis 0, the logits are b, with e^b = 0.9975031 three
    times and 1.0075282, so p = (0.2493735, 0.2518797, 0.2493735, 0.2493735), and weight column 0 becomes
    0.01 · ((1, 0, 0, 0) − p). One common step on both would have given 0.01 · ((1, 0, 0, 0) − ¼) / 2 instead.
    """
    method = support.new_method(WITHOUT_CALIBRATION)
    server, head = zero_head(method)
    method.aggregate(server, [without_covariances(points(0, [1])), without_covariances(points(1, [0]))])
    assert head.weight[:, 1].tolist() == pytest.approx([-0.0025, 0.0075, -0.0025, -0.0025])
    assert head.weight[:, 0].tolist() == pytest.approx([0.007506265, -0.002518797, -0.002493735, -0.002493735])
    assert not head.weight[:, 2:].any()


def test_classes_of_one_client_share_a_step() -> None:
    """Classes 0 and 1 together: gradients are averaged, so W[0, 0] = 0.01 · ¾ / 2."""
    method = support.new_method(WITHOUT_CALIBRATION)
    server, head = zero_head(method)
    method.aggregate(server, [without_covariances(points(0, [0, 1]))])
    assert head.weight[0, 0].item() == pytest.approx(0.00375)


def test_global_mean_is_weighted_by_samples_and_kept() -> None:
    """Class 1: one sample at 1 and three at 3 give (1 + 9) / 4 = 2.5. Nobody holds it in the next round: it stays."""
    method = support.new_method(WITHOUT_CALIBRATION)
    server = support.new_server(method)
    ones = torch.ones(1, SIZE)
    method.aggregate(
        server,
        [
            support.reply(0, {"means": ones}, labels=[1], counts=[1]),
            support.reply(1, {"means": torch.cat([7 * ones, 3 * ones])}, labels=[0, 1], counts=[5, 3]),
        ],
    )
    method.aggregate(server, [support.reply(0, {"means": 4 * ones}, labels=[2], counts=[9])])
    sent = method.download(server, 0, None)
    assert sent.metadata["labels"].tolist() == [0, 1, 2]
    assert sent.tensors["means"][:, 0].tolist() == [7.0, 2.5, 4.0]


def test_calibration_trains_on_virtual_features() -> None:
    """All samples of a class on one point: so are its virtual features, and 50 steps of 20 tell the classes apart."""
    method = support.new_method({"name": "dc-pfl", "calibration_batch_size": 20, "server_lr": 0.5})
    server, head = zero_head(method)
    method.aggregate(server, [points(0, [0, 1], scale=2.0), points(1, [2, 3], scale=2.0)])
    probabilities = head(2 * torch.eye(SIZE)[:4]).detach().softmax(1)
    assert float(probabilities.diagonal().min()) > 0.9


def test_virtual_features_are_exactly_as_many_as_asked() -> None:
    """1000 over 4 + 2, 2, 0 and 1 samples: quotas 666⅔, 222 2⁄9, 0, 111 1⁄9, so the one left goes to class 0."""
    method = support.new_method("dc-pfl")
    labels, counts = torch.tensor([0, 1, 0, 3]), torch.tensor([4, 2, 2, 1])
    sent = Gaussians(labels, counts, torch.randn(4, SIZE), torch.zeros(4, TRIANGLE))
    features, classes = virtual_features(method, sent)
    assert features.shape == (1000, SIZE)
    assert torch.bincount(classes, minlength=4).tolist() == [667, 222, 0, 111]


def test_virtual_features_may_be_clipped_at_zero() -> None:
    own = class_covariances(torch.randn(9, SIZE, generator=torch.Generator().manual_seed(0)), torch.zeros(9).long(), 4)
    for clip in (False, True):
        method = support.new_method({"name": "dc-pfl", "clip_virtual": clip})
        message = method.upload(support.trained([9, 0, 0, 0], statistics=own))
        sent = Gaussians(own.labels, own.counts, own.means, message.tensors["covariances"])
        features, _ = virtual_features(method, sent)
        assert bool((features < 0).any()) is not clip


def test_weights_of_the_printed_equation_are_an_option() -> None:
    """Two samples ±1 on axis 0, covariance 2: the printed weight is 2 / (2 − 1), so variances are twice as large."""
    triangles = torch.zeros(1, TRIANGLE)
    triangles[0, 0] = 2.0
    sent = Gaussians(torch.tensor([1]), torch.tensor([2]), torch.zeros(1, SIZE), triangles)
    spreads = []
    for printed in (False, True):
        method = support.new_method({"name": "dc-pfl", "paper_eq11": printed})
        features, _ = virtual_features(method, sent)
        spreads.append(float(features[:, 0].var()))
    assert spreads[1] == pytest.approx(2 * spreads[0], rel=1e-4)


def test_upload_holds_means_covariances_and_counts() -> None:
    """Class 2 has features 1 and 3 in every place: mean 2, every covariance ((−1)² + 1²) / (2 − 1) = 2; class 0 has
    one sample and covariance zero.
    """
    method = support.new_method("dc-pfl")
    features = torch.tensor([[1.0], [3.0], [10.0]]).expand(3, SIZE)
    own = class_covariances(features, torch.tensor([2, 2, 0]), 4)
    message = method.upload(support.trained([1, 0, 2, 0], statistics=own))
    assert message.tensors["means"][:, 0].tolist() == [10.0, 2.0]
    assert message.tensors["covariances"].tolist() == [[0.0] * TRIANGLE, [2.0] * TRIANGLE]
    assert message.metadata["counts"].tolist() == [1, 2]
    method.check(message)


def test_unsound_replies_are_refused() -> None:
    method = support.new_method("dc-pfl")
    good = points(0, [0, 1]).message
    method.check(good)
    negative = torch.zeros(2, TRIANGLE)
    negative[1, SIZE] = -1.0  # the second entry of the diagonal
    impossible = torch.zeros(2, TRIANGLE)
    impossible[1, [0, SIZE]], impossible[1, 1] = 1e-9, 1.0  # two small variances, and a large covariance
    for changed, reason in (
        ({"covariances": negative}, "negative variance"),
        ({"covariances": impossible}, "larger than its two variances allow"),
        ({"covariances": torch.zeros(2, SIZE * SIZE)}, "shape"),
        ({"covariances": torch.full((2, TRIANGLE), torch.nan)}, "finite"),
        ({"means": torch.zeros(1, SIZE)}, "shape"),
    ):
        with pytest.raises(BadMessage, match=reason):
            method.check(Message({**good.tensors, **changed}, good.metadata))
    with pytest.raises(BadMessage, match="a count above"):
        method.check(Message(good.tensors, {**good.metadata, "counts": torch.tensor([3, 2**63 - 1])}))
    with pytest.raises(BadMessage, match="below 1"):
        method.check(Message(good.tensors, {**good.metadata, "counts": torch.tensor([3, 0])}))
    with pytest.raises(BadMessage, match="unexpected"):
        support.new_method(WITHOUT_CALIBRATION).check(good)


def test_first_round_sends_the_head_only() -> None:
    method = support.new_method("dc-pfl")
    server = support.new_server(method)
    assert sorted(method.download(server, 0, None).tensors) == ["model.head.bias", "model.head.weight"]
    method.aggregate(server, [points(0, [1])])
    assert "means" in method.download(server, 0, None).tensors


def test_without_the_auxiliary_loss_no_means_are_sent() -> None:
    method = support.new_method({"name": "dc-pfl", "weight": 0})
    server = support.new_server(method)
    method.aggregate(server, [points(0, [1])])
    message = method.download(server, 0, None)
    assert sorted(message.tensors) == ["model.head.bias", "model.head.weight"]
    assert not message.metadata


def test_without_calibration_no_covariances_are_sent() -> None:
    method = support.new_method(WITHOUT_CALIBRATION)
    assert method.collect is not None and not method.collect.covariance


def test_received_head_and_means_replace_the_clients_own() -> None:
    clients = support.population("dc-pfl")
    state = dict(clients.new_network(0).state_dict())
    server = support.new_server(clients.method)
    clients.method.aggregate(server, [points(0, [2], scale=3.0)])
    message = clients.method.download(server, 0, None)
    changed = clients.method.receive(state, message, Knowledge(torch.ones(4), 2))
    assert sorted(changed) == ["means.known", "means.vectors", "model.head.bias", "model.head.weight"]
    assert changed["means.known"].tolist() == [False, False, True, False]
    assert changed["means.vectors"][2].tolist() == [0.0, 0.0, 3.0, 0.0, 0.0, 0.0]
    assert torch.equal(changed["model.head.weight"], server.modules["head"].weight)


def test_loss_adds_the_plain_norm() -> None:
    """A global mean that differs from the features by (3, 4, 0, …): 0.1 · 5, not 0.1 · 25; nothing if it is unknown."""
    clients = support.population("dc-pfl")
    net = clients.new_network(0)
    x, y = clients.dataset.batch(torch.tensor([0, 40]))
    plain = clients.method.loss(net, Batch(x, y))
    away = torch.tensor([3.0, 4.0] + [0.0] * (SIZE - 2))
    net.means.vectors[int(y[0])] = net.features(x)[0].detach() + away
    net.means.known[int(y[0])] = True
    assert (clients.method.loss(net, Batch(x, y)) - plain).tolist() == pytest.approx([0.5, 0.0], abs=1e-5)


def test_distance_zero_has_a_finite_gradient() -> None:
    clients = support.population("dc-pfl")
    net = clients.new_network(0)
    x, y = clients.dataset.batch(torch.tensor([0]))
    net.means.vectors[int(y)] = net.features(x)[0].detach()
    net.means.known[int(y)] = True
    clients.method.loss(net, Batch(x, y)).sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in net.parameters() if p.grad is not None)


def test_round_without_any_class_changes_nothing() -> None:
    method = support.new_method("dc-pfl")
    server = support.new_server(method)
    before = server.modules["head"].weight.detach().clone()
    method.aggregate(server, [points(0, [])])
    assert torch.equal(before, server.modules["head"].weight)
    assert not server.state["means.known"].any()


def test_same_round_gives_the_same_head() -> None:
    method = support.new_method("dc-pfl")
    heads = []
    for round in (1, 1, 2):
        server = support.new_server(method, round)
        method.aggregate(server, [points(0, [0, 1], [3, 4]), points(1, [1, 2], [2, 9])])
        heads.append(server.modules["head"].weight)
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])


def test_head_that_diverges_is_an_error() -> None:
    method = support.new_method("dc-pfl")
    with pytest.raises(DivergedError, match=r"head .* clients sent values of up to 1.0e\+30.*\(--lr\)"):
        method.aggregate(support.new_server(method), [points(0, [0, 1], scale=1e30)])
    fast = support.new_method({"name": "dc-pfl", "server_lr": 1e36})
    with pytest.raises(DivergedError, match=r"head .*server_lr=1e\+35"):
        fast.aggregate(support.new_server(fast), [points(0, [0, 1], scale=1e3)])


class Deep(SplitNetwork):
    """A network whose head is more than one layer."""

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        size = int(torch.tensor(input_shape).prod())
        extractor = nn.Sequential(nn.Flatten(), nn.Linear(size, SIZE), nn.ReLU())
        super().__init__(extractor, nn.Sequential(nn.Linear(SIZE, 5), nn.ReLU(), nn.Linear(5, classes)), SIZE)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.extractor(x))
        return logits


def test_head_of_several_layers_is_refused(tmp_path) -> None:
    with pytest.raises(InputError, match="one linear layer"):
        support.federation(tmp_path, "dc-pfl", models=(Deep,))
    with pytest.raises(InputError, match="Sequential"):
        support.population("dc-pfl", models=(Deep,)).new_network(0)


def test_stacked_clients_get_their_own_values() -> None:
    parity.assert_vmap_agrees(support.population("dc-pfl"))


def test_engines_agree(tmp_path) -> None:
    parity.assert_engines_agree(tmp_path, "dc-pfl")


def test_clients_share_no_storage(tmp_path) -> None:
    parity.assert_nothing_shared(tmp_path, "dc-pfl")


def test_headers_are_the_clients_own_after_training(tmp_path) -> None:
    """The global head is no client's and no average: each client keeps what it trained until it takes part again."""
    run = support.federation(tmp_path, "dc-pfl", rounds=1)
    run.run()
    after = run.server.modules["head"].weight
    heads = [run.engine.get_state(client)["model.head.weight"] for client in range(4)]
    assert all(not torch.equal(after, head) for head in heads)
    assert all(not torch.equal(heads[0], head) for head in heads[1:])


def test_it_learns(tmp_path) -> None:
    assert support.federation(tmp_path, "dc-pfl", rounds=8).run()["accuracy_best"] > 0.9


@pytest.mark.parametrize(("classes", "expected"), [(10, (251_500, 10_010)), (100, (1_257_500, 100_100))])
def test_traffic_is_the_closed_form(tmp_path, classes: int, expected: tuple[int, int]) -> None:
    """Up |C_i| (K + K (K + 1) / 2), beside |C_i| counts as metadata; down C (K + 1) + C K."""
    assert support.traffic(tmp_path, "dc-pfl", classes) == expected
