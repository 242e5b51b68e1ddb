"""The real packages, where they are installed: what they keep can be read back, and nothing leaves the machine."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest

import polyfed
from polyfed.records.claim import read_claim
from tests import support
from tests.trackers.test_trackers import SETTINGS, StopAfter, notes, run


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever connects to another machine fails; what trackers set in the environment is forgotten afterwards."""
    connect = socket.socket.connect

    def refuse(self: socket.socket, address: Any) -> None:
        if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "::1", "localhost"):
            raise AssertionError(f"connects to {address}")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", refuse)
    for name in ("MLFLOW_DISABLE_TELEMETRY", "MLFLOW_ALLOW_FILE_STORE", "WANDB_ERROR_REPORTING"):
        monkeypatch.setenv(name, os.environ.get(name, "true"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def interrupted_and_resumed(out: Path, tracker: str) -> polyfed.Result:
    with pytest.raises(polyfed.RunError, match="stopped"):
        run(out, tracker=tracker, watcher=StopAfter(2), rounds=4)
    result = polyfed.resume(out, data=support.tiny_dataset(), models=SETTINGS["models"])
    assert not [note for note in notes(out) if "does not follow" in note]
    return result


def test_tensorboard_shows_a_resumed_run_as_one_curve(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = interrupted_and_resumed(tmp_path / "run", "tensorboard")
    shown = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    shown.Reload()
    curve = [(event.step, event.value) for event in shown.Scalars("accuracy_mean")]
    assert [step for step, _ in curve] == [1, 2, 3, 4]
    assert [value for _, value in curve] == pytest.approx(result.rounds["accuracy_mean"].tolist(), abs=1e-6)


def test_mlflow_has_a_resumed_run_once(tmp_path: Path) -> None:
    tracking = pytest.importorskip("mlflow.tracking")
    result = interrupted_and_resumed(tmp_path / "run", "mlflow")
    client = tracking.MlflowClient((tmp_path / "run" / "mlflow").as_uri())
    (kept,) = client.search_runs([client.get_experiment_by_name("polyfed").experiment_id])
    assert kept.info.status == "FINISHED" and kept.data.params["training.lr"] == "0.05"
    history = client.get_metric_history(kept.info.run_id, "accuracy_mean")
    assert sorted((m.step, m.value) for m in history) == [
        (row["round"], row["accuracy_mean"]) for _, row in result.rounds.iterrows()
    ]
    assert kept.data.metrics["summary.accuracy_final"] == result.summary["accuracy_final"]


def test_wandb_keeps_an_offline_run_under_the_run_s_id(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    run(tmp_path / "run", tracker="wandb")
    assert notes(tmp_path / "run") == []
    token = read_claim(tmp_path / "run")["id"]
    (file,) = (tmp_path / "run" / "wandb").glob(f"offline-run-*/run-{token}.wandb")
    assert file.stat().st_size > 0
