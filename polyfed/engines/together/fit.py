"""Whether the clients of two runs can train in one cohort, and which numbers differ between them.

Runs may differ in their seeds and in numbers of the training and the method. Everything else that a stacked loss could
depend on must be the same, because one method object computes the losses of all runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import fields
from functools import partial
from math import inf
from typing import Any

import numpy as np
from torch import Tensor, nn

from polyfed.engines.stacked.numbers import METHOD, RATE, TRAINING, is_cached
from polyfed.methods.base import Method, Phase
from polyfed.methods.parts.network import ClientNetwork
from polyfed.population import Population

RATES = ("lr", "momentum", "weight_decay", "clip")
"""Numbers of the training that may differ between runs."""
PLAIN = (int, float, str, bool, tuple, type(None))


def misfit(first: Population, other: Population) -> str | None:
    """Why the clients of another run can't train in the cohorts of the first, or None."""
    if type(first.method) is not type(other.method):
        return f"its method is {other.method.name}, not {first.method.name}"
    if first.dataset.images is not other.dataset.images or first.dataset.labels is not other.dataset.labels:
        return "its samples are not the same tensors in memory (those of a table are scaled for each run)"
    if first.device != other.device:
        return f"it is on {other.device}, not on {first.device}"
    for name in ("mean", "std"):
        if getattr(first.dataset, name) != getattr(other.dataset, name):
            return f"its images are normalised with another {name}"
    common = first.looks.keys() & other.looks.keys()
    if any(first.looks[name] != other.looks[name] for name in common) or first.draws != other.draws:
        return "its networks are built differently"
    return _other_settings(first, other) or _other_method(first, other) or _other_phases(first, other)


def _other_settings(first: Population, other: Population) -> str | None:
    """The first setting that differs although it must not: only some numbers may."""
    for group, free in (("method", None), ("training", RATES)):
        ours, theirs = (_settings(people, group) for people in (first, other))
        for name, value in ours.items():
            numbers = isinstance(value, float) and isinstance(theirs[name], float)
            allowed = numbers if free is None else name in free
            if value != theirs[name] and not allowed:
                return f"{group}.{name} is {theirs[name]}, not {value}"
    return None


def _settings(people: Population, group: str) -> dict[str, Any]:
    settings = people.method.config if group == "method" else people.training
    return {name: getattr(settings, name) for name in type(settings).model_fields}


def _other_method(first: Population, other: Population) -> str | None:
    """What differs in the tasks that the methods were made for, or in the attributes that they keep."""
    for name in ("input_shape", "classes", "rounds", "feature_size", "features", "match"):
        if getattr(first.task, name) != getattr(other.task, name):
            return f"its task has another {name}"
    if first.task.auxiliary.name != other.task.auxiliary.name:
        return f"its auxiliary network is {other.task.auxiliary.name}, not {first.task.auxiliary.name}"
    differing = differs_in(first.method, other.method)
    return f"its method keeps another {differing}" if differing else None


def differs_in(one: Method, two: Method) -> str | None:
    """The first attribute beside their settings in which two methods differ, or None."""
    ours, theirs = map(_kept, (one, two))
    differing = [name for name in ours.keys() | theirs.keys() if not same(ours.get(name), theirs.get(name))]
    return min(differing, default=None)


def _kept(method: Method) -> dict[str, Any]:
    """A method's attributes, without its settings and what it computes when it is first needed."""
    own = ("config", "task", "training")
    return {n: v for n, v in vars(method).items() if n not in own and not is_cached(method, n)}


def _other_phases(first: Population, other: Population) -> str | None:
    def shape(phase: Phase) -> dict[str, Any]:
        known = {each.name: getattr(phase, each.name) for each in fields(phase)}
        return {n: v for n, v in known.items() if n not in ("loss", "draw", "lr")} | {"draws": phase.draw is not None}

    ours, theirs = ([shape(phase) for phase in each.method.phases()] for each in (first, other))
    return None if ours == theirs else "its phases are others"


def same(one: Any, two: Any, above: tuple[int, ...] = ()) -> bool:
    """Whether two objects hold the same values; what holds none (a function) is not compared.

    `above` are the objects that hold these, which are not looked at again.

    >>> same({"a": (1, [2])}, {"a": (1, [2])}), same([1], [2]), same(min, max)
    (True, False, True)
    """
    if type(one) is not type(two):
        return False
    if one is two or id(one) in above:
        return True
    if isinstance(one, Tensor | np.ndarray):
        return one.shape == two.shape and bool((one == two).all())
    if isinstance(one, (int, float, str, bytes, Set)):
        return bool(one == two)
    each = partial(same, above=(*above, id(one)))
    if isinstance(one, nn.Module):
        return str(one) == str(two) and each(one.state_dict(), two.state_dict())
    if isinstance(one, Mapping):
        return one.keys() == two.keys() and all(each(one[key], two[key]) for key in one)
    if isinstance(one, Sequence):
        return len(one) == len(two) and all(map(each, one, two))
    if callable(one) or not hasattr(one, "__dict__"):
        return True
    return each(vars(one), vars(two))


def look(network: ClientNetwork) -> list[tuple[str, str, dict[str, Any]]]:
    """A network's modules with their plain attributes, which its state does not contain.

    Training mode is left out, because phases set it.
    """

    def plain(module: nn.Module) -> dict[str, Any]:
        return {name: v for name, v in vars(module).items() if isinstance(v, PLAIN) and name != "training"}

    return [(name, type(module).__name__, plain(module)) for name, module in network.named_modules()]


def differing_numbers(runs: Sequence[Population]) -> dict[str, list[float]]:
    """The numbers that differ between runs, by the name under which steps find them: one value for each run."""
    found: dict[str, list[float]] = {}
    for group, prefix in (("method", METHOD), ("training", TRAINING)):
        settings = [_settings(people, group) for people in runs]
        for name in settings[0]:
            values = [own[name] for own in settings]
            if any(value != values[0] for value in values):
                found[prefix + name] = [inf if value is None else value for value in values]  # clip: none
    phases = [{phase.name: phase.lr or people.training.lr for phase in people.method.phases()} for people in runs]
    for name, rate in phases[0].items():
        if any(own[name] != rate for own in phases):
            found[RATE + name] = [own[name] for own in phases]
    return found
