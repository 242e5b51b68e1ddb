"""FedAvg, LG-FedAvg and Standalone, with numbers worked out by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from polyfed.engines.client.batches import batches
from polyfed.errors import BadMessage, InputError
from polyfed.methods.base import Knowledge
from polyfed.methods.parts.tools import part_of
from tests import support
from tests.methods import parity

SAME = {"fedavg": {"models": (support.Wide,)}, "lg-fedavg": {}}


@pytest.mark.parametrize("method", SAME)
def test_mean_is_weighted_by_samples(method: str) -> None:
    """Weights 1 and 5 with 30 and 10 samples: (30·1 + 10·5) / 40 = 2."""
    bound = support.new_method(method, **SAME[method])
    server = support.new_server(bound)
    ones = {name: torch.ones_like(tensor) for name, tensor in server.state.items()}
    fives = {name: 5 * tensor for name, tensor in ones.items()}
    bound.aggregate(server, [support.reply(0, ones, samples=[30]), support.reply(1, fives, samples=[10])])
    assert all(torch.equal(tensor, torch.full_like(tensor, 2.0)) for tensor in server.state.values())


@pytest.mark.parametrize(("method", "parts"), [("fedavg", "model"), ("lg-fedavg", "model.head")])
def test_what_travels_replaces_the_client_s_own(method: str, parts: str) -> None:
    clients = support.population(method, **SAME[method])
    state = {name: tensor + 1 for name, tensor in clients.new_network(0).state_dict().items()}
    server = support.new_server(clients.method)
    message = clients.method.download(server, 0, None)
    assert set(message.tensors) == set(part_of(state, parts))
    changed = clients.method.receive(state, message, Knowledge(torch.tensor([1, 0, 0, 0]), 1))
    assert all(torch.equal(changed[name], server.state[name]) for name in changed)
    upload = clients.method.upload(support.trained([3, 0, 4, 0], state))
    assert upload.metadata["samples"].tolist() == [7]
    clients.method.check(upload)


def test_first_download_is_the_clients_own_start() -> None:
    """Clients of one network start alike, and so does the server: the first round of FedAvg changes nothing."""
    clients = support.population("fedavg", models=(support.Wide,))
    server = support.new_server(clients.method)
    own = clients.new_network(1).state_dict()
    assert all(torch.equal(own[name], tensor) for name, tensor in server.state.items())


def test_batch_norm_statistics_are_averaged_and_counters_stay_home(tmp_path: Path) -> None:
    run = support.federation(tmp_path, "fedavg", models=(support.Normed,))
    run.run()
    assert "model.extractor.body.1.running_mean" in run.server.state
    assert not any("num_batches" in name for name in run.server.state)


def test_networks_must_be_the_same() -> None:
    with pytest.raises(
        InputError,
        match="fedavg needs the same network.*clients 0 and 2 have Wide and clients 1 and 3 have Narrow",
    ):
        support.new_method("fedavg")


@pytest.mark.parametrize("method", SAME)
def test_unsound_replies_are_refused(method: str) -> None:
    bound = support.new_method(method, **SAME[method])
    good = dict(support.new_server(bound).state)
    name = next(iter(good))
    for bad, reason in (
        ({**good, name: good[name] * torch.nan}, "finite"),
        ({**good, "more": good[name]}, "unexpected"),
    ):
        with pytest.raises(BadMessage, match=reason):
            bound.check(support.reply(0, bad, samples=[1]).message)


@pytest.mark.parametrize("method", ["standalone", *SAME])
def test_engines_agree_and_nothing_is_shared(tmp_path: Path, method: str) -> None:
    parity.assert_engines_agree(tmp_path, method, **SAME.get(method, {}))
    parity.assert_nothing_shared(tmp_path, method)


def test_standalone_sends_nothing(tmp_path: Path) -> None:
    run = support.federation(tmp_path, "standalone", rounds=6)
    summary = run.run()
    assert summary["upload_bytes"] == summary["download_bytes"] == 0
    assert summary["accuracy_final"] > 0.9


TUNED = {"name": "fedavg", "finetune_epochs": 2}


def test_fine_tuning_leaves_the_global_network_as_it_is(tmp_path: Path) -> None:
    """What is sent and averaged is the network before fine-tuning, whose batches are drawn as without it."""
    plain, tuned = (
        support.federation(tmp_path / name, options, models=(support.Wide,), rounds=3, participation=0.5)
        for name, options in (("plain", "fedavg"), ("tuned", TUNED))
    )
    for run in (plain, tuned):
        run.run()
    for name, tensor in plain.server.state.items():
        assert torch.equal(tensor, tuned.server.state[name])
    assert plain.folder.rounds().upload_floats.equals(tuned.folder.rounds().upload_floats)
    assert plain.folder.rounds().flops.sum() * 3 == tuned.folder.rounds().flops.sum()  # 1 epoch, then 1 + 2


def test_the_kept_model_is_the_global_one_fine_tuned(tmp_path: Path) -> None:
    """Two epochs by hand from the first global network, in the order that the phase draws; nothing else changes it."""
    run = support.federation(tmp_path, TUNED, models=(support.Wide,), rounds=1)
    run.run()
    clients = run.engine.population
    net = clients.new_network(0).model
    for batch in batches(clients, 0, clients.method.phases()[1], round=1):
        gradients = torch.autograd.grad(
            torch.nn.functional.cross_entropy(net(batch.x), batch.y), list(net.parameters())
        )
        with torch.no_grad():
            for parameter, gradient in zip(net.parameters(), gradients, strict=True):
                parameter -= clients.training.lr * gradient
    state = run.engine.get_state(0)
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(state[f"model.{name}"], parameter.data)
        assert not torch.allclose(state[f"model.{name}"], state[f"travelling.{name}"])
    predicted = clients.method.predict(run.engine._bench.network(0, "Wide", state), batch.x)["classifier"]
    torch.testing.assert_close(predicted, net(batch.x))


def test_fine_tuned_networks_are_not_scored_after_a_download() -> None:
    with pytest.raises(InputError, match="after-download.*fedavg.*leave it at 'after-training'"):
        support.population(TUNED, models=(support.Wide,), evaluate="after-download")
    support.population("fedavg", models=(support.Wide,), evaluate="after-download")


def test_engines_agree_on_fine_tuning(tmp_path: Path) -> None:
    parity.assert_vmap_agrees(support.population(TUNED, models=(support.Wide,)))
    parity.assert_engines_agree(tmp_path / "plain", TUNED, models=(support.Wide,))
    parity.assert_engines_agree(tmp_path / "normed", TUNED, models=(support.Normed,))


@pytest.mark.parametrize(
    ("method", "classes", "models", "floats"),
    [
        ("fedavg", 10, "cnn1", 2_621_558),
        ("fedavg", 100, "cnn1", 2_666_648),
        ("lg-fedavg", 10, "cnn5", 5_010),
        ("lg-fedavg", 100, "cnn5", 50_100),
    ],
)
def test_traffic_is_the_closed_form(tmp_path: Path, method: str, classes: int, models: str, floats: int) -> None:
    assert support.traffic(tmp_path, method, classes, models) == (floats, floats)
