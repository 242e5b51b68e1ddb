"""Trackers get every number once, continue after an interruption, and never change or end a run."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import polyfed
from polyfed.errors import InputError
from polyfed.records import RunFolder
from polyfed.records.claim import read_claim
from polyfed.trackers import TRACKERS, fed
from polyfed.trackers.base import About
from polyfed.trackers.mlflow import store_of
from tests import support
from tests.trackers.fakes import Fakes, install

SETTINGS: dict[str, Any] = {"models": [support.Wide, support.Narrow], "clients": 2, "rounds": 3, "device": "cpu"}


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Fakes:
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "")  # so that what trackers set is forgotten after the test
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return install(monkeypatch)


def run(out: Path, **settings: Any) -> polyfed.Result:
    return polyfed.run("standalone", data=support.tiny_dataset(), out=out, **{**SETTINGS, **settings})


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    """The rounds of the same run without a tracker."""
    return run(tmp_path_factory.mktemp("plain") / "run").rounds.drop(columns="seconds")


def notes(out: Path) -> list[str]:
    return [event["note"] for event in RunFolder.open(out).events() if event["event"] == "note"]


class StopAfter(polyfed.Watcher):
    def __init__(self, round: int) -> None:
        self.round = round

    def on_round(self, round: int, row: Any) -> None:
        self.stop_requested = round == self.round


@pytest.mark.parametrize("name", TRACKERS)
def test_a_tracker_gets_every_number_of_every_evaluated_round_once(tmp_path: Path, fakes: Fakes, name: str) -> None:
    """Rounds 2 and 3 are evaluated: every second, and the last."""
    result = run(tmp_path / "run", tracker=name, eval_every=2)
    logged = [(step, numbers) for step, numbers in fakes.of(name, "log") if not any("summary." in n for n in numbers)]
    for _, row in result.rounds.dropna(axis="columns").iterrows():  # AUC needs two classes
        numbers = [numbers for step, numbers in logged if step == row["round"]]
        together = {column: value for part in numbers for column, value in part.items()}
        assert sum(len(part) for part in numbers) == len(together) == len(row) - 1
        assert together == pytest.approx(dict(row.drop("round")), abs=1e-12)
    assert fakes.rounds(name) == [2, 3]
    assert len(fakes.of(name, "start")) == len(fakes.of(name, "close")) == 1
    assert notes(tmp_path / "run") == []


def test_each_keeps_settings_and_result_in_its_own_way(tmp_path: Path, fakes: Fakes) -> None:
    summary = run(tmp_path / "run", tracker="tensorboard,mlflow,wandb").summary
    token = read_claim(tmp_path / "run")["id"]
    (started,) = fakes.of("wandb", "start")
    assert (started["mode"], started["id"], started["resume"], started["name"]) == ("offline", token, "allow", "run")
    assert started["dir"] == str(tmp_path / "run")
    assert started["config"]["training.lr"] == 0.05 and started["config"]["method.name"] == "standalone"
    ((code, kept),) = fakes.of("wandb", "close")
    assert (code, kept["accuracy_final"], kept["rounds"]) == (0, summary["accuracy_final"], 3)
    assert fakes.of("mlflow", "start") == [(tmp_path / "run" / "mlflow").as_uri()]
    assert fakes.of("mlflow", "settings")[0]["clients"] == "2"
    step, numbers = fakes.of("mlflow", "log")[-1]
    assert (step, numbers["summary.accuracy_final"]) == (3, summary["accuracy_final"])
    assert fakes.of("mlflow", "close") == [("run0", "FINISHED")]
    assert fakes.of("tensorboard", "start") == [(str(tmp_path / "run" / "tensorboard"), 1)]
    assert "    seed: 0\n" in fakes.of("tensorboard", "settings")[0]
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true" and os.environ["WANDB_ERROR_REPORTING"] == "false"


def test_a_resumed_run_continues_the_same_tracker_run(tmp_path: Path, fakes: Fakes) -> None:
    with pytest.raises(polyfed.RunError, match="stopped after round 2"):
        run(tmp_path / "run", tracker="tensorboard,mlflow,wandb", watcher=StopAfter(2))
    assert fakes.of("mlflow", "close") == [("run0", "KILLED")] and fakes.of("wandb", "close")[0][0] == 130
    polyfed.resume(tmp_path / "run", data=support.tiny_dataset(), models=SETTINGS["models"])
    assert [fakes.rounds(name) for name in TRACKERS] == [[1, 2, 3]] * 3
    assert [step for _, step in fakes.of("tensorboard", "start")] == [1, 3]  # what came after the checkpoint is purged
    assert [run for run, _ in fakes.of("mlflow", "close")] == ["run0", "run0"] and len(fakes.stored) == 1
    assert len({given["id"] for given in fakes.of("wandb", "start")}) == 1


def test_a_run_can_get_a_tracker_when_it_is_resumed(tmp_path: Path, fakes: Fakes) -> None:
    with pytest.raises(polyfed.RunError, match="stopped"):
        run(tmp_path / "run", watcher=StopAfter(1))
    polyfed.resume(
        tmp_path / "run", data=support.tiny_dataset(), models=SETTINGS["models"], settings={"tracker": "wandb"}
    )
    assert fakes.rounds("wandb") == [2, 3]


@pytest.mark.parametrize("name", TRACKERS)
@pytest.mark.parametrize("call", ["start", "log", "close"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SystemExit(1)])
def test_a_tracker_that_fails_is_a_note_and_changes_no_number(
    tmp_path: Path, fakes: Fakes, plain: pd.DataFrame, name: str, call: str, error: BaseException
) -> None:
    shown: list[str] = []
    watcher = polyfed.Watcher()
    watcher.on_note = shown.append  # type: ignore[method-assign]
    fakes.fails[name, call] = error
    others = [other for other in TRACKERS if other != name]
    result = run(tmp_path / "run", tracker=list(TRACKERS), watcher=watcher)
    assert result.rounds.drop(columns="seconds").equals(plain)
    (note,) = shown
    words = "No space left on device" if isinstance(error, OSError) else "SystemExit"
    assert note.startswith(f"{name} does not follow the run any more: ") and words in note
    assert notes(tmp_path / "run") == ([note] if call != "close" else [])
    assert polyfed.resume(tmp_path / "run").folder.damage() == []
    assert [fakes.rounds(other) for other in others] == [[1, 2, 3]] * 2


def test_a_tracker_that_is_not_installed_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    run(tmp_path / "run", tracker="wandb")
    assert "install it with `pip install 'polyfed[wandb]'`" in notes(tmp_path / "run")[0]


def test_a_tracker_that_hangs_does_not_hold_a_run(
    tmp_path: Path, fakes: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = threading.Event()
    monkeypatch.setattr(fed, "PATIENCE", 0.1)
    monkeypatch.setattr(fakes, "tell", lambda *told: free.wait(20))
    begin = time.perf_counter()
    run(tmp_path / "run", tracker="tensorboard")
    assert time.perf_counter() - begin < 15
    assert notes(tmp_path / "run") == [
        "tensorboard does not follow the run any more: it has not answered for 0.1 seconds"
    ]
    free.set()


def test_a_slow_tracker_does_not_slow_rounds_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call takes 10 ms, so after the first the thread rests for a second, until the rest is needed."""
    logged: list[int] = []

    class Slow(fed.Tracker):
        def log(self, round: int, numbers: Any) -> None:
            time.sleep(0.01)
            logged.append(round)

        def close(self, state: Any, summary: Any) -> None:
            logged.append(-1)

    monkeypatch.setattr(fed, "new_tracker", lambda name, about: Slow(about))
    feed = fed.Feed("slow", About(tmp_path, "id", 1, {}))
    feed.add(1, {})
    time.sleep(0.2)
    begin = time.perf_counter()
    for round in range(2, 20):
        feed.add(round, {})
    assert time.perf_counter() - begin < 0.05 and logged == [1]
    feed.close("finished", {})
    assert logged == [*range(1, 20), -1] and not feed.failure


