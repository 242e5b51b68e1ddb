"""What Flower's SuperLink knows: members' keys, who is connected, questions and answers. All of it in memory.

It is made anew whenever the server starts. The run's own checkpoint and the sites' diaries are what survives.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping

from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from flwr.app import Message, Metadata
from flwr.app.message import remove_content_from_message
from flwr.common.constant import NOOP_ACCOUNT_NAME, NOOP_FLWR_AID, SUPERLINK_NODE_ID
from flwr.proto.message_pb2 import ObjectTree
from flwr.server.superlink.linkstate.in_memory_linkstate import InMemoryLinkState
from flwr.supercore.constant import NOOP_FEDERATION_ID, TaskType
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.object_store import NoObjectInStoreError, ObjectStore
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.superlink.federation import NoOpFederationManager

from polyfed.flower.wire import CHUNK, TYPES, answer_of, content_of
from polyfed.remote.transport import Kind, Packet

SMALL_OBJECTS = 16
"""More than a message has besides the pieces of its tensors."""


class Link(InMemoryLinkState):
    """Flower's state of a SuperLink, with one run and a fixed list of members."""

    def __init__(self, members: Mapping[str, EllipticCurvePublicKey], store: ObjectStore) -> None:
        super().__init__(NoOpFederationManager(), store)
        self.federation_manager.linkstate = self
        self.largest_reply: int | None = None
        """Bytes that an answer's message may have."""
        self._activations: Counter[int] = Counter()
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
                answer = self.message_ins_id_to_message_res_id.get(message_id)
                if answer is None or self._content(answer) is None:
                    if answer is not None:  # it was killed while it sent it
                        del self.message_ins_id_to_message_res_id[message_id]
                        del self.message_res_store[answer]
                    question.metadata.delivered_at = ""
            self._activations[node_id] += 1
            return super().activate_node(node_id, heartbeat_interval)

    def store_message_and_object_tree(
        self, message: Message, object_tree: ObjectTree, session_id: str
    ) -> tuple[bool, list[str]]:
        question = message.metadata.reply_to_message_id
        pieces = sum(1 for _ in iterate_object_tree(object_tree))
        largest = self.largest_reply
        if question and largest is not None and pieces > largest // CHUNK + 1 + SMALL_OBJECTS:
            with self.lock:
                self._refused[question] = "its answer is too large."
            return False, []
        return super().store_message_and_object_tree(message, object_tree, session_id)

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
                self.store_object(self._run, session, place, objects[place].deflate())
        return metadata.message_id

    def answer(self, question: str) -> Packet | None:
        """What the member answered, once all of it is here; a failure in words if that can't be read."""
        with self.lock:
            if question in self._refused:
                reason = self._refused[question]
                self.withdraw(question)
                return Packet({"failure": reason})
            place = self.message_ins_id_to_message_res_id.get(question)
            contents = None if place is None else self._content(place)
            if place is None or contents is None:
                return None
            self.withdraw(question)
        try:
            message = inflate_object_from_contents(place, contents)
            assert isinstance(message, Message)
            if message.has_error():
                return Packet({"failure": str(message.error.reason)[:500]})
            return answer_of(message.content, self.largest_reply)
        except Exception:  # whatever Flower makes of bytes that a member invented
            return Packet({"failure": "its answer can't be read."})

    def withdraw(self, question: str) -> None:
        """Forget a question and its answer."""
        with self.lock:
            answer = self.message_ins_id_to_message_res_id.get(question)
            for place in (question, answer):
                if place is not None:
                    self.object_store.delete(place)
            self.delete_messages({question})
            self._refused.pop(question, None)

    def _content(self, place: str) -> dict[str, bytes] | None:
        """All pieces of a message, or None while some have not come."""
        try:
            tree = self.object_store.get_object_tree(place)
        except NoObjectInStoreError:
            return None
        pieces = {node.object_id: self.object_store.get(node.object_id) for node in iterate_object_tree(tree)}
        found = {name: content for name, content in pieces.items() if content}
        return found if len(found) == len(pieces) else None
