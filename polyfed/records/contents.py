"""What can be read from a run's folder, finished or not: settings, records, results, models."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import load

from polyfed.config import Experiment, read_experiment
from polyfed.errors import InputError
from polyfed.message import State
from polyfed.records import disk
from polyfed.records.claim import own_command, read_claim, resume_command
from polyfed.records.ending import Ending
from polyfed.records.origin import check_same, check_same_names, fixed_settings
from polyfed.records.rows import MEMBER, event_of
from polyfed.records.states import Damaged, read_client

if TYPE_CHECKING:
    import pandas as pd

LOGS = ("rounds.csv", "evaluations.csv", "events.jsonl", "confusion.csv")
NEW_LOGS = {"confusion.csv"}
"""Runs that started with polyfed 0.1 do not have these."""
RESULTS = ("clients.csv", "summary.json")
CARD = "card.json"


class RunContents:
    """A run's folder, to read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._content = read_claim(path)
        """run.json"""
        self._parsed: tuple[Any, Ending] | None = None

    @property
    def config(self) -> Experiment:
        """The experiment of this run."""
        return self.read_config()

    def read_config(self, *, trust: bool = False) -> Experiment:
        """The experiment of this run; `trust` allows to import the code that it names."""
        return read_experiment(self.path / "config.yaml", trust=trust)

    @property
    def finished(self) -> bool:
        """Whether the run has ended."""
        return bool(self._content.get("finished"))

    @property
    def told(self) -> list[str]:
        """The members of a federation that know that the run has ended."""
        return [str(name) for name in self._content.get("told", [])]

    @property
    def planned_rounds(self) -> int | None:
        """How many rounds the run was to have when it was last started; None if that was not recorded."""
        rounds = self._content.get("rounds")
        return rounds if isinstance(rounds, int) else None

    @property
    def began_in(self) -> Path:
        """The folder from which the run was started; relative paths in its settings start there."""
        return Path(str(self._content.get("began_in", ".")))

    def check_resumable(self) -> None:
        """Raise if the run's clients are elsewhere, so that only its own command can continue it."""
        command = own_command(self._content)
        if command:
            raise InputError(f"the clients of the run in '{self.path}' are elsewhere: continue it with `{command}`.")

    def check_settings(self, config: Experiment) -> None:
        """Raise if these are not the settings that the run started with, as far as they determine its numbers."""
        check_same(self.path, self._content.get("settings", {}), fixed_settings(config))

    def check_facts(self, facts: Mapping[str, str], *, complete: bool = True) -> None:
        """Raise if data, partition or networks are not those that the run started with, or `complete` and not all."""
        known = self._content.get("facts", {})
        check_same(self.path, known, facts)
        if known and complete:
            check_same_names(self.path, known, facts)

    def starts(self) -> list[dict[str, Any]]:
        """When and where the run started, and continued if it was interrupted."""
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

    def confusion(self) -> pd.DataFrame:
        """confusion.csv as a frame; raises for a run that has recorded no such counts."""
        import pandas as pd

        has_file = not self.finished or "confusion.csv" in self._ending().records
        frame = self._frame("confusion.csv") if has_file else pd.DataFrame()
        if frame.empty:
            raise InputError(
                f"the run in '{self.path}' has recorded no confusion counts: they need test samples, are written at "
                "the end unless confusion is every, and neither with 'confusion: none' nor by clients elsewhere."
            )
        return frame

    def clients(self) -> pd.DataFrame:
        """clients.csv as a frame."""
        frame = self._frame("clients.csv")
        if MEMBER in frame:  # a name may look like a number or a missing value
            names = self._frame("clients.csv", usecols=[MEMBER], dtype=str, keep_default_na=False)
            frame[MEMBER] = names[MEMBER]
        return frame

    def events(self) -> list[dict[str, Any]]:
        """The complete lines of events.jsonl."""
        lines = (disk.read(self.path / "events.jsonl") or b"").split(b"\n")
        return [event for line in lines if (event := event_of(line)) is not None]

    def notes(self) -> list[str]:
        """What was noted about the run, not about clients, each once: such as that clients train one after another."""
        found = (e["note"] for e in self.events() if e["event"] == "note" and not e.keys() & {"client", "clients"})
        return list(dict.fromkeys(found))

    def summary(self) -> dict[str, Any]:
        """summary.json; a run that has not ended has none."""
        if not self.finished:
            raise InputError(
                f"the run in '{self.path}' is not finished; continue it with `{resume_command(self.path)}`."
            )
        stored = self._ending().results[1]
        if problem := stored.change(self.path):
            raise InputError(
                f"the result of the run in '{self.path}' can't be read: {problem}; restore it, or run it again from "
                "its config.yaml."
            )
        content: dict[str, Any] = json.loads(stored.read(self.path))
        return content

    def model_state(self, client: int) -> State:
        """A client's state at the end of the run."""
        self.summary()
        shards = self._ending().clients
        for shard in shards:
            if client in shard.clients:
                file = self.path / "models" / shard.file
                try:
                    return read_client(file, client)
                except Exception as error:  # safetensors raises its own errors
                    raise InputError(f"'{file}' is damaged or missing ({error}): restore it.") from error
        count = sum(len(shard.clients) for shard in shards)
        raise InputError(f"there is no client {client}; the run has {count} clients, counted from 0.")

    def server_state(self) -> State:
        """What the server remembered at the end of the run."""
        self.summary()
        try:
            return load(self._ending().server.read(self.path / "models"))
        except Damaged as error:
            raise InputError(f"the server's state in '{self.path / 'models'}' can't be read: {error}.") from error

    @property
    def has_models(self) -> bool:
        """Whether this finished run has its clients' models; clients elsewhere keep their own."""
        return bool(self._ending().clients)

    def card(self) -> bytes | None:
        """models/card.json of a finished run, as JSON; None if the run has written none."""
        self.summary()
        listed = self._ending().card
        try:
            return None if listed is None else listed.read(self.path / "models")
        except Damaged as error:
            raise InputError(f"the card in '{self.path / 'models'}' can't be read: {error}; restore it.") from error

    def _ending(self) -> Ending:
        listed = self._content.get("finished")
        if self._parsed is None or self._parsed[0] is not listed:
            try:
                self._parsed = listed, Ending.parse(listed, LOGS, RESULTS, NEW_LOGS)
            except Damaged as error:
                raise InputError(f"'{self.path / 'run.json'}' is damaged ({error}): restore the file.") from error
        return self._parsed[1]

    def _frame(self, name: str, **how: Any) -> pd.DataFrame:
        import pandas as pd  # here, because a run writes its tables without it

        path = self.path / name
        if not path.exists() and self.finished:
            raise InputError(f"'{path}' is missing: restore it, or run it again from its config.yaml.")
        if not path.exists():
            raise InputError(f"'{self.path}' has no {name} yet; continue the run with `{resume_command(self.path)}`.")
        content = path.read_bytes()
        try:
            # Another process may be writing the last line at this moment.
            frame: pd.DataFrame = pd.read_csv(io.BytesIO(content[: content.rfind(b"\n") + 1]), **how)
            return frame
        except (ValueError, pd.errors.ParserError, UnicodeDecodeError) as error:
            raise InputError(f"'{path}' is damaged ({' '.join(str(error).split())}).") from error
