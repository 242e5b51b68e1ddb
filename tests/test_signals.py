"""A run that was stopped, by Ctrl-C or by kill -9 at any moment, continues to the numbers it would have given."""

import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import polyfed
from polyfed import Watcher, cli
from tests.stopping import records

SMALL = '''
import os, signal
from torch import nn
from polyfed.records import disk

class Small(nn.Sequential):
    """A small network of the user's own."""

    def __init__(self, input_shape, classes):
        super().__init__(nn.Flatten(), nn.Linear(784, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, classes))

class Smaller(nn.Sequential):
    def __init__(self, input_shape, classes):
        super().__init__(nn.Flatten(), nn.Linear(784, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, classes))

# "checkpoint 3": the process kills itself in the middle of writing its third file into a folder of that name.
place, _, count = os.environ.get("DIE_AT", "").partition(" ")
if place:
    write, left = disk.write, iter(range(int(count) - 1, -1, -1))
    def dying(path, content, **options):
        if path.parent.name == place and next(left) == 0:
            data = content.encode() if isinstance(content, str) else content
            path.with_name(f".{path.name}.0123abcd.new").write_bytes(data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        write(path, content, **options)
    disk.write = dying
'''
ROUNDS = 24
SETTINGS: dict[str, Any] = {
    "data": "digits", "models": "small_of_user:Small,small_of_user:Smaller", "clients": 6, "participation": 0.5,
    "rounds": ROUNDS, "eval_every": 2, "seed": 3, "checkpoint_every": 1, "device": "cpu", "method": "fedproto",
}  # fmt: skip


processes = multiprocessing.get_context("forkserver")  # imports torch, which takes seconds, once for all
processes.set_forkserver_preload(["polyfed.cli.runs"])


def start(folder: Path, *arguments: str, die_at: str = "") -> BaseProcess:
    """`polyfed` in a process of its own, which writes into output.txt and errors.txt."""
    process = processes.Process(target=command, args=(folder, arguments, die_at))
    process.start()
    return process


def command(folder: Path, arguments: tuple[str, ...], die_at: str) -> None:
    os.chdir(folder)
    os.environ["DIE_AT"] = die_at
    for name, number in (("output.txt", 1), ("errors.txt", 2)):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.argv = ["polyfed", *arguments]
    cli.main()


def ended(process: BaseProcess, folder: Path) -> int | None:
    """A process's exit status; what it said about errors is shown when a test fails."""
    process.join(60)
    print((folder / "errors.txt").read_text())
    return process.exitcode


def checkpoint_round(run: Path) -> int:
    try:
        return int(json.loads((run / "checkpoint" / "manifest.json").read_text())["round"])
    except (OSError, ValueError):
        return 0


def wait_for_round(process: BaseProcess, run: Path, round: int) -> None:
    """Until the run has a checkpoint of that round, or has ended."""
    deadline = time.monotonic() + 60
    while checkpoint_round(run) < round and process.is_alive():
        assert time.monotonic() < deadline, "the run does not get on"
        time.sleep(0.002)


def test_a_run_killed_again_and_again_gives_the_same_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed in the midst of writing a checkpoint, at random moments, and in the midst of writing the models.

    Where exactly is drawn anew each time; a failure shows the seed.
    """
    (tmp_path / "small_of_user.py").write_text(SMALL)
    monkeypatch.syspath_prepend(str(tmp_path))
    polyfed.run(**SETTINGS, out=tmp_path / "whole")

    (tmp_path / "killed.yaml").write_text(polyfed.experiment(**SETTINGS).to_yaml())
    run, chance = tmp_path / "killed", random.Random(random.getrandbits(32))
    process = start(
        tmp_path, "run", "killed.yaml", "--trust", "--out", "killed", die_at=f"checkpoint {chance.randint(1, 20)}"
    )
    assert ended(process, tmp_path) == -signal.SIGKILL
    for _ in range(2):
        process = start(tmp_path, "resume", "killed", "--trust")
        wait_for_round(process, run, checkpoint_round(run) + chance.randint(1, 3))
        time.sleep(chance.random() * 0.05)
        process.kill()
        assert ended(process, tmp_path) == -signal.SIGKILL
    process = start(tmp_path, "resume", "killed", "--trust", die_at=f"models {chance.randint(1, 6)}")
    assert ended(process, tmp_path) == -signal.SIGKILL
    assert checkpoint_round(run) == ROUNDS - 1
    process = start(tmp_path, "resume", "killed", "--trust", "--quiet")
    assert ended(process, tmp_path) == 0
    assert (tmp_path / "output.txt").read_text() == "killed\n"
    assert records(run) == records(tmp_path / "whole")


def test_ctrl_c_finishes_the_round_and_says_how_to_go_on(tmp_path: Path) -> None:
    (tmp_path / "small_of_user.py").write_text(SMALL)
    text = polyfed.experiment(**{**SETTINGS, "rounds": 2000, "eval_every": 1}).to_yaml()
    (tmp_path / "long.yaml").write_text(text)
    process = start(tmp_path, "run", "long.yaml", "--trust", "--out", "stopped")
    wait_for_round(process, tmp_path / "stopped", 2)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGINT)
    assert ended(process, tmp_path) == 130
    rows = pd.read_csv(tmp_path / "stopped" / "rounds.csv")
    last = (tmp_path / "errors.txt").read_text().splitlines()[-1]
    assert last == f"polyfed: stopped after round {len(rows)} of 2000; continue with `polyfed resume stopped --trust`."
    assert "Stopping after this round" in (tmp_path / "output.txt").read_text()
    assert checkpoint_round(tmp_path / "stopped") == len(rows)


def test_sigterm_finishes_the_round_as_ctrl_c_does(tmp_path: Path) -> None:
    text = polyfed.experiment(**{**SETTINGS, "models": "cnn5", "rounds": 2000, "eval_every": 1}).to_yaml()
    (tmp_path / "long.yaml").write_text(text)
    process = start(tmp_path, "run", "long.yaml", "--out", "stopped")
    wait_for_round(process, tmp_path / "stopped", 1)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGTERM)
    assert ended(process, tmp_path) == 143
    rows = pd.read_csv(tmp_path / "stopped" / "rounds.csv")
    assert checkpoint_round(tmp_path / "stopped") == len(rows)
    assert "continue with `polyfed resume stopped`" in (tmp_path / "errors.txt").read_text()


@pytest.mark.skipif(sys.platform == "win32", reason="it has no such locks")
def test_a_run_that_is_going_on_is_left_alone(tmp_path: Path) -> None:
    class Impatient(Watcher):
        """Tries to resume the run that it watches."""

        def on_round(self, round: int, row: Mapping[str, Any] | None) -> None:
            with pytest.raises(polyfed.InputError, match="another process is working on"):
                polyfed.resume(tmp_path / "run")

    polyfed.run("standalone", clients=2, rounds=2, out=tmp_path / "run", watcher=Impatient(), device="cpu")
    assert polyfed.resume(tmp_path / "run").rounds["round"].tolist() == [1, 2]
