"""The settings of an experiment in one form, however a user wrote them: presets, shortcuts, hyphens, the word none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from pydantic import BaseModel

from polyfed.errors import InputError, unknown_name

_RELEASED_CODE = {
    "epochs": 10, "batch_size": 512, "lr": 0.01, "momentum": 0.9, "weight_decay": 1e-3, "clip": 50.0, "augment": True,
}  # fmt: skip
PRESETS: dict[str, dict[str, Any]] = {
    "paper": {
        "epochs": 1, "batch_size": 64, "lr": 0.01, "momentum": 0.0, "weight_decay": 0.0, "clip": None, "augment": False,
    },
    "released-code": _RELEASED_CODE,
    "batch-64": {**_RELEASED_CODE, "batch_size": 64},
}  # fmt: skip
"""Training settings by name."""

PRESET_TITLES: dict[str, str] = {
    "paper": "plain SGD, as the papers' texts say, with batch 64",
    "released-code": "as pFedES's code, batch 512: one step per epoch with 100 clients on CIFAR-100",
    "batch-64": "released-code with batch 64, where the published gains appear",
}

SHORTCUTS = ("epochs", "batch_size", "lr")
"""Training settings that may stand at the top level of an experiment."""


def normal_form(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same with underscores for hyphens, the method as a mapping, preset and shortcuts as part of the training."""
    flat = _underscored(values)
    method, preset = flat.get("method"), flat.pop("preset", None)
    if method is not None:
        flat["method"] = {"name": method} if isinstance(method, str) else method
    if isinstance(method, Mapping):
        flat["method"] = _underscored(method)
    nested, ray = _group(flat, "training", "lr: 0.1"), _group(flat, "ray", "hosts: 2")
    if preset is not None and preset not in PRESETS:
        raise unknown_name("preset", str(preset), PRESETS)
    shortcuts = {name: flat.pop(name) for name in SHORTCUTS if name in flat}
    given = {name: value for name, value in shortcuts.items() if value is not None}
    for name in given.keys() & nested.keys():
        if given[name] != nested[name]:
            raise InputError(
                f"{name} is {given[name]!r} at the top level and {nested[name]!r} under training: keep one of them."
            )
    return {**flat, "training": {**PRESETS.get(preset, {}), **nested, **given}, "ray": ray}


def _group(flat: dict[str, Any], name: str, example: str) -> dict[str, Any]:
    """Take a group of settings out."""
    values = flat.pop(name, None)
    if isinstance(values, BaseModel):
        values = values.model_dump()
    if not isinstance(values, Mapping | None):
        raise InputError(f"{name} is {values!r}, but must be names with values, such as '{example}'.")
    return _underscored(values or {})


def with_nones(model: type[BaseModel], values: Mapping[str, Any]) -> dict[str, Any]:
    """Read the word none as no value where a setting may have none; YAML itself has only null."""
    optional = {name for name, info in model.model_fields.items() if type(None) in get_args(info.annotation)}
    return {
        name: None if name in optional and isinstance(value, str) and value.lower() == "none" else value
        for name, value in values.items()
    }


def _underscored(values: Mapping[str, Any]) -> dict[str, Any]:
    return {str(name).replace("-", "_"): value for name, value in values.items()}
