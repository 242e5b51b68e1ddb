"""The recording proxy itself: what it says of the order in which a site sent things must be true."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'polyfed[flower]'")

from polyfed.deploy import keys
from tests.federation.recorder import Recorder


class Echo(BaseHTTPRequestHandler):
    """Sends back what it gets."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    keys.make_server_keys(tmp_path / "keys", ["127.0.0.1"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "keys" / "server.crt", tmp_path / "keys" / "server.key")
    with ThreadingHTTPServer(("127.0.0.1", 0), Echo) as server:
        server.daemon_threads = True
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield Recorder(tmp_path / "keys", server.server_address[1])
        server.shutdown()


def post(connection: ssl.SSLSocket, call: str, body: bytes) -> None:
    """Send a request, and read all of its response."""
    connection.sendall(f"POST /v1/{call} HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n".encode())
    connection.sendall(body)
    with connection.makefile("rb") as response:
        while response.readline() != b"\r\n":
            pass
        assert response.read(len(body)) == body


def test_requests_are_in_the_order_in_which_they_were_sent_on_whichever_connection(
    recorder: Recorder, tmp_path: Path
) -> None:
    """As from a client that opens a second connection for a heartbeat and then uses both."""
    trusted = ssl.create_default_context(cafile=str(tmp_path / "keys" / "ca.crt"))
    sent = [("one", b"1" * 100_000), ("two", b"2"), ("three", b"3"), ("four", b"4"), ("five", b"")]
    with ExitStack() as stack:
        places = [stack.enter_context(socket.create_connection(("127.0.0.1", recorder.port))) for _ in range(2)]
        both = [stack.enter_context(trusted.wrap_socket(place, server_hostname="127.0.0.1")) for place in places]
        for number, (call, body) in enumerate(sent):
            post(both[number % 2], call, body)
    recorder.close()
    assert [(request.call, request.body) for request in recorder.requests()] == sent
    assert all(body in recorder.bytes for _, body in sent)
