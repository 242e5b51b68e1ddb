"""Networks that the user brings: a class, a function, a ready network, or the name of one in a module."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import nn

from polyfed.errors import InputError, PolyfedError, first_line, user_place
from polyfed.models.layers import Match
from polyfed.models.split import SplitNetwork, split_network
from polyfed.shapes import TokenShape


@dataclass(frozen=True)
class FromFactory:
    """Calls a class or function for a new network and splits it.

    It is given whichever of these arguments its signature names: input_shape; in_channels or channels; classes,
    num_classes or n_classes; features or feature_size; for token ids, instead of channels, vocabulary or vocab_size,
    and padding or padding_idx.
    """

    factory: Callable[..., object]
    head: str | None = None
    """The layer that is the head; none: the last linear one."""

    def __call__(
        self, name: str, input_shape: tuple[int, ...], classes: int, features: int | None, match: Match
    ) -> SplitNetwork:
        network = call_factory(self.factory, name, input_shape, classes, features)
        return split_network(network, input_shape, classes, head=self.head, features=features, match=match, name=name)


@dataclass(frozen=True)
class FromInstance:
    """Copies a network that exists already, weights and all."""

    network: nn.Module
    head: str | None = None

    def __call__(
        self, name: str, input_shape: tuple[int, ...], classes: int, features: int | None, match: Match
    ) -> SplitNetwork:
        return split_network(
            self.network, input_shape, classes, head=self.head, features=features, match=match, name=name
        )


def call_factory(
    factory: Callable[..., object], name: str, input_shape: tuple[int, ...], classes: int, features: int | None = None
) -> nn.Module:
    """What a factory makes of a task, with the arguments that its signature asks for; it must be a network."""
    arguments = _arguments(factory, name, input_shape, classes, features)
    try:
        network = factory(**arguments)
    except PolyfedError:
        raise
    except Exception as error:
        given = ", ".join(f"{key}={value}" for key, value in arguments.items())
        raise InputError(
            f"{name}({given}) fails to build a network: {first_line(error)}{user_place(error)}."
        ) from error
    if not isinstance(network, nn.Module):
        kind = type(network).__name__
        raise InputError(f"{name} must return a network (a torch.nn.Module), but it returns a value of type {kind}.")
    return network


def factory_name(factory: Callable[..., object]) -> str:
    """What to call a factory in tables and errors: its own name."""
    if isinstance(factory, partial):
        return factory_name(factory.func)
    name = getattr(factory, "__name__", type(factory).__name__)
    return "factory" if name == "<lambda>" else name


def _arguments(
    factory: Callable[..., object], name: str, input_shape: tuple[int, ...], classes: int, features: int | None
) -> dict[str, object]:
    """The keyword arguments that a factory's signature asks for."""
    tokens = input_shape if isinstance(input_shape, TokenShape) else None
    offers: dict[tuple[str, ...], object] = {
        ("input_shape",): input_shape,
        ("in_channels", "channels"): input_shape[0] if input_shape and tokens is None else None,
        ("vocabulary", "vocab_size"): tokens.vocabulary if tokens is not None else None,
        ("padding", "padding_idx"): tokens.padding if tokens is not None else None,
        ("classes", "num_classes", "n_classes"): classes,
        ("features", "feature_size"): features,
    }
    parameters = _parameters(factory)
    keywords = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    arguments: dict[str, object] = {}
    for names, value in offers.items():
        accepted = [candidate for candidate in names if candidate in keywords]
        # The first name only: beside in_channels, "channels" is likely to be the network's own width.
        if accepted and value is not None:
            arguments[accepted[0]] = value
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    if takes_any and not keywords & {"classes", "num_classes", "n_classes"}:
        arguments["num_classes"] = classes  # torchvision's builders hide it behind **kwargs
    _check_complete(parameters, arguments, name)
    return arguments


def _parameters(factory: Callable[..., object]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(factory).parameters.values())
    except (TypeError, ValueError):  # some callables of extension modules have no signature
        return []


def _check_complete(parameters: list[inspect.Parameter], arguments: dict[str, object], name: str) -> None:
    for parameter in parameters:
        variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if variadic or parameter.name in arguments or parameter.default is not parameter.empty:
            continue
        if parameter.name in ("features", "feature_size"):
            raise InputError(
                f"{name} needs '{parameter.name}': set features to the number that the networks should have."
            )
        raise InputError(
            f"{name} needs an argument '{parameter.name}' that polyfed does not provide: give it a default, "
            "or use input_shape, in_channels (for token ids: vocabulary), classes or features."
        )
