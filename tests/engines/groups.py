"""Runs of a group, side by side and alone, for the tests of both."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from polyfed import api
from polyfed.assemble import data_kept
from polyfed.engines import together
from polyfed.records import RunFolder
from polyfed.server.federation import Watcher
from tests import support

SMALL: dict[str, Any] = {
    "clients": 4, "rounds": 2, "batch_size": 8, "classes_per_client": 2, "engine": "vectorized", "device": "cpu",
    "training": {"lr": 0.05}, "split": "8:1:1",
}  # fmt: skip
DATA = support.tiny_dataset()
MODELS = [support.Wide, support.Narrow]


def start(path: Path, method: Any, settings: Mapping[str, Any], watcher: Watcher | None = None) -> None:
    """Run one experiment on the tiny data, or continue it."""
    models = settings.get("models", MODELS)
    if (path / "config.yaml").exists():
        api.resume(path, data=DATA, models=models, watcher=watcher, progress=False)
        return
    values = {**SMALL, **settings, "data": DATA, "models": models}
    api.run(method, **values, out=path, watcher=watcher, progress=False)


def run_both(tmp_path: Path, runs: Mapping[str, tuple[Any, Mapping[str, Any]]]) -> dict[str, BaseException]:
    """Every run alone under alone/, and all of them together under joint/."""
    for name, (method, settings) in runs.items():
        start(tmp_path / "alone" / name, method, settings)
    return run_joint(tmp_path, runs)


def run_joint(
    tmp_path: Path, runs: Mapping[str, tuple[Any, Mapping[str, Any]]], watchers: Mapping[str, Watcher] | None = None
) -> dict[str, BaseException]:
    known = watchers or {}
    works = {
        name: lambda name=name, run=run: start(tmp_path / "joint" / name, *run, known.get(name))
        for name, run in runs.items()
    }
    with data_kept():
        return together.Group().run(works)


def assert_same(tmp_path: Path, names: Any) -> None:
    """The records and the clients' models of each run are those of the run alone."""
    for name in names:
        one, two = (RunFolder.open(tmp_path / where / name) for where in ("alone", "joint"))
        for table in ("rounds", "evaluations", "clients"):
            frames = [getattr(each, table)().drop(columns="seconds", errors="ignore") for each in (two, one)]
            pd.testing.assert_frame_equal(*frames, check_exact=False, rtol=1e-4, atol=1e-5)
        for client in range(4):
            expected, found = one.model_state(client), two.model_state(client)
            for key, tensor in expected.items():
                if key != "received.version":  # FedKD's hash of weights, which the last bit changes
                    torch.testing.assert_close(found[key], tensor, rtol=1e-3, atol=1e-4)


def notes(tmp_path: Path, name: str) -> list[str]:
    events = RunFolder.open(tmp_path / "joint" / name).events()
    return [event["note"] for event in events if event["event"] == "note"]


def seeds(method: Any, count: int = 3, **settings: Any) -> dict[str, tuple[Any, dict[str, Any]]]:
    return {f"seed{seed}": (method, {**settings, "seed": seed}) for seed in range(count)}
