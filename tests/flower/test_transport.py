"""Questions and answers over Flower: intact, on time, repeated where they were lost, refused where they are forged."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'polyfed[flower]'")

import httpx
from flwr.proto.fleet_pb2 import DeactivateNodeRequest, PullMessagesRequest
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest

from polyfed.flower import node as site_end
from polyfed.flower.server import Fleet
from polyfed.message import Message
from polyfed.remote.transport import Kind, Packet, Patience
from tests.flower import support
from tests.flower.support import echo, wait_for


def ask(people: support.Federation, *names: str, kind: Kind = "train", patience: Patience | None = None, **facts: Any):
    assert people.fleet is not None
    packets = {name: Packet(facts) for name in names}
    return people.fleet.transport.ask(kind, packets, patience or Patience(20))


def test_packets_arrive_intact_in_both_directions(people: support.Federation) -> None:
    """Facts and tensors, also of more than one piece (5 MiB)."""
    fleet = people.listen()
    for name in ("amber", "birch"):
        people.start(name, echo)
    wait_for(lambda: len(fleet.transport.nodes()) == 2)
    weights = {"w": torch.randn(3, 700_000), "b": torch.arange(5.0)}
    sent = {"amber": Packet({"round": 3}, Message(weights)), "birch": Packet({"round": 4, "ü": [1.5, None]})}
    answered: list[str] = []
    found = fleet.transport.ask("train", sent, Patience(30), answered.append)
    assert found["birch"].facts == {"kind": "train", "round": 4, "ü": [1.5, None]} and found["birch"].message is None
    assert found["amber"].message is not None
    assert all(torch.equal(found["amber"].message.tensors[name], weights[name]) for name in weights)
    assert sorted(answered) == ["amber", "birch"]
    assert not fleet.link.message_ins_store and not fleet.link.object_store.store  # type: ignore[attr-defined]


def test_each_kind_of_question_is_told_apart(people: support.Federation) -> None:
    fleet = people.listen()
    people.start("amber", echo)
    wait_for(lambda: list(fleet.transport.nodes()) == ["amber"])
    kinds: tuple[Kind, ...] = ("join", "train", "evaluate")
    assert [ask(people, "amber", kind=kind)["amber"].facts["kind"] for kind in kinds] == list(kinds)


def test_a_straggler_is_not_asked_again_until_it_has_answered(people: support.Federation) -> None:
    fleet = people.listen()
    done = threading.Event()

    def slow(kind: Kind, packet: Packet) -> Packet:
        done.wait(20)
        return Packet({"late": True})

    people.start("amber", echo)
    people.start("birch", slow)
    wait_for(lambda: len(fleet.transport.nodes()) == 2)
    found = ask(people, "amber", "birch", patience=Patience(60, enough=1, grace=0.2))
    assert list(found) == ["amber"]
    assert list(fleet.transport.nodes()) == ["amber"]
    assert sorted(fleet.transport.present()) == ["amber", "birch"]
    done.set()
    wait_for(lambda: "birch" in fleet.transport.nodes())
    assert ask(people, "birch", round=2)["birch"].facts == {"late": True}  # of this question: it always says so
    assert not fleet.link.message_ins_store


def test_a_site_that_connects_anew_is_noticed(people: support.Federation) -> None:
    fleet = people.listen()
    first = people.start("amber", echo)
    wait_for(lambda: list(fleet.transport.nodes()) == ["amber"])
    before = fleet.transport.connection("amber")
    first.stop.set()
    wait_for(lambda: not fleet.transport.present())
    people.start("amber", echo)
    wait_for(lambda: list(fleet.transport.present()) == ["amber"])
    assert fleet.transport.connection("amber") != before


def pass_time(fleet: Fleet, seconds: float) -> None:
    """For the server's patience and for questions, not for heartbeats; the sites have had all the time they needed."""
    with fleet.link.lock:
        for question in fleet.link.message_ins_store.values():
            question.metadata.created_at -= seconds
    fleet.transport._clock = lambda: time.monotonic() + seconds


