"""Who takes part: members join when they come, wait for each other, go and come back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from typing import Any

from polyfed.engines.base import Listener
from polyfed.errors import BadMessage, InputError, listed
from polyfed.methods.base import Method
from polyfed.profile import Profile
from polyfed.remote.agreement import Agreement
from polyfed.remote.checks import checked_profile, readable, unfit
from polyfed.remote.transport import Packet, Transport

POLL = 1.0
"""Seconds between two looks at who is there."""
RECONNECTING = 25.0
"""Seconds after the server's start within which every site that runs has tried to connect again."""


class Attendance:
    """The members of a run: who has joined, who is present, who missed which rounds."""

    def __init__(
        self,
        agreement: Agreement,
        transport: Transport,
        method: Method,
        invite: Callable[[Collection[int]], Mapping[int, Packet]],
    ) -> None:
        self._agreement = agreement
        self._transport = transport
        self._method = method
        self._invite = invite
        """Asks these clients to join."""
        self._names = {number: name for name, number in sorted(agreement.members.items(), key=lambda item: item[1])}
        self._profiles: dict[int, Profile] = {}
        self._joined: dict[int, Hashable] = {}
        """The members that joined since this process started, with the connection over which they did."""
        self._refused: dict[int, Hashable] = {}
        """Members that can't join, with their connections: they are asked again when they come anew."""
        self._missed: dict[int, list[int]] = {}
        """By member, the rounds since it was last available."""
        self.silent: set[int] = set()
        """Members that tell no scores."""
        self._expected: set[int] = set()
        """After a restart, those who took part until then: without them the run would not be what it was to be."""
        self._told: tuple[set[int], set[int]] = (set(), set())

    @property
    def profiles(self) -> Mapping[int, Profile]:
        """Everyone who has ever joined this run."""
        return self._profiles

    def available(self) -> list[int]:
        """The members that have joined and can be asked now."""
        there = set(self._transport.nodes())
        return [client for client, name in self._names.items() if name in there and self._is_in(client)]

    def gather(self, round: int, needed: int, listener: Listener, delay: float = 0.0) -> None:
        """After a delay, let new members join, and wait until there are enough for a round."""
        while delay > 0 and not listener.stop_requested:
            self._transport.wait(min(delay, POLL))
            delay -= POLL
        waited, patience = False, RECONNECTING
        while True:
            self.admit(listener.tell, round)
            shortage = self._shortage(needed) or (self._awaited() if patience > 0 else "")
            self._tell_members(listener)
            if not shortage or listener.stop_requested:
                break
            if not waited:
                listener.tell(shortage)
            waited = True
            self._transport.wait(POLL)
            patience -= POLL
        self._expected.clear()
        if shortage:
            return
        if waited:
            listener.tell(f"continuing with {listed([self._names[client] for client in self._present()])}")
        self._call_roll(round, listener.tell)

    def admit(self, tell: Callable[[str], None], round: int, *, returning: bool = False) -> None:
        """Ask the members that are new, or back, to join; one that can't is left out with a note.

        With `returning` only those who have joined before: who comes in the middle of a round joins before the next.
        """
        new = {c: each for c, each in self._newcomers().items() if c in self._profiles or not returning}
        answers = self._invite(list(new)) if new else {}
        for client, answer in sorted(answers.items()):
            name, known = self._names[client], client in self._profiles
            try:
                self._profiles[client] = self._checked(name, answer)
            except BadMessage as error:
                self._refused[client] = new[client]
                tell(f"{name} can't join: {str(error).removesuffix('.')}; it is asked again when it has reconnected")
                continue
            self._joined[client] = new[client]
            (self.silent.add if answer.facts.get("share") == "nothing" else self.silent.discard)(client)
            if round > 1 and not known:
                tell(f"{name} joins before round {round}")
        self._profiles = dict(sorted(self._profiles.items()))

    def _newcomers(self) -> dict[int, Hashable]:
        """The members that can be asked to join, with their connections; whoever has gone is forgotten."""
        present, there = set(self._transport.present()), set(self._transport.nodes())
        new = {}
        for client, name in self._names.items():
            connection = self._transport.connection(name)
            for group in (self._joined, self._refused):
                if name not in present or group.get(client, connection) != connection:
                    group.pop(client, None)
            if name in there and client not in self._joined and client not in self._refused:
                new[client] = connection
        return new

    def to_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps, as plain values."""
        return {
            "profiles": {str(client): profile.to_dict() for client, profile in self._profiles.items()},
            "missed": {str(client): rounds for client, rounds in self._missed.items()},
        }

    def restore(self, values: Mapping[str, Any]) -> None:
        """Continue with what `to_dict` gave; whoever is there is asked to join again."""
        try:
            found = {int(client): Profile.from_dict(each) for client, each in values.get("profiles", {}).items()}
            self._missed = {int(client): list(rounds) for client, rounds in values.get("missed", {}).items()}
        except (TypeError, ValueError, AttributeError) as error:
            raise InputError(f"the checkpoint's list of members can't be read ({error}).") from error
        self._profiles = dict(sorted((found | self._profiles).items()))
        self._expected = set(found) - set(self._missed)

    def _checked(self, name: str, answer: Packet) -> Profile:
        if answer.failed:
            raise BadMessage(readable(answer.facts["failure"]))
        profile = checked_profile(name, answer.facts.get("profile"), self._method)
        difference = unfit(self._method, profile)
        if difference:
            raise BadMessage(difference)
        return profile

    def _is_in(self, client: int) -> bool:
        return client in self._joined and self._joined[client] == self._transport.connection(self._names[client])

    def _present(self) -> list[int]:
        """The members that have joined and are connected; one that owes an answer counts."""
        there = set(self._transport.present())
        return [client for client, name in self._names.items() if name in there and self._is_in(client)]

    def _shortage(self, needed: int) -> str:
        """Who is missing for a round, in words; empty if there are enough."""
        here, quorum = self._present(), self._agreement.quorum
        missing = [name for client, name in self._names.items() if client not in here]
        if len(here) < quorum:
            is_here = f"{len(here)} of at least {quorum} members {'is' if len(here) == 1 else 'are'} here"
            return f"waiting for {listed(missing)}: {is_here}"
        free = self.available()
        if len(free) >= min(needed, len(self._names)):
            return ""
        busy = [self._names[client] for client in here if client not in free]
        return f"waiting for {listed(busy or missing)}: {len(free)} of at least {needed} members can be asked"

    def _awaited(self) -> str:
        """Who took part before the server was started anew and is still missing, in words."""
        missing = [name for client, name in self._names.items() if client in self._expected - set(self._present())]
        return f"waiting up to {RECONNECTING:g} s for {listed(missing)} to reconnect" if missing else ""

    def _call_roll(self, round: int, tell: Callable[[str], None]) -> None:
        """Remember who misses this round, and note who is back."""
        free = set(self.available())
        for client in self._profiles:
            if client not in free:
                self._missed.setdefault(client, []).append(round)
            elif client in self._missed:
                tell(f"{self._names[client]} is back after missing {_rounds(self._missed.pop(client))}")

    def _tell_members(self, listener: Listener) -> None:
        here = self._present()
        now = (set(here), set(self._names) - set(here))
        if now != self._told:
            self._told = now
            listener.on_members(*({client: self._names[client] for client in sorted(each)} for each in now))


def _rounds(missed: list[int]) -> str:
    """
    >>> _rounds([3]), _rounds([3, 4, 5]), _rounds([3, 5])
    ('round 3', 'rounds 3 to 5', 'rounds 3 and 5')
    """
    if len(missed) > 2 and missed == list(range(missed[0], missed[-1] + 1)):
        return f"rounds {missed[0]} to {missed[-1]}"
    return f"round{'s' if len(missed) > 1 else ''} {listed([str(round) for round in missed])}"
