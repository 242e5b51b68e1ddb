"""What only a GPU has: captured steps, streams, little memory. The numbers are those of the plain loop there."""

from __future__ import annotations

import warnings
from pathlib import Path
from threading import Thread
from typing import Any

import pandas as pd
import pytest
import torch

from polyfed.engines import SequentialEngine, VectorizedEngine
from polyfed.engines.stacked import replays
from polyfed.engines.stacked.captured import WORTH_A_SHAPE, Stream
from polyfed.engines.stacked.receiving import receive_all
from polyfed.message import Message
from polyfed.methods.base import Reply
from polyfed.server.replies import Door, Sizes
from tests import support
from tests.engines import test_dropout, test_frozen, test_global_draws, test_sequences
from tests.server import test_waits

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICE = "cuda"


def run(folder: Path, engine: Any, method: str, **settings: Any) -> tuple[pd.DataFrame, Any]:
    federation = support.federation(folder / engine.__name__, method, engine, device=DEVICE, tf32=False, **settings)
    federation.run()
    return federation.folder.rounds().drop(columns="seconds"), federation


@pytest.mark.parametrize("method", ["fd", "pfedes", "fedapen", "dc-pfl"])
def test_captured_steps_of_uneven_clients(tmp_path: Path, method: str) -> None:
    """Long enough for cohorts that shrink to get graphs of their own."""
    settings = {
        "dataset": support.tiny_dataset(per_class=120), "clients": 12, "partition": "dirichlet", "alpha": 0.3,
        "batch_size": 2, "rounds": 8, "lr": 0.01, "training": {"momentum": 0.5, "weight_decay": 1e-3},
    }  # fmt: skip
    expected, _ = run(tmp_path, SequentialEngine, method, **settings)
    actual, federation = run(tmp_path, VectorizedEngine, method, **settings)
    assert actual["loss_mean"].to_numpy() == pytest.approx(expected["loss_mean"].to_numpy(), rel=1e-2)
    steps = federation.engine._steps.values()
    assert any(len(step._graphs) > 1 for step in steps)
    assert max(max(step._asked.values(), default=0) for step in steps) > WORTH_A_SHAPE


def test_kernels_for_the_papers_cnns(tmp_path: Path) -> None:
    """With batches of several sizes, short ones among them."""
    settings = {
        "models": ("cnn1", "cnn2"), "dataset": support.tiny_dataset(side=32, channels=3), "lr": 0.01, "batch_size": 5,
        "clients": 6, "training": {"momentum": 0.5, "augment": True},
    }  # fmt: skip
    expected, _ = run(tmp_path, SequentialEngine, "fedproto", **settings)
    actual, federation = run(tmp_path, VectorizedEngine, "fedproto", **settings)
    assert federation.engine._steps
    pd.testing.assert_frame_equal(actual, expected, check_exact=False, rtol=1e-3, atol=1e-4)


def test_bf16_and_the_papers_cnns(tmp_path: Path) -> None:
    dataset = support.tiny_dataset(side=32, channels=3)
    settings = {"models": ("cnn1", "cnn5"), "dataset": dataset, "training": {"bf16": True, "augment": True}, "lr": 0.01}
    expected, _ = run(tmp_path, SequentialEngine, "fedproto", **settings)
    actual, _ = run(tmp_path, VectorizedEngine, "fedproto", **settings)
    assert actual["loss_mean"].to_numpy() == pytest.approx(expected["loss_mean"].to_numpy(), rel=0.05)


