"""Small checks of what federation.yaml and site.yaml say: groups of settings, names, addresses, public keys."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from polyfed.config import one_sentence
from polyfed.errors import InputError
from polyfed.normal_form import with_nones
from polyfed.settings import Settings

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
CURVE = "nistp384"
KEY_TYPE = f"ecdsa-sha2-{CURVE}"
POINT = 97
"""Bytes of a point on that curve: a mark, and two coordinates of 48 bytes."""

S = TypeVar("S", bound=Settings)


def checked(model: type[S], values: Mapping[Any, Any], label: str = "{}") -> S:
    """The settings, or an error of one sentence; hyphens in names and the word none are accepted."""
    named = {str(name).replace("-", "_"): value for name, value in values.items()}
    try:
        return model(**with_nones(model, named))
    except ValidationError as error:
        raise one_sentence(error, model, label) from error


def located(settings: S, folder: Path) -> S:
    """The same with paths that begin in the folder of the file they came from."""
    paths = {name: value for name, value in settings if isinstance(value, Path)}
    return settings.model_copy(update={name: folder / path.expanduser() for name, path in paths.items()})


def checked_name(what: str, value: object) -> str:
    """A name that can be part of a file's name."""
    if not isinstance(value, str) or not NAME.fullmatch(value):
        missing = value is None or value == ""
        said = f"{what} is missing: give" if missing else f"{what} is {value!r}, but must be"
        raise InputError(f"{said} a name of at most 64 letters, digits, dots, hyphens and underscores.")
    return value


def host_and_port(place: str) -> tuple[str, int] | None:
    """The parts of HOST:PORT; an IPv6 address stands in brackets. None if it is not like that.

    >>> host_and_port("fl.example.org:9443"), host_and_port("[::]:80"), host_and_port("fl.example.org")
    (('fl.example.org', 9443), ('::', 80), None)
    """
    host, _, port = place.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not host or not port.isdecimal() or not 1 <= int(port) <= 65535 or (":" in host and not bracketed):
        return None
    return host.removeprefix("[").removesuffix("]"), int(port)


def checked_place(what: str, value: str) -> str:
    """An address with a port."""
    if host_and_port(value) is None:
        raise InputError(f"{what} is '{value}', but must be HOST:PORT, such as fl.example.org:9443.")
    return value


def public_key(line: object, what: str) -> str:
    """A public key as one line without its comment; raises for anything else."""
    parts = line.split() if isinstance(line, str) else []
    if len(parts) < 2 or parts[0] != KEY_TYPE or not _is_key(parts[1]):
        given = "missing" if line is None else f"'{str(line)[:40]}{'…' if len(str(line)) > 40 else ''}'"
        raise InputError(
            f"the public key of {what} is {given}, but must be the line that `polyfed server keys` prints, which "
            f"begins with {KEY_TYPE}."
        )
    return f"{parts[0]} {parts[1]}"


def _is_key(text: str) -> bool:
    """Whether it has the form of an OpenSSH key: its type, its curve and a point, each after its length."""
    try:
        content = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return False
    fields, position = [], 0
    while position < len(content):
        end = position + 4 + int.from_bytes(content[position : position + 4], "big")
        fields.append(content[position + 4 : end])
        position = end
    complete = position == len(content) and len(fields) == 3
    return complete and fields[:2] == [KEY_TYPE.encode(), CURVE.encode()] and len(fields[2]) == POINT
