"""Packets as contents of Flower's messages: the facts as JSON, the message as safetensors. No pickle on either side."""

from __future__ import annotations

from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from polyfed.errors import BadMessage
from polyfed.remote.transport import Kind, Packet

TYPES: dict[Kind, str] = {"join": "query.join", "train": "train", "evaluate": "evaluate", "finish": "query.finish"}
"""What a question is called between Flower's two sides."""
KINDS: dict[str, Kind] = {name: kind for kind, name in TYPES.items()}

CHUNK = 5 * 2**20
"""Flower sends an array in pieces of this many bytes."""


def content_of(packet: Packet) -> RecordDict:
    """The packet as the content of a message; an array, because Flower sends arrays in pieces."""
    facts, message = packet.to_bytes()
    array = Array(dtype="uint8", shape=(len(message),), stype="safetensors", data=message)
    return RecordDict({"facts": ConfigRecord({"json": facts}), "message": ArrayRecord({"safetensors": array})})


def packet_of(content: Any) -> Packet:
    """What `content_of` gave; anything else raises `BadMessage`."""
    return Packet.from_bytes(*_bytes_of(content))


def answer_of(content: Any, largest: int | None) -> Packet:
    """A site's answer, whose message may have that many bytes; a failure in words if it can't be accepted."""
    try:
        return Packet.received(*_bytes_of(content), largest)
    except BadMessage as error:
        return Packet({"failure": str(error)})


def _bytes_of(content: Any) -> tuple[bytes, bytes]:
    try:
        facts, message = content["facts"]["json"], content["message"]["safetensors"].data
    except (KeyError, TypeError, AttributeError) as error:
        raise BadMessage("it is not one of polyfed's messages.") from error
    if not isinstance(facts, bytes) or not isinstance(message, bytes):
        raise BadMessage("it is not one of polyfed's messages.")
    return facts, message
