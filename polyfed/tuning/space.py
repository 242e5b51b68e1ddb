"""Where a search looks: for each setting its possible values, or a range of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from polyfed.comparison.plan import nested
from polyfed.config import GROUPS, Experiment, merged
from polyfed.config import experiment as checked
from polyfed.errors import InputError, unknown_name
from polyfed.methods import find_method
from polyfed.normal_form import normal_form
from polyfed.seeds import numpy_generator
from polyfed.yaml_text import parse_value, parse_values

Sampler: TypeAlias = Literal["tpe", "grid"]
COMMON: dict[str, tuple[Any, ...]] = {
    "training.lr": (0.01, 0.03, 0.1), "training.batch_size": (16, 64, 256), "training.epochs": (1, 10)
}  # fmt: skip
"""Searched for every method, Standalone included: a method must not win because only its own training was tuned."""


@dataclass(frozen=True)
class Choices:
    """A few values, tried as they are."""

    values: tuple[Any, ...]

    def __str__(self) -> str:
        return ", ".join(map(str, self.values))


@dataclass(frozen=True)
class Range:
    """All numbers between two ends, the ends included."""

    low: float
    high: float
    whole: bool = False

    @property
    def log(self) -> bool:
        """Whether ratios count rather than differences: from a factor of ten between the ends."""
        return self.low > 0 and self.high / self.low >= 10

    def __str__(self) -> str:
        return f"{self.low:g}..{self.high:g}"


Domain: TypeAlias = Choices | Range
Space: TypeAlias = dict[str, Domain]


def search_space(
    method: str, given: Mapping[str, Domain], sampler: Sampler, settings: Mapping[str, Any] | None = None
) -> Space:
    """The settings to search for a method: those given that it has, or else the common ones and its own grid.

    What the user has set is not searched.

    TPE treats three or more increasing numbers of a grid as the range that they span.
    """
    own = find_method(method)
    if given:
        return {
            name: domain
            for name, domain in given.items()
            if not name.startswith("method.") or name.removeprefix("method.") in own.Config.model_fields
        }
    values = {**COMMON, **{f"method.{name}": grid for name, grid in own.grid.items()}}
    fixed = set_by_user(settings or {})
    return {name: _domain(grid, sampler) for name, grid in values.items() if name not in fixed}


def set_by_user(settings: Mapping[str, Any]) -> set[str]:
    """The names of all settings that have a value, in full.

    >>> sorted(set_by_user({"lr": 0.1, "method": {"weight": 1}, "clients": 5}))
    ['clients', 'method.weight', 'training.lr']
    """
    found: set[str] = set()
    for name, value in normal_form(settings).items():
        found |= {f"{name}.{inner}" for inner in value} if isinstance(value, Mapping) else {name}
    return found


def _domain(values: Sequence[Any], sampler: Sampler) -> Domain:
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    if sampler == "grid" or not numbers or len(values) < 3 or list(values) != sorted(values):
        return Choices(tuple(values))
    return Range(values[0], values[-1], whole=all(isinstance(value, int) for value in values))


def as_space(search: Mapping[str, Any], sampler: Sampler) -> Space:
    """A space from Python: domains, lists of values, and what `--search` accepts.

    >>> as_space({"training.lr": "0.001..0.1", "method.weight": [0.1, 1]}, "tpe")
    {'training.lr': Range(low=0.001, high=0.1, whole=False), 'method.weight': Choices(values=(0.1, 1))}
    """
    space: Space = {}
    for name, domain in search.items():
        if isinstance(domain, str):
            space |= parse_search([f"{name}={domain}"], sampler)
        elif isinstance(domain, list | tuple) and domain:
            space[name] = Choices(tuple(domain))
        elif isinstance(domain, Choices | Range):
            space[name] = domain
        else:
            raise InputError(f"search has {domain!r} for {name}: give a list of values, or a range such as '0.1..1'.")
    return space


def parse_search(texts: Iterable[str], sampler: Sampler) -> Space:
    """`method.weight=0.1,1,10` and `training.lr=0.001..0.1` as a space.

    >>> parse_search(["training.lr=0.001..0.1", "method.weight=0.1,1"], "tpe")
    {'training.lr': Range(low=0.001, high=0.1, whole=False), 'method.weight': Choices(values=(0.1, 1))}
    """
    space: Space = {}
    for text in texts:
        name, separator, values = text.partition("=")
        name = name.strip().replace("-", "_")
        if not separator or not name or not values.strip():
            raise InputError(
                f"--search needs NAME=VALUE,VALUE or NAME=LOW..HIGH, such as training.lr=0.001..0.1, not '{text}'."
            )
        name = f"training.{name}" if name in ("lr", "batch_size", "epochs") else name
        if name in space:
            raise InputError(f"--search names {name} twice: give all its values at once.")
        space[name] = _parse_range(name, values) if ".." in values else _parse_choices(name, values)
        if sampler == "grid" and isinstance(space[name], Range):
            raise InputError(f"--search {name}={values} is a range, but a grid needs values: list them, or use TPE.")
    return space


def _parse_choices(name: str, text: str) -> Choices:
    values = tuple(parse_values(text))
    if len(set(map(repr, values))) != len(values):
        raise InputError(f"--search {name}={text} lists a value twice: keep one of them.")
    return Choices(values)


def _parse_range(name: str, text: str) -> Range:
    ends = [parse_value(part) for part in text.split("..")]
    if len(ends) != 2 or not all(isinstance(e, int | float) and not isinstance(e, bool) for e in ends):
        raise InputError(f"--search {name}={text} is not a range: write LOW..HIGH, such as 0.001..0.1.")
    low, high = ends
    if not low < high or not math.isfinite(high - low):
        raise InputError(f"--search {name}={text} has no values: the first number must be the smaller one.")
    return Range(low, high, whole=isinstance(low, int) and isinstance(high, int))


def check_space(methods: Sequence[str], given: Mapping[str, Domain], settings: Mapping[str, Any]) -> None:
    """Raise for a setting that can't be searched, and for a value that some method would refuse."""
    for name in given:
        group, _, inner = name.rpartition(".")
        if group == "method":
            known = {option for method in methods for option in find_method(method).Config.model_fields}
        else:
            known = set(GROUPS.get(group, Experiment).model_fields)
        if group not in ("", "method", *GROUPS) or inner not in known:
            raise unknown_name("setting", name, sorted(f"{group}.{each}" if group else each for each in known))
        if name in FIXED:
            raise InputError(f"{name} can't be searched: {FIXED[name]}")
        if name in set_by_user(settings):
            raise InputError(f"{name} is both set and searched: keep one of them.")
    for method in methods:
        for name, domain in search_space(method, given, "tpe", settings).items():
            for value in domain.values if isinstance(domain, Choices) else (domain.low, domain.high):
                applied(of_method(method, settings), {name: value})


