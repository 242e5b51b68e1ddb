"""Comparisons and searches whose runs train together give the results of runs done one by one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from polyfed.comparison.compare import compare
from polyfed.comparison.plan import Cell, plan
from polyfed.comparison.runner import run_cells
from polyfed.comparison.together import Named, grouped
from polyfed.engines.together.joint import JointEngine
from polyfed.errors import InputError
from polyfed.records import RunFolder
from polyfed.server.federation import Interrupted, Watcher
from polyfed.tuning import Choices, tune

SMALL: dict[str, Any] = {
    "models": "tests.support:Narrow", "clients": 3, "rounds": 2, "device": "cpu", "engine": "vectorized",
    "batch_size": 32, "lr": 0.1,
}  # fmt: skip
SEARCHED = {name: value for name, value in SMALL.items() if name != "lr"}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many clients took part in each common training."""
    seen: list[int] = []
    answers = JointEngine.answers
    monkeypatch.setattr(
        JointEngine,
        "answers",
        lambda self, round, downloads: (seen.append(len(downloads)), answers(self, round, downloads))[1],
    )
    return seen


def names(groups: list[list[Cell]]) -> list[list[str]]:
    return [[cell.name for cell in group] for group in groups]


def groups(methods: list[str], together: int | None, sweeps: Any = None, **settings: Any) -> list[list[str]]:
    cells = plan(methods, [0, 1, 2], {**SEARCHED, **settings}, sweeps)
    return names(grouped(cells, lambda cell: cell.config, together))


def test_runs_that_differ_in_seeds_and_numbers_form_a_group() -> None:
    seeds = [[f"standalone-seed{s}" for s in range(3)], [f"fedproto-seed{s}" for s in range(3)]]
    assert groups(["standalone", "fedproto"], 8) == seeds
    assert groups(["fedproto"], 2) == [["fedproto-seed0", "fedproto-seed1"], ["fedproto-seed2"]]
    assert [len(group) for group in groups(["fedproto"], 8, {"method.weight": [1, 0.5], "lr": [0.1, 1]})] == [8, 4]
    assert [len(group) for group in groups(["fedproto"], 8, {"method.distance": ["mse", "euclidean"]})] == [3, 3]
    assert [len(group) for group in groups(["fedproto"], 8, {"training.epochs": [1, 2]})] == [3, 3]


def test_on_a_cpu_runs_are_done_one_by_one_unless_asked() -> None:
    assert [len(group) for group in groups(["fedproto"], None)] == [1, 1, 1]
    assert [len(group) for group in groups(["fedproto"], None, device="cuda", clients=100)] == [2, 1]
    assert [len(group) for group in groups(["fedproto"], None, device="cuda", engine="sequential")] == [1, 1, 1]
    assert [len(group) for group in groups(["fedproto"], 1)] == [1, 1, 1]


@pytest.mark.parametrize(
    ("settings", "together", "words"),
    [({"engine": "sequential"}, 2, "only the vectorized engine"), ({}, 0, "together is 0, but must be")],
)
def test_what_can_not_be_is_refused(tmp_path: Path, settings: Any, together: int, words: str) -> None:
    with pytest.raises(InputError, match=words):
        run_cells(plan(["fedproto"], [0, 1], {**SMALL, **settings}), tmp_path, together=together)
    with pytest.raises(InputError, match=words):
        tune(["fedproto"], out=tmp_path / "search", together=together, **{**SMALL, **settings})


def test_a_comparison_has_the_same_table(tmp_path: Path, calls: list[int]) -> None:
    """Two methods, two seeds, two weights; and one run again for the noise, alone."""
    asked: dict[str, Any] = {"seeds": [0, 1], "sweeps": {"method.weight": [0.1, 1.0]}, **SMALL}
    alone = compare(["standalone", "fedproto"], out=tmp_path / "alone", **asked)
    assert calls == []
    joint = compare(["standalone", "fedproto"], out=tmp_path / "joint", together=4, **asked)
    assert calls == [6, 6, 12, 12]
    differing = [name for name in alone.table if "seconds" in name or name == "noise_floor"]
    tables = [each.table.drop(columns=differing) for each in (joint, alone)]
    pd.testing.assert_frame_equal(*tables, check_exact=False, rtol=1e-3, atol=1e-4)
    compare(["standalone", "fedproto"], out=tmp_path / "joint", together=4, **asked)
    assert len(calls) == 4  # all was finished


def test_processes_get_groups(tmp_path: Path) -> None:
    cells = plan(["standalone", "fedproto"], [0, 1], SMALL)
    lines: list[str] = []
    assert run_cells(cells, tmp_path, jobs=2, together=2, tell=lines.append) == {}
    assert len([line for line in lines if line.endswith("finished") and " of 4: " in line]) == 4
    assert all(RunFolder.open(tmp_path / "runs" / cell.name).finished for cell in cells)


def test_a_run_that_fails_is_named_and_the_others_finish(tmp_path: Path, calls: list[int]) -> None:
    cells = plan(["standalone"], [0], {**SEARCHED, "rounds": 3}, {"lr": [0.1, 1e12, 0.2]})
    failures = run_cells(cells, tmp_path, together=3)
    assert list(failures) == ["standalone-training.lr=1000000000000.0-seed0"]
    assert "lower the learning rate" in failures[cells[1].name]
    assert calls == [9, 6, 6, 6]  # the first round again, without the run that diverged
    assert RunFolder.open(tmp_path / "runs" / cells[2].name).finished


