"""FedGen, with numbers worked out by hand."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from polyfed.errors import BadMessage, DivergedError
from polyfed.message import Message
from polyfed.methods.base import Batch, Knowledge, Method, Server
from polyfed.methods.fedgen import FedGen, generator_of
from polyfed.methods.parts.feature_generator import (
    ClientGenerator,
    ServerGenerator,
    logits_of_all,
    sameness,
    shares_of,
    teaching_loss,
    train_generator,
)
from polyfed.methods.parts.tools import module_state
from polyfed.models import resolve
from polyfed.server import replay, training
from polyfed.server.kept import Kept
from polyfed.server.training import eager
from tests import support
from tests.methods import parity

LN2, LN3 = math.log(2), math.log(3)
CLASSES, SIZE = 4, support.FEATURES


def head(value: float) -> dict[str, Tensor]:
    return {"model.head.weight": torch.full((CLASSES, SIZE), value), "model.head.bias": torch.full((CLASSES,), value)}


def identity_head(scale: float = 1.0) -> dict[str, Tensor]:
    """Feature c speaks for class c."""
    return {"model.head.weight": scale * torch.eye(CLASSES, SIZE), "model.head.bias": torch.zeros(CLASSES)}


def aggregated(method: Method, *replies: tuple[dict[str, Tensor], list[int], list[int]]) -> Server:
    server = support.new_server(method)
    method.aggregate(
        server, [support.reply(i, tensors, labels=y, counts=n) for i, (tensors, y, n) in enumerate(replies)]
    )
    return server


def test_loss_by_hand() -> None:
    """Real features are 0, generated ones (1, 0, …), the head's only weight is ln 3: logits 0 and (ln 3, 0, 0, 0).

    Cross entropy of the sample: ln 4. The only known class is 0: ln 2 for its generated feature. With q = (½, ⅙, ⅙, ⅙)
    and p = ¼ each, KL(q‖p) = ½ ln 4/3. Weights 2 and 3. A sample of the unknown class 1 gets no guidance.
    """
    clients = support.population("fedgen")
    net = clients.new_network(0)
    for parameter in net.parameters():
        parameter.data.zero_()
    net.model.head.weight.data[0, 0] = LN3
    net.generator.last.bias.data[0] = 1.0
    net.generator.known[0] = True
    net.generator.weights.copy_(torch.tensor([2.0, 3.0]))
    x = clients.dataset.batch(torch.tensor([0, 40]))[0]
    drawn = clients.method.phases()[0].draw(torch.Generator().manual_seed(0), 2)
    values = clients.method.loss(net, Batch(x, torch.tensor([0, 1]), drawn=drawn))
    unguided = 2 * LN2 + 2 * LN2
    assert values.tolist() == pytest.approx([unguided + 3 * 0.5 * math.log(4 / 3), unguided], abs=1e-5)


def test_guidance_teaches_the_extractor_and_not_the_guide() -> None:
    """With real features 0 the divergence depends on the head's weights only through the guide, which is detached."""
    clients = support.population({"name": "fedgen", "label_weight": 0})
    net = clients.new_network(0)
    for parameter in net.parameters():
        parameter.data.zero_()
    net.model.head.weight.data[0, 0] = LN3
    net.generator.last.bias.data[0] = 1.0
    net.generator.known.fill_(True)
    net.generator.weights.copy_(torch.tensor([0.0, 1.0]))
    x, y = clients.dataset.batch(torch.tensor([0]))
    drawn = clients.method.phases()[0].draw(torch.Generator().manual_seed(0), 1)
    clients.method.loss(net, Batch(x, y, drawn=drawn)).sum().backward()
    assert not bool(net.model.head.weight.grad.any())
    assert bool(net.model.head.bias.grad.any())


