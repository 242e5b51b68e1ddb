"""What a member with a valid key can't do: answer for others, ask them, or fill the server with its answers."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'polyfed[flower]'")

import httpx
from flwr.app import ConfigRecord, Metadata, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.fleet_pb2 import PullMessagesRequest, PushMessagesRequest
from flwr.proto.message_pb2 import ObjectTree, PushObjectRequest
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree

from polyfed.flower.server import LARGEST_REQUEST
from polyfed.flower.wire import content_of
from polyfed.remote.transport import Packet, Patience
from tests.flower import support
from tests.flower.support import echo, wait_for


class Raw:
    """A member that says what it likes: a valid key, and requests of its own."""

    def __init__(self, people: support.Federation, name: str) -> None:
        self.connection = people.connection(name, echo)
        self.client = self.connection._client()
        self.node = self.connection._activate(self.client)

    def question(self) -> FlowerMessage:
        found: list[Any] = []
        wait_for(
            lambda: bool(
                found.extend(self.client.PullMessages(PullMessagesRequest(node=self.node)).messages_list) or found
            )
        )
        return message_from_proto(found[0])

    def push(self, reply: FlowerMessage, **changes: Any) -> Any:
        reply.metadata.__dict__.update(_message_id=reply.object_id, **changes)
        request = PushMessagesRequest(
            node=self.node,
            messages_list=[message_to_proto(remove_content_from_message(reply))],
            message_object_trees=[get_object_tree(reply)],
        )
        pushed = self.client.PushMessages(request)
        objects = get_all_nested_objects(reply)
        for place in pushed.objects_to_push:
            piece = PushObjectRequest(
                node=self.node,
                run_id=reply.metadata.run_id,
                object_id=place,
                object_content=objects[place].deflate(),
                session_id=pushed.session_id,
            )
            self.client.PushObject(piece)
        return pushed


def asked(people: support.Federation, *names: str) -> tuple[threading.Thread, dict[str, Packet]]:
    """A question in the background, to these members."""
    found: dict[str, Packet] = {}
    assert people.fleet is not None
    transport, packets = people.fleet.transport, {name: Packet({"round": 1}) for name in names}
    thread = threading.Thread(target=lambda: found.update(transport.ask("train", packets, Patience(20))))
    thread.start()
    return thread, found


def test_a_member_cannot_answer_for_another(people: support.Federation) -> None:
    """Not even if it knows the question that the other one was asked."""
    fleet = people.listen()
    amber, birch = Raw(people, "amber"), Raw(people, "birch")
    thread, found = asked(people, "birch")
    question = birch.question()
    forged = FlowerMessage(RecordDict({"facts": ConfigRecord({"json": b'{"round": 1}'})}), reply_to=question)
    with pytest.raises(httpx.HTTPStatusError, match="403"):
        amber.push(forged)
    own_name = FlowerMessage(RecordDict(), reply_to=question)
    amber.push(own_name, _src_node_id=amber.node.node_id)  # it is not the one that was asked
    assert not fleet.link.message_res_store
    birch.push(FlowerMessage(RecordDict(), reply_to=question))
    thread.join(20)
    assert found["birch"].facts == {"failure": "it is not one of polyfed's messages."}


def test_a_member_cannot_spoil_anothers_answer(people: support.Federation) -> None:
    """It knows the facts that birch will answer with, and names that object first: with a part that never comes.

    Nor can it have birch's answer refused by announcing one for it that is too large, or keep the server's memory busy
    with answers to questions that nobody asked.
    """
    fleet = people.listen()
    fleet.transport.largest_reply = 1000
    amber, birch = Raw(people, "amber"), Raw(people, "birch")
    thread, found = asked(people, "amber", "birch")
    question = birch.question()
    honest = FlowerMessage(content_of(Packet({"round": 1})), reply_to=question)
    own = FlowerMessage(content_of(Packet({"round": 1})), reply_to=amber.question())
    own.metadata.__dict__["_message_id"] = own.object_id
    false = get_object_tree(own)
    for node in false.children[0].children:
        node.children.append(ObjectTree(object_id="ab" * 32))
    bare = message_to_proto(remove_content_from_message(own))
    amber.client.PushMessages(PushMessagesRequest(node=amber.node, messages_list=[bare], message_object_trees=[false]))
    many = RecordDict({str(place): ConfigRecord({"n": place}) for place in range(100)})
    for changes in ({}, {"_reply_to_message_id": "cd" * 32}):
        amber.push(FlowerMessage(many, reply_to=question), _src_node_id=amber.node.node_id, **changes)
    assert not fleet.link._refused
    birch.push(honest)
    fleet.link.deactivate_node(amber.node.node_id)
    thread.join(20)
    assert found["birch"].facts == {"round": 1} and found["amber"].failed
    link = fleet.link
    assert not (link._arriving or link._refused or link.message_res_store or link._object_push_sessions)


def test_a_member_cannot_ask_another(people: support.Federation) -> None:
    fleet = people.listen()
    amber, birch = Raw(people, "amber"), Raw(people, "birch")
    metadata = Metadata(fleet.link._run, "", amber.node.node_id, birch.node.node_id, "", "", time.time(), 60, "train")
    forged = FlowerMessage(content=content_of(Packet({"round": 1})), metadata=metadata)  # type: ignore[call-overload]
    amber.push(forged)
    assert not fleet.link.message_ins_store and not fleet.link.object_store.get(forged.object_id)


def test_an_answer_whose_pieces_are_too_large_together_is_refused(people: support.Federation) -> None:
    """Its number of pieces is right, and each fits into a request; the server keeps none of them."""
    fleet = people.listen()
    fleet.transport.largest_reply = 1000
    amber = Raw(people, "amber")
    thread, found = asked(people, "amber")
    question = amber.question()
    amber.push(FlowerMessage(RecordDict({"facts": ConfigRecord({"json": bytes(4 * 2**20)})}), reply_to=question))
    thread.join(20)
    assert found["amber"].facts == {"failure": "its answer is too large."}
    assert not fleet.link._arriving


def test_without_a_signature_nothing_is_answered(people: support.Federation) -> None:
    """Also if the request does not look like one of Flower's, so that nothing is there to be authenticated."""
    fleet = people.listen()
    amber = Raw(people, "amber")
    body = PullMessagesRequest(node=amber.node).SerializeToString()
    with httpx.Client(verify=str(people.folder / "ca.crt")) as browser:
        for kind in ("application/x-protobuf", "application/protobuf", "text/plain", "application/json"):
            answer = browser.post(
                f"https://127.0.0.1:{fleet.port}/v1/fleet/pull-messages", content=body, headers={"content-type": kind}
            )
            assert 400 <= answer.status_code < 500


