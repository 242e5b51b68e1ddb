"""The user's own objects by their address, `package.module:name`, and whether their code may be run."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from difflib import get_close_matches
from pathlib import Path

from polyfed.errors import InputError, first_line

PYTHON = "python:"
"""Marks data or networks that were passed as Python objects, in a run's record."""
LIBRARIES = ("torchvision", "timm", "hf")
"""What stands before a colon in names of other libraries' networks, which are no addresses of code."""
ADDRESS = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")

_allowed: ContextVar[Collection[str] | None] = ContextVar("allowed", default=None)
"""None: whatever settings name may be imported; otherwise only what is listed here."""


@contextmanager
def trusting(trust: bool, given: Collection[str] = ()) -> Iterator[None]:
    """Inside, code that settings name may be imported, or not: what a user typed is trusted, what files say is not.

    `given` are the settings (method, engine, proxy) that the user typed, whatever a file says beside them.
    """
    token = _allowed.set(None if trust else frozenset(given))
    try:
        yield
    finally:
        _allowed.reset(token)


def is_trusted(what: str) -> bool:
    """Whether the code that this setting names may be imported."""
    allowed = _allowed.get()
    return allowed is None or what in allowed


def load_trusted(address: str, what: str) -> object:
    """What an address names, if the user allows its code to be run."""
    if not is_trusted(what):
        raise InputError(
            f"the {what} '{address}' is code that would be run: if you trust it, say so with --trust (in Python with "
            "trust=True)."
        )
    return load_object(address)


def names_code(value: object) -> bool:
    """Whether a setting holds an address, alone or in a list separated by commas.

    >>> names_code("cnn5, nets:Small"), names_code("python:Small"), names_code("8:1:1"), names_code(None)
    (True, False, False, False)
    """
    if not isinstance(value, str) or value.startswith(PYTHON):
        return False
    return any(ADDRESS.fullmatch(part.strip()) and not is_library(part.strip()) for part in value.split(","))


def is_library(name: str) -> bool:
    """Whether a name is that of another library's network.

    >>> is_library("timm:resnet18"), is_library("nets:Small"), is_library("cnn5")
    (True, False, False)
    """
    library, colon, _ = name.partition(":")
    return bool(colon) and library in LIBRARIES


def needs_trust(name: str) -> bool:
    """Whether the name of a network or an engine makes polyfed run code, or open a file that could hold some.

    >>> needs_trust("nets:Small"), needs_trust("timm:resnet18"), needs_trust("timm:resnet18?weights=a.pt")
    (True, False, True)
    """
    if not is_library(name):
        return ":" in name
    weights = name.partition("?weights=")[2]
    return bool(weights) and not weights.endswith(".safetensors")


def importable(folder: Path) -> None:
    """Let modules in this folder be found, before others of the same names."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def load_object(address: str) -> object:
    """What "package.module:name" names; modules in the current directory are found too.

    The directory stays on the import path, because a factory may import its neighbours only when it is called.
    """
    module_name, _, attribute = address.partition(":")
    if not module_name or not attribute:
        raise InputError(f"'{address}' does not name an object: write package.module:name.")
    if "" not in sys.path:
        importable(Path.cwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise InputError(f"module '{module_name}' of '{address}' can't be imported: {first_line(error)}.") from error
    if not hasattr(module, attribute):
        near = get_close_matches(attribute, [name for name in vars(module) if not name.startswith("_")], n=1)
        hint = f"did you mean '{near[0]}'?" if near else "name a class or function that it defines."
        raise InputError(f"module '{module_name}' has no '{attribute}': {hint}")
    found: object = getattr(module, attribute)
    return found
