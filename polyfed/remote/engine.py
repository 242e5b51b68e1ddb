"""The engine of a federation whose clients live elsewhere: it only sends and receives."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from polyfed.engines.base import Engine, Listener
from polyfed.errors import BadMessage
from polyfed.evaluation import Score, Shares
from polyfed.message import Message, State
from polyfed.methods.base import Method, Reply
from polyfed.profile import Profile
from polyfed.remote.agreement import Agreement
from polyfed.remote.attendance import Attendance
from polyfed.remote.checks import checked_loss, checked_shares, readable, rules_of
from polyfed.remote.transport import Kind, Packet, Patience, Transport

JOINING_SECONDS = 60.0
"""How long a member may take to join or to finish: it only has to say who it is, or to keep its model."""
FIRST_DELAY = 5.0
"""Seconds before the next round after one with too few replies; after each further one twice as long."""
LONGEST_DELAY = 60.0


class RemoteEngine(Engine):
    """Asks sites to train and to evaluate. What comes back is checked before it is believed."""

    name = "remote"
    patient = True

    def __init__(self, agreement: Agreement, transport: Transport, method: Method) -> None:
        self.agreement = agreement
        self.transport = transport
        self.notes = []
        self.largest_reply = method.agreed_schema.largest
        """Bytes that a reply's message may have; None if the method's schema has no limit."""
        transport.largest_reply = self.largest_reply
        self._names = {number: name for name, number in agreement.members.items()}
        self._attendance = Attendance(agreement, transport, method, self._invite)
        self._rules = rules_of(method)

    @property
    def profiles(self) -> Mapping[int, Profile]:
        return self._attendance.profiles

    def gather(self, round: int, needed: int, listener: Listener, failed: int = 0) -> None:
        # Sites that fail at once must not use up all rounds before anyone can look.
        delay = min(LONGEST_DELAY, FIRST_DELAY * 2 ** (failed - 1)) if failed else 0.0
        self._attendance.gather(round, needed, listener, delay)

    def available(self) -> Collection[int]:
        return self._attendance.available()

    def remembered(self) -> Mapping[str, Any]:
        return self._attendance.to_dict()

    def recall(self, values: Mapping[str, Any]) -> None:
        self._attendance.restore(values)

    def train(
        self,
        round: int,
        downloads: Mapping[int, Message],
        done: Callable[[int], None] = lambda client: None,
        *,
        score: bool = False,
    ) -> list[Reply]:
        packets = {c: Packet({"round": round, "score": score}, message) for c, message in downloads.items()}
        answers = self._ask("train", packets, done)
        # One that crashed and was quickly back is as able to be scored in this round as the others.
        self._attendance.admit(self.notes.append, round, returning=True)
        absent = self._absence(answers)
        return [self._reply(client, round, answers.get(client), absent) for client in sorted(downloads)]

    def evaluate(
        self, clients: Iterable[int], round: int, downloads: Mapping[int, Message] | None = None
    ) -> Mapping[int, Score]:
        received, asked = downloads or {}, sorted(set(clients) - self._attendance.silent)
        answers = self._ask("evaluate", {client: Packet({"round": round}, received.get(client)) for client in asked})
        scores = {client: self._shares(answer) for client, answer in answers.items()}
        return {client: score for client, score in sorted(scores.items()) if score is not None}

    def finish(self, round: int, downloads: Mapping[int, Message]) -> Mapping[int, str]:
        """Tell these clients that the run is over, with what the server knows at its end.

        Returns what those who answered could not do, in words; nothing if all is well.
        """
        packets = {client: Packet({"round": round}, message) for client, message in downloads.items()}
        answers = self._ask("finish", packets)
        return {client: readable(answer.facts.get("failure", "")) for client, answer in answers.items()}

    def admit(self, tell: Callable[[str], None], round: int) -> None:
        """Let members join that are there now, without waiting."""
        self._attendance.admit(tell, round)

    def restore(self, round: int, states: Mapping[int, State]) -> None:
        """Sites keep their own states, and know from a request's round where the run stands."""

    def close(self) -> None:
        pass

    def _invite(self, clients: Collection[int]) -> Mapping[int, Packet]:
        return self._ask("join", {client: Packet({"terms": self.agreement.terms}) for client in clients})

    def _ask(
        self, kind: Kind, packets: Mapping[int, Packet], done: Callable[[int], None] = lambda client: None
    ) -> dict[int, Packet]:
        addressed = {
            (name := self._names[client]): Packet(
                {"run": self.agreement.run, "name": name, **packet.facts}, packet.message
            )
            for client, packet in packets.items()
        }
        numbers, patience = self.agreement.members, self.agreement.patience
        if kind in ("join", "finish"):  # whoever is there is waited for
            patience = Patience(min(patience.timeout, JOINING_SECONDS))
        answers = self.transport.ask(kind, addressed, patience, lambda name: done(numbers[name]))
        return {numbers[name]: answer for name, answer in answers.items() if name in addressed}

    def _absence(self, answers: Mapping[int, Packet]) -> str:
        """Why whoever has not answered is left out."""
        patience, valid = self.agreement.patience, sum(not answer.failed for answer in answers.values())
        if patience.enough is None or valid < patience.enough:
            return f"no answer within {patience.timeout:g} s"
        return f"no answer yet, {patience.grace:g} s (grace) after {patience.enough} others (enough_replies)"

    def _reply(self, client: int, round: int, answer: Packet | None, absent: str) -> Reply:
        if answer is None:
            return Reply(client, Message(), failure=absent)
        try:
            facts = answer.facts
            if answer.failed:
                return Reply(client, Message(), failure=readable(facts["failure"]))
            if facts.get("round") != round:
                raise BadMessage(f"it answered for round {readable(facts.get('round'), 20)}, not for round {round}.")
            loss = checked_loss(facts.get("loss"))
            return Reply(client, answer.message or Message(), loss, evaluation=self._shares(answer))
        except BadMessage as error:
            return Reply(client, Message(), failure=str(error))

    def _shares(self, answer: Packet) -> Shares | None:
        found = checked_shares(answer.facts.get("evaluation"), self._rules)
        if found is not None:  # where the method's rules are not known, all are scored by those of the first
            self._rules = found.rules
        return found
