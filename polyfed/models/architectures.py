"""Which network each client owns: names, groups of names and the user's own networks, all as `Architecture`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, TypeAlias, get_args

import torch
from torch import nn

from polyfed.addresses import is_library, load_object
from polyfed.errors import InputError, unknown_name
from polyfed.models.catalogue import GROUPS, NETWORKS, FromCatalogue
from polyfed.models.factories import FromFactory, FromInstance, factory_name
from polyfed.models.layers import HEADS, Match, check_match, check_sizes
from polyfed.models.libraries import FromLibrary, from_library
from polyfed.models.split import SplitNetwork
from polyfed.seeds import numpy_generator
from polyfed.shapes import as_shape

Assignment = Literal["cycle", "random"]


class Maker(Protocol):
    """Anything that makes a new network for a task; `name` is for its errors."""

    def __call__(
        self, name: str, input_shape: tuple[int, ...], classes: int, features: int | None, match: Match
    ) -> SplitNetwork: ...


@dataclass(frozen=True)
class Architecture:
    """A kind of network that clients can own. Two are equal if they build the same kind.

    >>> resolve("cnn5")[0].build((3, 32, 32), classes=10).feature_size
    500
    """

    name: str
    maker: Maker = field(repr=False)

    def build(
        self, input_shape: Sequence[int], classes: int, features: int | None = None, match: str = "pool"
    ) -> SplitNetwork:
        """A network for this task, with initial weights drawn from torch's global generator.

        `features` asks for that many features instead of the network's own number, by pooling along the features
        (`match="pool"`, without parameters) or by a learned linear layer (`match="project"`).
        """
        check_sizes(classes, features)
        return self.maker(self.name, as_shape(input_shape), classes, features, check_match(match))


Models: TypeAlias = "str | nn.Module | Architecture | Callable[..., nn.Module] | Sequence[Models]"


Head: TypeAlias = str | Sequence[str | None] | Mapping[str, str] | None
"""The layer at which networks of the user's own are split: one for all, one for each, or by the networks' names."""


def resolve(models: Models, head: Head = None) -> list[Architecture]:
    """The architectures that a description names, in order.

    A description is a name ("resnet18", "resnet34+mlp256"), a group ("papers"), several with commas between them, the
    name of another library's ("timm:NAME"), the address of the user's own ("package.module:factory"), a network class,
    a function that returns a network, a network (copied for every build), or a list of all these. `head` names the
    layer at which networks of the user's own are split, instead of their last linear layer: one name for all, several
    (with commas between them, or a list) in the order of these networks, or a mapping from their names.
    """
    found = _distinct(_resolve(models))
    if not found:
        raise InputError("there are no networks to choose from: name at least one, for example 'cnn1'.")
    own = [a.name for a in found if isinstance(a.maker, FromFactory | FromInstance)]
    if head is not None and not own and any(isinstance(a.maker, FromLibrary) for a in found):
        raise InputError(
            f"head is {head!r}, but it is for networks of your own: those of libraries are split at their last layer, "
            "so leave it out, or write the network's address (torchvision.models:NAME)."
        )
    if head is not None and not own:
        names = [architecture.name for architecture in found]
        shown = f"{', '.join(names[:3])}{', …' if len(names) > 3 else ''}"
        known = f"heads of {shown} are" if len(names) > 1 else f"head of {shown} is"
        raise InputError(f"head is {head!r}, but the {known} known: leave it out.")
    heads = _heads(list(dict.fromkeys(own)), head)
    return [_with_head(architecture, heads.get(architecture.name)) for architecture in found]


def _with_head(architecture: Architecture, head: str | None) -> Architecture:
    """The architecture with its head named, if it is the user's own; polyfed's know their heads."""
    if head is None or not isinstance(architecture.maker, FromFactory | FromInstance):
        return architecture
    return replace(architecture, maker=replace(architecture.maker, head=head))


def _heads(own: list[str], head: Head) -> dict[str, str | None]:
    """The named head of each of the user's own networks."""
    if isinstance(head, Mapping):
        short = {name.rpartition(":")[2]: name for name in own}
        for name in head:
            if name not in own and name not in short:
                raise unknown_name("network in head", name, {*own, *short})
        return {short.get(name, name): layer for name, layer in head.items()}
    named = [part.strip() for part in head.split(",")] if isinstance(head, str) else list(head or [None])
    if len(named) == 1:
        named *= len(own)
    if len(named) != len(own) and own:
        raise InputError(
            f"head names {len(named)} layers, but there are {len(own)} networks of your own ({', '.join(own)}): give "
            "one name for all of them, or one for each, in their order."
        )
    return dict(zip(own, [layer or None for layer in named], strict=bool(own)))