def test_a_late_answer_is_never_taken_for_another(people: support.Federation) -> None:
    """The first question is given up after its timeout; its answer comes while the second one waits."""
    fleet = people.listen()
    busy, release = threading.Event(), threading.Event()

    def slow(kind: Kind, packet: Packet) -> Packet:
        if packet.facts["round"] == 1:
            busy.set()
            release.wait(20)
        return Packet({"answers": packet.facts["round"]})

    people.start("amber", slow)
    wait_for(lambda: list(fleet.transport.nodes()) == ["amber"])
    thread, found = asked_in_the_background(people, "amber", round=1)
    assert busy.wait(20)
    pass_time(fleet, 20)
    thread.join(20)
    assert found == {}
    wait_for(lambda: list(fleet.transport.nodes()) == ["amber"])  # the timeout has passed: it may be asked again
    threading.Timer(0.3, release.set).start()
    assert ask(people, "amber", round=2)["amber"].facts == {"answers": 2}


def test_a_member_that_is_away_is_missing_from_the_answers(people: support.Federation) -> None:
    fleet = people.listen()
    people.start("amber", echo)
    wait_for(lambda: list(fleet.transport.nodes()) == ["amber"])
    assert list(ask(people, "amber", "cedar")) == ["amber"]


def assert_nothing_is_kept(people: support.Federation) -> None:
    """Once all questions are answered or given up, they need no memory."""
    assert people.fleet is not None
    link = people.fleet.link
    assert not link.message_ins_store and not link.message_res_store and not link._object_push_sessions
    assert not link.object_store.store  # type: ignore[attr-defined]


def raw(people: support.Federation, name: str) -> tuple[Any, Any]:
    """A connection that only does what the test says, as if its process had died after that."""
    connection = people.connection(name, echo)
    client = connection._client()
    return client, connection._activate(client)


def asked_in_the_background(
    people: support.Federation, name: str, round: int = 7
) -> tuple[threading.Thread, dict[str, Packet]]:
    found: dict[str, Packet] = {}
    thread = threading.Thread(target=lambda: found.update(ask(people, name, round=round)))
    thread.start()
    return thread, found


def test_a_site_that_died_with_a_question_is_asked_again_when_it_comes_back(people: support.Federation) -> None:
    people.listen()
    client, node = raw(people, "amber")
    thread, found = asked_in_the_background(people, "amber")
    wait_for(lambda: bool(client.PullMessages(PullMessagesRequest(node=node)).messages_list))
    people.start("amber", echo)
    thread.join(20)
    assert found["amber"].facts == {"kind": "train", "round": 7}


def test_a_site_that_died_while_it_answered_is_asked_again(people: support.Federation) -> None:
    """Its answer was announced, but not all pieces came; those that came are not kept for ever."""
    people.listen()
    dying = people.connection("amber", echo)
    client = dying._client()
    node = dying._activate(client)
    thread, found = asked_in_the_background(people, "amber")
    client.PushObject = lambda piece: (_ for _ in ()).throw(RuntimeError("killed"))  # type: ignore[method-assign]
    with pytest.raises(Exception, match="killed"):
        dying._serve(client, node)
    people.start("amber", echo)
    thread.join(20)
    assert found["amber"].facts == {"kind": "train", "round": 7}
    assert_nothing_is_kept(people)


def test_half_an_answer_to_a_question_that_was_given_up_is_not_kept(people: support.Federation) -> None:
    fleet = people.listen()
    dying = people.connection("amber", echo)
    client = dying._client()
    node = dying._activate(client)
    thread, found = asked_in_the_background(people, "amber")
    client.PushObject = lambda piece: (_ for _ in ()).throw(RuntimeError("killed"))  # type: ignore[method-assign]
    with pytest.raises(Exception, match="killed"):
        dying._serve(client, node)
    pass_time(fleet, 20)
    thread.join(20)
    assert found == {}
    wait_for(lambda: list(fleet.transport.nodes()) == ["amber"])
    assert_nothing_is_kept(people)


