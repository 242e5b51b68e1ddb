"""A host in this process, without a cluster, and the ray engine on whatever device there is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import polyfed
from polyfed.engines import SequentialEngine, VectorizedEngine
from polyfed.engines.hosts import Host, HostTraits, Packer, unpacked, unpacked_message
from polyfed.errors import InputError
from polyfed.message import Message
from tests import support

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = [pytest.param(False, SequentialEngine), pytest.param(True, VectorizedEngine, marks=needs_gpu)]
SETTINGS: dict[str, Any] = {"clients": 6, "split": "6:2:2", "tf32": False, "lr": 0.05}


def packed(messages: dict[int, Message]) -> dict[int, Any]:
    return {client: Packer().message(message) for client, message in messages.items()}


@pytest.mark.parametrize(("gpu", "engine"), DEVICES)
@pytest.mark.parametrize("method", ["fedproto", "lg-fedavg", "dc-pfl"])
def test_a_host_answers_as_the_local_engine_does(method: str, gpu: bool, engine: Any) -> None:
    """Two rounds with scores; then another host goes on from the states of the first, as after a death.

    What comes from a host is on the CPU, whatever it trains on.
    """
    device = "cuda" if gpu else "cpu"
    people = support.population(method, **SETTINGS, device=device)
    own = people.slice([1, 2, 4])
    local, host = engine(own), Host(own, HostTraits(gpu=gpu, tf32=False))
    server = support.new_server(people.method)
    for round in (1, 2):
        downloads = {client: people.method.download(server, client, None) for client in own.clients}
        expected, answers = local.train(round, downloads), host.train(round, packed(downloads), True)
        scores = local.evaluate(own.clients, round)
        for reply, (sent, message) in zip(expected, answers.replies, strict=True):
            found = unpacked_message(message).tensors
            assert all(tensor.device.type == "cpu" for tensor in found.values())
            assert (sent.client, sent.evaluation) == (reply.client, scores[reply.client])
            for name, tensor in reply.message.tensors.items():
                torch.testing.assert_close(found[name], tensor.cpu(), rtol=1e-4, atol=1e-5)
        states, _ = host.states(own.clients)
        host = Host(own, HostTraits(gpu=gpu, tf32=False))
        host.restore(states, own.clients)
    assert host.evaluate(own.clients, 2, {}) == scores
    local.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_only_counted_is_refused_in_a_sentence() -> None:
    with pytest.raises(InputError, match="counts a GPU that PyTorch does not find .*--set ray.gpus=0"):
        Host(support.population("standalone"), HostTraits(gpu=True))


@pytest.mark.parametrize(
    ("device", "gpus"), [pytest.param("cuda", 1, marks=needs_gpu), pytest.param("cuda", 0, marks=needs_gpu)]
)
def test_a_gpu_host_agrees_with_vectorized(tmp_path: Path, device: str, gpus: int) -> None:
    """The whole way, with a Ray of its own; without a GPU of the host's own the server alone is on it."""
    pytest.importorskip("ray", reason="the ray engine needs the extra polyfed[ray]")
    compare(tmp_path, device, {"hosts": 1, "gpus": gpus})


def compare(tmp_path: Path, device: str, settings: dict[str, Any]) -> None:
    values = {**support.DEFAULTS, **SETTINGS, "rounds": 3, "device": device}
    given = {"data": support.tiny_dataset(), "models": [support.Wide, support.Narrow]}
    runs = [
        polyfed.run("fedproto", **{**values, "engine": engine, "ray": settings}, **given, out=tmp_path / engine)
        for engine in ("vectorized", "ray")
    ]
    one, other = (run.rounds.set_index("round") for run in runs)
    assert other["loss_mean"].to_numpy() == pytest.approx(one["loss_mean"].to_numpy(), rel=1e-3)
    assert other["accuracy_mean"].to_numpy() == pytest.approx(one["accuracy_mean"].to_numpy(), abs=0.1)
    for client in range(values["clients"]):
        for name, tensor in runs[0].folder.model_state(client).items():
            torch.testing.assert_close(runs[1].folder.model_state(client)[name], tensor, rtol=1e-3, atol=1e-4)


def test_what_is_packed_comes_out_the_same() -> None:
    state = {
        "float": torch.rand(3, 2).t(),
        "half": torch.rand(4).bfloat16(),
        "truth": torch.tensor([True, False]),
        "number": torch.tensor(7),
        "nothing": torch.zeros(0, 3),
    }
    found = unpacked(Packer().tensors(state))
    assert all(torch.equal(found[name], state[name]) and found[name].dtype == state[name].dtype for name in state)
    sparse = torch.eye(2).to_sparse()
    assert unpacked(Packer().tensors({"sparse": sparse}))["sparse"] is sparse


def test_what_many_receive_travels_once() -> None:
    packer, head = Packer(), torch.rand(10)
    sent = [packer.message(Message({"head": head})) for _ in range(5)]
    assert packer.bytes == 40
    assert len({id(message.tensors["head"]) for message in sent}) == 1
