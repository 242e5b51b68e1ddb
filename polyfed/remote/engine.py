"""The engine of a federation whose clients live elsewhere: it only sends and receives."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from polyfed.engines.base import Engine
from polyfed.errors import BadMessage, RunError
from polyfed.evaluation import Evaluation
from polyfed.message import Message, State
from polyfed.methods.base import Reply
from polyfed.profile import Profile
from polyfed.remote.agreement import Agreement
from polyfed.remote.transport import Kind, Packet, Patience, Transport


class RemoteEngine(Engine):
    """Asks sites to train and to evaluate. What comes back is checked before it is believed."""

    name = "remote"

    def __init__(self, agreement: Agreement, transport: Transport) -> None:
        self.agreement = agreement
        self.transport = transport
        self.notes = []
        self._names = {number: name for name, number in agreement.members.items()}

    def join(self) -> Mapping[int, Profile]:
        found, absent = {}, []
        answers = self._ask("join", {client: Packet() for client in self._names})
        for client, name in sorted(self._names.items()):
            answer = answers.get(client)
            if answer is None or "profile" not in answer.facts:
                absent.append(name)
                continue
            found[client] = _profile(name, answer.facts["profile"])
        if absent:
            raise RunError(f"{', '.join(absent)} did not join: start these sites, or remove them from the agreement.")
        return found

    def available(self) -> Collection[int]:
        there = set(self.transport.nodes())
        return [client for client, name in sorted(self._names.items()) if name in there]

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
        absent = self._absence(answers)
        return [self._reply(client, round, answers.get(client), absent) for client in sorted(downloads)]

    def evaluate(
        self, clients: Iterable[int], round: int, downloads: Mapping[int, Message] | None = None
    ) -> dict[int, Evaluation]:
        received = downloads or {}
        answers = self._ask("evaluate", {c: Packet({"round": round}, received.get(c)) for c in sorted(clients)})
        scores = {client: _evaluation(answer.facts.get("evaluation")) for client, answer in answers.items()}
        return {client: score for client, score in sorted(scores.items()) if score is not None}

    def restore(self, round: int, states: Mapping[int, State]) -> None:
        """Sites keep their own states, and know from a request's round where the run stands."""

    def close(self) -> None:
        pass

    def _ask(
        self, kind: Kind, packets: Mapping[int, Packet], done: Callable[[int], None] = lambda client: None
    ) -> dict[int, Packet]:
        addressed = {
            self._names[client]: Packet({"run": self.agreement.run, **packet.facts}, packet.message)
            for client, packet in packets.items()
        }
        numbers, patience = self.agreement.members, self.agreement.patience
        if kind == "join":  # everyone is needed once, however slow
            patience = Patience(patience.timeout)
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
                return Reply(client, Message(), failure=str(facts["failure"])[:500])
            if facts.get("round") != round:
                raise BadMessage(f"it answered for round {str(facts.get('round'))[:20]}, not for round {round}.")
            loss, flops = facts.get("loss"), facts.get("flops", 0)
            if not isinstance(flops, int) or flops < 0 or not isinstance(loss, float | int | None):
                raise BadMessage("its loss or its count of operations is not a number.")
            return Reply(
                client,
                answer.message or Message(),
                math.nan if loss is None else float(loss),
                flops,
                evaluation=_evaluation(facts.get("evaluation")),
            )
        except BadMessage as error:
            return Reply(client, Message(), failure=str(error))


def _profile(name: str, values: Any) -> Profile:
    try:
        return Profile.from_dict({**values, "name": name})
    except (TypeError, ValueError) as error:
        raise RunError(f"'{name}' introduced itself with a profile that can't be read ({error}).") from error


def _evaluation(values: Any) -> Evaluation | None:
    """An evaluation as it came over the wire; None if it makes no sense."""
    try:
        found = Evaluation.from_dict(values).without_confusion()
        parts = ((found.test, found.test_correct), (found.validation, found.validation_correct))
        sound = all(
            isinstance(samples, int) and all(isinstance(n, int) and 0 <= n <= samples for n in correct.values())
            for samples, correct in parts
        )
        return found if sound and found.test_correct else None
    except (TypeError, ValueError, AttributeError):
        return None
