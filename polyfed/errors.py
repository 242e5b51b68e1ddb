"""What can go wrong, as a small family. A message is one sentence that says what is wrong and what would be right."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class PolyfedError(Exception):
    """Base of every error that polyfed raises on purpose; the command line prints it as one sentence."""

    exit_status = 1


class InputError(PolyfedError):
    """The caller asked for something impossible: an unknown name, a value out of range, an unreadable file."""

    exit_status = 2


class RunError(PolyfedError):
    """A run that started could not go on."""


class BadMessage(PolyfedError):
    """A message has the wrong names, shapes, types or values; a reply that raises this is left out of its round."""


class DivergedError(RunError):
    """A training loss became NaN or infinite."""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> InputError:
    """The error for a name that does not exist, with the nearest name that does.

    >>> str(unknown_name("method", "fedprot", ["fedproto", "fedavg"]))
    "unknown method 'fedprot': did you mean 'fedproto'? Known: fedavg, fedproto."
    """
    names = sorted(known)
    near = get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    hint = f"did you mean '{near[0]}'? " if near else ""
    return InputError(f"unknown {kind} '{name}': {hint}Known: {', '.join(names)}.")