def test_chosen_classes_are_known_and_equally_likely() -> None:
    generator = ClientGenerator(CLASSES, SIZE, noise=2, hidden=3)
    generator.known[[1, 3]] = True
    assert generator.choose(torch.tensor([0.0, 0.49, 0.5, 1 - 2**-24])).tolist() == [1, 1, 3, 3]
    generator.known.fill_(True)
    chosen = generator.choose(torch.rand(4000, generator=torch.Generator().manual_seed(0)))
    assert torch.bincount(chosen, minlength=CLASSES).tolist() == pytest.approx([1000] * CLASSES, abs=100)
    generator.known.fill_(False)
    assert 0 <= int(generator.choose(torch.tensor([0.7]))) < CLASSES


def test_clients_get_batch_norm_with_its_running_statistics() -> None:
    """A unit with mean 3, variance 4 − ε, weight 6 and bias 1 becomes x · 6 / 2 + (1 − 3 · 3)."""
    server = ServerGenerator(CLASSES, SIZE, noise=2, hidden=5)
    norm = server.norm
    with torch.no_grad():
        for tensor, value in zip(
            (norm.running_mean, norm.running_var, norm.weight, norm.bias), (3.0, 4.0 - norm.eps, 6.0, 1.0), strict=True
        ):
            tensor.fill_(value)
    sent = server.for_clients()
    assert sent["generator.norm.weight"].tolist() == pytest.approx([3.0] * 5)
    assert sent["generator.norm.bias"].tolist() == pytest.approx([-8.0] * 5)
    assert sum(t.numel() for t in sent.values()) == sum(p.numel() for p in server.parameters())
    client = ClientGenerator(CLASSES, SIZE, noise=2, hidden=5)
    client.load_state_dict({n.removeprefix("generator."): t for n, t in sent.items()}, strict=False)
    noise, labels = torch.randn(7, 2, generator=torch.Generator().manual_seed(0)), torch.arange(7) % CLASSES
    torch.testing.assert_close(client(noise, labels), server.eval()(noise, labels))


def test_heads_count_by_their_share_of_a_label() -> None:
    """Head A gives label 0 the probability ½, head B ¼; of label 0 they hold 3 and 1 samples, of label 1 none and 2.

    Label 0: ¾ ln 2 + ¼ ln 4 = 1.25 ln 2. Label 1: only head B counts. A label that nobody holds has loss 0, not NaN.
    """
    logits = torch.zeros(2, 3, 3)
    logits[0, 0, 0] = LN2  # of three classes: 2 / (2 + 1 + 1)
    logits[1, 0, 0] = math.log(2 / 3)  # 2/3 / (2/3 + 1 + 1)
    logits[0, 1, 1] = 50.0
    logits[1, 1, 1] = LN2
    counts = torch.tensor([[3.0, 0.0, 0.0], [1.0, 2.0, 0.0]]).double()
    values = teaching_loss(logits, torch.tensor([0, 1, 2]), shares_of(counts))
    assert values.tolist() == pytest.approx([1.25 * LN2, LN2, 0.0], abs=1e-6)


def test_sameness_falls_with_the_distance_of_features() -> None:
    """Noise (0, 0) and (1, 1): mean square 1. Features differ by 2 ln 2 and 0: mean ln 2. exp(−1 · ln 2) = ½."""
    noise = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    assert float(sameness(noise, torch.tensor([[0.0, 1.0], [2 * LN2, 1.0]]))) == pytest.approx(0.5)
    assert float(sameness(noise, torch.ones(2, 2))) == 1.0


