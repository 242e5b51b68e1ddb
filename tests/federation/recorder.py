"""A proxy on loopback that ends TLS between a site and the server, and keeps every byte that the site sends.

Sites accept it only because the test's own authority signed its certificate.
"""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

from flwr.app import Message as FlowerMessage
from flwr.proto.fleet_pb2 import PullMessagesResponse, PushMessagesRequest
from flwr.proto.message_pb2 import PushObjectRequest
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

from polyfed.flower.wire import KINDS, packet_of
from polyfed.remote.transport import Kind, Packet

T = TypeVar("T")


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


class Connection:
    """All that went over one connection, both ways."""

    def __init__(self) -> None:
        self.up, self.down = bytearray(), bytearray()
        self.moments: dict[int, int] = {}
        """Where in `up` a piece begins, and how many pieces had come before it on all connections."""


class Recorder:
    """Stands between one site and the server. One thread does everything: TLS connections can't be shared by two."""

    def __init__(self, keys: Path, server: int) -> None:
        self._server = server
        self._own = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._own.load_cert_chain(keys / "server.crt", keys / "server.key")
        self._trusted = ssl.create_default_context(cafile=str(keys / "ca.crt"))
        self._connections: list[Connection] = []
        self._open: set[asyncio.Task[None]] = set()
        self._pieces = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._listener = self._do(asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._own))
        self.port = int(self._listener.sockets[0].getsockname()[1])

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _serve(self, from_site: asyncio.StreamReader, to_site: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            from_server, to_server = await asyncio.open_connection(
                "127.0.0.1", self._server, ssl=self._trusted, server_hostname="127.0.0.1"
            )
            connection = Connection()
            self._connections.append(connection)

            def keep(data: bytes) -> None:
                connection.moments[len(connection.up)] = self._pieces
                self._pieces += 1
                connection.up += data

            await asyncio.gather(_copy(from_site, to_server, keep), _copy(from_server, to_site, connection.down.extend))
        except OSError:  # the server does not listen yet, or no more
            to_site.close()
        finally:
            self._open.discard(task)

    def close(self, seconds: float = 30.0) -> None:
        """Wait for the ends of all connections, so that nothing is missing, and stop listening."""
        self._do(self._end(seconds))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self, seconds: float) -> None:
        self._listener.close()
        if self._open:
            _, left = await asyncio.wait(self._open, timeout=seconds)
            assert not left, "a connection is still open"

    @property
    def bytes(self) -> bytes:
        """All that the site sent, in the clear."""
        return b"\n".join(bytes(connection.up) for connection in self._connections)

    def requests(self) -> list[Request]:
        """In the order in which they began: a site that sends a heartbeat meanwhile uses two connections in turn."""
        found = [
            (connection.moments[begin], request)
            for connection in self._connections
            for begin, request in _messages(bytes(connection.up))
        ]
        return [request for _, request in sorted(found, key=itemgetter(0))]

    def answers(self) -> list[tuple[Kind, Packet]]:
        """What the site answered, with the kind of question; every piece that it sent must be part of an answer."""
        kinds, contents, trees = dict[str, Kind](), dict[str, bytes](), []
        for connection in self._connections:
            for _, response in _messages(bytes(connection.down)):
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


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter, keep: Callable[[bytes], object]) -> None:
    with suppress(OSError):
        while data := await source.read(65536):
            keep(data)
            target.write(data)
            await target.drain()
    target.close()


def _messages(content: bytes) -> Iterator[tuple[int, Request]]:
    """HTTP messages one after another, each with the length of its body, and where they begin."""
    begin = 0
    while begin < len(content):
        head, _, rest = content[begin:].partition(b"\r\n\r\n")
        first, *lines = head.decode("ascii").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        assert "transfer-encoding" not in headers
        length = int(headers.get("content-length", 0))
        yield begin, Request(first, headers, rest[:length])
        begin += len(head) + 4 + length
