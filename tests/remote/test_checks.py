"""What a site says is checked: what makes no sense stays outside, and nobody else is harmed."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import polyfed
from polyfed.engines import SequentialEngine
from polyfed.message import Message
from polyfed.remote import InMemoryTransport, Packet, RemoteEngine, Site
from polyfed.remote.checks import rules_of
from polyfed.remote.transport import LARGEST_FACTS
from tests.remote.support import Run, agreement, changed, setting

HOSTILE: list[Mapping[str, Any]] = [
    {"round": 1, "loss": "low"},
    {"round": 1, "loss": [1]},
    {"round": 1, "loss": True},
    {"round": 1, "loss": math.nan},
    {"round": 1, "loss": -math.inf},
    {"round": 2, "loss": 0.5},
    {"round": "1", "loss": 0.5},
    {"loss": 0.5},
]


@pytest.mark.parametrize("facts", HOSTILE)
def test_facts_that_make_no_sense_are_a_failed_reply(tmp_path: Path, facts: Mapping[str, Any]) -> None:
    _, people = setting("standalone")
    transport = InMemoryTransport({"amber": lambda kind, packet: Packet(facts)})
    (reply,) = RemoteEngine(agreement(people), transport, people.method).train(1, {0: Message()})
    assert reply.failure


@pytest.mark.parametrize(
    "evaluation",
    [
        None, 3, [], {"test": 5}, {"test": {"classifier": 0.5}},
        {"test": {"classifier": 1.5}, "validation": {"classifier": 0.5}},
        {"test": {"classifier": -0.1}, "validation": {"classifier": 0.5}},
        {"test": {"classifier": math.nan}, "validation": {"classifier": 0.5}},
        {"test": {"classifier": "1"}, "validation": {"classifier": 0.5}},
        {"test": {"classifier": True}, "validation": {"classifier": 0.5}},
        {"test": {"classifier": 0.5}, "validation": {"other": 0.5}},
        {"test": {"other": 0.5}, "validation": {"other": 0.5}},
        {"test": {"classifier": 0.5, "other": 1}, "validation": {"classifier": 0.5, "other": 1}},
        {"test": {}, "validation": {}},
        {"test": {"classifier": 0.5}, "validation": {"classifier": 0.5}, "samples": 7},
        *({"test": {"classifier": 0.5}, "validation": {"classifier": 0.5}, "further": further} for further in (
            3, {"test": {"classifier": {}}}, {"test": {"classifier": {}}, "validation": {}},
            {"test": {"other": {}}, "validation": {"other": {}}},
            {"test": {"classifier": {"samples": 0.5}}, "validation": {"classifier": {}}},
            {"test": {"classifier": {"macro_f1": 1.5}}, "validation": {"classifier": {}}},
            {"test": {"classifier": {"macro_f1": "1"}}, "validation": {"classifier": {}}},
            {"test": {"classifier": {}}, "validation": {"classifier": {}}, "train": {"classifier": {}}},
        )),
    ],
)  # fmt: skip
def test_scores_that_make_no_sense_are_missing(evaluation: Any) -> None:
    _, people = setting("standalone")
    transport = InMemoryTransport({"amber": lambda kind, packet: Packet({"evaluation": evaluation})})
    assert RemoteEngine(agreement(people), transport, people.method).evaluate([0], 1) == {}


def test_scores_that_make_sense_arrive() -> None:
    """The same question as above, and a site without validation samples."""
    _, people = setting("standalone")
    shares: dict[str, Any] = {"test": {"classifier": 0.25}, "validation": {"classifier": None}}
    transport = InMemoryTransport({"amber": lambda kind, packet: Packet({"evaluation": shares})})
    score = RemoteEngine(agreement(people), transport, people.method).evaluate([0], 1)[0]
    assert score.accuracy() == 0.25 and math.isnan(score.validation_accuracy())
    assert score.counts("test", "classifier") is None
    assert math.isnan(score.measure("balanced_accuracy"))  # a site that tells no more than accuracy
    further = {"test": {"classifier": {"macro_f1": 0.75, "auc": None}}, "validation": {"classifier": {}}}
    shares["further"] = further
    score = RemoteEngine(agreement(people), transport, people.method).evaluate([0], 1)[0]
    assert score.measure("macro_f1") == 0.75 and math.isnan(score.measure("auc"))


@pytest.mark.parametrize("method", polyfed.METHODS)
def test_a_server_that_knows_no_network_knows_the_rules_of_prediction(method: str) -> None:
    _, people = setting(method)
    known = people.method
    rules = SequentialEngine(people).evaluate([0], 1)[0].rules
    assert rules_of(known) == rules
    if "network" not in known.requires:
        assert rules_of(type(known)(known.config, replace(known.task, architecture=None), known.training)) == rules


def spoilt(said: Packet, **changes: Any) -> Packet:
    message = said.message
    assert message is not None
    tensors = {name: changes["tensor"](tensor) for name, tensor in message.tensors.items()}
    return Packet(said.facts, Message(tensors, message.metadata))


DOOR: dict[str, tuple[Callable[[Packet], Packet], str]] = {
    "not finite": (lambda said: spoilt(said, tensor=lambda t: t * float("nan")), "holds values that are not finite"),
    "wrong shape": (lambda said: spoilt(said, tensor=lambda t: t[:, :2].contiguous()), "has shape"),
    "too large": (lambda said: spoilt(said, tensor=lambda t: torch.zeros(1000, 6)), "bytes can have at most"),
    "long facts": (lambda said: Packet({**said.facts, "x": "y" * LARGEST_FACTS}), "its facts of 1000"),
    "another round": (lambda said: Packet({**said.facts, "round": 7}, said.message), "answered for round 7, not for"),
    "no round": (lambda said: Packet({}, said.message), "answered for round None"),
    "no message": (lambda said: Packet(said.facts), "lacks the tensor 'prototypes'"),
    "other names": (
        lambda said: Packet(said.facts, Message({"weights": torch.zeros(2)})), "unexpected tensor 'weights'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", DOOR)
def test_a_reply_that_is_not_agreed_on_stays_outside(tmp_path: Path, case: str) -> None:
    """Three replies are fused, the fourth is named with its reason."""
    change, words = DOOR[case]
    run = Run(tmp_path)
    run.transport.sites["cedar"] = changed(run.transport.sites["cedar"], "train", change)
    run.federation.round(1)
    assert run.column("replies") == [3]
    (note,) = [event["note"] for event in run.federation.folder.events() if event["event"] == "note"]
    assert note.startswith("round 1 continues without client 2 (cedar): ") and words in note


def test_a_sites_words_cannot_command_the_servers_terminal(tmp_path: Path) -> None:
    run = Run(tmp_path, minimum_members=2)
    for name, kind in (("cedar", "train"), ("dune", "join")):
        own = run.transport.sites[name]
        run.transport.sites[name] = changed(own, kind, lambda said: Packet({"failure": "\x1b[2J\ngone" + "x" * 9999}))
    run.federation.round(1)
    assert [note.count(" [2J gone") for note in run.seen.notes] == [1, 1]
    assert all(note.isprintable() and len(note) < 1200 for note in run.seen.notes)


def test_a_server_of_another_run_gets_no_answer(tmp_path: Path) -> None:
    run = Run(tmp_path, minimum_members=3)
    other = agreement(run.people, "run-2")
    stranger = Site("dune", other, run.people.slice([3]), tmp_path / "stranger")
    run.transport.sites["dune"] = stranger.answer
    run.federation.round(1)
    assert "dune can't join: it takes part in run run-2, not in another" in run.seen.notes[0]


def test_a_reply_that_is_too_large_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Message, "from_bytes", None)
    packet = Packet.received(b"{}", b"x" * 101, 100)
    assert packet.facts == {"failure": "its message of 101 bytes can have at most 100."}


@pytest.mark.parametrize("facts", [b"[]", b"\xff", b"{", b"[" * 50_000])
def test_an_answer_that_cannot_be_read_is_a_failure(facts: bytes) -> None:
    assert Packet.received(facts, b"").failed