@pytest.mark.parametrize("method", ["standalone", "fedproto", "pfedes"])
def test_batch_norm_trains_in_captured_steps_of_cohorts(tmp_path: Path, method: str) -> None:
    """Short ResNets with uneven clients: short batches are padded, and buffers agree too."""
    settings = {
        "models": ("resnet4", "resnet6"), "dataset": support.tiny_dataset(side=32, channels=3), "clients": 6,
        "partition": "dirichlet", "alpha": 0.5, "batch_size": 6, "rounds": 3, "lr": 0.005, "features": 64,
        "training": {"momentum": 0.5, "weight_decay": 1e-3, "epochs": 2},
    }  # fmt: skip
    expected, plain = run(tmp_path, SequentialEngine, method, **settings)
    actual, captured = run(tmp_path, VectorizedEngine, method, **settings)
    assert not [event for event in captured.folder.events() if "one after another" in event.get("note", "")]
    assert actual["loss_mean"].to_numpy() == pytest.approx(expected["loss_mean"].to_numpy(), rel=1e-2)
    steps = captured.engine._steps
    assert {size for _, size, _ in steps} == {3}
    assert all(step._graphs for step in steps.values())
    for client in range(6):
        state = captured.engine.get_state(client)
        for name, tensor in plain.engine.get_state(client).items():
            if name.endswith("num_batches_tracked"):
                assert torch.equal(state[name], tensor), name
            elif name.endswith(("running_mean", "running_var")):
                torch.testing.assert_close(state[name], tensor, rtol=2e-2, atol=2e-3, msg=name)


