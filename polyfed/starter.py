"""An experiment's file to start from: every setting with its meaning and default, a few of them switched on."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from polyfed.config import GROUPS, Experiment
from polyfed.errors import InputError
from polyfed.methods import find_method
from polyfed.ranges import typed
from polyfed.records import disk
from polyfed.report.tables import described, fields

WIDTH = 80
ON = ("data", "clients", "models", "rounds", "seed")
"""The settings that most people change first."""
SUFFIXES = (".yaml", ".yml")


def write_starter(path: Path, method: str) -> None:
    """Write a new file; one that exists is left as it is."""
    if path.suffix not in SUFFIXES:
        raise InputError(f"'{path}' must end in .yaml, so that `polyfed run` knows it is a file.")
    content = starter(method)
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
        *_settings(find_method(method).Config, "  "),
    ]
    for setting in fields(Experiment):
        name = setting["name"]
        if name in GROUPS:
            lines += ["", *_comment(setting["description"], ""), f"{name}:", *_settings(GROUPS[name], "  ")]
        elif name != "method":
            lines += _setting(setting, "", on=name in ON)
    return "\n".join(lines) + "\n"


def _settings(model: type[BaseModel], indent: str) -> Iterator[str]:
    for setting in fields(model):
        yield from _setting(setting, indent)


def _setting(setting: Mapping[str, Any], indent: str, *, on: bool = False) -> list[str]:
    line = f"{indent}{'' if on else '#'}{setting['name']}: {typed(setting['default'])}"
    return ["", *_comment(described(setting), indent), line]


def _comment(words: str, indent: str) -> list[str]:
    start = f"{indent}# "
    return textwrap.wrap(words, WIDTH, initial_indent=start, subsequent_indent=start, break_on_hyphens=False)