def test_sameness_has_the_bits_of_the_plain_formula_and_so_has_its_gradient() -> None:
    """Seventy vectors of 500 are compared seven at a time; another loss reaches the features too."""
    noise, start = torch.randn(70, 40), torch.randn(70, 500)

    def plain(noise: Tensor, features: Tensor) -> Tensor:
        apart = (noise[:, None] - noise).square().mean(2) * (features[:, None] - features).abs().mean(2)
        return torch.exp(-apart.sum() / (70 * 69))

    def outcome(formula: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        leaf = start.clone().requires_grad_()
        features = leaf * 1.5
        value = features.logsumexp(1).mean() + formula(noise, features)
        value.backward()
        assert leaf.grad is not None
        return value.detach(), leaf.grad

    for ours, expected in zip(outcome(sameness), outcome(plain), strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=0)


def test_head_is_the_mean_weighted_by_samples() -> None:
    """1 + 2 samples with value 1 and 9 with value 5: (3 · 1 + 9 · 5) / 12 = 4."""
    server = aggregated(support.new_method("fedgen"), (head(1.0), [0, 1], [1, 2]), (head(5.0), [1], [9]))
    assert server.state["model.head.weight"].unique().tolist() == pytest.approx([4.0])
    assert server.state["model.head.bias"].unique().tolist() == pytest.approx([4.0])


def test_generator_comes_after_the_first_round_with_the_names_of_known_classes_only() -> None:
    method = support.new_method("fedgen")
    first = method.download(support.new_server(method), 0, None)
    assert sorted(first.tensors) == ["model.head.bias", "model.head.weight"]
    assert not first.metadata
    server = aggregated(method, (head(0.1), [0], [7]), (head(0.2), [2], [5]))
    second = method.download(server, 0, None)
    assert list(second.metadata) == ["labels"]
    assert second.metadata["labels"].tolist() == [0, 2]
    method.aggregate(server, [support.reply(0, head(0.1), labels=[3], counts=[1])])
    assert method.download(server, 0, None).metadata["labels"].tolist() == [0, 2, 3]  # known once, known for good


def test_weights_fade_and_have_a_floor() -> None:
    """10 · 0.98 in round 2, 10 · 0.98² in round 3, at least 0.0001; a weight of zero stays zero; nothing in round 1."""
    clients = support.population({"name": "fedgen", "label_weight": 10, "guidance_weight": 0})
    method, state = clients.method, dict(clients.new_network(0).state_dict())
    before = method.download(support.new_server(method), 0, None)
    assert "generator.weights" not in method.receive(state, before, Knowledge(torch.ones(CLASSES).long(), 1))
    assert state["generator.weights"].tolist() == [0.0, 0.0]
    message = method.download(aggregated(method, (head(0.1), [0, 3], [7, 1])), 0, None)
    for round, expected in ((2, 9.8), (3, 9.604), (2000, 1e-4)):
        changed = method.receive(state, message, Knowledge(torch.ones(CLASSES).long(), round))
        assert changed["generator.weights"].tolist() == pytest.approx([expected, 0.0])
        assert changed["generator.known"].tolist() == [True, False, False, True]
    assert set(changed) <= set(state)


@pytest.mark.parametrize("lr", [0.001, 0.05])
def test_usual_weights_are_one_at_any_learning_rate(lr: float) -> None:
    method = support.new_method("fedgen", lr=lr)
    assert isinstance(method, FedGen)
    assert method.weights(1).tolist() == [1.0, 1.0]


def test_generator_learns_what_the_heads_recognise() -> None:
    """Heads for which feature c speaks for class c: features generated for a class are soon recognised as that class.

    Class 3 is held by nobody. The generator's state lives on, so repeated rounds go on from it.
    """
    method = support.new_method({"name": "fedgen", "server_lr": 0.003})
    server = support.new_server(method)
    start = module_state("generator", generator_of(server))
    for round in range(1, 7):
        server.round = round
        replies = [support.reply(c, identity_head(3.0), labels=[c, 2], counts=[4, 4]) for c in (0, 1)]
        method.aggregate(server, replies)
    generator = generator_of(server).eval()
    labels = torch.tensor([0, 1, 2] * 50)
    features = generator(torch.randn(150, 32, generator=torch.Generator().manual_seed(3)), labels)
    assert float((features[:, :CLASSES].argmax(1) == labels).float().mean()) > 0.95
    assert all(bool(torch.isfinite(t).all()) for t in generator.state_dict().values())
    assert not torch.equal(start["generator.last.weight"], generator.last.weight)


class Training:
    """A generator of five hidden units and three heads; nobody has samples of class 1."""

    steps, size, lr = 20, 6, 0.01

    def __init__(self, device: str = "cpu") -> None:
        torch.manual_seed(0)
        self.head = nn.Linear(SIZE, CLASSES, bias=False)
        self.heads = {"weight": 2 * torch.randn(3, CLASSES, SIZE, device=device)}
        self.generator = ServerGenerator(CLASSES, SIZE, noise=3, hidden=5).to(device)
        self.counts = torch.tensor([[3, 0, 0, 1], [1, 0, 2, 0], [5, 0, 0, 0]]).double()
        self.random = torch.Generator().manual_seed(1)
        self.notes: list[str] = []
        self.kept: Kept | None = None

    def run(self) -> float:
        return train_generator(
            self.generator, self.head, self.heads, self.counts, steps=self.steps, batch_size=self.size, lr=self.lr,
            random=self.random, notes=self.notes, kept=self.kept,
        )  # fmt: skip

    def run_plainly(self) -> float:
        """The same steps, one after another, each with its own draws."""
        optimiser = torch.optim.Adam(self.generator.parameters(), self.lr, weight_decay=1e-2)
        losses, logits_of = [], logits_of_all(self.head, self.heads)
        for _ in range(self.steps):
            labels = torch.tensor([0, 2, 3])[torch.randint(3, (self.size,), generator=self.random)]
            noise = torch.randn(self.size, 3, generator=self.random)
            features = self.generator.train()(noise, labels)
            values = teaching_loss(logits_of(features), labels, shares_of(self.counts))
            optimiser.zero_grad()
            (values.mean() + sameness(noise, features)).backward()
            optimiser.step()
            losses.append(values.detach())
        return float(torch.cat(losses).mean())

    def left(self) -> dict[str, Tensor]:
        """What training has changed: weights, statistics of batch norm, the state of the draws."""
        return {**self.generator.state_dict(), "draws": self.random.get_state()}


def test_generator_s_steps_are_those_of_a_plain_loop_bit_by_bit() -> None:
    quick, plain = Training(), Training()
    start = {name: tensor.clone() for name, tensor in quick.left().items()}
    assert quick.run() == plain.run_plainly()
    assert all(torch.equal(tensor, plain.left()[name]) for name, tensor in quick.left().items())
    assert all(bool((tensor != start[name]).any()) for name, tensor in quick.left().items())
    assert int(quick.generator.norm.num_batches_tracked) == 20
    assert not quick.generator.training
    assert all(parameter.grad is None for parameter in quick.generator.parameters())


def test_steps_that_cannot_be_captured_are_made_and_the_server_notes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*given: object, **options: object) -> None:
        raise RuntimeError("not permitted")

    monkeypatch.setattr(training, "on_gpu", lambda tensor: True)
    monkeypatch.setattr(replay._Span, "_plain", replay._Span._take)
    monkeypatch.setattr(torch.cuda, "Stream", object)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(replay, "capturing", refused)
    sent = (head(0.3), [0], [7]), (head(0.2), [2], [5])
    noted = aggregated(support.new_method("fedgen"), *sent)
    with eager():
        plain = aggregated(support.new_method("fedgen"), *sent)
    assert noted.notes == ["the server's steps can't be captured on the GPU and take longer (not permitted)"]
    assert plain.notes == []
    # The learning rate of steps that may be captured is a tensor, of 32 bits.
    torch.testing.assert_close(generator_of(noted).state_dict(), generator_of(plain).state_dict())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, where steps are captured")
