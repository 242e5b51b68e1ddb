"""What Flower's SuperLink knows: members' keys, who is connected, questions and answers. All of it in memory.

It is made anew whenever the server starts. The run's own checkpoint and the sites' diaries are what survives.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from flwr.app import Message, Metadata
from flwr.app.message import remove_content_from_message
from flwr.common.constant import NOOP_ACCOUNT_NAME, NOOP_FLWR_AID, SUPERLINK_NODE_ID
from flwr.proto.message_pb2 import ObjectTree
from flwr.server.superlink.linkstate.in_memory_linkstate import InMemoryLinkState
from flwr.supercore.constant import NOOP_FEDERATION_ID, TaskType
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_id,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.object_store import ObjectStore
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.superlink.federation import NoOpFederationManager

from polyfed.flower.wire import CHUNK, TYPES, answer_of, content_of
from polyfed.remote.transport import LARGEST_FACTS, Kind, Packet

SMALL_OBJECTS = 16
"""More than a message has besides the pieces of its tensors."""


@dataclass(frozen=True)
class Arriving:
    """An answer on its way: its pieces by their hashes, empty until they come."""

    session: str
    root: str
    pieces: dict[str, bytes]
    most: int | None
    """Bytes that all of them may have."""

    @property
    def complete(self) -> bool:
        return bool(self.pieces) and all(self.pieces.values())

    @property
    def too_large(self) -> bool:
        return self.most is not None and sum(map(len, self.pieces.values())) > self.most


class Link(InMemoryLinkState):
    """Flower's state of a SuperLink, with one run and a fixed list of members."""

    def __init__(self, members: Mapping[str, EllipticCurvePublicKey], store: ObjectStore) -> None:
        super().__init__(NoOpFederationManager(), store)
        self.federation_manager.linkstate = self
        self.largest_reply: int | None = None
        """Bytes that an answer's message may have."""
        self._arriving: dict[str, Arriving] = {}
        """Answers by question."""
        self._activations: Counter[int] = Counter()
        self._left: set[int] = set()
        """The members that have said farewell and not connected since."""
        self._refused: dict[str, str] = {}
        """Why the answer to a question was refused when it came in."""
        self._numbers = {
            name: self.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, public_key_to_bytes(key), 0, name=name)
            for name, key in members.items()
        }
        self._run = self.create_run(None, None, None, {}, NOOP_FEDERATION_ID, None, NOOP_FLWR_AID, TaskType.SERVER_APP)
        task = self._get_run(self._run).primary_task_id
        assert task is not None
        self.claim_task(task)
        self.activate_task(task)

    def _cleanup_expired_task_tokens_locked(self) -> None:
        """Flower would end a run whose process sends no heartbeats; this one's process is the SuperLink itself."""

    def activate_node(self, node_id: int, heartbeat_interval: float) -> bool:
        """A site that connects anew has lost what it was asked before: ask it again.

        It holds the key of the one that was connected, so that one is gone, even if its heartbeats ran out only now.
        """
        with self.lock:
            self.deactivate_node(node_id)
            for message_id, question in self.message_ins_store.items():
                if question.metadata.dst_node_id != node_id:
                    continue
                arriving = self._arriving.get(message_id)
                if arriving is None or not arriving.complete:
                    if arriving is not None:  # it was killed while it sent it
                        self._drop_answer(message_id)
                    question.metadata.delivered_at = ""
            self._activations[node_id] += 1
            self._left.discard(node_id)
            return super().activate_node(node_id, heartbeat_interval)

    def deactivate_node(self, node_id: int) -> bool:
        """A site says farewell."""
        with self.lock:
            self._left.add(node_id)
            return super().deactivate_node(node_id)

    def acknowledge_node_heartbeat(self, node_id: int, heartbeat_interval: float) -> bool:
        """A heartbeat; one that was still on its way when its site said farewell does not bring the site back."""
        with self.lock:
            return node_id not in self._left and super().acknowledge_node_heartbeat(node_id, heartbeat_interval)

    def store_message_and_object_tree(
        self, message: Message, object_tree: ObjectTree, session_id: str
    ) -> tuple[bool, list[str]]:
        """A member announces its answer: which pieces it has.

        They are kept apart from everybody else's, unlike Flower's: there whoever names an object first decides what it
        is made of, for all others too.
        """
        with self.lock:
            self._object_push_sessions.pop(session_id, None)
            question = message.metadata.reply_to_message_id
            asked = self.message_ins_store.get(question)
            if asked is None or asked.metadata.dst_node_id != message.metadata.src_node_id:
                return False, []
            pieces = dict.fromkeys(node.object_id for node in iterate_object_tree(object_tree))
            most = None if self.largest_reply is None else self.largest_reply + LARGEST_FACTS + SMALL_OBJECTS * 2**16
            if most is not None and len(pieces) > most // CHUNK + 1 + SMALL_OBJECTS:
                self._refused[question] = "its answer is too large."
                return False, []
            if question in self._arriving or self.store_message_res(message) is None:
                return False, []
            self._arriving[question] = Arriving(session_id, object_tree.object_id, dict.fromkeys(pieces, b""), most)
            return True, list(pieces)

    def store_object(self, run_id: int, session_id: str, object_id: str, object_content: bytes) -> bool:
        """A piece of a member's answer."""
        with self.lock:
            for question, arriving in self._arriving.items():
                if session_id and arriving.session == session_id and object_id in arriving.pieces:
                    if get_object_id(object_content) != object_id:
                        return False
                    arriving.pieces[object_id] = object_content
                    if arriving.too_large:
                        arriving.pieces.clear()
                        self._refused[question] = "its answer is too large."
                    return True
        return False

    def connected(self) -> list[str]:
        """The members whose heartbeats have come."""
        there = self.get_nodes(self._run)
        return [name for name, number in self._numbers.items() if number in there]

    def connection(self, name: str) -> int:
        """How often that member has connected."""
        return self._activations[self._numbers[name]]

    def ask(self, name: str, kind: Kind, packet: Packet, seconds: float) -> str:
        """Put a question where that member finds it for so many seconds; returns the question's id."""
        metadata = Metadata(
            run_id=self._run,
            message_id="",
            src_node_id=SUPERLINK_NODE_ID,
            dst_node_id=self._numbers[name],
            reply_to_message_id="",
            group_id=str(packet.facts.get("round", "")),
            created_at=time.time(),
            ttl=seconds,
            message_type=TYPES[kind],
        )
        message = Message(content=content_of(packet), metadata=metadata)  # type: ignore[call-overload]
        with no_object_id_recompute(), self.lock:
            metadata.__dict__["_message_id"] = message.object_id
            session = self.start_session(self._run)
            tree, objects = get_object_tree(message), get_all_nested_objects(message)
            bare = remove_content_from_message(message)
            _, missing = super().store_message_and_object_tree(bare, tree, session)
            for place in missing:
                super().store_object(self._run, session, place, objects[place].deflate())
        return metadata.message_id

    def answer(self, question: str) -> Packet | None:
        """What the member answered, once all of it is here; a failure in words if that can't be read."""
        with self.lock:
            if question in self._refused:
                reason = self._refused[question]
                self.withdraw(question)
                return Packet({"failure": reason})
            arriving = self._arriving.get(question)
            if arriving is None or not arriving.complete:
                return None
            self.withdraw(question)
        try:
            message = inflate_object_from_contents(arriving.root, arriving.pieces)
            assert isinstance(message, Message)
            if message.has_error():
                return Packet({"failure": str(message.error.reason)[:500]})
            return answer_of(message.content, self.largest_reply)
        except Exception:  # whatever Flower makes of bytes that a member invented
            return Packet({"failure": "its answer can't be read."})

    def withdraw(self, question: str) -> None:
        """Forget a question and its answer, also one that Flower has forgotten itself, after its time."""
        with self.lock:
            self.delete_messages({question})
            self._refused.pop(question, None)

    def delete_messages(self, message_ins_ids: set[str]) -> None:
        """Forget questions with all their pieces, and what has come of their answers."""
        with self.lock:
            for question in message_ins_ids:
                self.object_store.delete(question)
                self._drop_answer(question)
            super().delete_messages(message_ins_ids)

    def _drop_answer(self, question: str) -> None:
        self._arriving.pop(question, None)
        answer = self.message_ins_id_to_message_res_id.pop(question, None)
        self.message_res_store.pop(answer or "", None)
