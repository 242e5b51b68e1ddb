"""What a site announces is what it sends: compared with everything that a federation put on the wire."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import polyfed
from polyfed.deploy.announce import Announcement, announce
from polyfed.errors import RunError
from polyfed.message import Message
from polyfed.records import RunFolder
from polyfed.remote import InMemoryTransport, Packet, RemoteEngine
from polyfed.server.federation import Federation
from tests.deploy.test_member import members, one
from tests.methods import parity


def announced(folder: Path, **settings: Any) -> Announcement:
    return announce(one(folder, **settings))


@pytest.mark.parametrize("method", [*polyfed.METHODS, *parity.OPTIONS])
def test_nothing_leaves_that_was_not_announced(tmp_path: Path, method: Any) -> None:
    """Every answer of every site in three rounds, for all methods, against the announcement made before the run."""
    method = parity.OPTIONS.get(method, method)
    name = method if isinstance(method, str) else method["name"]
    shared = "network" in polyfed.METHODS[name].requires
    common = {"network": "tests.support:Normed"} if shared else {}
    terms = {"method": method, "rounds": 3, "participation": 0.7, "task": common}
    people = members(tmp_path, own_networks=not shared, **terms)
    told = {m.name: Announcement.from_dict(json.loads(json.dumps(announce(m).to_dict()))) for m in people}
    agreed = people[0].terms
    transport = InMemoryTransport({m.name: m.site().answer for m in people}, record=True)
    config = agreed.experiment()
    folder = RunFolder.create(tmp_path / "run", config)
    method = agreed.method()
    engine = RemoteEngine(agreed.agreement(), transport, method)
    federation = Federation(config, method, engine, folder)
    federation.run()
    engine.finish(3, {client: federation.download(client) for client in range(3)})
    answers = list(transport.record or ())[1::2]
    assert {kind for kind, *_ in answers} >= {"join", "train", "finish"}
    for kind, site, facts, message in answers:
        assert told[site].unannounced(kind, Packet.from_bytes(facts, message)) is None


def test_the_upload_of_prototypes_has_the_sizes_of_the_sites_classes(tmp_path: Path) -> None:
    """Amber has classes 0 and 1 of 4 and 6 features: 2 · 6 floats of 4 bytes, and two labels of 8 bytes."""
    found = announced(tmp_path)
    assert [(e.name, e.kind, e.shape, e.trial, e.numbers, e.bytes) for e in found.upload] == [
        ("prototypes", "floats", ("seen", 6), (2, 6), 12, 48),
        ("labels", "labels", ("seen",), (2,), 2, 16),
    ]
    assert found.upload_bytes > 48 + 16
    assert found.join == {"profile": {"name": "amber", "features": 6}, "share": "scores"}
    assert found.reveals == polyfed.METHODS["fedproto"].reveals


def test_a_site_that_shares_nothing_announces_no_scores(tmp_path: Path) -> None:
    found = announced(tmp_path, share="nothing")
    assert (found.train, found.evaluate, found.join["share"]) == ({"round": 1}, {}, "nothing")
    scored = announced(tmp_path)
    assert scored.train.keys() == {"round", "loss", "evaluation"}
    assert found.unannounced("train", Packet(scored.train)) == "the fact 'loss'"


def test_the_trial_has_a_sample_of_every_class_even_if_a_batch_is_smaller(tmp_path: Path) -> None:
    found = announced(
        tmp_path, classes=(0, 1, 2, 3), terms={"training": {"batch_size": 3}}, network="tests.support:Normed"
    )
    assert found.upload[0].trial == (4, 6)


def test_a_trial_leaves_nothing_in_the_sites_folder(tmp_path: Path) -> None:
    announced(tmp_path)
    assert not (tmp_path / "amber" / "state").exists()


def test_what_was_not_announced_is_named(tmp_path: Path) -> None:
    found = announced(tmp_path)
    good = Message({"prototypes": torch.zeros(1, 6)}, {"labels": torch.tensor([1])})
    facts = dict(found.train)
    wrong: list[tuple[Any, Packet, str]] = [
        ("train", Packet({**facts, "path": "/x"}, good), "the fact 'path'"),
        ("train", Packet({**facts, "loss": "text"}, good), "the fact 'loss' with the value text"),
        ("train", Packet(facts, Message({"images": torch.zeros(1)})), "the tensor 'images'"),
        ("train", Packet(facts, Message({"prototypes": torch.zeros(1, 7)})), "the tensor 'prototypes' with shape (1,"),
        (
            "train",
            Packet(facts, Message({"prototypes": torch.zeros(2, 6)}, {"labels": torch.tensor([1])})),
            "the tensor 'labels' with shape (1,)",
        ),
        (
            "join",
            Packet({"profile": {"name": "amber", "features": 7}, "share": "scores"}),
            "the fact 'profile.features' with the value 7",
        ),
        ("join", Packet({"profile": {"name": "amber", "classes": [0]}}), "the fact 'profile.classes'"),
        ("join", Packet(found.join, good), "a message with tensors"),
        ("evaluate", Packet({"evaluation": {"confusion": {}}}), "the fact 'evaluation.confusion'"),
        ("evaluate", Packet({"failure": "no", "labels": [1]}), "the fact 'labels'"),
    ]
    for kind, packet, words in wrong:
        assert str(found.unannounced(kind, packet)).startswith(words)
    assert found.unannounced("train", Packet(facts, good)) is None
    assert found.unannounced("train", Packet({"failure": "the loss is no longer finite"})) is None


def test_a_trial_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="the trial of 'train' failed: the .* no longer finite"):
        announced(tmp_path, terms={"training": {"lr": 1e30, "batch_size": 2}})
