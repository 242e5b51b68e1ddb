"""Who and what is refused at the server's door, and why; nothing of it does harm."""

from __future__ import annotations

import http.client
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'polyfed[flower]'")

import httpx
from flwr.proto.control_pb2 import RegisterNodeRequest, StartRunRequest
from flwr.proto.fleet_pb2 import PullMessagesRequest, RegisterNodeFleetRequest
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.control.control_http_client import ControlHttpClient
from flwr.supercore.runtime import RuntimeHttpClient

from polyfed.deploy import certificates, keys
from polyfed.flower.node import Refused, Unreachable
from polyfed.flower.server import LARGEST_REQUEST
from polyfed.message import Message
from polyfed.remote.transport import Packet, Patience
from tests.flower import support
from tests.flower.support import echo, wait_for


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
