"""An experiment's file to start from: every setting with its meaning and default, a few of them switched on."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel

from polyfed.config import GROUPS, Experiment
from polyfed.errors import InputError
from polyfed.methods import find_method
from polyfed.ranges import typed
from polyfed.records import disk
from polyfed.report.tables import described, fields
from polyfed.yaml_text import parse_value

WIDTH = 80
ON = ("data", "clients", "models", "rounds", "seed")
"""The settings that most people change first."""
SUFFIXES = (".yaml", ".yml")


def write_starter(path: Path, method: str) -> None:
    """Write a new file; one that exists is left as it is."""
    if path.suffix not in SUFFIXES:
        raise InputError(f"'{path}' must end in .yaml, so that `polyfed run` knows it is a file.")
    write_new(path, starter(method))


def write_new(path: Path, content: str) -> None:
    """Write a file that does not exist yet."""
    try:
        disk.write_first(path, content)
    except FileExistsError as error:
        raise InputError(f"'{path}' exists, and init overwrites nothing: choose another name.") from error
    except OSError as error:
        raise InputError(f"can't write '{path}': {error.strerror or error}.") from error


def starter(method: str) -> str:
    """The content of the file."""
    lines = [
        "# An experiment of polyfed: `polyfed run` runs this file as it is.",
        "# A line that begins with '#' and a name has the default of that setting:",
        "# remove the '#' to change it. `polyfed methods` lists the methods.",
        "",
        "method:",
        f"  name: {method}",
        *settings(find_method(method).Config, "  "),
    ]
    for setting in fields(Experiment):
        name = setting["name"]
        if name in GROUPS:
            lines += ["", *comment(setting["description"], ""), f"{name}:", *settings(GROUPS[name], "  ")]
        elif name != "method":
            lines += _setting(setting, "", on=name in ON)
    return "\n".join(lines) + "\n"


def settings(
    model: type[BaseModel], indent: str, on: Mapping[str, Any] = MappingProxyType({}), names: Collection[str] = ()
) -> Iterator[str]:
    """Lines for the settings of a group; those in `on` have the value given there, the others are comments.

    `names`: only these; empty: all.
    """
    for setting in fields(model):
        name = setting["name"]
        if name in on:
            yield from _setting({**setting, "default": on[name]}, indent, on=True)
        elif not names or name in names:
            yield from _setting(setting, indent)


def _setting(setting: Mapping[str, Any], indent: str, *, on: bool = False) -> list[str]:
    line = f"{indent}{'' if on else '#'}{setting['name']}: {written(setting['default'])}"
    return ["", *comment(described(setting), indent), line]


def written(value: object) -> str:
    """A value as a user would write it in a YAML file.

    >>> written(("cat", "dog")), written("8:1:1"), written("no"), written(None)
    ('[cat, dog]', '8:1:1', "'no'", 'none')
    """
    if isinstance(value, tuple | list):
        return f"[{', '.join(written(each) for each in value)}]"
    text = typed(value)
    return text if not isinstance(value, str) or parse_value(text) == value else f"'{text}'"


def comment(words: str, indent: str) -> list[str]:
    """Lines of a comment."""
    start = f"{indent}# "
    return textwrap.wrap(words, WIDTH, initial_indent=start, subsequent_indent=start, break_on_hyphens=False)
