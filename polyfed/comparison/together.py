"""Which runs of a plan can train together, and how such a group is brought to its end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from polyfed.assemble import data_kept
from polyfed.config import Experiment
from polyfed.engines.together import Group
from polyfed.engines.together.fit import RATES
from polyfed.errors import InputError
from polyfed.methods import find_method
from polyfed.server.watcher import Watcher

MOST_RUNS, MOST_CLIENTS = 16, 256
"""How many runs, and how many participants of all of them, train together on a GPU unless the user says otherwise."""
Item = TypeVar("Item")


class Run(NamedTuple):
    """A run of a group: what it is, where it is kept, and who is told about it."""

    config: Experiment
    path: Path
    watcher: Watcher


def grouped(
    items: Sequence[Item], config_of: Callable[[Item], Experiment], together: int | None = None
) -> list[list[Item]]:
    """The items in groups whose runs can train together, in the order of each group's first item.

    `together` is the largest size of a group; None: as many as make sense on a GPU, and one on a CPU.
    """
    groups: dict[str, list[list[Item]]] = {}
    for number, item in enumerate(items):
        config = config_of(item)
        most = most_together(config, together)
        own = groups.setdefault(_kind(config) if most > 1 else f"item {number}", [[]])
        if own[-1] and len(own[-1]) >= most:
            own.append([])
        own[-1].append(item)
    return [group for own in groups.values() for group in own]


def _on_gpu(config: Experiment) -> bool:
    return config.device.startswith("cuda") or (config.device == "auto" and torch.cuda.is_available())


def most_together(config: Experiment, together: int | None = None) -> int:
    """How many runs with these settings train together: what the user says, or what makes sense."""
    stacks = config.engine == "vectorized" or (config.engine == "auto" and _on_gpu(config))
    if together is None:
        return max(1, min(MOST_RUNS, MOST_CLIENTS // config.participants)) if stacks and _on_gpu(config) else 1
    if together < 1:
        raise InputError(f"together is {together}, but must be a whole number at least 1.")
    if together > 1 and not stacks:
        raise InputError(
            f"together is {together}, but only the vectorized engine trains clients of several runs together: use "
            "--engine vectorized, or leave --together out."
        )
    return together


def _kind(config: Experiment) -> str:
    """What runs that may train together have in common: everything except their seeds and numbers."""
    content = config.model_dump(mode="json", exclude={"seed"})
    content["training"] = {name: value for name, value in content["training"].items() if name not in RATES}
    options = find_method(str(config.method["name"])).Config(**config.options).model_dump()
    content["method"] = (
        config.method["name"],
        {name: "a number" if isinstance(value, float) else value for name, value in options.items()},
    )
    return repr(content)


def finish_together(
    runs: Mapping[str, Run], finish: Callable[[Experiment, Path, Watcher], None]
) -> dict[str, BaseException]:
    """Bring runs to their end in one group; returns the errors of those that failed or were stopped, by name."""
    with data_kept():
        return Group().run({name: partial(finish, *run) for name, run in runs.items()})


class Named(Watcher):
    """Passes what happens in one run on to a watcher of several runs; notes start with the run's name."""

    def __init__(self, outer: Watcher, name: str, *, leads: bool) -> None:
        self._outer, self._name, self._leads = outer, name, leads

    @property
    def stop_requested(self) -> bool:  # type: ignore[override]
        return self._outer.stop_requested

    def on_start(self, config: Any, first_round: int) -> None:
        self._outer.folder = self.folder
        if self._leads:
            self._outer.on_start(config, first_round)

    def on_client(self, round: int, client: int) -> None:
        if self._leads:  # the others' clients finish at the same time
            self._outer.on_client(round, client)

    def on_round(self, round: int, row: Mapping[str, Any] | None) -> None:
        self._outer.on_round(round, None if row is None else {**row, "run": self._name})

    def on_note(self, note: str) -> None:
        self._outer.on_note(f"{self._name}: {note}")


def named_watchers(outer: Watcher, names: Sequence[str]) -> dict[str, Watcher]:
    """A watcher for each run of a group."""
    return {name: Named(outer, name, leads=name == names[0]) for name in names}
