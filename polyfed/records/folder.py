"""The run folder: what a person needs later, as plain files with stable names and columns.

config.yaml        the complete experiment, with versions; `polyfed run config.yaml` runs it again
rounds.csv         a row per evaluated round
evaluations.csv    a row per evaluated round, part (test, validation) and rule of prediction
clients.csv        a row per client, written at the end
summary.json       the run's result in a few numbers, written at the end
events.jsonl       everything noteworthy, a line each: where it ran, rounds with their costs, faults, fallbacks
checkpoint/        where to go on after an interruption; removed at the end
models/            client-0003.safetensors: each client's private model (`model.…`) and what the method keeps beside it
"""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd
from torch import Tensor

from polyfed.config import Experiment, read_experiment
from polyfed.errors import InputError
from polyfed.message import state_bytes
from polyfed.records import atomic
from polyfed.records.checkpoint import Checkpoints

ROUND_COLUMNS = (
    "round", "accuracy_mean", "accuracy_weighted", "accuracy_std", "accuracy_worst_decile", "loss_mean", "participants",
    "replies", "upload_floats", "download_floats", "upload_bytes", "download_bytes", "flops", "seconds",
)  # fmt: skip
EVALUATION_COLUMNS = (
    "round", "part", "rule", "accuracy_mean", "accuracy_weighted", "accuracy_std", "accuracy_worst_decile",
)  # fmt: skip
CLIENT_COLUMNS = (
    "client", "architecture", "parameters", "train_samples", "validation_samples", "test_samples", "classes",
    "accuracy_final", "accuracy_at_best_validation", "accuracy_best",
)  # fmt: skip


class RunFolder:
    """One run's folder, to write while it runs and to read afterwards."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = Checkpoints(path / "checkpoint")

    @classmethod
    def create(cls, path: Path, config: Experiment) -> RunFolder:
        """A new run's folder; one that already holds a run is not touched."""
        if (path / "config.yaml").exists():
            raise InputError(
                f"'{path}' already holds a run; go on with `polyfed resume {path}` or choose another folder (--out)."
            )
        try:
            path.mkdir(parents=True, exist_ok=True)
            folder = cls(path)
            folder.checkpoints.remove()  # of a run whose config is gone
            folder.keep_until(0)
            atomic.write(path / "config.yaml", config.to_yaml())
        except OSError as error:
            raise InputError(f"can't write to '{path}': {error.strerror}; choose another folder (--out).") from error
        return folder

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """An existing run's folder."""
        path = Path(path)
        if not (path / "config.yaml").is_file():
            raise InputError(f"'{path}' holds no run: it has no config.yaml.")
        return cls(path)

    @contextmanager
    def owned(self) -> Iterator[None]:
        """Inside, no other process can go on with this run. One that dies lets go of it."""
        with (self.path / "config.yaml").open("rb") as file:
            if sys.platform != "win32":
                import fcntl

                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError as error:
                    raise InputError(
                        f"another process is working on '{self.path}'; wait until it has ended, or stop it first."
                    ) from error
                except OSError:
                    pass  # a file system without locks
            yield

    # Writing ----------------------------------------------------------------------------------------------------

    def add_round(self, row: Mapping[str, Any]) -> None:
        """Add a row to rounds.csv."""
        self._append("rounds.csv", _csv([[row[name] for name in ROUND_COLUMNS]]))

    def add_evaluations(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add rows to evaluations.csv."""
        self._append("evaluations.csv", _csv([[row[name] for name in EVALUATION_COLUMNS] for row in rows]))

    def add_start(self, round: int, engine: str, machine: str) -> None:
        """Record that the run begins, or goes on after that round."""
        versions = {name: version(name) for name in ("polyfed", "torch")}
        self.add_event("start", round=round, date=date.today().isoformat(), engine=engine, machine=machine, **versions)

    def add_event(self, kind: str, **details: Any) -> None:
        """Add a line to events.jsonl."""
        self._append("events.jsonl", _json({"event": kind, **details}) + "\n")

    def write_clients(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write clients.csv."""
        content = _csv([list(CLIENT_COLUMNS), *([row[name] for name in CLIENT_COLUMNS] for row in rows)])
        atomic.write(self.path / "clients.csv", content)

    def write_model(self, client: int, state: Mapping[str, Tensor]) -> None:
        """Write a client's private model."""
        folder = self.path / "models"
        folder.mkdir(exist_ok=True)
        atomic.write(folder / f"client-{client:04d}.safetensors", state_bytes(state))

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json, the sign of a finished run."""
        atomic.write(self.path / "summary.json", _json(summary, indent=2) + "\n")

    def keep_until(self, round: int) -> None:
        """Drop all records of later rounds, and a last line that a kill left half written."""
        for name, columns in (("rounds.csv", ROUND_COLUMNS), ("evaluations.csv", EVALUATION_COLUMNS)):
            path = self.path / name
            rows = list(csv.reader(path.read_text().splitlines())) if path.exists() else []
            kept = [row for row in rows[1:] if len(row) == len(columns) and row[0].isdigit() and int(row[0]) <= round]
            atomic.write(path, _csv([list(columns), *kept]))
        events = [event for event in self.events() if event.get("round", 0) <= round]
        atomic.write(self.path / "events.jsonl", "".join(json.dumps(event) + "\n" for event in events))

    # Reading ----------------------------------------------------------------------------------------------------

    @property
    def config(self) -> Experiment:
        """The experiment of this run."""
        return read_experiment(self.path / "config.yaml")

    @property
    def finished(self) -> bool:
        """Whether the run has ended."""
        return (self.path / "summary.json").exists()

    def starts(self) -> list[dict[str, Any]]:
        """When and where the run began, and went on if it was interrupted."""
        return [event for event in self.events() if event["event"] == "start"]

    def origin(self) -> str:
        """The same in words: versions, machine and date."""
        places = (f"polyfed {e['polyfed']}, torch {e['torch']}, {e['machine']}, {e['date']}" for e in self.starts())
        return "; ".join(dict.fromkeys(places)) or "not recorded"

    def rounds(self) -> pd.DataFrame:
        """rounds.csv as a frame."""
        return self._frame("rounds.csv")

    def evaluations(self) -> pd.DataFrame:
        """evaluations.csv as a frame."""
        return self._frame("evaluations.csv")

    def clients(self) -> pd.DataFrame:
        """clients.csv as a frame."""
        return self._frame("clients.csv")

    def events(self) -> list[dict[str, Any]]:
        """The whole lines of events.jsonl."""
        path = self.path / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        events = []
        for line in lines:
            try:
                events.append(json.loads(line))
            except ValueError:  # a line that a kill left half written
                continue
        return events

    def summary(self) -> dict[str, Any]:
        """summary.json; a run that has not ended has none."""
        if not self.finished:
            raise InputError(f"the run in '{self.path}' is not finished; go on with `polyfed resume {self.path}`.")
        content: dict[str, Any] = json.loads((self.path / "summary.json").read_text())
        return content

    def _frame(self, name: str) -> pd.DataFrame:
        path = self.path / name
        if not path.exists():
            raise InputError(f"'{self.path}' has no {name} yet; go on with `polyfed resume {self.path}`.")
        return pd.read_csv(path)

    def _append(self, name: str, text: str) -> None:
        with (self.path / name).open("a", newline="") as file:
            file.write(text)


def _csv(rows: Iterable[Iterable[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def _json(values: Mapping[str, Any], indent: int | None = None) -> str:
    """JSON that every program reads: it has no NaN, so a number that does not exist is null."""
    return json.dumps({name: None if value != value else value for name, value in values.items()}, indent=indent)
