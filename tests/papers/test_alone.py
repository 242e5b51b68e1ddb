"""Methods without partners: a client hears of nobody else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from polyfed.message import State
from tests import support

ALONE = "papers.alone:FedProtoAlone"
NOT_AVERAGED = ["papers.alone:FMLAlone", "papers.alone:FedClassAvgAlone"]


def test_a_client_receives_only_what_it_sent() -> None:
    """Both hold class 1, of which FedProto's prototype would be the mean, 3. The third has sent nothing yet."""
    method = support.new_method(ALONE)
    server = support.new_server(method)
    first = support.reply(0, {"prototypes": torch.tensor([[2.0, 2.0]])}, labels=[1])
    second = support.reply(1, {"prototypes": torch.tensor([[7.0, 7.0], [4.0, 4.0]])}, labels=[0, 1])
    method.aggregate(server, [first, second])
    downloads = [method.download(server, client, None) for client in range(3)]
    assert [each.tensors["prototypes"][:, 0].tolist() for each in downloads[:2]] == [[2.0], [7.0, 4.0]]
    assert [each.metadata["labels"].tolist() for each in downloads[:2]] == [[1], [0, 1]]
    assert not downloads[2].tensors and not downloads[2].metadata


def test_a_later_upload_replaces_the_one_before() -> None:
    method = support.new_method(ALONE)
    server = support.new_server(method)
    for value in (2.0, 5.0):
        method.aggregate(server, [support.reply(0, {"prototypes": torch.tensor([[value]])}, labels=[1])])
    assert method.download(server, 0, None).tensors["prototypes"].tolist() == [[5.0]]


def test_it_equals_fedproto_where_classes_have_one_owner(tmp_path: Path) -> None:
    """Four classes, two clients with two each: there is no partner to miss."""
    settings = {"clients": 2, "classes_per_client": 2, "rounds": 3}
    alone, fedproto = (support.federation(tmp_path / name[:6], name, **settings) for name in (ALONE, "fedproto"))
    assert alone.run()["accuracy_final"] == fedproto.run()["accuracy_final"]
    columns = ["round", "loss_mean"]
    assert alone.folder.rounds()[columns].equals(fedproto.folder.rounds()[columns])


@pytest.mark.parametrize("name", NOT_AVERAGED)
def test_a_client_goes_on_with_its_own_module(name: str) -> None:
    """One that has sent nothing yet begins like all others, also after others have sent something."""
    method = support.new_method(name)
    server = support.new_server(method)
    first = method.download(server, 0, None).tensors
    sent = [{key: torch.full_like(tensor, value) for key, tensor in first.items()} for value in (2.0, 5.0, 3.0)]
    for client, own in zip((0, 1, 0), sent, strict=True):
        method.aggregate(server, [support.reply(client, own)])
    assert _same(method.download(server, 0, None).tensors, sent[2])
    assert _same(method.download(server, 1, None).tensors, sent[1])
    assert _same(method.download(server, 2, None).tensors, first)


@pytest.mark.parametrize(("name", "original"), list(zip(NOT_AVERAGED, ["fml", "fedclassavg"], strict=True)))
def test_nothing_else_is_left_out(tmp_path: Path, name: str, original: str) -> None:
    """The mean over a single client is what it has sent."""
    found = []
    for number, method in enumerate((name, original)):
        federation = support.federation(tmp_path / str(number), method, clients=1, classes_per_client=4, rounds=2)
        federation.run()
        found.append(federation.engine.get_state(0))
    assert _same(*found)


def _same(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
