"""The run folder: what a person needs later, as plain files with stable names and columns.

config.yaml        the complete experiment, with versions; `polyfed run config.yaml` runs it again
run.json           what the run started with, and its files: how it is recognised, checked and resumed
rounds.csv         a row per evaluated round
evaluations.csv    a row per evaluated round, part (test, validation) and rule of prediction
confusion.csv      how many test samples of which class each client predicts as which, of some rounds or all
clients.csv        a row per client, written at the end
summary.json       the run's result in a few numbers, written at the end
events.jsonl       everything noteworthy, a line each: where it ran, rounds with their costs, faults, fallbacks
checkpoint/        where to continue after an interruption; removed at the end
models/            client-0003.safetensors: each client's private model (`model.…`) and what the method keeps beside it;
                   files of many clients if there are more than a few hundred; server.safetensors: the server's state;
                   card.json: what prediction needs besides these
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from safetensors.torch import load

from polyfed import confusion
from polyfed.config import Experiment
from polyfed.errors import InputError
from polyfed.message import State, state_bytes
from polyfed.records import disk
from polyfed.records.checkpoint import Checkpoints, Restored
from polyfed.records.claim import check_free, locked, new_id, read_claim, taken, writable
from polyfed.records.contents import CARD, LOGS, RESULTS, RunContents
from polyfed.records.ending import Ending
from polyfed.records.log import Extent, Log
from polyfed.records.origin import fixed_settings
from polyfed.records.rows import (
    CLIENT_COLUMNS,
    EVALUATION_COLUMNS,
    MEMBER,
    ROUND_COLUMNS,
    as_csv,
    as_json,
    event_of,
    started_with,
)
from polyfed.records.states import ClientStates, Damaged, States, write_file, write_models

NAMES = ("config.yaml", "run.json", *LOGS, *RESULTS, "checkpoint", "models")
"""Everything that a run writes into its folder."""


class RunFolder(RunContents):
    """One run's folder, to write while it runs and to read afterwards."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.checkpoints = Checkpoints(path / "checkpoint", str(self._content.get("id")))
        self._round_columns = started_with(path / "rounds.csv", ROUND_COLUMNS)
        self._rounds = self._log("rounds.csv", self._round_columns)
        self._evaluation_columns = started_with(path / "evaluations.csv", EVALUATION_COLUMNS)
        self._evaluations = self._log("evaluations.csv", self._evaluation_columns)
        self._events = self._log("events.jsonl", ())
        self._confusion = self._log("confusion.csv", confusion.COLUMNS)
        logs = (self._rounds, self._evaluations, self._events, self._confusion)
        self._logs = {log.path.name: log for log in logs}

    @classmethod
    def create(
        cls, path: Path, config: Experiment, facts: Mapping[str, str] | None = None, command: str = ""
    ) -> RunFolder:
        """A new run's folder. It must be new or empty: nothing that is already there is touched.

        `facts` say what the run starts with besides its settings; `resume` checks that they are still true. `command`
        continues the run if `polyfed resume` can't.
        """
        content = {
            "id": new_id(),
            "began_in": str(Path.cwd()),
            "rounds": config.rounds,
            "settings": fixed_settings(config),
            "facts": dict(facts or {}),
            **({"command": command} if command else {}),
        }
        setting = "server.folder" if command else "--out"
        with writable(path, setting):
            try:
                if not path.is_dir():
                    disk.make_folder(path)
                with locked(path):
                    disk.remove_unfinished(path, NAMES)
                    check_free(path, LOGS, setting)
                    disk.write_first(path / "run.json", as_json(content, indent=2) + "\n")
                    folder = cls(path)
                    for log in folder._logs.values():
                        log.create()
                    disk.write(path / "config.yaml", config.to_yaml())
            except FileExistsError as error:  # another process was faster, or it is a file
                raise taken(path, setting) from error
        return folder

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """An existing run's folder."""
        path = Path(path)
        for name in ("config.yaml", "run.json"):
            if not (path / name).is_file():
                raise InputError(f"'{path}' holds no run: it has no {name}.")
        folder = cls(path)
        if not folder._content:
            raise InputError(f"'{path / 'run.json'}' is damaged, so the run can't be recognised: restore the file.")
        return folder

    @contextmanager
    def owned(self) -> Iterator[None]:
        """Inside, no other process can work on this run. A process that dies releases it."""
        with locked(self.path):
            disk.check_no_links(self.path, NAMES)
            disk.remove_unfinished(self.path, NAMES)
            self._content = read_claim(self.path)  # another process may have finished the run meanwhile
            yield

    # Writing ----------------------------------------------------------------------------------------------------

    def add_round(self, row: Mapping[str, Any]) -> None:
        """Add a row to rounds.csv."""
        self._rounds.append(as_csv([[row[name] for name in self._round_columns]]))

    def add_evaluations(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add rows to evaluations.csv."""
        self._evaluations.append(as_csv([[row[name] for name in self._evaluation_columns] for row in rows]))

    def add_confusion(self, rows: Iterable[Iterable[int | str]]) -> None:
        """Add rows to confusion.csv."""
        self._confusion.append(as_csv(rows))

    def add_start(self, round: int, engine: str, machine: str) -> None:
        """Record that the run starts, or continues after that round."""
        versions = {name: version(name) for name in ("polyfed", "torch")}
        self.add_event("start", round=round, date=date.today().isoformat(), engine=engine, machine=machine, **versions)

    def add_event(self, kind: str, **details: Any) -> None:
        """Add a line to events.jsonl."""
        self._events.append(as_json({"event": kind, **details}) + "\n")

    def save(
        self,
        round: int,
        server: State,
        progress: Mapping[str, Any],
        states: States | None,
    ) -> None:
        """Write a checkpoint of a finished round, which relies on all records so far."""

        def records() -> dict[str, Extent]:
            return {name: log.sync() for name, log in self._logs.items()}

        if states is None:  # every client keeps its own state
            self.checkpoints.save(round, server, progress, records=records)
        else:
            self.checkpoints.save(round, server, progress, states.changed_clients(), states.get_state, records)
            states.mark_saved()
        if not self._content.get("checkpointed"):  # from now on, a run without checkpoints has lost them
            self._write_content(checkpointed=True)

    def restore(self, round: int | None = None, *, repair: bool = False) -> tuple[Restored | None, list[str]]:
        """The newest intact checkpoint or that of a round, with all records cut back to it, and what was wrong.

        None if there has been no checkpoint yet, or for round 0: the run starts from the beginning.
        """
        if round == 0:
            self._write_content(checkpointed=None)
            self.checkpoints.remove(LOGS)
            saved = None
        else:
            saved = self.checkpoints.restore(round, repair=repair)
            if saved is None and round is not None:
                known = ", ".join(str(r) for r in [0, *self.checkpoints.rounds()])
                raise InputError(f"there is no checkpoint of round {round} in '{self.path}'; there are {known}.")
            if saved is None and self._content.get("checkpointed"):
                raise InputError(
                    f"all checkpoints of '{self.path}' are gone: restore the folder 'checkpoint' if you have a "
                    "copy, or start the run again from the beginning with --from 0."
                )
        if saved is not None and round is not None:
            self.checkpoints.go_back(saved)
        notes = list(saved.notes) if saved else []
        for name, log in self._logs.items():
            extent = saved.records.get(name) if saved and not self._written_at_the_end(name) else None
            notes.append(log.cut(extent, saved.round if saved else 0))
        return saved, [note for note in notes if note]

    def finish(
        self,
        round: int,
        server: State,
        progress: Mapping[str, Any],
        clients: Iterable[Mapping[str, Any]],
        states: States | None,
        summary: Mapping[str, Any],
        card: Mapping[str, Any] | None = None,
    ) -> None:
        """Write the models, clients.csv and summary.json; then the run is finished, and its checkpoints are removed.

        `card` is what a reader of the models needs to predict with them.
        """
        rows = list(clients)
        models = self.path / "models"
        disk.make_folder(models)
        files = [] if states is None else write_models(models, [int(row["client"]) for row in rows], states.get_state)
        stored = write_file(models, "server.safetensors", state_bytes(server))
        kept = None if card is None else write_file(models, CARD, (as_json(card) + "\n").encode())
        disk.sync_folder(models)
        disk.remove_unfinished(models, (*(file.file for file in files), stored.file, CARD))
        columns = [*CLIENT_COLUMNS, *([MEMBER] if any(MEMBER in row for row in rows) else [])]
        table = as_csv([columns, *([row[name] for name in columns] for row in rows)])
        texts = zip(RESULTS, (table, as_json(summary, indent=2) + "\n"), strict=True)
        results = tuple(write_file(self.path, name, text.encode()) for name, text in texts)
        disk.sync_folder(self.path)
        records = {name: log.sync(copy=False) for name, log in self._logs.items()}
        end = Ending(round, dict(progress), stored, tuple(files), records, results, kept)
        self._write_content(finished=end.to_dict())
        self.tidy()

    def keep_told(self, names: Iterable[str]) -> None:
        """Remember which members of a federation know that the run has ended."""
        self._write_content(told=sorted(names))

    def tidy(self) -> None:
        """Remove the checkpoints of a finished run, which a kill may have left."""
        if self.finished:
            with suppress(OSError):  # someone else's, or on a read-only disk
                self.checkpoints.remove(LOGS)

    def reopen(self, *, repair: bool = False) -> list[str]:
        """Let a finished run continue: its end becomes a checkpoint. Returns what was wrong with it.

        Damaged records are refused, unless `repair` says to continue with the rows that are left.
        """
        end = self._ending()
        models = self.path / "models"
        try:
            for shard in end.clients:
                shard.read(models)
            server = load(end.server.read(models))
        except Damaged as error:
            raise InputError(
                f"the run in '{self.path}' can't continue: {error} in its folder 'models'; restore the file, or run it "
                "again from its config.yaml."
            ) from error
        damaged = [name for name, extent in end.records.items() if not self._logs[name].has(extent)]
        if damaged and not repair:
            raise InputError(
                f"the run in '{self.path}' can't continue: {' and '.join(damaged)} changed after it had ended; "
                "restore that, or continue with the rows that are left (--repair)."
            )
        disk.make_folder(self.checkpoints.folder)
        problems = [log.cut(end.records.get(name), end.round) for name, log in self._logs.items()]
        self.save(end.round, server, end.progress, ClientStates(models, end.clients))
        self._write_content(finished=None)
        for file in end.results:
            disk.remove(self.path / file.file)
        for name in [*(shard.file for shard in end.clients), end.server.file, CARD]:
            disk.remove(models / name)
        disk.remove_folder(models)
        return [problem for problem in problems if problem]

    def rewrite_config(self, config: Experiment) -> None:
        """Keep changed settings: more rounds, or others that the user asked for."""
        self._write_content(settings=fixed_settings(config))
        disk.write(self.path / "config.yaml", config.to_yaml())

    def plan(self, rounds: int) -> None:
        """Remember how many rounds the run is to have from now on."""
        self._write_content(rounds=rounds)

    def damage(self) -> list[str]:
        """What is wrong with the records of a finished run."""
        end = self._ending()
        found = [self._logs[name].damage(extent) for name, extent in end.records.items()]
        found += [file.change(self.path) for file in end.results]
        found += [end.card.change(self.path / "models")] if end.card else []
        return [problem for problem in found if problem]

    def _write_content(self, **changes: Any) -> None:
        content = {**self._content, **changes}
        disk.write(
            self.path / "run.json", as_json({n: v for n, v in content.items() if v is not None}, indent=2) + "\n"
        )
        self._content = content

    def _written_at_the_end(self, name: str) -> bool:
        """Whether a record is written at the end, from the run's progress; until then it has no rows."""
        return name == "confusion.csv" and self._content.get("settings", {}).get("confusion") != "every"

    def _log(self, name: str, columns: tuple[str, ...]) -> Log:
        def is_row(line: str, round: int) -> bool:
            row = next(csv.reader([line]), [])
            return len(row) == len(columns) and row[0].isdecimal() and int(row[0]) <= round

        def is_event(line: str, round: int) -> bool:
            event = event_of(line.encode())
            return event is not None and event.get("round", 0) <= round

        path, copy = self.path / name, self.path / "checkpoint" / name
        if columns:
            return Log(path, copy, as_csv([columns]), is_row)
        # Starts and notes are kept even if the run did not get to a checkpoint after them.
        return Log(path, copy, "", is_event, lambda line: json.loads(line)["event"] != "round")
