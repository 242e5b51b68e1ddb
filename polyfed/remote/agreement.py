"""What all sides must share before round one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from polyfed.errors import InputError, unknown_name
from polyfed.ranges import typed
from polyfed.remote.transport import Patience
from polyfed.shapes import TokenShape

LONGEST = 60
"""Characters of a value that a sentence shows."""
_MISSING = object()


@dataclass(frozen=True)
class Agreement:
    """The same on the server and on every site; it converts to and from plain values."""

    run: str
    """The run's id; a message of another run is refused."""
    experiment: Mapping[str, Any]
    """The settings, without those that belong to one side: data, networks, devices."""
    classes: int
    input_shape: tuple[int, ...]
    members: Mapping[str, int]
    """Who takes part, and as which client; every draw of a client depends on its number."""
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    """How pixels are normalised: the same everywhere, whatever each site's own images are."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Public keys by member, where the transport checks them."""
    reply_timeout: float = 600.0
    """Seconds until a site that has not answered is left out of the round, and may be asked again."""
    enough_replies: int | None = None
    """Valid answers after which a round need not wait for the rest; None: it waits for all."""
    grace: float = 0.0
    """Seconds that the rest still has when there are enough."""
    minimum_members: int | None = None
    """With fewer members present the run pauses; None: all are needed."""
    terms: Mapping[str, Any] = field(default_factory=dict)
    """What the members agreed on, as plain values; every site compares it with its own before it joins."""
    vocabulary: int | None = None
    padding: int | None = None
    """What a dataset says about its token ids, where samples are such."""

    def __post_init__(self) -> None:
        if sorted(self.members.values()) != list(range(len(self.members))):
            raise InputError(
                f"the members are clients {sorted(self.members.values())}, but must be numbered from 0 to "
                f"{len(self.members) - 1}, each once."
            )
        if isinstance(self.input_shape, TokenShape):  # plain values only, which survive JSON
            shape = self.input_shape
            plain = {"input_shape": tuple(shape), "vocabulary": shape.vocabulary, "padding": shape.padding}
            for name, value in plain.items():
                object.__setattr__(self, name, value)
        for name in ("enough_replies", "minimum_members"):
            value = getattr(self, name)
            if value is not None and (not _is_number(value, int) or not 1 <= value <= len(self.members)):
                raise InputError(
                    f"{name} is {value!r}, but must be a whole number from 1 to {len(self.members)}, the number of "
                    "members, or none."
                )
        if not _is_number(self.grace, int, float) or not 0 <= self.grace < math.inf:
            raise InputError(f"grace is {self.grace!r}, but must be a number of seconds at least 0.")
        if not _is_number(self.reply_timeout, int, float) or not 0 < self.reply_timeout < math.inf:
            raise InputError(f"reply_timeout is {self.reply_timeout!r}, but must be a number of seconds above 0.")

    @property
    def patience(self) -> Patience:
        """How long the server waits for answers."""
        return Patience(self.reply_timeout, self.enough_replies, self.grace)

    @property
    def quorum(self) -> int:
        """How many members must be present for a round."""
        return len(self.members) if self.minimum_members is None else self.minimum_members

    def number(self, name: str) -> int:
        """As which client a member takes part."""
        if name not in self.members:
            raise InputError(f"'{name}' is not a member of this federation; members are {', '.join(self.members)}.")
        return self.members[name]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON or YAML."""
        return {**asdict(self), **{name: list(getattr(self, name)) for name in ("input_shape", "mean", "std")}}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Agreement:
        """What `to_dict` gave."""
        known = [one.name for one in fields(Agreement)]
        for name in values:
            if name not in known:
                raise unknown_name("term of an agreement", str(name), known)
        lists = {name: tuple(values[name]) for name in ("input_shape", "mean", "std") if name in values}
        return Agreement(**{**values, **lists})


def _is_number(value: object, *kinds: type) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)


def first_difference(own: Any, other: Any, path: str = "") -> str | None:
    """The first value in which two agreements' terms differ, in words; None if they are the same.

    >>> first_difference({"training": {"lr": 0.05}}, {"training": {"lr": 0.1}})
    'training.lr is 0.05 here and 0.1 at the server'
    >>> first_difference({"numbers": [{"fill": 1}, {"fill": 2}]}, {"numbers": [{"fill": 1}, {"fill": 3}]})
    'numbers.1.fill is 2 here and 3 at the server'
    """
    if _is_rows(own) and _is_rows(other):
        own, other = (dict(enumerate(rows)) for rows in (own, other))
    if isinstance(own, Mapping) and isinstance(other, Mapping):
        for name in dict.fromkeys([*own, *other]):
            inner = f"{path}.{name}" if path else str(name)
            found = first_difference(own.get(name, _MISSING), other.get(name, _MISSING), inner)
            if found:
                return found
        return None
    if _plain(own) == _plain(other):
        return None
    return f"{_shown(path)} is {_shown(own)} here and {_shown(other)} at the server"


def _is_rows(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(each, Mapping) for each in value) and len(value) > 0


def _plain(value: Any) -> Any:
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def _shown(value: Any) -> str:
    """A value in a sentence; what another side sent may be of any length."""
    text = "missing" if value is _MISSING else typed(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
