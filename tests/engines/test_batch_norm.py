"""Batch norm on the vectorized engine: each client has statistics of its own, with the sequential engine's numbers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor, nn

from polyfed.assemble import assemble
from polyfed.config import experiment
from polyfed.engines import SequentialEngine, VectorizedEngine
from polyfed.engines.stacked.plan import new_plan
from polyfed.engines.stacked.step import PhaseStep
from polyfed.errors import InputError
from polyfed.message import Message
from polyfed.methods.base import Reply
from polyfed.population import Population
from tests import support
from tests.support import run

HERE = "tests.engines.test_batch_norm"


class Plain(support.Normed):
    """A network with batch norm and without dropout."""

    def __init__(self, in_channels: int, classes: int, norm: nn.Module | None = None) -> None:
        super().__init__(in_channels, classes)
        self.body[1] = norm or nn.BatchNorm2d(4, momentum=0.3)
        self.body[5] = nn.Identity()


class Residual(nn.Module):
    """A block with a shortcut, batch norm of images and of vectors, max-pooling."""

    def __init__(self, in_channels: int, classes: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(in_channels, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6))
        self.second = nn.Sequential(nn.ReLU(), nn.Conv2d(6, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6))
        self.rest = nn.Sequential(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(54, support.FEATURES))
        self.last = nn.Sequential(nn.BatchNorm1d(support.FEATURES), nn.ReLU())
        self.out = nn.Linear(support.FEATURES, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        logits: Tensor = self.out(self.last(self.rest(torch.relu(x + self.second(x)))))
        return logits


class NormedProxy(nn.Sequential):
    """A proxy extractor for pFedES, with batch norm."""

    def __init__(self, channels: int) -> None:
        super().__init__(nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels))


def assert_agree(tmp_path: Path, method: Any, **settings: Any) -> list[str]:
    """Both engines give the same rounds, states (buffers included) and evaluations; what only one of them says."""
    expected, said, plain = run(tmp_path, SequentialEngine, method, **settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("polyfed.engines.base.local.train", None)  # nothing goes through the plain loop
        actual, notes, captured = run(tmp_path, VectorizedEngine, method, **settings)
    pd.testing.assert_frame_equal(actual, expected, check_exact=False, rtol=1e-4, atol=1e-5)
    everybody = range(plain.config.clients)
    assert captured.engine.evaluate(everybody, 9) == plain.engine.evaluate(everybody, 9)
    for client in everybody:
        assert_states_agree(captured.engine, plain.engine, client)
    assert [note for note in notes if note in said] == said
    return [note for note in notes if note not in said]


def assert_states_agree(one: Any, other: Any, client: int) -> None:
    for name, tensor in other.get_state(client).items():
        torch.testing.assert_close(one.get_state(client)[name], tensor, rtol=1e-3, atol=1e-4, msg=name)


def train_both(clients: Population) -> tuple[list[Reply], list[Reply]]:
    """What clients answer on the vectorized and on the sequential engine; their states agree."""
    everybody = range(len(clients.data))
    engines = VectorizedEngine(clients), SequentialEngine(clients)
    actual, expected = (engine.train(1, {client: Message() for client in everybody}) for engine in engines)
    for client in everybody:
        assert_states_agree(*engines, client)
    return actual, expected


def shortened(clients: Population, kept: Sequence[int]) -> Population:
    """The clients with so many training samples each."""
    data = {
        client: replace(own, train=own.train[:count])
        for (client, own), count in zip(clients.data.items(), kept, strict=True)
    }
    return replace(clients, data=data)


@pytest.mark.parametrize("method", ["standalone", "fedavg", "fedproto", "dc-pfl", "fml", "fedgen", "fedclassavg", "fd"])
def test_methods_agree_with_the_plain_loop(tmp_path: Path, method: str) -> None:
    notes = assert_agree(tmp_path, method, models=(Plain,), clients=5, lr=0.05)
    assert notes == []


@pytest.mark.parametrize(
    "settings",
    [
        {"training": {"momentum": 0.9, "weight_decay": 1e-2, "clip": 0.5}},
        {"training": {"weight_decay": 1e-2, "augment": True, "epochs": 3}},
        {"partition": "dirichlet", "alpha": 0.5, "batch_size": 5, "training": {"epochs": 2, "momentum": 0.5}},
        {"participation": 0.5, "clients": 6, "rounds": 3},
        {"evaluate": "after-download"},
        {"batch_size": 1000},
        {"models": (Residual, support.Wide, Plain), "clients": 7},
    ],
    ids=lambda settings: "-".join(settings),
)
def test_uneven_cases_agree_with_the_plain_loop(tmp_path: Path, settings: dict[str, Any]) -> None:
    assert_agree(tmp_path, "fedproto", **{"models": (Plain, Residual), "lr": 0.02, **settings})


@pytest.mark.parametrize("models", [(support.Wide,), (Plain,)])
def test_batch_norm_beside_the_model_and_in_some_phases_only(tmp_path: Path, models: Any) -> None:
    """The proxy's statistics rest while the model trains, and the model's while the proxy trains."""
    method = {"name": "pfedes", "proxy": f"{HERE}:NormedProxy"}
    training = {"momentum": 0.5, "weight_decay": 1e-2}
    notes = assert_agree(tmp_path, method, models=models, training=training, lr=0.02, batch_size=7)
    assert notes == []


def rows_seen(patch: pytest.MonkeyPatch) -> list[Tensor]:
    """The rows of all steps from now on."""
    original, seen = PhaseStep.__call__, []

    def step(self: PhaseStep, inputs: Any) -> None:
        seen.append(inputs["rows"])
        original(self, inputs)

    patch.setattr(PhaseStep, "__call__", step)
    return seen


def test_every_batch_of_a_single_client_has_exactly_its_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """21, 16, 11 and 1 samples in batches of 8: 5 are not padded, and 3 and a single sample are left out."""
    clients = shortened(support.population("standalone", models=(Plain,), epochs=2), (21, 16, 11, 1))
    monkeypatch.setattr("polyfed.engines.vectorized.LARGEST_COHORT", 1)
    seen = rows_seen(monkeypatch)
    train_both(clients)
    assert all(bool((rows >= 0).all()) for rows in seen[1:])
    # Two copies of one client try whether it can be captured; then each client has its two epochs.
    shapes = [tuple(rows.shape) for rows in seen]
    assert shapes == [(2, 2), *[(1, 8), (1, 8), (1, 5)] * 2, *[(1, 8)] * 4, *[(1, 8)] * 2]


def test_a_cohort_trains_padded_batches_and_shrinks_to_one_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same clients together: few samples are left out, short batches are padded, and few clients have many."""
    clients = shortened(support.population("standalone", models=(Plain,), epochs=2), (21, 16, 11, 1))
    seen = rows_seen(monkeypatch)
    train_both(clients)
    assert [(rows >= 0).sum(1).tolist() for rows in seen] == [
        [2, 2], [8, 8, 8, 0], [8, 8, 8, 0], [5, 8], [8, 8], [8], [5],
    ]  # fmt: skip


