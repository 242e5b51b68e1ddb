"""Clients that live elsewhere: a site beside each client's data, and an engine that talks to sites over a transport."""

from polyfed.remote.agreement import Agreement
from polyfed.remote.engine import RemoteEngine
from polyfed.remote.site import Site
from polyfed.remote.transport import InMemoryTransport, Packet, Patience, Transport

__all__ = ["Agreement", "InMemoryTransport", "Packet", "Patience", "RemoteEngine", "Site", "Transport"]