def test_little_memory_halves_cohorts_and_changes_no_number(tmp_path: Path) -> None:
    settings = {"models": (support.Wide,), "clients": 8, "rounds": 2}
    expected, _ = run(tmp_path, SequentialEngine, "fedproto", **settings)
    original, refused = VectorizedEngine._train_phase, []

    def too_large(self: VectorizedEngine, clients: list[int], *rest: Any) -> Any:
        step = yield from original(self, clients, *rest)  # everything is captured and queued before memory runs out
        if len(clients) > 2:
            refused.append(len(clients))
            raise torch.OutOfMemoryError("no room")
        return step

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VectorizedEngine, "_train_phase", too_large)
        actual, _ = run(tmp_path, VectorizedEngine, "fedproto", **settings)
    assert refused
    pd.testing.assert_frame_equal(actual, expected, check_exact=False, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("network", [test_frozen.Frozen, test_frozen.FrozenNorm, test_frozen.stem_only])
def test_what_is_frozen_rests_in_captured_steps(tmp_path: Path, network: Any) -> None:
    settings = {"models": (network,), "rounds": 3, "lr": 0.02, "training": {"momentum": 0.5, "weight_decay": 1e-2}}
    expected, plain = run(tmp_path, SequentialEngine, "fedavg", **settings)
    actual, federation = run(tmp_path, VectorizedEngine, "fedavg", **settings)
    pd.testing.assert_frame_equal(actual, expected, check_exact=False, rtol=1e-3, atol=1e-4)
    for one in (plain, federation):
        test_frozen.assert_rest(one, ".body.1." if network is test_frozen.Frozen else ".stem.")


@pytest.mark.parametrize("network", test_global_draws.DRAWING)
@pytest.mark.parametrize("engine", [SequentialEngine, VectorizedEngine])
def test_draws_from_global_generators_repeat(tmp_path: Path, engine: Any, network: Any) -> None:
    """Dropout in cuDNN's recurrent layers among them, which keeps a state of its own."""
    losses = []
    for number in range(2):
        torch.manual_seed(number)
        rounds, _ = run(tmp_path / str(number), engine, "fedproto", models=(network,), rounds=3)
        losses.append(rounds["loss_mean"].to_numpy())
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize(
    "network",
    [test_dropout.Dropped, test_dropout.SamplesSecond, support.Normed, test_sequences.Transformer,
     test_sequences.Vision, test_sequences.Recurrent, test_sequences.Fused],
)  # fmt: skip
def test_captured_steps_use_the_masks_of_the_loop(tmp_path: Path, network: Any) -> None:
    """Several steps are replayed with new masks, for uneven clients; cuDNN's recurrent layers are the reference."""
    settings = {
        "models": (network,), "dataset": support.tiny_dataset(channels=3), "clients": 6, "rounds": 3, "lr": 0.02,
        "batch_size": 6, "training": {"epochs": 2},
    }  # fmt: skip
    expected, _ = run(tmp_path, SequentialEngine, "fedproto", **settings)
    actual, federation = run(tmp_path, VectorizedEngine, "fedproto", **settings)
    assert all(step._graphs for step in federation.engine._steps.values()) and federation.engine._steps
    assert actual["loss_mean"].to_numpy() == pytest.approx(expected["loss_mean"].to_numpy(), rel=1e-3)


def covariances_on_the_gpu(reply: Reply) -> Reply:
    moved = {**reply.message.tensors, "covariances": reply.message.tensors["covariances"].to(DEVICE)}
    return Reply(reply.client, Message(moved, reply.message.metadata))


def test_a_server_waits_as_often_for_many_clients_as_for_few() -> None:
    method = support.new_method("dc-pfl")
    found = []
    for clients in (3, 3, 24):  # the first time, tables are made
        server = support.new_server(method)
        server.device = torch.device(DEVICE)
        replies = [covariances_on_the_gpu(test_waits.sent(client)) for client in range(clients)]
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                accepted, _ = Door(method, 100).admit(1, replies, Sizes())
                method.aggregate(server, accepted)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        found.append(sum("synchroniz" in str(each.message) for each in warned))
    assert 0 < found[1] == found[2] < 10


def test_replies_on_both_devices_are_refused_with_their_reasons() -> None:
    """Clients 1 and 2 are wrong, one on each device; the others are accepted, and the numbers are the CPU's."""
    replies = [test_waits.sent(client) for client in range(6)]
    replies[1] = test_waits.spoiled(replies[1], "covariances", 1, 3, float("nan"))
    replies[2] = test_waits.spoiled(replies[2], "covariances", 1, support.FEATURES, -1.0)
    mixed = [covariances_on_the_gpu(reply) if reply.client % 2 else reply for reply in replies]
    heads = []
    for given, device in ((replies, "cpu"), (mixed, DEVICE)):
        method = support.new_method("dc-pfl")
        server = support.new_server(method)
        server.device = torch.device(device)
        accepted, refused = Door(method, 100).admit(1, given, Sizes())
        assert refused == {
            1: "'covariances' holds values that are not finite.",
            2: "'covariances' holds a negative variance.",
        }
        method.aggregate(server, accepted)
        heads.append(server.modules["head"].weight.detach())
    torch.testing.assert_close(heads[1], heads[0], rtol=1e-3, atol=1e-4)


def test_downloads_arrive_without_waiting() -> None:
    """FedGen's, with a generator that all clients share, known classes, and weights that are made on the CPU."""
    people = support.population("fedgen", device=DEVICE)
    server = support.new_server(people.method)
    head = {"model.head.weight": torch.ones(4, support.FEATURES), "model.head.bias": torch.ones(4)}
    people.method.aggregate(server, [support.reply(0, head, labels=[0, 2], counts=[3, 4])])
    message = people.method.download(server, 0, None)
    states = [dict(people.new_network(client).state_dict()) for client in range(3)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        receive_all(people, range(3), states, dict.fromkeys(range(3), message), 2)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for state in states:
        assert state["generator.known"].tolist() == [True, False, True, False]
        assert state["generator.weights"].tolist() == pytest.approx([0.98, 0.98])
        for name, tensor in message.tensors.items():
            assert torch.equal(state[name].cpu(), tensor), name


def test_a_thread_that_has_computed_nothing_can_capture() -> None:
    """Of runs that train together, any one's thread may capture what another's has prepared."""
    x, found = torch.eye(3, device=DEVICE), []
    x @ x

    def work() -> None:
        graph, product = replays.capture(Stream(x.device), lambda: x @ x)
        graph.replay()
        found.append(product)

    thread = Thread(target=work)
    thread.start()
    thread.join()
    torch.testing.assert_close(found, [x])