@pytest.mark.parametrize("method", ["standalone", "fd", "dc-pfl"])
def test_a_small_last_batch_is_left_out_as_in_the_plain_loop(method: str) -> None:
    """Eleven samples in batches of 8 leave three over, too few; twelve leave four. One client has no other batch.

    FD averages over what was seen.
    """
    clients = shortened(support.population(method, models=(Plain,), epochs=2), (11, 16, 12, 1))
    actual, expected = train_both(clients)
    words = "phase 'model': a last batch was left out because it was too small for batch norm"
    assert [reply.notes for reply in expected] == [(words,), (), (), (words,)]
    assert [reply.notes for reply in actual] == [(words,), (), (), (words,)]
    assert [reply.loss for reply in actual] == pytest.approx([reply.loss for reply in expected], nan_ok=True)
    for one, two in zip(actual, expected, strict=True):
        assert {n: t.tolist() for n, t in one.message.metadata.items()} == {
            n: t.tolist() for n, t in two.message.metadata.items()
        }
        for name, tensor in two.message.tensors.items():
            torch.testing.assert_close(one.message.tensors[name], tensor, rtol=1e-4, atol=1e-5)


def test_a_small_last_batch_is_kept_while_batch_norm_does_not_train() -> None:
    """Only the proxy has batch norm, so the phase of the model sees all nine samples."""
    method = {"name": "pfedes", "proxy": f"{HERE}:NormedProxy"}
    actual, expected = train_both(shortened(support.population(method, models=(support.Wide,)), (9, 9, 8, 8)))
    words = "phase 'proxy': a last batch was left out because it was too small for batch norm"
    assert [words in reply.notes for reply in actual] == [words in reply.notes for reply in expected]
    assert [words in reply.notes for reply in actual] == [True, True, False, False]
    assert [reply.loss for reply in actual] == pytest.approx([reply.loss for reply in expected])


