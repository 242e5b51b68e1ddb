"""What a client tells the server when it joins, and whether clients fit together."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from polyfed.errors import InputError, clients_named, listed
from polyfed.methods.base import Method
from polyfed.models import SplitNetwork, parameter_count
from polyfed.models.frozen import rest_of


@dataclass(frozen=True)
class Profile:
    """A client as the server knows it. None stands for what the client does not tell."""

    name: str = ""
    network: str | None = None
    """The name of its network."""
    features: int | None = None
    """How many features its extractor gives."""
    head: str | None = None
    """The names and shapes of its head's tensors."""
    frozen: str | None = None
    """Which parameters of the head are frozen."""
    classes: tuple[int, ...] | None = None
    """The classes with training samples, in ascending order."""
    parameters: int | None = None
    train_samples: int | None = None
    validation_samples: int | None = None
    test_samples: int | None = None

    def told_for(self, method: Method) -> Profile:
        """Only what the method needs to know about a client; everything else stays with the client."""
        shares_head = "head" in method.requires
        return Profile(
            self.name,
            network=self.network if "network" in method.requires else None,
            features=self.features if "features" in method.requires else None,
            head=self.head if shares_head else None,
            frozen=self.frozen if shares_head else None,
            classes=self.classes if method.announces_classes else None,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, without what is not told."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Profile:
        """What `to_dict` gave, perhaps by way of JSON."""
        profile = Profile(**values)
        return replace(profile, classes=None if profile.classes is None else tuple(profile.classes))


def network_profile(name: str, network: SplitNetwork) -> Profile:
    """A network's part of a profile."""
    head = " and ".join(f"{key} {tuple(tensor.shape)}" for key, tensor in network.head.state_dict().items())
    return Profile(
        network=name,
        features=network.feature_size,
        head=head,
        frozen=" and ".join(sorted(rest_of(network.head).parameters)) or "nothing",
        parameters=parameter_count(network),
    )


def named(clients: Sequence[int], profiles: Mapping[int, Profile]) -> str:
    """Clients in words, and by the names under which they have joined, if these are few."""
    names = [profiles[client].name for client in clients if client in profiles]
    words = clients_named(clients)
    return f"{words} ({listed(names)})" if all(names) and len(names) == len(clients) <= 4 else words


def check_common(method: Method, profiles: Mapping[int, Profile]) -> None:
    """Raise unless the clients have in common what the method needs; the error names the clients and the difference."""
    alike = len({profile.features for profile in profiles.values()}) == 1
    fewest = min((profile.features for profile in profiles.values() if profile.features is not None), default=500)
    number = f"(--features {fewest})"
    head_remedy = (
        "choose networks with the same kind of head, such as one linear layer with a bias"
        if alike
        else f"choose networks with equal heads, or bring them to one number of features {number}"
    )
    tests: dict[str, tuple[str, Callable[[Profile], Hashable], str]] = {
        "network": ("the same network", lambda own: own.network, "give all the same one (--models cnn1)"),
        "features": (
            "the same number of features",
            lambda own: f"{own.features} features",
            f"bring them to one number {number}",
        ),
        "head": ("the same head", lambda own: own.head, head_remedy),
        "frozen": (
            "the same parameters of the head frozen",
            lambda own: f"{own.frozen} frozen",
            "freeze the same ones in all networks (requires_grad)",
        ),
    }
    for need in [*method.requires, *(["frozen"] if "head" in method.requires else [])]:
        what, value_of, remedy = tests[need]
        groups: dict[Hashable, list[int]] = {}
        for client, profile in profiles.items():
            groups.setdefault(value_of(profile), []).append(client)
        if len(groups) > 1:
            (first, some), (second, others) = list(groups.items())[:2]
            raise InputError(
                f"{method.name} needs {what} in every client, but {_having(some, profiles, first)} and "
                f"{_having(others, profiles, second)}; {remedy}."
            )


def _having(clients: Sequence[int], profiles: Mapping[int, Profile], value: Hashable) -> str:
    """Who has what; with the names of their networks, unless these are what they have."""
    networks = [name for name in dict.fromkeys(profiles[client].network for client in clients) if name != value]
    shown = [name for name in networks if name][:3]
    with_networks = f" ({', '.join(shown)}{', …' if len(networks) > len(shown) else ''})" if shown else ""
    return f"{clients_named(clients)}{with_networks} {'has' if len(clients) == 1 else 'have'} {value}"


def samples_known(profiles: Iterable[Profile]) -> int | None:
    """The most samples that a client trains on, if all clients tell."""
    counts = [profile.train_samples for profile in profiles]
    return max((count for count in counts if count is not None), default=0) if None not in counts else None