def assign(
    architectures: Sequence[Architecture], clients: int, *, how: Assignment = "cycle", seed: int = 0
) -> list[Architecture]:
    """One architecture per client: in turn, or at random with equal chances."""
    if not architectures:
        raise InputError("there are no networks to assign: give at least one architecture.")
    if clients < 1:
        raise InputError(f"the number of clients must be at least 1, not {clients}.")
    if how == "cycle":
        return [architectures[client % len(architectures)] for client in range(clients)]
    if how == "random":
        choices = numpy_generator(seed, "architectures").integers(len(architectures), size=clients)
        return [architectures[choice] for choice in choices]
    raise unknown_name("way to assign networks", how, get_args(Assignment))


def parameter_count(module: nn.Module) -> int:
    """How many numbers a module learns; batch-norm statistics are not among them."""
    return sum(parameter.numel() for parameter in module.parameters())


def smallest(
    architectures: Sequence[Architecture],
    input_shape: Sequence[int],
    classes: int,
    features: int | None = None,
    match: str = "pool",
) -> Architecture:
    """The architecture with the fewest parameters on this task, the first of them if several have as few."""
    if not architectures:
        raise InputError("there are no networks to choose the smallest from: give at least one architecture.")
    distinct = list(dict.fromkeys(architectures))
    return min(distinct, key=lambda choice: _built_size(choice, as_shape(input_shape), classes, features, match))


def _built_size(
    architecture: Architecture, input_shape: tuple[int, ...], classes: int, features: int | None, match: str
) -> int:
    with torch.random.fork_rng(devices=[]):
        try:
            with torch.device("meta"):  # shapes without values: a large network costs nothing
                return parameter_count(architecture.build(input_shape, classes, features, match))
        except Exception:  # a user's network may need real values; whatever is truly wrong shows below
            return parameter_count(architecture.build(input_shape, classes, features, match))


def _resolve(models: object) -> list[Architecture]:
    if isinstance(models, Architecture):
        return [models]
    if isinstance(models, str):
        return [found for part in models.split(",") if part.strip() for found in _named(part.strip())]
    if isinstance(models, nn.Module):  # before callable(): a network can be called too
        return [Architecture(type(models).__name__, FromInstance(models))]
    if isinstance(models, Sequence):
        return [found for part in models for found in _resolve(part)]
    if callable(models):
        return [Architecture(factory_name(models), FromFactory(models))]
    kind = type(models).__name__
    raise InputError(
        f"a value of type {kind} does not describe networks: "
        "give a name, a network class, a function that returns a network, or a list of them."
    )


def _named(name: str) -> list[Architecture]:
    """The architectures of one name."""
    if is_library(name):
        maker = from_library(name)
        return [Architecture(maker.title, maker)]
    if ":" in name:
        found = _resolve(load_object(name))
        # One object keeps its address as its name, so that a run's record says where it came from.
        return [replace(found[0], name=name)] if len(found) == 1 else found
    given, name = name, name.lower()
    if name in GROUPS:
        return [member for part in GROUPS[name] for member in _named(part)]
    network, plus, head = name.partition("+")
    if network not in NETWORKS:
        problem = unknown_name("network", given.partition("+")[0], [*NETWORKS, *GROUPS])
        raise InputError(f"{str(problem)[:-1]}; one of your own is package.module:name.")
    if plus and head not in HEADS:
        raise unknown_name("head", head, HEADS)
    return [Architecture(name, FromCatalogue(network, head or None))]


def _distinct(architectures: list[Architecture]) -> list[Architecture]:
    """The same architectures, with a number after the name where different ones share it."""
    named: dict[str, Architecture] = {}
    result = []
    for architecture in architectures:
        number, name = 1, architecture.name
        while named.setdefault(name, architecture).maker != architecture.maker:
            number += 1
            name = f"{architecture.name}-{number}"
        result.append(replace(architecture, name=name))
    return result