def of_method(method: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with that method, and the options that were given for it."""
    return merged({**settings, "method": {"name": method}}, {"method": settings.get("method", {})})


FIXED = {
    "seed": "trials are averaged over seeds, which --seeds names.",
    "method": "name the methods as arguments.",
    "rounds": "every trial has the same number of rounds; set it with --rounds.",
    "evaluate": "trials that are scored at other moments can't be compared; make a search for each value.",
    "devices": "trials with other devices can't be compared; make a search for each value.",
    **dict.fromkeys(("data", "data_folder", "label", "client", "image"), "trials on other data can't be compared."),
    **dict.fromkeys(
        ("clients", "partition", "classes_per_client", "alpha", "min_samples", "split", "test_set"),
        "trials whose clients have other samples can't be compared; make a search for each value.",
    ),
}
"""What can't be searched, and why: mostly because the trial with the easiest task would win."""


def applied(settings: Mapping[str, Any], values: Mapping[str, Any]) -> Experiment:
    """The experiment with these values for searched settings."""
    return checked(**merged(settings, nested(values)))


def grid_points(space: Space, seed: int, method: str) -> list[dict[str, Any]]:
    """All combinations of a grid, in an order drawn at random, so that a few trials are spread over it."""
    points = [
        dict(zip(space, values, strict=True))
        for values in itertools.product(*(d.values for d in space.values() if isinstance(d, Choices)))
    ]
    order = numpy_generator(seed, "tune", "grid", method).permutation(len(points))
    return [points[place] for place in order]