def test_the_watcher_behind_trackers_still_stops_a_run_and_knows_its_folder(tmp_path: Path, fakes: Fakes) -> None:
    watcher = StopAfter(1)
    with pytest.raises(polyfed.RunError, match="stopped after round 1"):
        run(tmp_path / "run", tracker="wandb", watcher=watcher)
    assert watcher.folder == tmp_path / "run"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("tensorbord", "unknown tracker 'tensorbord': did you mean 'tensorboard'?"),
        ("none,wandb", "tracker is 'none,wandb': give names or none, not both"),
        (3, "tracker is 3, but must be one of none, tensorboard, mlflow, wandb, or several"),
        ("", "unknown tracker ''"),
    ],
)
def test_other_names_are_refused(value: Any, words: str) -> None:
    with pytest.raises(InputError, match=words.replace("?", r"\?")):
        polyfed.experiment(method="standalone", tracker=value)


@pytest.mark.parametrize("value", [None, "none", [], "None"])
def test_none_is_no_tracker(value: Any) -> None:
    assert polyfed.experiment(method="standalone", tracker=value).tracker == "none"


@pytest.mark.parametrize(
    "uri", ["http://example.org:5000", "https://x", "databricks://profile", "postgresql://h/db", "file://h/x"]
)
def test_mlflow_never_writes_to_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uri: str) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    with pytest.raises(InputError, match="writes to local stores alone"):
        store_of(About(tmp_path, "id", 1, {}))


def test_mlflow_may_use_one_local_store_for_all_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for uri, store in (
        ("file:///data/mlruns", "file:///data/mlruns"),
        ("mlruns", (tmp_path / "mlruns").as_uri()),
        ("databricks", (tmp_path / "databricks").as_uri()),  # to MLflow that word alone is a server
    ):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        assert store_of(About(tmp_path / "run", "id", 1, {})) == store