@pytest.mark.parametrize("steps", [20, 50, 100])
def test_captured_steps_are_those_of_the_loop(steps: int) -> None:
    """The weights, batch norm's statistics and its count of batches, the mean loss, and what is drawn afterwards."""
    captured, loop = Training("cuda"), Training("cuda")
    means = []
    for one in (captured, loop):
        one.steps = steps
        with eager() if one is loop else nullcontext():
            means.append(one.run())
        assert one.notes == []
        assert all(parameter.grad is None for parameter in one.generator.parameters())
        assert int(one.generator.norm.num_batches_tracked) == steps
    assert means[0] == pytest.approx(means[1], rel=1e-4)
    for name, tensor in captured.left().items():
        torch.testing.assert_close(tensor, loop.left()[name], rtol=1e-3, atol=1e-4, msg=name)


def test_features_of_different_noise_are_driven_apart() -> None:
    """Heads of zeros teach nothing, so only the diversity term is left to move the generator."""
    method = support.new_method("fedgen")
    noise = torch.randn(40, 32, generator=torch.Generator().manual_seed(1))
    labels = torch.zeros(40, dtype=torch.int64)
    before = float(sameness(noise, generator_of(support.new_server(method)).eval()(noise, labels)).detach())
    server = aggregated(method, (head(0.0), [0], [5]))
    after = float(sameness(noise, generator_of(server).eval()(noise, labels)).detach())
    assert after < 0.9 * before