class StopsAfter(Watcher):
    """Asks to stop after so many rounds in all, and remembers whose they were."""

    def __init__(self, rounds: int) -> None:
        self.rounds: list[tuple[str, int]] = []
        self._most = rounds

    def on_round(self, round: int, row: Mapping[str, Any] | None) -> None:
        assert row is not None
        self.rounds.append((row["run"], round))
        self.stop_requested = len(self.rounds) >= self._most


def test_a_stop_ends_all_runs_of_a_group_and_the_same_call_continues(tmp_path: Path, calls: list[int]) -> None:
    cells = plan(["fedproto"], [0, 1, 2], {**SMALL, "rounds": 3})
    run_cells(cells, tmp_path / "alone")
    watcher = StopsAfter(3)
    with pytest.raises(Interrupted, match="stopped with 0 of 3 runs done"):
        run_cells(cells, tmp_path / "joint", together=3, watcher=watcher)
    assert {(cell.name, 1) for cell in cells} <= set(watcher.rounds) and len(watcher.rounds) <= 6
    assert run_cells(cells, tmp_path / "joint", together=3) == {}
    assert calls == [9, 6, 9]  # the run that asked stopped after round 1; the others were already in round 2
    for cell in cells:
        alone, joint = (RunFolder.open(tmp_path / way / "runs" / cell.name).rounds() for way in ("alone", "joint"))
        frames = [each.drop(columns="seconds") for each in (joint, alone)]
        pd.testing.assert_frame_equal(*frames, check_exact=False, rtol=1e-4, atol=1e-5)


def test_a_killed_group_continues_from_its_checkpoints(tmp_path: Path) -> None:
    """Killed at once after a few rounds; the same command ends with the numbers of runs that were never killed."""
    settings = {**SMALL, "rounds": 12, "checkpoint_every": 1}
    cells = plan(["fedproto"], [0, 1], settings)
    run_cells(cells, tmp_path / "alone")
    code = (
        "import sys; from pathlib import Path; from tests.comparison.test_together import *\n"
        f"run_cells(plan(['fedproto'], [0, 1], {settings!r}), Path(sys.argv[1]), together=2)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "joint")], env={**os.environ})
    table = tmp_path / "joint" / "runs" / cells[1].name / "rounds.csv"
    while process.poll() is None and not (table.exists() and len(table.read_text().splitlines()) > 3):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert run_cells(cells, tmp_path / "joint", together=2) == {}
    for cell in cells:
        alone, joint = (RunFolder.open(tmp_path / way / "runs" / cell.name).rounds() for way in ("alone", "joint"))
        frames = [each.drop(columns="seconds") for each in (joint, alone)]
        pd.testing.assert_frame_equal(*frames, check_exact=False, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("prune", [False, True])
def test_a_search_finds_the_same(tmp_path: Path, prune: bool, calls: list[int]) -> None:
    """Four points of a grid with two seeds: eight runs in one group, one of which diverges."""
    pytest.importorskip("optuna", reason="tuning needs the extra polyfed[tune]")
    search = {"training.lr": Choices((0.0001, 0.1, 1e12, 0.05))}
    asked: dict[str, Any] = {
        "trials": 4, "sampler": "grid", "search": search, "seeds": [100, 101], "prune": prune, **SEARCHED
    }  # fmt: skip
    tune(["fedproto"], out=tmp_path / "alone", **asked)
    assert calls == []
    tune(["fedproto"], out=tmp_path / "joint", together=8, **asked)
    assert calls[0] == 24
    alone, joint = (pd.read_csv(tmp_path / way / "trials.csv").drop(columns="seconds") for way in ("alone", "joint"))
    pd.testing.assert_frame_equal(joint, alone, check_exact=False, rtol=1e-3, atol=1e-3)
    assert joint.state.tolist().count("failed") == 1
    assert not any((tmp_path / "joint" / "runs").iterdir())


def test_a_pruned_trial_takes_its_other_seeds_with_it(tmp_path: Path) -> None:
    """After five good trials, two bad ones are pruned in the first seed, and the second seed does not count."""
    pytest.importorskip("optuna", reason="tuning needs the extra polyfed[tune]")
    search = {"training.lr": Choices((0.1, 0.11, 0.12, 0.13, 0.14, 1e-6, 1e-7))}
    asked: dict[str, Any] = {"trials": 7, "sampler": "grid", "search": search, "seeds": [100, 101], **SEARCHED}
    asked["rounds"] = 4
    tables = []
    for way, together in (("alone", 1), ("joint", 4)):
        tune(["standalone"], out=tmp_path / way, together=together, **asked)
        tables.append(pd.read_csv(tmp_path / way / "trials.csv").drop(columns="seconds"))
    pd.testing.assert_frame_equal(tables[1], tables[0], check_exact=False, rtol=1e-3, atol=1e-3)


def test_a_watcher_hears_which_run_it_is_about() -> None:
    said: list[Any] = []

    class Outer(Watcher):
        def on_note(self, note: str) -> None:
            said.append(note)

        def on_round(self, round: int, row: Mapping[str, Any] | None) -> None:
            said.append((round, row))

        def on_client(self, round: int, client: int) -> None:
            said.append(client)

    one, two = Named(Outer(), "one", leads=True), Named(Outer(), "two", leads=False)
    for watcher in (one, two):
        watcher.on_client(1, 5)
        watcher.on_round(1, {"loss_mean": 2.0})
        watcher.on_note("slow")
    assert said == [
        5, (1, {"loss_mean": 2.0, "run": "one"}), "one: slow", (1, {"loss_mean": 2.0, "run": "two"}), "two: slow"
    ]  # fmt: skip