def test_only_visited_samples_cost_anything() -> None:
    """Eleven samples in batches of 8 leave three over, and a client of one sample computes nothing."""
    clients = shortened(support.population("standalone", models=(Plain,)), (8, 11, 16, 1))
    for replies in train_both(clients):
        assert [reply.flops / replies[0].flops for reply in replies] == [1, 1, 2, 0]


def test_two_samples_left_over_do_not_ruin_a_resnet() -> None:
    """32 images in batches of 10: a step on the last two made a ResNet-18's features 10 000 times as large."""
    images = support.tiny_dataset(side=32, channels=3)
    config = experiment(method="standalone", models="resnet18", clients=1, batch_size=10, lr=0.01, device="cpu")
    clients = shortened(assemble(config, images), (32,))
    with closing(SequentialEngine(clients)) as engine:
        (reply,) = engine.train(1, {0: Message()})
        network = clients.new_network(0)
        network.load_state_dict(engine.get_state(0))
    features = network.eval().features(clients.dataset.batch(clients.data[0].train)[0])
    assert float(features.detach().abs().max()) < 10
    assert "too small for batch norm" in reply.notes[0]


def test_nothing_but_batches_of_one_is_refused() -> None:
    words = (
        r"clients 0, 1, 2 and 3 \(Plain\) would never take a step in phase 'model', because batch norm .*--batch-size 2"
    )
    with pytest.raises(InputError, match=words):
        support.population("standalone", models=(Plain,), batch_size=1)
    support.population("standalone", models=(support.Wide,), batch_size=1)


def test_clients_of_one_sample_are_refused_by_name() -> None:
    """Two samples of each of 8 clients, of which one is for the test; networks without batch norm can do that."""
    settings: dict[str, Any] = {"data": support.tiny_dataset(per_class=4), "clients": 8, "split": "5:0:5"}
    words = r"clients 1, 3, 5 and 7 \(Plain\) would never .* and each have one sample to train on: .*min_samples"
    with pytest.raises(InputError, match=words):
        support.population("standalone", models=(support.Wide, Plain), partition="iid", **settings)


def test_clients_with_few_samples_in_their_only_batch_are_named() -> None:
    """One batch of three or four trains, because there is nothing else to learn from, but may ruin a deep network."""
    settings: dict[str, Any] = {"data": support.tiny_dataset(per_class=10), "clients": 8, "partition": "iid"}
    found = support.population("standalone", models=(support.Wide, Plain), batch_size=64, split="5:0:5", **settings)
    assert {len(own.train) for own in found.data.values()} == {3, 4}
    (note,) = [words for words in found.notes if "batch norm" in words]
    assert note.startswith("clients 1, 3, 5 and 7 (Plain) each have fewer than 8 samples to train on in phase 'model'")
    assert "min_samples" in note
    enough = support.population("standalone", models=(support.Wide, Plain), batch_size=6, split="5:0:5", **settings)
    assert not [words for words in enough.notes if "batch norm" in words]


