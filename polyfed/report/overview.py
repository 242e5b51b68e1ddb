"""What a folder holds, read without data, networks or the user's code: a run or a comparison, and how far it is.

Folders may be unfinished, damaged or written by another version. Whatever can be read is shown; a folder that can't be
read is listed with the reason.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import pandas as pd
from yaml import YAMLError

from polyfed.errors import InputError, PolyfedError
from polyfed.records import RunFolder
from polyfed.records.claim import is_locked, resume_command
from polyfed.records.rows import MEMBER
from polyfed.yaml_text import parse_yaml

State = Literal["running", "interrupted", "unfinished", "finished", "damaged"]
"""Unfinished: where it can't be known whether a process is at work."""
DEPTH = 4
"""How many folders deep runs are looked for."""
WORST = 5


@dataclass(frozen=True)
class Overview:
    """A run, as far as its folder tells."""

    path: Path
    state: State
    problem: str = ""
    """Why it can't be read, or what is wrong with its records."""
    method: str | None = None
    data: str | None = None
    clients: int | None = None
    seed: int | None = None
    rounds: int | None = None
    """How many it is to have."""
    done: int = 0
    """How many it has had."""
    changed: float = math.nan
    """When something was last written, in seconds since 1970."""
    curve: Mapping[int, float] = field(default_factory=dict)
    """The mean accuracy on test samples in each evaluated round."""
    summary: Mapping[str, Any] = field(default_factory=dict)
    """The result, of a finished run."""
    worst: list[dict[str, Any]] = field(default_factory=list)
    """The clients with the lowest final accuracy, of a finished run."""
    notes: list[tuple[int, str]] = field(default_factory=list)
    """Rounds and remarks, each remark once."""
    origin: str = ""
    resume: str = ""
    """The command that continues it."""

    @property
    def accuracy(self) -> float | None:
        """The mean accuracy in the last evaluated round."""
        return self.curve[max(self.curve)] if self.curve else None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for programs."""
        return {
            "path": str(self.path),
            "kind": "run",
            "state": self.state,
            "problem": self.problem or None,
            "method": self.method,
            "data": self.data,
            "clients": self.clients,
            "seed": self.seed,
            "rounds": self.rounds,
            "rounds_done": self.done,
            "accuracy": self.accuracy,
            "changed": _date(self.changed),
        }

    def details(self) -> dict[str, Any]:
        """The same with the curve, the result, the worst clients and the notes."""
        return {
            **self.to_dict(),
            "curve": [{"round": number, "accuracy": value} for number, value in self.curve.items()],
            "summary": dict(self.summary) or None,
            "worst_clients": self.worst,
            "notes": [{"round": number, "note": note} for number, note in self.notes],
            "origin": self.origin,
        }


@dataclass(frozen=True)
class Group:
    """A comparison: how many of its runs are finished."""

    path: Path
    methods: list[str]
    data: str | None
    runs: int
    finished: int
    changed: float

    @property
    def state(self) -> State:
        """Running if a process works on it."""
        if self.finished == self.runs:
            return "finished"
        locked = is_locked(self.path)
        return "unfinished" if locked is None else "running" if locked else "interrupted"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for programs."""
        return {
            "path": str(self.path),
            "kind": "comparison",
            "state": self.state,
            "methods": self.methods,
            "data": self.data,
            "runs": self.runs,
            "runs_finished": self.finished,
            "changed": _date(self.changed),
        }


def read_run(path: Path) -> Overview:
    """The run in a folder; raises if there is none, or if it can't be recognised."""
    if is_comparison(path):
        raise InputError(f"'{path}' is a comparison: `polyfed list {path}` lists its runs.")
    folder = RunFolder.open(path)
    settings = _settings(path)
    problems: list[str] = []
    curve, events = _curve(folder, problems), folder.events()
    done = [event.get("round", 0) for event in events if event["event"] == "round"]
    summary, worst = _result(folder, problems)
    locked = is_locked(path)
    state: State = "unfinished" if locked is None else "running" if locked else "interrupted"
    method = settings.get("method")
    return Overview(
        path,
        "finished" if folder.finished else state,
        " ".join(problems),
        _text(method.get("name") if isinstance(method, Mapping) else method),
        _text(settings.get("data")),
        _number(settings.get("clients")),
        _number(settings.get("seed")),
        folder.planned_rounds or _number(settings.get("rounds")),
        max(done, default=0),
        _changed(path),
        curve,
        summary,
        worst,
        _notes(events),
        _origin(folder),
        resume_command(path),
    )


def find_runs(folder: Path) -> Iterator[Overview | Group]:
    """The runs and comparisons in a folder, in the order of names; a comparison's own runs if it is that folder."""
    if not folder.is_dir():
        raise InputError(f"'{folder}' is not a folder: name one that holds runs, or start a run with `polyfed run`.")
    if is_run(folder):
        yield _read(folder)
        return
    for path in _below(folder, DEPTH):
        yield _group(path) if is_comparison(path) else _read(path)


