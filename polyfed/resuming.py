"""Whether and how a run may continue: with which settings, with whose code, from which folder.

A run says when it continues, and what is different then; one that ends with an error says how to continue it.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from polyfed.addresses import PYTHON, needs_trust
from polyfed.assemble import named_data
from polyfed.compute import out_of_memory
from polyfed.config import Experiment, experiment, merged
from polyfed.data import Dataset, as_data, parse_address, with_given
from polyfed.devices import MIXES
from polyfed.errors import DivergedError, InputError, LostError, RunError
from polyfed.records import RunFolder
from polyfed.records.claim import resume_command
from polyfed.records.origin import fixed_settings, shown
from polyfed.registry import ENGINES
from polyfed.server.federation import Federation
from polyfed.server.unsaved import was_unsaved

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


def given_parts(config: Experiment, data: Any, partition: Any) -> Dataset | None:
    """The data of a run that continues, with who owns what, as far as they came from Python; None: they are named."""
    if (config.partition == "given") != (partition is not None):
        raise InputError(
            "the partition came from Python; pass it again: polyfed.resume(run, partition=…)."
            if partition is None
            else f"the run has the partition {config.partition}, so none can be passed: leave it out."
        )
    dataset = None if data is None else given_data(config, data)
    return dataset if partition is None else with_given(dataset or named_data(config), partition, config.seed)


def given_data(config: Experiment, data: Any) -> Dataset:
    """The data of a run that came from Python, passed again."""
    dataset = as_data(data, config.model_dump())
    if isinstance(dataset, str):
        raise InputError(f"data is '{dataset}', but the run names its data itself: leave data out.")
    return dataset


def record_start(
    federation: Federation, machine: str, config_before: Experiment | None = None, planned: int | None = None
) -> None:
    """Record where the run starts or continues, and what is different from before."""
    folder, start = federation.folder, federation.server.round
    earlier = folder.starts()
    folder.add_start(start, federation.engine.name, machine)
    if earlier and earlier[-1]["machine"] != machine:
        federation.note(f"until round {start} the run was on {earlier[-1]['machine']}; it continues on {machine}")
    now = folder.starts()[-1]["polyfed"]
    if earlier and earlier[-1]["polyfed"] != now:
        federation.note(
            f"until round {start} the run was made by polyfed {earlier[-1]['polyfed']}; it continues with {now}, whose "
            "numbers may differ"
        )
    if config_before is not None:
        for change in differences(config_before, federation.config):
            federation.note(f"from round {start + 1} on, {change}")
    if federation.progress.unsaved is not None:
        federation.note(was_unsaved(federation.progress.unsaved, start))
    if start and planned not in (None, federation.config.rounds) and federation.method.depends_on_rounds:
        federation.note(
            f"{federation.method.name} plans ahead for all rounds, so a run that had {federation.config.rounds} from "
            "the beginning would give other numbers"
        )


@contextmanager
def enough_memory(what: str) -> Iterator[None]:
    """Inside, running out of memory is an error in one sentence."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        raise RunError(
            f"{what} does not fit into memory: choose smaller batches (--batch-size), smaller networks or less data, "
            "or keep fewer clients' states in memory (--set memory_budget=4)."
        ) from error


@contextmanager
def explained(folder: RunFolder, config: Experiment) -> Iterator[None]:
    """Inside, an error that ends a run says how to continue it."""
    command = resume_command(folder.path)
    again = f"`{command}`"
    try:
        with enough_memory("the run"):
            yield
    except OSError as error:
        raise RunError(
            f"the run can't continue: {error.strerror or error}; when that is fixed, {again} continues from the last "
            "checkpoint."
        ) from error
    except LostError as error:
        raise LostError(f"{error}: {again} continues from the last checkpoint.") from error
    except DivergedError as error:
        rounds = folder.checkpoints.rounds()
        if not rounds:
            raise
        raise DivergedError(
            f"{error} To go back, use `{command} --from {rounds[0]} --set "
            f"training.lr={config.training.lr / 10:g}`; there are checkpoints of rounds {', '.join(map(str, rounds))}."
        ) from error