def test_plan_without_padding_leaves_out_small_last_batches() -> None:
    """Two passes over 11 samples in batches of 8: three are left out of each. Of 14, six are enough."""
    clients = shortened(support.population("standalone", models=(Plain,), epochs=2), (11, 14, 9, 9))
    phase = clients.method.phases()[0]
    plan = new_plan(clients, [0], width=8, size=1, phase=phase, round=1, normed=True, pads=False)
    assert (plan.active, plan.samples, len(plan.left_out[0])) == ([1] * 2, [8] * 2, 6)
    other = new_plan(clients, [1], width=8, size=1, phase=phase, round=1, normed=True, pads=False)
    assert (other.samples, len(other.left_out[0])) == ([8, 6, 8, 6], 0)
    visited = torch.cat([plan.inputs["rows"].flatten(), *plan.left_out])
    assert sorted(visited.tolist()) == sorted(clients.data[0].train.tolist() * 2)


def test_bf16_trains_batch_norm_too(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"models": (Plain,), "lr": 0.02, "training": {"bf16": True}}
    expected, usual, _ = run(tmp_path, SequentialEngine, "standalone", **settings)
    actual, notes, _ = run(tmp_path, VectorizedEngine, "standalone", **settings)
    assert notes == usual  # no word of the plain loop
    assert actual.loss_mean.to_numpy() == pytest.approx(expected.loss_mean.to_numpy(), rel=0.02)


def test_running_out_of_memory_counts_no_batch_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    method = type(support.new_method("fedproto"))
    original, calls = method.upload, []

    def upload(self: Any, client: Any) -> Any:
        calls.append(client)
        if len(calls) in (12, 14):  # four clients in two rounds of the plain loop, then on the other engine
            raise torch.OutOfMemoryError("no room")
        return original(self, client)

    monkeypatch.setattr(method, "upload", upload)
    notes = assert_agree(tmp_path, "fedproto", models=(Plain,))
    assert len(calls) > 16
    assert notes == ["4 clients at once did not fit into memory; from now on at most 2 train together"]


class Halves(Plain):
    """Batch norm of two rows per sample."""

    def __init__(self, in_channels: int, classes: int) -> None:
        super().__init__(in_channels, classes)
        self.halved = nn.BatchNorm1d(support.FEATURES // 2)
        self.body.append(nn.Unflatten(1, (2, support.FEATURES // 2)))

    def forward(self, x: Tensor) -> Tensor:
        rows: Tensor = self.halved(self.body(x).flatten(0, 1))
        logits: Tensor = self.out(rows.reshape(len(x), -1))
        return logits


def test_rows_that_are_not_samples_train_one_client_after_another(tmp_path: Path) -> None:
    """Nobody knows which of them are padding."""
    assert assert_agree(tmp_path, "fedproto", models=(Halves,), batch_size=7) == [
        "clients with Halves train one after another because of batch norm: its batch norm gets 4 rows for 2 samples"
    ]


class Branching(Plain):
    """Its forward decides on the data, which can't be captured."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if bool(x.sum() > -1e9) else super().forward(-x)


class Unremembering(Plain):
    """Batch norm that keeps no running statistics."""

    def __init__(self, in_channels: int, classes: int) -> None:
        super().__init__(in_channels, classes, nn.BatchNorm2d(4, track_running_stats=False))


class Cumulative(Plain):
    """Batch norm whose running statistics are means over all batches."""

    def __init__(self, in_channels: int, classes: int) -> None:
        super().__init__(in_channels, classes, nn.BatchNorm2d(4, momentum=None))


class PerInstance(Plain):
    """Instance norm that keeps running statistics, which are means over a batch."""

    def __init__(self, in_channels: int, classes: int) -> None:
        super().__init__(in_channels, classes, nn.InstanceNorm2d(4, track_running_stats=True))


@pytest.mark.parametrize("network", [Branching, Unremembering, Cumulative, PerInstance])
def test_what_can_not_be_captured_goes_through_the_loop_and_says_so_once(
    tmp_path: Path, network: type[nn.Module]
) -> None:
    settings: dict[str, Any] = {"models": (network,), "rounds": 3, "batch_size": 7}
    expected, _, plain = run(tmp_path, SequentialEngine, "fedproto", **settings)
    actual, notes, looped = run(tmp_path, VectorizedEngine, "fedproto", **settings)
    pd.testing.assert_frame_equal(actual, expected, check_exact=False, rtol=1e-4, atol=1e-5)
    assert_states_agree(looped.engine, plain.engine, 0)
    assert sum(f"{network.__name__} train one after another: " in note for note in notes) == 1
