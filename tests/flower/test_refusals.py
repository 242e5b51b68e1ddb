"""Who and what is refused at the server's door, and why; nothing of it does harm."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'polyfed[flower]'")

import httpx
from flwr.app import ConfigRecord, Metadata, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.control_pb2 import RegisterNodeRequest, StartRunRequest
from flwr.proto.fleet_pb2 import PullMessagesRequest, PushMessagesRequest, RegisterNodeFleetRequest
from flwr.proto.message_pb2 import ObjectTree, PushObjectRequest
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.control.control_http_client import ControlHttpClient
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.runtime import RuntimeHttpClient

from polyfed.deploy import certificates, keys
from polyfed.flower.node import Refused, Unreachable
from polyfed.flower.server import LARGEST_REQUEST
from polyfed.flower.wire import content_of
from polyfed.message import Message
from polyfed.remote.transport import Packet, Patience
from tests.flower import support
from tests.flower.support import echo, wait_for


@pytest.fixture
def people(tmp_path: Path) -> Iterator[support.Federation]:
    with support.federation(tmp_path / "keys") as found:
        yield found


def test_an_unregistered_key_is_refused_in_a_sentence(people: support.Federation) -> None:
    fleet = people.listen()
    keys.make_site_keys(people.folder, "stranger")
    with pytest.raises(Refused, match="does not accept this site's key: ask the coordinator"):
        people.connection("stranger", echo).run()
    assert not fleet.transport.nodes()


@pytest.mark.parametrize(("seconds", "accepted"), [(-200, True), (3, True), (60, False)])
def test_clocks_may_differ_by_minutes_but_no_site_may_be_ahead(
    people: support.Federation, monkeypatch: pytest.MonkeyPatch, seconds: float, accepted: bool
) -> None:
    """A site's clock signs its requests and dates its answers; the sentence names it if it is wrong."""
    fleet = people.listen()
    for module in ("flwr.supernode.node_auth_http_interceptor.now", "flwr.app.message.message.now"):
        monkeypatch.setattr(module, lambda: datetime.now(UTC) + timedelta(seconds=seconds))
    if not accepted:
        with pytest.raises(Refused, match="check that this machine's clock is right"):
            people.connection("amber", echo).run()
        return
    people.start("amber", echo)
    wait_for(lambda: list(fleet.transport.nodes()) == ["amber"])
    assert fleet.transport.ask("train", {"amber": Packet({"round": 1})}, Patience(20))["amber"].facts["round"] == 1


def test_another_authoritys_server_is_refused_by_the_site(people: support.Federation, tmp_path: Path) -> None:
    people.listen()
    keys.make_server_keys(tmp_path / "others", ["127.0.0.1"])
    with pytest.raises(Refused, match="certificate of the server at .* can't be accepted"):
        people.connection("amber", echo, authority=tmp_path / "others" / "ca.crt").run()


def test_a_server_under_another_name_is_refused_by_the_site(people: support.Federation) -> None:
    authority, key = (people.folder / "ca.crt").read_bytes(), keys.read_private_key(people.folder / "ca.key")
    own = keys.read_private_key(people.folder / "server.key")
    other = certificates.new_server_certificate(authority, key, own.public_key(), ["fl.example.org"], 30)
    (people.folder / "server.crt").write_bytes(other)
    people.listen()
    with pytest.raises(Refused, match="can't be accepted"):
        people.connection("amber", echo).run()


