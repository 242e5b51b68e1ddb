"""The door on the server's side: the checks before a reply is fused, and what is remembered of it.

A reply is accepted if it arrived, is what the method agreed on, claims no more samples than a client can have, and is
not far larger than usual. What is usual is a median, so this works while fewer than half of the replies are hostile.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from polyfed.errors import BadMessage, DivergedError
from polyfed.message import Counts, largest_each
from polyfed.methods.base import Method, Reply

MOST_SAMPLES = 10**7
"""What a reply may claim where nobody knows how many samples a client has."""
REMEMBERED_ROUNDS = 5
UNUSUAL = 10.0
"""A reply this many times as large as usual is named when training diverges soon after."""
SMALL = 0.05
"""A tensor is never compared with less than this: one that starts at zero may grow by any factor."""


@dataclass
class Sizes:
    """How large the replies of the last rounds were, tensor by tensor; a size is the largest absolute value."""

    rounds: list[dict[str, tuple[float, int]]] = field(default_factory=list)
    """For each remembered round and each tensor, the median size of the accepted replies and their number."""
    unusual: list[tuple[int, int, float]] = field(default_factory=list)
    """Accepted replies that were unusually large: round, client and how many times as large as usual."""

    def usual(self, name: str, now: Iterable[float]) -> float:
        """The median of this round's sizes and of the last rounds', whose replies count as their round's median."""
        before = (sizes[name] for sizes in self.rounds if name in sizes)
        return max(SMALL, _median([*before, *((size, 1) for size in now)]))

    def add(self, round: int, accepted: Mapping[int, Mapping[str, float]], ratios: Mapping[int, float]) -> None:
        """Remember a round's accepted replies, by client, and forget the oldest."""
        by_name: dict[str, list[tuple[float, int]]] = {}
        for sizes in accepted.values():
            for name, size in sizes.items():
                by_name.setdefault(name, []).append((size, 1))
        medians = {name: (_median(sizes), len(sizes)) for name, sizes in by_name.items()}
        self.rounds = [*self.rounds, medians][-REMEMBERED_ROUNDS:]
        recent = [entry for entry in self.unusual if entry[0] > round - REMEMBERED_ROUNDS]
        self.unusual = recent + [(round, client, ratios[client]) for client in accepted if ratios[client] > UNUSUAL]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return asdict(self)

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Sizes:
        """What `to_dict` gave."""
        rounds = [{name: (size, count) for name, (size, count) in sizes.items()} for sizes in values["rounds"]]
        return Sizes(rounds, [(round, client, ratio) for round, client, ratio in values["unusual"]])


def _median(sizes: Sequence[tuple[float, int]]) -> float:
    """The lower median of sizes, each with its weight: of two the smaller, so that one alone can't make itself usual.

    >>> _median([(5.0, 1), (1.0, 1)]), _median([(5.0, 3), (1.0, 1)])
    (1.0, 5.0)
    """
    passed, half = 0, sum(weight for _, weight in sizes) / 2
    for size, weight in sorted(sizes):
        passed += weight
        if passed >= half:
            return size
    return 0.0


class Door:
    """The checks of one run, in their order."""

    def __init__(self, method: Method, bound: float | None, most_samples: int = MOST_SAMPLES) -> None:
        self.method = method
        self.bound = bound
        """How many times as large as usual a reply may be; none: no limit."""
        self.most_samples = most_samples

    def admit(self, round: int, replies: Sequence[Reply], sizes: Sizes) -> tuple[list[Reply], dict[int, str]]:
        """The replies that can be fused, and by client why the others can't; the sizes remember this round."""
        refused: dict[int, str] = {}
        sized: dict[int, Mapping[str, Tensor]] = {}
        arrived = [reply for reply in replies if not reply.failure]
        certain = self.method.certain([reply.message for reply in arrived])
        passed = {reply.client for reply, is_certain in zip(arrived, certain, strict=True) if is_certain}
        for reply in replies:
            try:
                self._check(reply, agreed=reply.client in passed)
                sized[reply.client] = self.method.sized(reply.message)
            except BadMessage as error:
                refused[reply.client] = str(error)
        measured = _measured(sized)
        ratios, where = _ratios(measured, sizes)
        for client, ratio in ratios.items():
            if self.bound is not None and ratio > self.bound:
                refused[client] = (
                    f"its '{where[client]}' is {ratio:.3g} times as large as usual, more than reply_bound allows "
                    f"({self.bound:g})."
                )
        accepted = {client: found for client, found in measured.items() if client not in refused}
        sizes.add(round, accepted, ratios)
        return [reply for reply in replies if reply.client in accepted], refused

    @contextmanager
    def naming_causes(self, sizes: Sizes) -> Iterator[None]:
        """Inside, an error about diverged training also names an unusually large reply that was fused before."""
        try:
            yield
        except DivergedError as error:
            if not sizes.unusual:
                raise
            round, client, ratio = max(sizes.unusual, key=lambda entry: entry[2])
            raise DivergedError(
                f"{str(error).removesuffix('.')}; the reply of client {client} in round {round} was {ratio:.3g} times "
                f"as large as usual and may be the cause (--set reply_bound={min(100, math.floor(ratio / 2))} refuses "
                "such replies)."
            ) from error

    def _check(self, reply: Reply, *, agreed: bool) -> None:
        if reply.failure:
            raise BadMessage(reply.failure)
        if not agreed:
            self.method.check(reply.message)
        self._counted(reply)

    def _counted(self, reply: Reply) -> None:
        """A client claims no more samples, in all its classes together, than a client can have."""
        for name, entry in self.method.agreed_schema.metadata.items():
            if isinstance(entry, Counts) and name in reply.message.metadata:
                total = int(reply.message.metadata[name].sum())
                if total > self.most_samples:
                    raise BadMessage(
                        f"'{name}' claims {total} samples, more than a client can have ({self.most_samples})."
                    )


def _measured(sized: Mapping[int, Mapping[str, Tensor]]) -> dict[int, dict[str, float]]:
    """By client, how large each of its tensors is that are not empty."""
    entries = [(client, name, t) for client, own in sized.items() for name, t in own.items() if t.numel()]
    found: dict[int, dict[str, float]] = {client: {} for client in sized}
    for (client, name, _), size in zip(entries, largest_each([t for _, _, t in entries]), strict=True):
        found[client][name] = size
    return found


def _ratios(measured: Mapping[int, Mapping[str, float]], sizes: Sizes) -> tuple[dict[int, float], dict[int, str]]:
    """By client, how many times as large as usual its reply is, and in which tensor."""
    names = dict.fromkeys(name for found in measured.values() for name in found)
    usual = {name: sizes.usual(name, [found[name] for found in measured.values() if name in found]) for name in names}
    ratios: dict[int, float] = {}
    where: dict[int, str] = {}
    for client, found in measured.items():
        each = {name: size / usual[name] for name, size in found.items()}
        where[client] = max(each, key=lambda name: each[name], default="")
        ratios[client] = each.get(where[client], 0.0)
    return ratios, where
