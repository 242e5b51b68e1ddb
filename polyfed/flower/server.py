"""The server's end: Flower's fleet interface over TLS, and the transport that puts questions behind it."""

from __future__ import annotations

import threading
import time
from collections.abc import Awaitable, Callable, Collection, Hashable, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from fastapi import FastAPI
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.supercore.error import http_error_translator
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.protobuf.translation import ProtobufTranslationMiddleware
from flwr.superlink.routers.fleet.node_auth import NodeAuthMiddleware
from flwr.superlink.routers.fleet.router import router
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from polyfed.errors import InputError
from polyfed.flower.state import Link
from polyfed.flower.wire import CHUNK
from polyfed.remote.transport import Kind, Packet, Patience, Transport

LARGEST_REQUEST = CHUNK + 2**20
"""Bytes of a request: a piece of an array and what is around it."""
CALLS = frozenset(
    f"/v1/fleet/{name}"
    for name in (
        "activate-node",
        "confirm-message-received",
        "deactivate-node",
        "pull-messages",
        "pull-object",
        "push-messages",
        "push-object",
        "send-node-heartbeat",
    )
)
"""What a site calls. Of the fleet interface too, nothing that registers a node or hands out an app."""
IDLE = 75
"""Seconds after which an idle connection is closed: later than sites close theirs, so that none is used as it ends."""
POLL = 0.02
"""Seconds between two looks at what has come in."""


class FlowerTransport(Transport):
    """Members that are connected through Flower; each is known by its key."""

    def __init__(self, link: Link, clock: Callable[[], float] = time.monotonic) -> None:
        self._link = link
        self._clock = clock
        self._owed: dict[str, Debt] = {}

    def nodes(self) -> Collection[str]:
        for name, debt in list(self._owed.items()):
            if self._link.answer(debt.question) is not None:  # too late to count
                del self._owed[name]
            elif self._clock() >= debt.forgiven:
                self._forgive(name)
        return [name for name in self._link.connected() if name not in self._owed]

    def present(self) -> Collection[str]:
        return self._link.connected()

    def connection(self, node: str) -> Hashable:
        return self._link.connection(node)

    def ask(
        self,
        kind: Kind,
        packets: Mapping[str, Packet],
        patience: Patience,
        done: Callable[[str], None] = lambda node: None,
    ) -> dict[str, Packet]:
        begin = self._clock()
        self._link.largest_reply = self.largest_reply
        there = set(self._link.connected())
        for name in packets:
            self._forgive(name)
        asked = {
            name: self._link.ask(name, kind, packet, patience.timeout)
            for name, packet in packets.items()
            if name in there
        }
        answers: dict[str, Packet] = {}
        valid: list[float] = []
        while asked and self._clock() < patience.deadline(begin, valid):
            there = set(self._link.connected())
            for name, question in list(asked.items()):
                answer = self._link.answer(question)
                if answer is None and name in there:
                    continue
                if answer is None:
                    self._link.withdraw(question)
                    answer = Packet({"failure": "the connection to it was lost."})
                del asked[name]
                answers[name] = answer
                valid += [] if answer.failed else [self._clock()]
                done(name)
            time.sleep(POLL if asked else 0)
        for name, question in asked.items():
            self._owed[name] = Debt(question, begin + patience.timeout)
        return answers

    def _forgive(self, name: str) -> None:
        debt = self._owed.pop(name, None)
        if debt is not None:
            self._link.withdraw(debt.question)


@dataclass(frozen=True)
class Debt:
    """An answer that is still to come, and when its member may be asked something else all the same."""

    question: str
    forgiven: float


class Fleet:
    """Flower's fleet interface, listening. Its other interfaces, to control runs and to run apps, are not served."""

    def __init__(
        self,
        members: Mapping[str, EllipticCurvePublicKey],
        certificate: Path,
        key: Path,
        place: tuple[str, int],
    ) -> None:
        """Members by name with their public keys; where to listen, as host and port."""
        host, port = place
        factory = ObjectStoreFactory()
        self.link = Link(members, factory.store())
        self.transport = FlowerTransport(self.link)
        self._server = uvicorn.Server(
            uvicorn.Config(
                fleet_app(self.link),
                host=host,
                port=port,
                ssl_certfile=str(certificate),
                ssl_keyfile=str(key),
                log_level="critical",
                access_log=False,
                lifespan="off",
                ws="none",
                timeout_graceful_shutdown=2,
                timeout_keep_alive=IDLE,
                server_header=False,
            )
        )
        self._thread = threading.Thread(target=self._serve, name="fleet", daemon=True)
        self._where = f"{host}:{port}"

    def _serve(self) -> None:
        try:
            self._server.run()
        except SystemExit:  # what uvicorn does if it can't listen
            return

    def start(self) -> None:
        """Listen, or say why not."""
        self._thread.start()
        while not self._server.started:
            if not self._thread.is_alive():
                raise InputError(f"the server can't listen on {self._where}: another program does, or it may not.")
            time.sleep(0.02)

    @property
    def port(self) -> int:
        """Where it listens; of use if it was asked for port 0."""
        return int(self._server.servers[0].sockets[0].getsockname()[1])

    def close(self) -> None:
        """Stop listening."""
        self._server.should_exit = True
        self._thread.join(5)


def fleet_app(link: Link) -> Any:
    """Those of Flower's fleet routes that sites need, behind Flower's authentication."""
    app = FastAPI(
        openapi_url=None,
        middleware=[
            Middleware(BaseHTTPMiddleware, dispatch=http_error_translator),
            Middleware(ProtobufTranslationMiddleware),
            Middleware(NodeAuthMiddleware),
            Middleware(BaseHTTPMiddleware, dispatch=_only_for_oneself),
        ],
    )
    app.state.linkstate_factory = _Known(link)
    app.state.enable_supernode_auth = True
    app.state.fleet_event_log_plugin = None
    app.include_router(router)
    return Gate(app)


class _Known:
    """Gives Flower's routes the state that is there."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def state(self) -> Link:
        return self._link


async def _only_for_oneself(request: Request, call_next: RequestResponseEndpoint) -> Response:
    """Refuse answers in another member's name, which Flower takes from whoever knows the question's id."""
    asked = getattr(request.state, "protobuf_request", None)
    if isinstance(asked, PushMessagesRequest) and any(
        message.metadata.src_node_id != asked.node.node_id for message in asked.messages_list
    ):
        return JSONResponse({"detail": "An answer in another member's name"}, status_code=403)
    return await call_next(request)


Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Gate:
    """Lets through the calls that a site makes, and ends one that is larger than any of them."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if scope["path"] not in CALLS:
            await JSONResponse({"detail": "Not Found"}, status_code=404)(scope, receive, send)
            return
        body = bytearray()
        more = True
        while more:
            event = await receive()
            if event["type"] != "http.request":
                return
            body += event.get("body", b"")
            more = event.get("more_body", False)
            if len(body) > LARGEST_REQUEST:
                await JSONResponse({"detail": "The request is too large"}, status_code=413)(scope, receive, send)
                return
        given = False

        async def replay() -> MutableMapping[str, Any]:
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": bytes(body), "more_body": False}

        await self._app(scope, replay, send)
