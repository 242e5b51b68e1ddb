"""Who is told about a run while it runs, and can stop it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from polyfed.config import Experiment
from polyfed.errors import RunError


class Watcher:
    """Is told about a run's progress; the default shows nothing. The command line uses one to show progress."""

    stop_requested = False
    """Set it, and the run ends after the round in progress, with a checkpoint."""
    folder: Path | None = None
    """The run's folder, as soon as there is one."""

    def may_begin(self, runs: Sequence[str]) -> bool:
        """Where several runs are made: whether these, which train together, may begin now.

        If not, the next are asked about, and these again when others have ended. This may be asked in any thread, but
        in one at a time.
        """
        return True

    def on_start(self, config: Experiment, first_round: int) -> None: ...

    def on_client(self, round: int, client: int) -> None: ...

    def on_round(self, round: int, row: Mapping[str, Any] | None) -> None:
        """`row` is what rounds.csv gets, or None for a round without evaluation."""

    def on_note(self, note: str) -> None: ...

    def on_members(self, present: Mapping[int, str], absent: Mapping[int, str]) -> None:
        """Who is there and who is not, by client number, whenever that has changed; only where clients are real."""


class Interrupted(RunError):
    """The run was asked to stop and can be resumed."""

    exit_status = 130
    failures: Mapping[str, str] = MappingProxyType({})
    """Where several runs were stopped, why some of them had failed before, by name."""