def test_a_member_cannot_use_anothers_number(people: support.Federation) -> None:
    people.listen()
    amber, birch = Raw(people, "amber"), Raw(people, "birch")
    with pytest.raises(httpx.HTTPStatusError, match="401"):
        amber.client.PullMessages(PullMessagesRequest(node=birch.node))


def test_an_answer_in_too_many_pieces_is_refused(people: support.Federation) -> None:
    people.listen()
    amber = Raw(people, "amber")
    thread, found = asked(people, "amber")
    many = RecordDict({str(place): ConfigRecord({"n": place}) for place in range(100)})
    pushed = amber.push(FlowerMessage(many, reply_to=amber.question()))
    assert not pushed.objects_to_push
    thread.join(20)
    assert found["amber"].facts == {"failure": "its answer is too large."}


def test_a_request_that_is_too_large_is_ended(people: support.Federation) -> None:
    people.listen()
    amber = Raw(people, "amber")
    piece = PushObjectRequest(node=amber.node, object_content=bytes(LARGEST_REQUEST + 1))
    with pytest.raises((httpx.HTTPStatusError, httpx.TransportError)) as refused:
        amber.client.PushObject(piece)
    assert not isinstance(refused.value, httpx.HTTPStatusError) or refused.value.response.status_code == 413


@pytest.mark.parametrize(
    "content",
    [
        RecordDict(),
        RecordDict({"facts": ConfigRecord({"json": b"[1, 2]"}), "message": ConfigRecord({"safetensors": b""})}),
        RecordDict({"facts": ConfigRecord({"json": "text"})}),
    ],
)
def test_an_answer_that_is_none_of_ours_is_a_failure(people: support.Federation, content: RecordDict) -> None:
    people.listen()
    amber = Raw(people, "amber")
    thread, found = asked(people, "amber")
    amber.push(FlowerMessage(content, reply_to=amber.question()))
    thread.join(20)
    assert found["amber"].failed and "polyfed" in found["amber"].facts["failure"]


def test_bytes_that_are_no_object_are_a_failure(people: support.Federation) -> None:
    """Each piece is stored under its hash, so wrong bytes are not even stored; the question is answered by silence."""
    fleet = people.listen()
    amber = Raw(people, "amber")
    thread, found = asked(people, "amber")
    reply = FlowerMessage(RecordDict({"facts": ConfigRecord({"json": b"{}"})}), reply_to=amber.question())
    reply.metadata.__dict__["_message_id"] = reply.object_id
    request = PushMessagesRequest(
        node=amber.node,
        messages_list=[message_to_proto(remove_content_from_message(reply))],
        message_object_trees=[get_object_tree(reply)],
    )
    pushed = amber.client.PushMessages(request)
    for place in pushed.objects_to_push:
        piece = PushObjectRequest(
            node=amber.node,
            run_id=reply.metadata.run_id,
            object_id=place,
            object_content=b"junk",
            session_id=pushed.session_id,
        )
        assert not amber.client.PushObject(piece).stored
    fleet.link.deactivate_node(amber.node.node_id)
    thread.join(20)
    assert found["amber"].failed
