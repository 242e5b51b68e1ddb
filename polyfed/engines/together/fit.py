"""Whether the clients of two runs can train in one cohort, and which numbers differ between them.

Runs may differ in their seeds and in numbers of the training and the method. Everything else that a stacked loss could
depend on must be the same, because one method object computes the losses of all runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from math import inf
from typing import Any

from torch import nn

from polyfed.engines.stacked.chains import joins
from polyfed.engines.stacked.numbers import METHOD, RATE, TRAINING
from polyfed.methods.base import Method, Phase
from polyfed.population import Population
from polyfed.sameness import Pairs, differs_in, same

RATES = ("lr", "momentum", "weight_decay", "clip")
"""Numbers of the training that may differ between runs."""
STATE = (
    "_parameters", "_buffers", "_modules", "training", "_flat_weights", "_flat_weight_refs", "flatten_parameters"
)  # fmt: skip
"""Attributes of a module that hold its state, or what phases and engines set; recurrent layers list their weights."""


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


def _other_phases(first: Population, other: Population) -> str | None:
    def shape(phase: Phase) -> dict[str, Any]:
        known = {each.name: getattr(phase, each.name) for each in fields(phase)}
        return {n: v for n, v in known.items() if n not in ("loss", "draw", "lr")} | {"draws": phase.draw is not None}

    if type(first.method).phases_in is not Method.phases_in:
        return "its phases may change from round to round"
    ours, theirs = ([shape(phase) for phase in each.method.phases()] for each in (first, other))
    return None if ours == theirs else "its phases are others"


def alike(one: nn.Module, two: nn.Module) -> bool:
    """Whether two networks differ in nothing but their states; training mode, which phases set, does not count.

    >>> alike(nn.Linear(1, 2), nn.Linear(1, 2)), alike(nn.Dropout(0.1), nn.Dropout(0.2))
    (True, False)
    """
    ours, theirs = dict(one.named_modules()), dict(two.named_modules())
    if ours.keys() != theirs.keys():
        return False
    pairs = [(module, theirs[name]) for name, module in ours.items()]
    seen: Pairs = {(id(module), id(other)): (module, other) for module, other in pairs}
    return all(_kind(module) == _kind(other) and same(_plain(module), _plain(other), seen) for module, other in pairs)


def _kind(module: nn.Module) -> tuple[str, str]:
    """A module's class by name: parametrised ones have a class for each instance."""
    return type(module).__module__, type(module).__qualname__


def _plain(module: nn.Module) -> dict[str, Any]:
    """A module's attributes that its state does not contain; hooks without their numbers, which are never the same."""
    kept = {name: value for name, value in vars(module).items() if name not in STATE and not joins(value)}
    return {name: list(value.values()) if "_hooks" in name else value for name, value in kept.items()}


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
