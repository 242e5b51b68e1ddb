"""What is kept of a finished run: one line of JSON, a few kilobytes, in a file per entry of the campaign."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from pydantic import BaseModel, ConfigDict, Field, model_validator

from papers.campaign import FOLDER, Campaign, Run
from polyfed.comparison.outcomes import read_outcome
from polyfed.errors import InputError
from polyfed.records import RunFolder, disk
from polyfed.records.origin import shown
from polyfed.reproduce.measures import chosen_round, measured, series
from polyfed.reproduce.recipes import Compare

RESULTS = FOLDER / "results"
WHEN = ("last", "last-tenth", "best")
AVERAGES = ("mean", "weighted", "participants")
NOTE = 200
"""Characters of a note."""
Record = dict[str, Any]
Key = tuple[str, str, str, int]


class Form(BaseModel):
    """What the page needs of a record; there may be more."""

    model_config = ConfigDict(strict=True)

    entry: str
    setting: str
    method: str
    seed: int
    settings: dict[str, Any]
    polyfed: str
    commit: str | None
    torch: str
    machine: str
    date: str
    seconds: float
    accuracy: dict[str, dict[str, dict[str, float | None]]]
    own_best: float | None
    costs: dict[str, float]
    rounds: list[int] = Field(min_length=1)
    curves: dict[str, list[float | None]]

    @model_validator(mode="after")
    def _complete(self) -> Form:
        if self.accuracy.keys() != self.curves.keys() or any(len(c) != len(self.rounds) for c in self.curves.values()):
            raise ValueError("curves need a value for each round, for all rules of prediction")
        return self


def record_of(run: Run, path: Path, *, commit: str | None, margins: bool = False) -> Record:
    """The record of the finished run in a folder."""
    folder = RunFolder.open(path)
    evaluations, summary, clients = folder.evaluations(), folder.summary(), folder.clients()
    last = folder.starts()[-1]
    by_rule = {str(rule): rows for rule, rows in evaluations.groupby("rule", sort=False)}
    record = {
        "entry": run.entry, "setting": run.setting, "method": run.row, "seed": run.seed, "settings": run.told,
        "polyfed": last["polyfed"], "commit": commit, "torch": last["torch"], "machine": last["machine"],
        "engine": last["engine"], "date": last["date"], "starts": len(folder.starts()),
        "seconds": round(summary["seconds"], 1), "wall_seconds": _wall(path),
        "accuracy": {rule: _accuracies(rows) for rule, rows in by_rule.items()},
        "at_best_validation": {r: round(read_outcome(path, r).accuracy_at_best_validation, 5) for r in by_rule},
        "own_best": round(float(clients["accuracy_best"].mean()), 5),
        "costs": {
            **{f"{name}_per_round": round(summary[name] / summary["rounds"])
               for name in ("upload_bytes", "download_bytes", "upload_floats", "download_floats", "flops")},
            "floats_last_round": round(measured(path, Compare(what="floats"), None) * 1e6),
            "parameters_mean": round(float(clients["parameters"].mean())),
        },
        "rounds": sorted(int(round) for round in evaluations["round"].unique()),
        "curves": {rule: _of(rows, "test")["accuracy_mean"].round(4).tolist() for rule, rows in by_rule.items()},
        "clients": clients.sort_values("client")["accuracy_final"].round(4).tolist(),
        "notes": [in_a_line(note) for note in folder.notes()],
    }  # fmt: skip
    if margins:
        found = list(series("margins", path, Compare(), None))
        record["margins"] = [[round(row["client_margin"], 3), round(row["global_margin"], 3)] for row in found]
    plain: Record = json.loads(json.dumps(record), parse_constant=lambda _: None)  # JSON has no NaN
    return plain


def in_a_line(note: str) -> str:
    """
    >>> in_a_line("too\\n  long: " + "a" * 300)[:12], len(in_a_line("a" * 300))
    ('too long: aa', 200)
    """
    words = " ".join(note.split())
    return words if len(words) <= NOTE else words[: NOTE - 1] + "…"


def _of(rows: pd.DataFrame, part: str) -> pd.DataFrame:
    return rows[rows["part"] == part]


def _accuracies(rows: pd.DataFrame) -> dict[str, dict[str, float]]:
    """Accuracies by average and choice of round; those on validation samples too, to choose options by."""
    curves = {average: _of(rows, "test")[["round", f"accuracy_{average}"]] for average in AVERAGES}
    curves["validation"] = _of(rows, "validation")[["round", "accuracy_mean"]]
    return {
        average: {
            when: round(chosen_round(curve.set_axis(["round", "accuracy"], axis=1), Compare(round=when)), 5)
            for when in WHEN
        }
        for average, curve in curves.items()
        if len(curve)
    }


def _wall(path: Path) -> float:
    """Seconds from the first file to the last, with evaluation and loading, which `seconds` leaves out."""
    return round((path / "summary.json").stat().st_mtime - (path / "config.yaml").stat().st_mtime, 1)


def key_of(record: Record) -> Key:
    """Which run a record is of."""
    return record["entry"], record["setting"], record["method"], record["seed"]


def line_of(record: Record) -> str:
    return json.dumps(record, separators=(",", ":"), allow_nan=False) + "\n"


def append(record: Record, folder: Path) -> None:
    """Add a record to the file of its entry, without a line that was cut off there. It is on disk when this returns."""
    path = folder / f"{record['entry']}.jsonl"
    before = disk.read(path) or b""
    if not before.endswith(b"\n") and before:
        disk.write(path, before[: before.rfind(b"\n") + 1])
    disk.append(path, line_of(record).encode(), sync=True)


def read_records(folders: Iterable[Path]) -> dict[Key, Record]:
    """All records in the files of these folders; raises if two records of the same run differ.

    A last line without a line break was cut off while it was written, and is left out.
    """
    found: dict[Key, Record] = {}
    for path in (path for folder in folders for path in sorted(folder.glob("*.jsonl"))):
        for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
            if not line.endswith(b"\n"):
                continue
            record = parse(line, f"line {number} of '{path}'")
            if found.setdefault(key_of(record), record) != record:
                raise InputError(
                    f"'{path}' has another record of {_named(key_of(record))} than was read before: remove one."
                )
    return found


def parse(text: bytes, where: str) -> Record:
    """The record that a line holds; raises if it is not a whole one."""
    try:
        record: Record = json.loads(text.decode())
        Form.model_validate(record)
    except ValueError as error:
        raise InputError(f"{where} is no record: remove it, or fetch the file again.") from error
    return record


def check(records: Mapping[Key, Record], campaign: Campaign) -> None:
    """Raise if a record is of no run of the campaign, or of one with other settings."""
    planned = {run.key: run for run in campaign.runs()}
    for key, record in records.items():
        if key not in planned:
            raise InputError(f"{_named(key)} is recorded but not in the campaign: remove its line, or add it there.")
        check_settings(planned[key], record)


def check_settings(run: Run, record: Record) -> None:
    """Raise if a record is of a run with other settings, or of one that did not reach its last round.

    A setting that a record lacks is newer than the record, which has it at its default.
    """
    now, before = run.told, {**run.usual, **record["settings"]}
    for name in (name for name in {**now, **before} if now.get(name) != before.get(name)):
        raise InputError(
            f"{_named(run.key)} is recorded with {name} {shown(before.get(name))}, but the campaign has "
            f"{shown(now.get(name))}: name the former there, give the entry another name, or remove the record."
        )
    if (last := record["rounds"][-1]) != run.config.rounds:
        raise InputError(
            f"{_named(run.key)} is recorded up to round {last}, but the campaign has {run.config.rounds} rounds: "
            "remove the record."
        )


def _named(key: Key) -> str:
    return f"{key[2]} with seed {key[3]} in {key[0]}, {key[1]}"
