"""The site's end: connects to the server, is asked, answers. It opens no port and runs no code but its own."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from flwr.app import Error, Message
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, ObjectTree, PullObjectRequest, PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from polyfed.errors import BadMessage, RunError
from polyfed.flower.wire import CHUNK, KINDS, content_of, packet_of
from polyfed.remote.transport import Kind, Packet

HEARTBEAT = 10.0
"""Seconds that Flower is told; after twice as long without one it takes a site for gone. The shortest it allows."""
BEATS = 4.0
"""Seconds between two heartbeats."""
POLL = (0.05, 1.0)
"""Seconds between two questions for work: at first after an answer, and at most."""
RETRY = (0.5, 10.0)
"""Seconds before the next attempt to connect: the first, and at most."""

LARGEST_QUESTION = 2**32
LARGEST_RESPONSE = CHUNK + 2**20
"""Bytes of a response: a piece of an array and what is around it."""
OBJECTS = 16
"""More than a message has besides the pieces of its tensors."""

Answer = Callable[[Kind, Packet], Packet]


class Refused(RunError):
    """The server, or its certificate, can't be accepted, or the server does not accept this site."""


class Unreachable(Exception):
    """The server can't be reached now."""


class SiteConnection:
    """One site's connection. `run` ends when `stop` is set, or if the very first attempt is refused."""

    def __init__(
        self, address: str, certificate: Path, key: EllipticCurvePrivateKey, answer: Answer, note: Callable[[str], None]
    ) -> None:
        self._address = address
        self._answer = answer
        self._note = note
        self._key = public_key_to_bytes(key.public_key())
        self._certificate = certificate
        self._signed = NodeAuthHttpInterceptor(key, key.public_key())
        self.largest = LARGEST_QUESTION
        """Bytes that a question may have."""
        self.stop = threading.Event()

    def run(self) -> None:
        """Connect, answer, and connect again whenever the connection is lost."""
        connected, wait, reason = False, RETRY[0], ""
        while not self.stop.is_set():
            try:
                with self._client() as client:
                    node = self._activate(client)
                    self._note(f"connected to {self._address}")
                    connected, wait, reason = True, RETRY[0], ""
                    self._serve(client, node)
            except Refused as error:
                if not connected:
                    raise
                self._note(str(error))
            except Unreachable as error:
                if self.stop.is_set():
                    self._note(
                        f"no connection to {self._address} ({error}) before it confirmed the last answer: if it still "
                        "waits for that, start this site again"
                    )
                elif str(error) != reason:  # said once, not at every attempt
                    self._note(f"no connection to {self._address} ({error}); trying again until there is")
                reason = str(error)
            self.stop.wait(wait)
            wait = min(RETRY[1], wait * 2)

    def _client(self) -> FleetHttpClient:
        authority = self._certificate.read_bytes()
        client = FleetHttpClient.from_server_address(self._address, False, authority, [self._signed])
        client._client.follow_redirects = False  # else a server could send signed requests to any other address
        client._client.headers.update({"user-agent": "polyfed", "accept-encoding": "identity"})  # no versions
        client._client.event_hooks = {"response": [_bounded]}
        return client

    def _activate(self, client: FleetHttpClient) -> Node:
        request = ActivateNodeRequest(public_key=self._key, heartbeat_interval=HEARTBEAT)
        return Node(node_id=_call(client.ActivateNode, request, self._address).node_id)

    def _serve(self, client: FleetHttpClient, node: Node) -> None:
        """Answer questions until the connection is lost or the site is stopped."""
        lost = threading.Event()
        beating = threading.Thread(target=self._beat, args=(client, node, lost), daemon=True)
        beating.start()
        wait = POLL[0]
        try:
            while not self.stop.is_set() and not lost.is_set():
                pulled = _call(client.PullMessages, PullMessagesRequest(node=node), self._address)
                if pulled.messages_list:
                    self._handle(
                        client, node, message_from_proto(pulled.messages_list[0]), pulled.message_object_trees[0]
                    )
                    wait = POLL[0]
                else:
                    self.stop.wait(wait)
                    wait = min(POLL[1], wait * 1.2)
            if lost.is_set():
                raise Unreachable("it does not know this connection any more")
        except KeyboardInterrupt:
            self.stop.set()
            raise
        finally:
            lost.set()
            beating.join(BEATS)  # it uses the client, which is closed next
            if self.stop.is_set():
                with suppress(httpx.HTTPError, RuntimeError):
                    client.DeactivateNode(DeactivateNodeRequest(node_id=node.node_id))

    def _beat(self, client: FleetHttpClient, node: Node, lost: threading.Event) -> None:
        """Say every few seconds that the site is alive, also while it trains."""
        request = SendNodeHeartbeatRequest(node=node, heartbeat_interval=HEARTBEAT)
        while not lost.wait(BEATS):
            try:
                if not client.SendNodeHeartbeat(request).success:  # the farewell of the process before came late
                    lost.set()
            except httpx.HTTPStatusError:  # a server that was started anew knows other connections
                lost.set()
            except (httpx.HTTPError, RuntimeError):
                continue

    def _handle(self, client: FleetHttpClient, node: Node, message: Message, tree: ObjectTree) -> None:
        reply = self._reply(client, node, message, tree)
        run = message.metadata.run_id
        with no_object_id_recompute():
            reply.metadata.__dict__["_message_id"] = reply.object_id
            objects = get_all_nested_objects(reply)
            bare = remove_content_from_message(reply) if reply.has_content() else reply
            pushed = _call(
                client.PushMessages,
                PushMessagesRequest(
                    node=node,
                    messages_list=[message_to_proto(bare)],
                    message_object_trees=[get_object_tree(reply)],
                ),
                self._address,
            )
            for place in pushed.objects_to_push:
                piece = PushObjectRequest(
                    node=node,
                    run_id=run,
                    object_id=place,
                    object_content=objects[place].deflate(),
                    session_id=pushed.session_id,
                )
                _call(client.PushObject, piece, self._address)
        # Only now: a site that is killed before it has answered is asked again, if the question is still there.
        confirmed = ConfirmMessageReceivedRequest(node=node, run_id=run, message_object_id=message.metadata.message_id)
        with suppress(Unreachable, Refused):
            _call(client.ConfirmMessageReceived, confirmed, self._address)

    def _reply(self, client: FleetHttpClient, node: Node, message: Message, tree: ObjectTree) -> Message:
        kind = KINDS.get(message.metadata.message_type)
        try:
            if kind is None:
                raise BadMessage("this site only answers polyfed's questions.")
            contents: dict[str, bytes] = {}
            for piece in iterate_object_tree(tree):
                request = PullObjectRequest(node=node, run_id=message.metadata.run_id, object_id=piece.object_id)
                contents[piece.object_id] = _call(client.PullObject, request, self._address).object_content
                if sum(map(len, contents.values())) > self.largest or len(contents) > self.largest // CHUNK + OBJECTS:
                    raise BadMessage("the question is too large.")
            asked = inflate_object_from_contents(message.metadata.message_id, contents)
            packet = packet_of(asked.content)  # type: ignore[attr-defined]
        except (Unreachable, Refused):
            raise
        except Exception as error:  # whatever a server invents, it gets an answer and no more
            reason = str(error) if isinstance(error, BadMessage) else "the question can't be read."
            self._note(f"refused a question: {reason}")
            return Message(Error(code=0, reason=reason), reply_to=message)
        return Message(content_of(self._answer(kind, packet)), reply_to=message)


