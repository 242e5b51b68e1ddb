"""A run that was stopped, by Ctrl-C or by kill -9 at any moment, goes on to the numbers it would have given."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import polyfed
from polyfed import Watcher
from polyfed.federation import Interrupted
from tests import support

SMALL = '''
import os, signal
from torch import nn

class Small(nn.Sequential):
    """A small network of the user's own."""

    def __init__(self, input_shape, classes):
        super().__init__(nn.Flatten(), nn.Linear(784, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, classes))

class Smaller(nn.Sequential):
    def __init__(self, input_shape, classes):
        super().__init__(nn.Flatten(), nn.Linear(784, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, classes))

# The process kills itself when it forces this file to the disk, counted from its start: in the middle of a checkpoint.
remaining = int(os.environ.get("DIE_AT_FSYNC", 0))
if remaining:
    fsync = os.fsync
    def dying(file):
        global remaining
        remaining -= 1
        if remaining == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        fsync(file)
    os.fsync = dying
'''
ROUNDS = 20
SETTINGS: dict[str, Any] = {
    "data": "digits", "models": "small_of_user:Small,small_of_user:Smaller", "clients": 6, "participation": 0.5,
    "rounds": ROUNDS, "eval_every": 2, "seed": 3, "checkpoint_every": 1, "device": "cpu", "method": "fedproto",
}  # fmt: skip


def start(folder: Path, *arguments: str, die_at_fsync: int = 0) -> subprocess.Popen[str]:
    """`polyfed` in a process of its own."""
    environment = {**os.environ, "DIE_AT_FSYNC": str(die_at_fsync), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "polyfed", *arguments],
        cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def checkpoint_round(run: Path) -> int:
    try:
        return int(json.loads((run / "checkpoint" / "manifest.json").read_text())["round"])
    except (OSError, ValueError):
        return 0


def wait_for_round(process: subprocess.Popen[str], run: Path, round: int) -> None:
    """Until the run has a checkpoint of that round, or has ended."""
    deadline = time.monotonic() + 60
    while checkpoint_round(run) < round and process.poll() is None:
        assert time.monotonic() < deadline, "the run does not get on"
        time.sleep(0.002)


def records(run: Path) -> dict[str, Any]:
    """Everything in a run's folder that must not depend on interruptions."""
    rounds = pd.read_csv(run / "rounds.csv", dtype=str).drop(columns="seconds")
    texts = {name: (run / name).read_text() for name in ("clients.csv", "evaluations.csv")}
    models = {path.name: path.read_bytes() for path in sorted((run / "models").iterdir())}
    return {"rounds": rounds.to_csv(), **texts, **models}


def test_a_run_killed_again_and_again_gives_the_same_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in the midst of a checkpoint, at a random moment, and in its last checkpoint or among the models after it.

    Where exactly is drawn anew each time. Every start of Python takes seconds, so the last one happens in here.
    """
    (tmp_path / "small_of_user.py").write_text(SMALL)
    monkeypatch.syspath_prepend(str(tmp_path))
    polyfed.run(**SETTINGS, out=tmp_path / "whole")

    (tmp_path / "killed.yaml").write_text(polyfed.experiment(**SETTINGS).to_yaml())
    run, chance = tmp_path / "killed", random.Random()
    # A new run forces 7 files to the disk; a checkpoint those of 3 clients, server, progress and one or two manifests.
    process = start(tmp_path, "run", "killed.yaml", "--out", "killed", die_at_fsync=7 + chance.randint(1, 20))
    assert process.wait(60) == -signal.SIGKILL, process.communicate()
    assert checkpoint_round(run) <= 3

    process = start(tmp_path, "resume", "killed")
    wait_for_round(process, run, checkpoint_round(run) + chance.randint(1, 9))
    time.sleep(chance.random() * 0.1)
    process.kill()
    process.communicate()

    left = ROUNDS - 1 - checkpoint_round(run)
    process = start(tmp_path, "resume", "killed", die_at_fsync=3 + 7 * left + chance.randint(-6, 6))
    assert process.wait(60) == -signal.SIGKILL, process.communicate()
    assert checkpoint_round(run) >= ROUNDS - 2
    polyfed.resume(run)
    assert records(run) == records(tmp_path / "whole")


def test_ctrl_c_finishes_the_round_and_says_how_to_go_on(tmp_path: Path) -> None:
    (tmp_path / "small_of_user.py").write_text(SMALL)
    text = polyfed.experiment(**{**SETTINGS, "rounds": 2000, "eval_every": 1}).to_yaml()
    (tmp_path / "long.yaml").write_text(text)
    process = start(tmp_path, "run", "long.yaml", "--out", "stopped")
    wait_for_round(process, tmp_path / "stopped", 2)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    rows = pd.read_csv(tmp_path / "stopped" / "rounds.csv")
    assert process.returncode == 130
    assert "Stopping after this round" in output
    assert errors == (
        f"polyfed: stopped after round {len(rows)} of 2000; go on with `polyfed resume stopped`.\n"
    )
    assert checkpoint_round(tmp_path / "stopped") == len(rows)


class StopAfterTwo(Watcher):
    def on_round(self, round: int, row: Mapping[str, Any] | None) -> None:
        self.stop_requested = round == 2


@pytest.mark.parametrize("method", polyfed.METHODS)
def test_every_method_goes_on_from_its_checkpoint(tmp_path: Path, method: str) -> None:
    """The server's networks and states, the clients' modules and all seeds come back."""
    own: dict[str, Any] = {"data": support.tiny_dataset(), "models": [support.Wide, support.Narrow]}
    if "network" in polyfed.METHODS[method].requires:
        own["models"] = [support.Wide]
    settings = {**support.DEFAULTS, "method": method, "rounds": 3, "participation": 0.5, "split": "6:2:2"}
    polyfed.run(**settings, **own, out=tmp_path / "whole")
    with pytest.raises(Interrupted):
        polyfed.run(**settings, **own, out=tmp_path / "stopped", watcher=StopAfterTwo())
    polyfed.resume(tmp_path / "stopped", **own)
    assert records(tmp_path / "stopped") == records(tmp_path / "whole")


def test_a_finished_run_is_only_read(tmp_path: Path) -> None:
    own: dict[str, Any] = {"data": support.tiny_dataset(), "models": [support.Wide]}
    whole = polyfed.run("standalone", **support.DEFAULTS, **own, out=tmp_path / "run")
    before = records(tmp_path / "run")
    again = polyfed.resume(tmp_path / "run", **own)
    assert again.summary == whole.summary
    assert records(tmp_path / "run") == before


@pytest.mark.parametrize(("missing", "words"), [("data", "hand it over again"), ("models", "hand them over again")])
def test_what_came_from_python_must_be_handed_over_again(tmp_path: Path, missing: str, words: str) -> None:
    own: dict[str, Any] = {"data": support.tiny_dataset(), "models": [support.Wide]}
    polyfed.run("standalone", **support.DEFAULTS, **own, out=tmp_path / "run")
    with pytest.raises(polyfed.InputError, match=words):
        polyfed.resume(tmp_path / "run", **{name: value for name, value in own.items() if name != missing})


def test_a_damaged_checkpoint_is_told_and_the_one_before_taken(tmp_path: Path) -> None:
    own: dict[str, Any] = {"data": support.tiny_dataset(), "models": [support.Wide, support.Narrow]}
    settings = {**support.DEFAULTS, "method": "fedproto", "rounds": 4, "checkpoint_every": 1}
    polyfed.run(**settings, **own, out=tmp_path / "whole")
    with pytest.raises(Interrupted):
        polyfed.run(**settings, **own, out=tmp_path / "stopped", watcher=StopAfterTwo())
    (tmp_path / "stopped" / "checkpoint" / "server.2.safetensors").write_bytes(b"torn")
    polyfed.resume(tmp_path / "stopped", **own)
    assert records(tmp_path / "stopped") == records(tmp_path / "whole")
    notes = [event["note"] for event in polyfed.RunFolder(tmp_path / "stopped").events() if event["event"] == "note"]
    assert notes == [
        "a checkpoint is damaged, so the run goes on after round 1: manifest.json: 'server.2.safetensors' is damaged"
    ]
