"""Whether and how a run may continue: with which settings, with whose code, from which folder."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from polyfed.addresses import PYTHON, needs_trust
from polyfed.assemble import named_data
from polyfed.config import Experiment, experiment, merged
from polyfed.data import Dataset, as_data, parse_address, with_given
from polyfed.devices import MIXES
from polyfed.errors import InputError
from polyfed.records.origin import fixed_settings, shown
from polyfed.registry import ENGINES

CHANGEABLE = ("training.", "method.")
"""Settings that may change during a run if the user says so; others would make it another federation."""


def changed_settings(config: Experiment, rounds: int | None, changes: Mapping[str, Any]) -> Experiment:
    """The experiment with more rounds and other settings; raises for one that can't change in the middle of a run."""
    wanted = merged(config.model_dump(), {**changes, **({} if rounds is None else {"rounds": rounds})})
    changed = experiment(**wanted)
    before, after = fixed_settings(config), fixed_settings(changed)
    for name in after:
        fixed = name == "method.name" or not name.startswith(CHANGEABLE)
        if fixed and before.get(name) != after[name]:
            raise InputError(
                f"{name} can't change in the middle of a run: start a new one. Only settings of training and of the "
                "method, rounds, engine and device can."
            )
    return changed


def differences(before: Experiment, after: Experiment) -> list[str]:
    """Which settings that determine numbers are different, in words."""
    old, new = fixed_settings(before), fixed_settings(after)
    return [f"{name} is {shown(new[name])}, not {shown(old.get(name))}" for name in new if new[name] != old.get(name)]


def check_trusted(config: Experiment, source: Path, *, trust: bool, given: Collection[str] = ()) -> None:
    """Raise if a file's settings name code to import and the user has not allowed it, or an engine that is not there.

    `given`: which settings come from the user, not from the file.
    """
    models = [] if config.models.startswith(PYTHON) else config.models.split(",")
    named = {"models": models, "auxiliary": [config.auxiliary or ""], "engine": [config.engine]}
    code = [
        name.strip()
        for what, names in named.items()
        if what not in given
        for name in names
        if needs_trust(name.strip())
    ]
    if code and not trust:
        raise InputError(
            f"'{source}' names code that would be run, '{code[0]}': if you trust it, say so with --trust (in Python "
            "with trust=True)."
        )
    if config.engine not in ENGINES.reserved:
        ENGINES.find(config.engine)


def located(config: Experiment, began_in: Path) -> Experiment:
    """The experiment with relative paths resolved from where the run started, if they do not exist here."""
    changes: dict[str, Any] = {}
    own = parse_address(config.data)
    if own is not None:
        changes["data"] = own.moved(began_in).text
    table = Path(config.devices or "")
    if config.devices not in (None, *MIXES) and not table.exists() and (began_in / table).exists():
        changes["devices"] = str(began_in / table)
    folder = config.data_folder or Path(os.environ.get("POLYFED_DATA", "data"))
    if not folder.exists() and (began_in / folder).exists():
        changes["data_folder"] = began_in / folder
    return config.model_copy(update=changes)


def given_data(config: Experiment, data: Any, partition: Any) -> Dataset | None:
    """The data of a run that continues, as far as they came from Python; None: they are named."""
    if (config.partition == "given") != (partition is not None):
        raise InputError(
            "the partition came from Python; pass it again: polyfed.resume(run, partition=…)."
            if partition is None
            else f"the run has the partition {config.partition}, so none can be passed: leave it out."
        )
    if data is not None:
        data = as_data(data, config.model_dump())
        if isinstance(data, str):
            raise InputError(f"data is '{data}', but the run names its data itself: leave data out.")
    if partition is None:
        return data  # type: ignore[no-any-return]
    return with_given(data or named_data(config), partition, config.seed)