class _Bounded(httpx.SyncByteStream):
    """A response's bytes, up to the largest that a server of ours sends."""

    def __init__(self, stream: httpx.SyncByteStream) -> None:
        self._stream = stream

    def __iter__(self) -> Iterator[bytes]:
        seen = 0
        for some in self._stream:
            seen += len(some)
            if seen > LARGEST_RESPONSE:
                raise httpx.ReadError("it sends too much")
            yield some

    def close(self) -> None:
        self._stream.close()


def _bounded(response: httpx.Response) -> None:
    """End a response that would fill this machine's memory."""
    if "content-encoding" in response.headers:  # a few bytes can become any number of them
        raise httpx.ReadError("it compresses its responses")
    assert isinstance(response.stream, httpx.SyncByteStream)
    response.stream = _Bounded(response.stream)


def _call(method: Callable[[Any], Any], request: Any, address: str) -> Any:
    """One request; what goes wrong becomes `Refused`, if trying again can't help, or `Unreachable`."""
    try:
        return method(request)
    except httpx.HTTPStatusError as error:
        status = error.response.status_code
        if isinstance(request, ActivateNodeRequest) and 400 <= status < 500:
            raise Refused(
                f"the server at {address} does not accept this site's key: ask the coordinator whether federation.yaml "
                "has its public key, and check that this machine's clock is right."
            ) from error
        raise Unreachable(f"it answered with status {status}") from error
    except httpx.TransportError as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, ssl.SSLError):
            cause = cause.__cause__ or cause.__context__
        if isinstance(cause, ssl.SSLCertVerificationError):
            raise Refused(
                f"the certificate of the server at {address} can't be accepted ({cause.verify_message}): check the "
                "address, and that `certificate` in site.yaml is the authority's file that the coordinator gave you."
            ) from error
        raise Unreachable("it speaks no TLS" if isinstance(cause, ssl.SSLError) else type(error).__name__) from error
    except (RuntimeError, ValueError) as error:  # a closed client, or bytes that are no answer
        raise Unreachable(str(error)[:100]) from error
