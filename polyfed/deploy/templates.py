"""The files to start from: federation.yaml for whoever coordinates, site.yaml for every member."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polyfed.config import Experiment
from polyfed.deploy.checks import checked_name, public_key
from polyfed.deploy.groups import CommonTask, ServerSettings
from polyfed.deploy.member import SiteSettings
from polyfed.deploy.terms import AGREED
from polyfed.errors import InputError
from polyfed.methods import find_method
from polyfed.methods.base import Training
from polyfed.methods.parts.shared_network import SharedNetwork
from polyfed.starter import comment, settings, written

KEYS = Path("keys")
"""Where `polyfed server keys` puts keys, next to the terms."""


def federation_text(
    folder: Path, name: str, method: str, members: Sequence[str], classes: Sequence[str], input_shape: Sequence[int]
) -> str:
    """The content of federation.yaml. Public keys that are in the folder keys/ there already are filled in."""
    chosen = find_method(method)
    checked_name("name", name)
    lines = [
        *comment(
            "The terms of a federation: give this file to every member. There are no secrets in it. All members and "
            "the server must have the same, except for the group 'server'.",
            "",
        ),
        *comment(
            "A line that begins with '#' and a name has the default of that setting: remove the '#' to change it.", ""
        ),
        "",
        *comment("the run's name; a new run needs a new one", ""),
        f"name: {written(name)}",
        "",
        "method:",
        f"  name: {chosen.name}",
        *settings(chosen.Config, "  "),
        *settings(Experiment, "", {"rounds": 20, "seed": 0}, _plain_names()),
        "",
        "training:",
        *settings(Training, "  "),
        "",
        *comment("the problem that all members work on", ""),
        "task:",
        *settings(CommonTask, "  ", _task(chosen, classes, input_shape)),
        "",
        *comment(
            "everybody who takes part, with the line that `polyfed server keys FOLDER --site NAME` prints; the order "
            "must not change",
            "",
        ),
        "members:",
        *(f"  {written(member)}: {_key(folder, member)}" for member in _checked_members(members)),
        "",
        *comment("what only the server reads; members may leave this group out", ""),
        "server:",
        *settings(ServerSettings, "  ", {"listen": "0.0.0.0:9443", "folder": "run"}),
    ]
    return "\n".join(lines) + "\n"


def site_text(values: Mapping[str, Any]) -> str:
    """The content of site.yaml, with these values."""
    checked_name("name", values["name"])
    lines = [
        *comment("A site of a federation: this file belongs to one member and never leaves it.", ""),
        *comment(
            "A line that begins with '#' and a name has the default of that setting: remove the '#' to change it. "
            "Relative paths begin in the folder of this file.",
            "",
        ),
        *settings(SiteSettings, "", values),
    ]
    return "\n".join(lines) + "\n"


def _plain_names() -> list[str]:
    return [name for name in AGREED if name not in ("method", "training")]


def _task(method: type[Any], classes: Sequence[str], input_shape: Sequence[int]) -> dict[str, Any]:
    image = len(input_shape) == 3
    normalised = {"mean": [0.5] * input_shape[0], "std": [0.25] * input_shape[0]} if image else {}
    shared = issubclass(method, SharedNetwork)
    matched = shared or bool({"features", "head"} & set(method.requires))
    return {
        "classes": list(classes),
        "input_shape": list(input_shape),
        **normalised,
        **({"features": 64} if matched else {}),
        **({"auxiliary": "cnn5"} if shared else {}),
        **({"network": "cnn1"} if "network" in method.requires else {}),
    }


def _checked_members(members: Sequence[str]) -> list[str]:
    names = [checked_name("the name of a member", member) for member in members]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise InputError(f"'{repeated}' is twice among the members: give each its own name.")
    return names


def _key(folder: Path, member: str) -> str:
    path = folder / KEYS / f"{member}.pub"
    try:
        return public_key(path.read_text(), f"'{member}' in '{path}'")
    except FileNotFoundError:
        return "PUBLIC-KEY"
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"can't read '{path}': {getattr(error, 'strerror', None) or error}.") from error
