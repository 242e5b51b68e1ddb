"""What all sides must share before round one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from polyfed.errors import InputError


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
    """Seconds until a site that has not answered is left out of the round."""

    def __post_init__(self) -> None:
        if sorted(self.members.values()) != list(range(len(self.members))):
            raise InputError(
                f"the members are clients {sorted(self.members.values())}, but must be numbered from 0 to "
                f"{len(self.members) - 1}, each once."
            )

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
        lists = {name: tuple(values[name]) for name in ("input_shape", "mean", "std") if name in values}
        return Agreement(**{**values, **lists})