def test_sites_come_back_to_a_server_that_was_started_anew(people: support.Federation) -> None:
    first = people.listen()
    people.start("amber", echo)
    wait_for(lambda: list(first.transport.nodes()) == ["amber"])
    port = first.port
    first.close()
    second = people.listen(port)
    wait_for(lambda: list(second.transport.nodes()) == ["amber"])
    assert ask(people, "amber", round=2)["amber"].facts["round"] == 2
    assert any("no connection" in note for note in people.notes)


def test_a_site_that_leaves_is_known_to_be_away(people: support.Federation) -> None:
    fleet = people.listen()
    site = people.start("amber", echo)
    wait_for(lambda: list(fleet.transport.nodes()) == ["amber"])
    site.stop.set()
    wait_for(lambda: not fleet.transport.nodes())


def test_a_heartbeat_that_comes_after_the_farewell_does_not_bring_a_site_back(people: support.Federation) -> None:
    fleet = people.listen()
    client, node = raw(people, "amber")
    beat = SendNodeHeartbeatRequest(node=node, heartbeat_interval=site_end.HEARTBEAT)
    assert client.SendNodeHeartbeat(beat).success and list(fleet.transport.present()) == ["amber"]
    client.DeactivateNode(DeactivateNodeRequest(node_id=node.node_id))
    assert not client.SendNodeHeartbeat(beat).success and not fleet.transport.present()
    raw(people, "amber")
    assert client.SendNodeHeartbeat(beat).success and list(fleet.transport.present()) == ["amber"]


def test_a_site_that_is_taken_for_gone_connects_anew(
    people: support.Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A farewell of the process before it came late."""
    monkeypatch.setattr(site_end, "BEATS", 0.05)
    fleet = people.listen()
    people.start("amber", echo)
    wait_for(lambda: list(fleet.transport.nodes()) == ["amber"])
    before = fleet.transport.connection("amber")
    fleet.link.deactivate_node(fleet.link._numbers["amber"])
    wait_for(lambda: list(fleet.transport.nodes()) == ["amber"])
    assert fleet.transport.connection("amber") == before + 1
    assert any("it does not know this connection any more" in note for note in people.notes)


def test_a_site_that_ends_does_not_say_that_it_tries_again(people: support.Federation) -> None:
    """The server ends before it confirms the site's last answer."""
    fleet = people.listen()

    def last(kind: Kind, packet: Packet) -> Packet:
        site.stop.set()
        return Packet()

    def lost(request: Any) -> Any:
        raise httpx.ReadError("it is gone")

    site = people.connection("amber", last)
    connect = site._client

    def connected() -> Any:
        client = connect()
        client.PushMessages = lost  # type: ignore[method-assign]
        return client

    site._client = connected
    running = threading.Thread(target=site.run, daemon=True)
    running.start()
    wait_for(lambda: list(fleet.transport.nodes()) == ["amber"])
    thread, _ = asked_in_the_background(people, "amber")
    running.join(20)
    thread.join(20)
    assert not running.is_alive() and not any("trying again" in note for note in people.notes)
    assert any("(ReadError) before it confirmed the last answer: if it still waits" in note for note in people.notes)


def test_who_loses_the_connection_during_a_question_fails_with_a_reason(people: support.Federation) -> None:
    people.listen()
    client, node = raw(people, "amber")
    thread, found = asked_in_the_background(people, "amber")
    wait_for(lambda: bool(client.PullMessages(PullMessagesRequest(node=node)).messages_list))
    assert people.fleet is not None
    people.fleet.link.deactivate_node(node.node_id)  # what Flower does when heartbeats stop
    thread.join(20)
    assert found["amber"].facts == {"failure": "the connection to it was lost."}
