"""Runs that are stopped on purpose, and what must not depend on it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import polyfed
from polyfed import Watcher
from polyfed.server.federation import Interrupted
from tests import support


class StopAfterTwo(Watcher):
    def on_round(self, round: int, row: Mapping[str, Any] | None) -> None:
        self.stop_requested = round == 2


def tiny() -> dict[str, Any]:
    return {"data": support.tiny_dataset(), "models": [support.Wide, support.Narrow]}


def stopped(path: Path, **settings: Any) -> Path:
    """A run that stopped after round 2."""
    settings = {**support.DEFAULTS, "method": "fedproto", "rounds": 4, "checkpoint_every": 1, **settings}
    with pytest.raises(Interrupted):
        polyfed.run(**settings, **tiny(), out=path, watcher=StopAfterTwo())
    return path


def records(run: Path) -> dict[str, Any]:
    """Everything in a run's folder that must not depend on interruptions."""
    rounds = pd.read_csv(run / "rounds.csv", dtype=str).drop(columns="seconds")
    texts = {name: (run / name).read_text() for name in ("clients.csv", "evaluations.csv", "confusion.csv")}
    models = {path.name: path.read_bytes() for path in sorted((run / "models").iterdir())}
    return {"rounds": rounds.to_csv(), **texts, **models}


def notes(run: Path) -> list[str]:
    """What a run remarked on itself."""
    return [event["note"] for event in polyfed.RunFolder(run).events() if event["event"] == "note"]
