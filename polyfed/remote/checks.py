"""What comes from the other side is checked here before it is believed.

At the server a site's profile, scores and loss; at a site the rounds that it is asked for and what it receives.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from polyfed.engines.client.round import changes
from polyfed.errors import BadMessage, InputError
from polyfed.evaluation import Shares
from polyfed.message import Message, State, check_download_metadata, largest
from polyfed.methods.base import Method
from polyfed.methods.parts.network import ClientNetwork
from polyfed.methods.parts.tools import is_variance
from polyfed.models import SplitNetwork
from polyfed.population import Population
from polyfed.profile import Profile, network_profile
from polyfed.seeds import watched
from polyfed.shapes import kind_of

LARGEST_VALUE = 1e9
"""No weight, feature or logit of a network that works is larger."""
LONGEST_TEXT = 1000
LONGEST_RULE = 100
MOST_RULES = 20
_NEEDS = {"network": "network", "features": "number of features", "head": "head", "frozen": "frozen part of the head"}
"""What clients may have to have in common, in words."""


class _AnyExtractor(nn.Module):
    """Stands for a client's extractor where no client's network is known: features of the right number."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1)[:, :1].expand(len(x), self.size).contiguous()


def common_model(method: Method) -> SplitNetwork:
    """A network with what the method's clients have in common."""
    task = method.task
    if task.architecture is not None:
        return task.new_model()
    return SplitNetwork(_AnyExtractor(task.feature_size), task.new_head(), task.feature_size)


def rules_of(method: Method) -> tuple[str, ...]:
    """The names of the method's rules of prediction, from a prediction for one empty sample; empty if it fails."""
    try:
        with watched(), torch.no_grad():
            model = common_model(method)
            network = ClientNetwork(model, method.client_modules(model)).eval()
            shape = method.task.input_shape
            return tuple(method.predict(network, torch.zeros(1, *shape, dtype=kind_of(shape))))
    except Exception:  # a user's method may need more of a network than its features and its head
        return ()


def checked_round(value: Any, most: int) -> int:
    """The round that a server asks for: one of the run's."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise BadMessage(f"it was asked for round {str(value)[:20]}, but rounds are numbers from 1 to {most}.")
    return value


def check_download(own: Population, state: State, message: Message, round: int) -> None:
    """Raise `BadMessage` for a download that would spoil a client's state; the state does not change.

    A server may be hostile: what its download changes must exist, may change, has the shapes and types of what is
    there, and holds sensible values.
    """
    (client,), method = own.clients, own.method
    check_download_metadata(message.metadata, method.task.classes)
    try:
        changed = changes(own, client, state, message, round)
    except InputError as error:
        raise BadMessage(str(error)) from error
    except (KeyError, ValueError, RuntimeError, IndexError, TypeError) as error:
        raise BadMessage(f"the download is not one of {method.name}.") from error
    for name, tensor in changed.items():
        if tensor.dtype != state[name].dtype:
            raise BadMessage(f"the download's '{name}' is {tensor.dtype}, which is not the type of the client's.")
        size = float(largest([tensor])) if tensor.is_floating_point() else 0.0
        if not math.isfinite(size):
            raise BadMessage(f"the download's '{name}' holds values that are not finite.")
        if size > LARGEST_VALUE:
            raise BadMessage(f"the download's '{name}' holds values as large as {size:.3g}.")
        if is_variance(name) and bool((tensor < 0).any()):
            raise BadMessage(f"the download's '{name}' holds a negative variance.")


def readable(value: Any, most: int = LONGEST_TEXT) -> str:
    """A site's own words, as they may be shown: not long, and without anything that a terminal obeys.

    >>> readable("no \x1b[31mpower", 8)
    'no  [31m'
    """
    return "".join(each if each.isprintable() else " " for each in str(value)[:most])


def checked_loss(value: Any) -> float:
    """A training loss as it came; NaN if it is not told."""
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise BadMessage("its loss is not a finite number.")
    return float(value)


def checked_shares(values: Any, rules: tuple[str, ...]) -> Shares | None:
    """Scores as they came; None if they make no sense or are not by these rules. Without rules, any few are right."""
    try:
        found = Shares.from_dict(values)
    except (TypeError, ValueError):
        return None
    few = len(found.rules) <= MOST_RULES and all(len(rule) <= LONGEST_RULE for rule in found.rules)
    return found if found.rules == (rules or found.rules) and few else None


def checked_profile(name: str, values: Any, method: Method) -> Profile:
    """A profile as it came, reduced to what the method needs to know; raises `BadMessage` if it is no such thing."""
    if not isinstance(values, Mapping):
        raise BadMessage("its profile is not names with values.")
    told: dict[str, Any] = {}
    for key in ("network", "head", "frozen"):
        if values.get(key) is not None:
            told[key] = _text(key, values[key])
    if values.get("features") is not None:
        told["features"] = _number("features", values["features"])
    if method.announces_classes:
        told["classes"] = _classes(values.get("classes"), method.task.classes)
    return Profile(name, **told).told_for(method)


def unfit(method: Method, profile: Profile) -> str:
    """In what a profile differs from what the method's clients must have in common; empty if in nothing."""
    model = common_model(method)
    name = "" if method.task.architecture is None else method.task.architecture.name
    expected = network_profile(name, model).told_for(method)
    for need, what in _NEEDS.items():
        own, common = getattr(profile, need), getattr(expected, need)
        if own is None and common is not None:
            return f"it does not tell its {what}, which {method.name} needs"
        if own != common:
            return f"its {what} is {own}, but {common} in this federation"
    return ""


def _text(key: str, value: Any) -> str:
    if not isinstance(value, str) or len(value) > LONGEST_TEXT:
        raise BadMessage(f"the '{key}' of its profile is not a short text.")
    return readable(value)


def _number(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise BadMessage(f"the '{key}' of its profile is not a whole number above 0.")
    return value


def _classes(values: Any, classes: int) -> tuple[int, ...]:
    right = isinstance(values, list | tuple) and all(type(each) is int and 0 <= each < classes for each in values)
    if not right or list(values) != sorted(set(values)):
        raise BadMessage(f"the classes of its profile are not numbers from 0 to {classes - 1} in ascending order.")
    return tuple(values)
