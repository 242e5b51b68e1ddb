"""A server on loopback and sites in threads, connected by real TLS with real keys."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from polyfed.deploy import keys
from polyfed.flower.node import Answer, SiteConnection
from polyfed.flower.server import Fleet
from polyfed.remote.transport import Kind, Packet

NAMES = ("amber", "birch", "cedar")
LARGEST = 2**24


class Federation:
    """A folder with everybody's keys, a server that listens, and sites that come and go."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        keys.make_server_keys(folder, ["127.0.0.1"])
        self.public = {name: keys.make_site_keys(folder, name) for name in NAMES}
        self.notes: list[str] = []
        self.fleet: Fleet | None = None
        self._sites: list[tuple[SiteConnection, threading.Thread]] = []

    def listen(self, port: int = 0, *, certificate: str = "server") -> Fleet:
        """Start the server; again on the same port after `close`, like one that was killed."""
        members = {name: keys.read_public_key(line) for name, line in self.public.items()}
        where = [self.folder / f"{certificate}.{kind}" for kind in ("crt", "key")]
        self.fleet = Fleet(members, where[0], where[1], ("127.0.0.1", port))
        self.fleet.transport.largest_reply = LARGEST
        self.fleet.start()
        return self.fleet

    def connection(self, name: str, answer: Answer, *, key: Path | None = None, authority: Path | None = None):
        """A site's end, not yet running."""
        assert self.fleet is not None
        private = keys.read_private_key(key or self.folder / f"{name}.key")
        address, trusted = f"127.0.0.1:{self.fleet.port}", authority or self.folder / "ca.crt"
        return SiteConnection(address, trusted, private, answer, self.notes.append)

    def start(self, name: str, answer: Answer) -> SiteConnection:
        """A site in a thread of its own."""
        connection = self.connection(name, answer)

        def run() -> None:
            with suppress(OSError):
                connection.run()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        self._sites.append((connection, thread))
        return connection

    def close(self) -> None:
        for connection, _ in self._sites:
            connection.stop.set()
        for _, thread in self._sites:
            thread.join(10)
        if self.fleet is not None:
            self.fleet.close()


@contextmanager
def federation(folder: Path) -> Iterator[Federation]:
    """Closed at the end."""
    found = Federation(folder)
    try:
        yield found
    finally:
        found.close()


def echo(kind: Kind, packet: Packet) -> Packet:
    """Answers with what it was asked."""
    return Packet({"kind": kind, **packet.facts}, packet.message)


def wait_for(condition: Callable[[], bool], seconds: float = 30) -> None:
    """Fail if the condition does not become true in time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)
