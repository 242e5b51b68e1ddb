"""Settings in words: which values one accepts, and a value as a user would type it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args, get_origin

from pydantic import BaseModel

from polyfed.registry import Registry


def allowed(model: type[BaseModel], path: list[str], message: str) -> str:
    """What a field accepts, in words: its range or its choices."""
    for part in path[:-1]:
        nested = model.model_fields[part].annotation if part in model.model_fields else None
        if isinstance(nested, type) and issubclass(nested, BaseModel):
            model = nested
    described = describe_range(model, path[-1]) if path[-1] in model.model_fields else ""
    return f"must be {described}" if described else message[:1].lower() + message[1:]


def typed(value: object) -> str:
    """A value as a user would type it.

    >>> typed(None), typed(True), typed(0.1), typed("8:1:1")
    ('none', 'true', '0.1', '8:1:1')
    """
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def describe_range(model: type[BaseModel], name: str) -> str:
    """The values a field accepts, in words.

    >>> from polyfed.config import Experiment
    >>> describe_range(Experiment, "participation"), describe_range(Experiment, "assignment")
    ('a number greater than 0 and at most 1', 'one of cycle, random')
    """
    info = model.model_fields[name]
    for names in info.metadata:
        if isinstance(names, Registry):
            return f"one of {', '.join(names.choices)}, or package.module:Class"
    choices = [c for c in (info.annotation, *get_args(info.annotation)) if getattr(c, "__origin__", None) is Literal]
    if choices:
        return "one of " + ", ".join(str(choice) for choice in get_args(choices[0]))
    types = {info.annotation, *get_args(info.annotation)}
    if any(get_origin(kind) in (list, tuple) for kind in types) and str not in types:
        return ""  # its description says what belongs in the list
    kinds = {bool: "true or false", int: "a whole number", float: "a number", str: "text", Path: "a path"}
    noun = next((noun for kind, noun in kinds.items() if kind in types), "")
    words = {"gt": "greater than", "ge": "at least", "lt": "less than", "le": "at most"}
    limits = [
        f"{word} {getattr(limit, key):g}"
        for limit in info.metadata
        for key, word in words.items()
        if hasattr(limit, key)
    ]
    text = " ".join(part for part in (noun, " and ".join(limits)) if part)
    return f"{text}, or none" if text and type(None) in types else text