def test_server_that_diverges_says_so() -> None:
    method = support.new_method("fedgen")
    server = support.new_server(method)
    generator_of(server).last.bias.data.fill_(math.inf)
    with pytest.raises(DivergedError, match="server_lr"):
        method.aggregate(server, [support.reply(0, head(0.1), labels=[0], counts=[5])])


def test_server_training_is_repeatable_and_leaves_messages_alone() -> None:
    method = support.new_method("fedgen")
    sent = head(0.3)
    first, second = (generator_of(aggregated(method, (sent, [0], [7]), (head(0.2), [2], [5]))) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert torch.equal(sent["model.head.weight"], head(0.3)["model.head.weight"])


def test_upload_holds_the_head_and_the_counts_of_seen_classes() -> None:
    clients = support.population("fedgen")
    state = dict(clients.new_network(0).state_dict())
    message = clients.method.upload(support.trained([3, 0, 0, 9], state))
    assert sorted(message.tensors) == ["model.head.bias", "model.head.weight"]
    assert message.metadata["labels"].tolist() == [0, 3]
    assert message.metadata["counts"].tolist() == [3, 9]
    clients.method.check(message)


def test_unsound_replies_are_refused() -> None:
    method = support.new_method("fedgen")
    for tensors, labels, counts, reason in (
        (head(math.nan), [0], [1], "finite"),
        (head(1.0), [0], [0], "below 1"),
        (head(1.0), [0, 1], [1], "shape"),
        (head(1.0), [9], [1], "outside"),
        (head(1.0), [], [], "without samples"),
    ):
        metadata = {"labels": torch.tensor(labels).long(), "counts": torch.tensor(counts).long()}
        with pytest.raises(BadMessage, match=reason):
            method.check(Message(tensors, metadata))


@pytest.mark.parametrize(("classes", "expected"), [(10, (5_010, 284_550)), (100, (50_100, 375_720))])
def test_traffic_is_the_closed_form(tmp_path: Path, classes: int, expected: tuple[int, int]) -> None:
    assert support.traffic(tmp_path, "fedgen", classes) == expected


def test_traffic_of_table_5_of_the_fedtgp_paper() -> None:
    """K = 512, C = 100, 20 clients: 20 · (2 · 51 300 + 331 776) = 8 687 520 floats, the table's 8.69 M."""
    small = support.new_method("fedgen")
    task = replace(small.task, architecture=resolve("cnn")[0], input_shape=(3, 32, 32), classes=100, feature_size=512)
    method = FedGen(FedGen.Config(), task, small.training)
    server = support.new_server(method)
    server.state["known"][:] = True
    up = method.upload(support.trained([1] * 100, module_state("model", task.new_model())))
    assert up.floats == 51_300
    assert 20 * (up.floats + method.download(server, 0, None).floats) == 8_687_520


def test_losses_agree_under_vmap() -> None:
    parity.assert_vmap_agrees(support.population("fedgen"))


def test_engines_agree(tmp_path: Path) -> None:
    parity.assert_engines_agree(tmp_path, "fedgen", lr=0.01)


def test_clients_share_no_storage(tmp_path: Path) -> None:
    parity.assert_nothing_shared(tmp_path, "fedgen")


def test_it_learns(tmp_path: Path) -> None:
    run = support.federation(tmp_path, "fedgen", rounds=15, lr=0.05, eval_every=15)
    assert run.run()["accuracy_final"] > 0.9
