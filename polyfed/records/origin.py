"""What a run started with: resuming it with anything else would give numbers that describe no experiment."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from polyfed.config import Experiment
from polyfed.errors import InputError

FREE = {
    "rounds", "engine", "device", "workers", "memory_budget", "ray", "checkpoint_every", "data_folder", "tracker",
}  # fmt: skip
"""Settings that may change when a run continues: they say how long and where it runs, not what comes out."""


def fixed_settings(config: Experiment) -> dict[str, Any]:
    """The settings that determine a run's numbers, by name: `seed`, `training.lr`, `method.weight`."""
    return {n: v for n, v in settings_by_name(config).items() if n.partition(".")[0] not in FREE}


def settings_by_name(config: Experiment) -> dict[str, Any]:
    """All settings, those in groups by their full names."""
    settings: dict[str, Any] = {}
    for name, value in config.model_dump(mode="json").items():
        if isinstance(value, Mapping):
            settings |= {f"{name}.{inner}": setting for inner, setting in value.items()}
        else:
            settings[name] = value
    return settings


def check_same(run: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise if something is not as it was when the run started, naming the first difference."""
    for name, value in before.items():
        if name in now and now[name] != value:
            raise InputError(
                f"{name} is {shown(now[name])}, but the run in '{run}' started with {shown(value)}: restore that, "
                "or start a new run."
            )


def check_same_names(run: Path, before: Collection[str], now: Collection[str]) -> None:
    """Raise if something that the run started with is gone, or something is new."""
    gone, come = ([name for name in names if name not in others] for names, others in ((before, now), (now, before)))
    if gone or come:
        found = " and ".join([*(f"{name} is gone" for name in gone), *(f"{name} is new" for name in come)])
        raise InputError(f"the run in '{run}' started with other things: {found}; restore them, or start a new run.")


def shown(value: Any) -> str:
    """A setting as a user would type it."""
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