def test_an_expired_certificate_is_refused_by_the_site(
    people: support.Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    from datetime import timedelta

    authority, key = (people.folder / "ca.crt").read_bytes(), keys.read_private_key(people.folder / "ca.key")
    own = keys.read_private_key(people.folder / "server.key")
    now = certificates._now()
    monkeypatch.setattr(certificates, "_now", lambda: now - timedelta(days=400))
    old = certificates.new_server_certificate(authority, key, own.public_key(), ["127.0.0.1"], 30)
    (people.folder / "server.crt").write_bytes(old)
    people.listen()
    with pytest.raises(Refused, match="expired"):
        people.connection("amber", echo).run()


def test_plain_http_gets_no_answer(people: support.Federation) -> None:
    fleet = people.listen()
    connection = http.client.HTTPConnection("127.0.0.1", fleet.port, timeout=10)
    with pytest.raises((http.client.HTTPException, OSError)):
        connection.request("POST", "/v1/fleet/activate-node", b"")
        connection.getresponse()


def test_a_site_sends_nothing_to_a_server_without_tls(people: support.Federation) -> None:
    """It says so and tries again; its requests carry a signature that must not be read on the way."""
    people.listen()
    seen: list[bytes] = []

    class Plain(threading.Thread):
        def run(self) -> None:
            while True:
                try:
                    client, _ = listener.accept()
                except OSError:
                    return
                seen.append(client.recv(10_000))
                client.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                client.close()

    import socket

    listener = socket.create_server(("127.0.0.1", 0))
    Plain(daemon=True).start()
    connection = people.connection("amber", echo)
    connection._address = f"127.0.0.1:{listener.getsockname()[1]}"
    thread = threading.Thread(target=connection.run, daemon=True)
    thread.start()
    wait_for(lambda: any("no connection" in note for note in people.notes))
    connection.stop.set()
    listener.close()
    thread.join(20)
    assert seen and all(b"POST" not in content and b"flwr" not in content for content in seen)


def test_nobody_outside_can_register_a_key_or_submit_an_app(people: support.Federation) -> None:
    """With the authority's certificate, which every member has, and Flower's own clients. Nor with a member's key."""
    fleet = people.listen()
    address, authority = f"127.0.0.1:{fleet.port}", (people.folder / "ca.crt").read_bytes()
    stranger = keys.read_public_key(keys.make_site_keys(people.folder, "stranger"))
    before = set(fleet.link.nodes)
    pem = certificates.serialization.PublicFormat.SubjectPublicKeyInfo
    key = stranger.public_bytes(certificates.serialization.Encoding.PEM, pem)
    with ControlHttpClient.from_server_address(address, False, authority, []) as control:
        for call, request in (
            (control.RegisterNode, RegisterNodeRequest(public_key=key)),
            (control.StartRun, StartRunRequest()),
        ):
            with pytest.raises(httpx.HTTPStatusError, match="404"):
                call(request)  # type: ignore[operator]
    with (
        RuntimeHttpClient.from_server_address(address, False, authority, []) as runtime,
        pytest.raises(httpx.HTTPStatusError, match="404"),
    ):
        runtime.AcquireTask(AcquireTaskRequest())
    member = people.connection("amber", echo)
    with member._client() as client, pytest.raises(httpx.HTTPStatusError):
        client.RegisterNode(RegisterNodeFleetRequest(public_key=key))
    with httpx.Client(verify=str(people.folder / "ca.crt")) as browser:
        paths = (
            "/",
            "/docs",
            "/openapi.json",
            "/v1/control/list-runs",
            "/v1/runtime/acquire-task",
            "/health",
            "/v1/fleet/get-fab",
        )
        for path in paths:
            assert browser.get(f"https://{address}{path}").status_code == 404
            assert browser.post(f"https://{address}{path}").status_code == 404
    assert set(fleet.link.nodes) == before and len(fleet.link.run_ids) == 1


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


@pytest.mark.parametrize("kind", ["large", "compressed"])
def test_a_response_of_any_size_does_not_fill_a_sites_memory(people: support.Federation, kind: str) -> None:
    people.listen()
    connection = people.connection("amber", echo)
    headers = {"content-encoding": "gzip"} if kind == "compressed" else {}
    content = b"x" if headers else bytes(LARGEST_REQUEST + 1)
    sent = httpx.MockTransport(lambda request: httpx.Response(200, headers=headers, stream=httpx.ByteStream(content)))
    with connection._client() as client:
        client._client._transport = sent
        with pytest.raises(Unreachable, match="ReadError"):
            connection._activate(client)


def test_a_question_that_is_too_large_is_refused(people: support.Federation) -> None:
    fleet = people.listen()
    site = people.start("amber", echo)
    site.largest = 2**20
    wait_for(lambda: list(fleet.transport.nodes()) == ["amber"])
    message = Message({"w": torch.zeros(2**20)})
    found = fleet.transport.ask("train", {"amber": Packet({"round": 1}, message)}, Patience(20))
    assert found["amber"].facts == {"failure": "the question is too large."}


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


def test_a_site_answers_a_strangers_question_with_a_refusal_only(people: support.Federation) -> None:
    """A server that sends what is none of polyfed's questions gets no training and no data."""
    fleet = people.listen()
    calls: list[Any] = []

    def answer(kind: Any, packet: Packet) -> Packet:
        calls.append(kind)
        return Packet({}, Message())

    people.start("amber", answer)
    wait_for(lambda: list(fleet.transport.nodes()) == ["amber"])
    from polyfed.flower import state

    state.TYPES["train"] = "query.secrets"
    try:
        found = fleet.transport.ask("train", {"amber": Packet({"round": 1})}, Patience(20))
    finally:
        state.TYPES["train"] = "train"
    assert found["amber"].facts == {"failure": "this site only answers polyfed's questions."} and not calls
    assert people.notes[-1] == "refused a question: this site only answers polyfed's questions."


def test_a_site_follows_no_redirection(people: support.Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request is signed, and its body is an answer: neither goes where a server points to."""
    people.listen()
    client = people.connection("amber", echo)._client()
    elsewhere: list[str] = []

    def handle(request: httpx.Request) -> httpx.Response:
        elsewhere.append(request.url.host)
        return httpx.Response(307, headers={"location": "http://10.0.0.1/"})

    client._client._transport = httpx.MockTransport(handle)
    monkeypatch.setattr(client._client, "_mounts", {})
    with pytest.raises(httpx.HTTPStatusError):
        client.PullMessages(PullMessagesRequest())
    assert elsewhere == ["127.0.0.1"]