def is_run(path: Path) -> bool:
    """Whether a folder holds a run, or what is left of one."""
    return (path / "run.json").is_file() or ((path / "config.yaml").is_file() and (path / "rounds.csv").is_file())


def is_comparison(path: Path) -> bool:
    """Whether a folder holds a comparison."""
    return (path / "comparison.yaml").is_file()


def _read(path: Path) -> Overview:
    try:
        return read_run(path)
    except (PolyfedError, OSError) as error:
        return Overview(path, "damaged", str(error), changed=_changed(path))


def _below(folder: Path, depth: int) -> Iterator[Path]:
    try:
        inner = sorted(Path(entry.path) for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False))
    except OSError:  # someone else's
        return
    for path in inner:
        if is_run(path) or is_comparison(path):
            yield path
        elif depth > 1 and not path.name.startswith("."):
            yield from _below(path, depth - 1)


def _group(path: Path) -> Group:
    runs = [_read(run) for run in _below(path / "runs", 1)]
    plan = _yaml(path / "comparison.yaml")
    parts = {name: plan.get(name) for name in ("methods", "sweeps", "settings")}
    methods, sweeps, settings = (part if isinstance(part, Mapping) else {} for part in parts.values())
    seeds = plan.get("seeds")
    tried = [seeds, *sweeps.values()]
    planned = len(methods) * math.prod(len(values) if isinstance(values, list) else 0 for values in tried)
    return Group(
        path,
        [str(name) for name in methods],
        _text(settings.get("data")),
        max(planned, len(runs)),
        sum(run.state == "finished" for run in runs),
        max([_changed(path), *(run.changed for run in runs if run.changed == run.changed)]),
    )


def _curve(folder: RunFolder, problems: list[str]) -> dict[int, float]:
    try:
        rows = folder.rounds()[["round", "accuracy_mean"]].apply(pd.to_numeric, errors="coerce").dropna()
    except (InputError, KeyError) as error:
        problems.append(str(error) if isinstance(error, InputError) else "rounds.csv has other columns.")
        return {}
    return {int(number): float(value) for number, value in zip(rows["round"], rows["accuracy_mean"], strict=True)}


def _result(folder: RunFolder, problems: list[str]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    if not folder.finished:
        return {}, []
    try:
        summary = folder.summary()
        problems += [f"{problem}." for problem in folder.damage()]
        rows = folder.clients().sort_values("accuracy_final").dropna(subset=["accuracy_final"]).head(WORST)
    except (InputError, KeyError) as error:
        problems.append(str(error))
        return {}, []
    columns = ["client", "architecture", "train_samples", "test_samples", "accuracy_final"]
    columns += [name for name in ("balanced_accuracy_final", "largest_class", MEMBER) if name in rows]
    return summary, json.loads(rows[columns].to_json(orient="records", double_precision=15))


def _notes(events: list[dict[str, Any]]) -> list[tuple[int, str]]:
    found: dict[str, int] = {}
    for event in events:
        if event["event"] == "note":
            found.setdefault(str(event.get("note", "")), event.get("round", 0))
    return [(number, note) for note, number in found.items()]


def _origin(folder: RunFolder) -> str:
    try:
        return folder.origin()
    except KeyError:
        return "not recorded"


def _settings(path: Path) -> dict[str, Any]:
    """The settings as they are written, so that those of another version can be read too, and no code is imported."""
    return _yaml(path / "config.yaml")


def _yaml(path: Path) -> dict[str, Any]:
    try:
        content = parse_yaml(path.read_text())
    except (OSError, ValueError, YAMLError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _changed(path: Path) -> float:
    names = ("events.jsonl", "rounds.csv", "run.json", "comparison.yaml")
    times = [file.stat().st_mtime for name in names if (file := path / name).is_file()]
    return max(times, default=math.nan)


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _date(moment: float) -> str | None:
    return None if math.isnan(moment) else datetime.fromtimestamp(moment).astimezone().isoformat(timespec="seconds")


def age(moment: float) -> str:
    """How long ago that was, roughly.

    >>> age(time.time() - 5), age(time.time() - 200), age(time.time() - 7300), age(time.time() - 200_000)
    ('5 s', '3 min', '2 h', '2 d')
    """
    if math.isnan(moment):
        return "–"
    seconds = max(0.0, time.time() - moment)
    for limit, size, unit in ((90, 1, "s"), (90 * 60, 60, "min"), (36 * 3600, 3600, "h")):
        if seconds < limit:
            return f"{seconds // size:.0f} {unit}"
    return f"{seconds // 86400:.0f} d"
