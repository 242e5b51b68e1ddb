"""A proxy on loopback that ends TLS between a site and the server, and keeps every byte that the site sends.

Sites accept it only because the test's own authority signed its certificate.
"""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from flwr.app import Message as FlowerMessage
from flwr.proto.fleet_pb2 import PullMessagesResponse, PushMessagesRequest
from flwr.proto.message_pb2 import PushObjectRequest
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

from polyfed.flower.wire import KINDS, packet_of
from polyfed.remote.transport import Kind, Packet


@dataclass(frozen=True)
class Request:
    """One HTTP request, or one response."""

    first: str
    headers: dict[str, str]
    body: bytes

    @property
    def call(self) -> str:
        """The last part of its path."""
        return self.first.split()[1].rpartition("/")[2]


class Recorder:
    """Stands between one site and the server."""

    def __init__(self, keys: Path, server: int) -> None:
        self._server = server
        self._keys = keys
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._own = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._own.load_cert_chain(keys / "server.crt", keys / "server.key")
        self._sent: list[tuple[bytearray, bytearray]] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, plain: socket.socket) -> None:
        trusted = ssl.create_default_context(cafile=str(self._keys / "ca.crt"))
        with suppress(OSError), self._own.wrap_socket(plain, server_side=True) as site:
            there = socket.create_connection(("127.0.0.1", self._server))
            with trusted.wrap_socket(there, server_hostname="127.0.0.1") as server:
                up, down = bytearray(), bytearray()
                self._sent.append((up, down))
                back = threading.Thread(target=_copy, args=(server, site, down), daemon=True)
                back.start()
                _copy(site, server, up)
                back.join()

    def close(self) -> None:
        self._listener.close()

    @property
    def bytes(self) -> bytes:
        """All that the site sent, in the clear."""
        return b"\n".join(bytes(up) for up, _ in self._sent)

    def requests(self) -> list[Request]:
        return [request for up, _ in self._sent for request in _messages(bytes(up))]

    def answers(self) -> list[tuple[Kind, Packet]]:
        """What the site answered, with the kind of question; every piece that it sent must be part of an answer."""
        kinds, contents, trees = dict[str, Kind](), dict[str, bytes](), []
        for _, down in self._sent:
            for response in _messages(bytes(down)):
                with suppress(Exception):  # other responses than that to a pull
                    for message in PullMessagesResponse.FromString(response.body).messages_list:
                        kinds[message.metadata.message_id] = KINDS[message.metadata.message_type]
        for request in self.requests():
            if request.call == "push-object":
                piece = PushObjectRequest.FromString(request.body)
                contents[piece.object_id] = piece.object_content
            elif request.call == "push-messages":
                pushed = PushMessagesRequest.FromString(request.body)
                trees += zip(pushed.messages_list, pushed.message_object_trees, strict=True)
        named = {node.object_id for _, tree in trees for node in iterate_object_tree(tree)}
        assert set(contents) <= named
        found = []
        for message, tree in trees:
            assert not message.HasField("error") or not message.error.reason
            inflated = inflate_object_from_contents(
                tree.object_id, {node.object_id: contents[node.object_id] for node in iterate_object_tree(tree)}
            )
            assert isinstance(inflated, FlowerMessage)
            content = inflated.content
            assert set(content) == {"facts", "message"} and set(content["facts"]) == {"json"}
            assert set(content["message"]) == {"safetensors"}
            found.append((kinds[message.metadata.reply_to_message_id], packet_of(content)))
        return found


def _copy(source: ssl.SSLSocket, target: ssl.SSLSocket, kept: bytearray) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            kept += data
            target.sendall(data)
    with suppress(OSError):
        # Not the method of SSLSocket: after that, the other thread would read what is still encrypted.
        socket.socket.shutdown(target, socket.SHUT_RDWR)


def _messages(content: bytes) -> Iterator[Request]:
    """HTTP messages one after another, each with the length of its body."""
    while content:
        head, _, rest = content.partition(b"\r\n\r\n")
        first, *lines = head.decode("ascii").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        assert "transfer-encoding" not in headers
        length = int(headers.get("content-length", 0))
        yield Request(first, headers, rest[:length])
        content = rest[length:]
