"""All runs get to their end: new ones, interrupted ones, and those beside one that was killed."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from polyfed.assemble import assemble
from polyfed.comparison.outcomes import read_outcome
from polyfed.comparison.plan import Cell, plan
from polyfed.comparison.runner import run_cells
from polyfed.engines import SequentialEngine
from polyfed.engines.client.workbench import state_of
from polyfed.errors import InputError
from polyfed.records import RunFolder
from polyfed.server.federation import Federation, Interrupted, Watcher
from tests.support import tiny_dataset

SMALL: dict[str, Any] = {
    "models": "tests.support:Narrow", "clients": 3, "rounds": 2, "device": "cpu", "engine": "sequential",
    "batch_size": 16, "lr": 0.1,
}  # fmt: skip


def small(methods: list[str], seeds: list[int], **settings: Any) -> list[Cell]:
    return plan(methods, seeds, {**SMALL, **settings})


def accuracies(folder: Path, cells: list[Cell]) -> dict[str, list[float]]:
    return {cell.name: read_outcome(folder / "runs" / cell.name).curve["accuracy"].tolist() for cell in cells}


class StopsAfter(Watcher):
    """Asks to stop after so many rounds in all."""

    def __init__(self, rounds: int) -> None:
        self.left = rounds

    def on_round(self, round: int, row: Mapping[str, Any] | None) -> None:
        self.left -= 1
        self.stop_requested = self.left <= 0


def test_methods_with_the_same_seed_share_data_partition_first_networks_and_participants(tmp_path: Path) -> None:
    """And another seed has others; the methods' own modules come on top."""
    cells = small(["standalone", "fedproto", "fml"], [0, 1], participation=0.4, clients=6, auxiliary="cnn5")
    people = {(cell.method, cell.seed): assemble(cell.config) for cell in cells}

    def parts(method: str, seed: int) -> list[list[int]]:
        return [part.tolist() for own in people[method, seed].data.values() for part in own.parts]

    def weights(method: str, seed: int) -> list[np.ndarray]:
        network = people[method, seed].new_network(2)
        return [tensor.numpy() for name, tensor in state_of(network).items() if name.startswith("model.")]

    def participants(cell: Cell) -> list[list[int]]:
        folder = RunFolder.create(tmp_path / cell.name, cell.config)
        population = people[cell.method, cell.seed]
        federation = Federation(cell.config, population.method, SequentialEngine(population), folder)
        return [federation.participants(round) for round in range(1, 6)]

    chosen = {(cell.method, cell.seed): participants(cell) for cell in cells}
    for method in ("fedproto", "fml"):
        for seed in (0, 1):
            assert parts(method, seed) == parts("standalone", seed)
            assert chosen[method, seed] == chosen["standalone", seed]
            pairs = list(zip(weights(method, seed), weights("standalone", seed), strict=True))
            assert pairs and all((mine == theirs).all() for mine, theirs in pairs)
    assert parts("standalone", 0) != parts("standalone", 1)
    assert chosen["standalone", 0] != chosen["standalone", 1]
    assert not (weights("standalone", 0)[0] == weights("standalone", 1)[0]).all()


def test_finished_runs_stay_and_an_interrupted_one_continues_to_the_same_numbers(tmp_path: Path) -> None:
    cells = small(["standalone", "fedproto"], [0, 1], rounds=3)
    assert run_cells(cells, tmp_path / "all") == {}
    with pytest.raises(Interrupted, match="stopped with 1 of 4 runs done; the same command continues"):
        run_cells(cells, tmp_path / "parts", watcher=StopsAfter(4))
    first = tmp_path / "parts/runs/standalone-seed0/summary.json"
    before = first.stat().st_mtime_ns
    lines: list[str] = []
    assert run_cells(cells, tmp_path / "parts", tell=lines.append) == {}
    assert lines[0] == "3 runs to do, 1 already finished"
    assert first.stat().st_mtime_ns == before
    assert accuracies(tmp_path / "parts", cells) == accuracies(tmp_path / "all", cells)
    lines.clear()
    assert run_cells(cells, tmp_path / "parts", tell=lines.append) == {}
    assert lines == []


def test_a_failed_run_is_named_and_the_others_continue(tmp_path: Path) -> None:
    cells = small(["fedavg", "standalone"], [0], models="tests.support:Narrow,tests.support:Wide")
    failures = run_cells(cells, tmp_path)
    assert list(failures) == ["fedavg-seed0"] and "needs the same network" in failures["fedavg-seed0"]
    assert read_outcome(tmp_path / "runs/standalone-seed0").accuracy() > 0


def test_input_that_is_wrong_for_all_runs_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="unknown dataset 'digit'"):
        run_cells(small(["standalone", "fedproto"], [0], data="digit"), tmp_path)


def test_a_folder_with_another_run_is_left_alone(tmp_path: Path) -> None:
    (cell,) = small(["standalone"], [0])
    assert run_cells([cell], tmp_path) == {}
    config = tmp_path / "runs" / cell.name / "config.yaml"
    before = config.read_text()
    others = small(["standalone"], [0], rounds=3)
    with pytest.raises(InputError, match="holds a run with rounds 2, not 3: move it away"):
        run_cells(others, tmp_path)
    changed = yaml.safe_load(before) | {"models": "no.such.module:Net"}
    config.write_text(yaml.safe_dump(changed))
    with pytest.raises(InputError, match="holds a run with models no.such.module:Net"):
        run_cells([cell], tmp_path)


def test_what_only_this_process_has_can_t_go_to_others(tmp_path: Path) -> None:
    cells = plan(["standalone"], [0], {**SMALL, "data": "python:tiny"})
    with pytest.raises(InputError, match="data from Python can't be given to other processes: use jobs=1"):
        run_cells(cells, tmp_path, jobs=2, data=tiny_dataset())
    assert run_cells(cells, tmp_path, data=tiny_dataset()) == {}
    with pytest.raises(InputError, match="jobs is 0, but must be"):
        run_cells(cells, tmp_path, jobs=0)


class StopsWhenBegun(Watcher):
    """Asks to stop as soon as a run has had two rounds; only its folder tells, as the run is in another process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def stop_requested(self) -> bool:  # type: ignore[override]
        return any(len(path.read_text().splitlines()) > 2 for path in self._folder.glob("runs/*/rounds.csv"))


class NoMoreOnceBegun(Watcher):
    """Lets no further run begin once one has made a round."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def may_begin(self, runs: Sequence[str]) -> bool:
        return not any(self._folder.glob("runs/*/rounds.csv"))


class OnlyWith(Watcher):
    """Lets runs begin whose names have this in them."""

    def __init__(self, part: str) -> None:
        self._part = part

    def may_begin(self, runs: Sequence[str]) -> bool:
        return all(self._part in name for name in runs)


@pytest.mark.parametrize("jobs", [1, 2])
def test_runs_that_have_begun_end_where_no_more_may_begin(tmp_path: Path, jobs: int) -> None:
    cells = small(["standalone"], list(range(2 * jobs + 1)))
    with pytest.raises(Interrupted, match=rf"of {len(cells)} runs done; the same command continues"):
        run_cells(cells, tmp_path, jobs=jobs, watcher=NoMoreOnceBegun(tmp_path))
    begun = [RunFolder.open(path) for path in (tmp_path / "runs").iterdir()]
    assert 1 <= len(begun) <= 2 * jobs and all(each.finished for each in begun)
    assert run_cells(cells, tmp_path, jobs=jobs) == {}


class AfterTheOther(Watcher):
    """Lets the first runs begin only when the others have been asked about; keeps what it was asked."""

    def __init__(self, first: str) -> None:
        self.first, self.asked = first, list[list[str]]()

    def may_begin(self, runs: Sequence[str]) -> bool:
        self.asked.append(list(runs))
        return self.first not in runs or len(self.asked) > 1


@pytest.mark.parametrize("jobs", [1, 2])
def test_runs_that_may_not_begin_are_asked_about_again_with_those_that_train_with_them(
    tmp_path: Path, jobs: int
) -> None:
    cells = small(["standalone", "fedproto"], [0, 1], engine="vectorized")
    names = [["standalone-seed0", "standalone-seed1"], ["fedproto-seed0", "fedproto-seed1"]]
    watcher = AfterTheOther("standalone-seed0")
    assert run_cells(cells, tmp_path, jobs=jobs, together=2, watcher=watcher) == {}
    assert watcher.asked == [*names, names[0]]


class Broken(Watcher):
    def may_begin(self, runs: Sequence[str]) -> bool:
        raise RuntimeError("a watcher's own fault")


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_watcher_s_own_fault_is_not_swallowed(tmp_path: Path, jobs: int) -> None:
    with pytest.raises(RuntimeError, match="a watcher's own fault"):
        run_cells(small(["standalone"], [0, 1]), tmp_path, jobs=jobs, watcher=Broken())


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_run_that_may_not_begin_makes_room_for_the_next(tmp_path: Path, jobs: int) -> None:
    cells = small(["standalone", "fedproto"], [0, 1])
    with pytest.raises(Interrupted, match="stopped with 2 of 4 runs done; the same command continues"):
        run_cells(cells, tmp_path, jobs=jobs, watcher=OnlyWith("seed1"))
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["fedproto-seed1", "standalone-seed1"]


def test_processes_lose_one_run_when_killed_and_stop_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is killed as if memory were short: its run fails, the others finish, and the next call finishes it too.

    Asked to stop, workers end their rounds; the rest continues to the numbers of this process.
    """
    monkeypatch.setenv("POLYFED_TEST_DIES", str(tmp_path / "died"))
    cells = small(["standalone"], [0, 1, 2, 3], models="tests.comparison.networks:Deadly")
    failures = run_cells(cells, tmp_path, jobs=2)
    assert len(failures) == 1
    assert "its process was ended by SIGKILL; the machine may be short of memory" in next(iter(failures.values()))
    others = [cell for cell in cells if cell.name not in failures]
    assert all(RunFolder.open(tmp_path / "runs" / other.name).finished for other in others)
    assert run_cells(cells, tmp_path) == {}

    longer = small(["standalone"], [0], rounds=40)
    assert run_cells(longer, tmp_path / "alone") == {}
    with pytest.raises(Interrupted, match="the same command continues"):
        run_cells(longer, tmp_path / "side", jobs=2, watcher=StopsWhenBegun(tmp_path / "side"))
    stopped = RunFolder.open(tmp_path / "side/runs/standalone-seed0")
    assert not stopped.finished and stopped.checkpoints.rounds()
    assert run_cells(longer, tmp_path / "side") == {}
    assert accuracies(tmp_path / "side", longer) == accuracies(tmp_path / "alone", longer)


def test_a_process_that_has_lost_its_gpu_gets_no_more_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that it did on the GPU afterwards would fail, in no time: it would use up the runs that are left."""
    monkeypatch.setenv("POLYFED_TEST_DIES", str(tmp_path / "lost"))
    cells = small(["standalone"], [0, 1, 2, 3, 4], models="tests.comparison.networks:Faulty", device="auto")
    failures = run_cells(cells, tmp_path, jobs=2)
    assert [("illegal memory access" in reason) for reason in failures.values()] == [True]
    assert sum(RunFolder.open(path).finished for path in (tmp_path / "runs").iterdir()) >= 4


def test_a_process_whose_run_fails_otherwise_takes_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYFED_TEST_SAYS", str(tmp_path / "said"))
    cells = small(["standalone"], [0, 1, 2, 3], models="tests.comparison.networks:Talkative")
    with pytest.raises(InputError, match="nothing works here"):
        run_cells(cells, tmp_path, jobs=2)
    assert 1 <= len(set((tmp_path / "said").read_text().split())) <= 2


def test_this_process_begins_no_run_after_it_has_lost_its_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = small(["fedavg", "standalone"], [0], models="tests.support:Narrow,tests.support:Wide")
    monkeypatch.setattr("polyfed.comparison.runner.gpu_has_failed", lambda device: device == "cpu")
    with pytest.raises(Interrupted, match="1 of 2 runs done because this process can't use its GPU any more;") as stop:
        run_cells(cells, tmp_path)
    assert list(stop.value.failures) == ["fedavg-seed0"] and stop.value.exit_status == 1
    assert list(run_cells(cells[::-1], tmp_path / "last")) == ["fedavg-seed0"]  # there is none after it
    monkeypatch.undo()
    assert (
        list(run_cells(cells, tmp_path)) == ["fedavg-seed0"]
        and RunFolder.open(tmp_path / "runs" / cells[1].name).finished
    )


class Hears(Watcher):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def on_note(self, note: str) -> None:
        self.notes.append(note)


@pytest.mark.parametrize("together", [1, 2])
def test_a_note_comes_from_another_process_too(tmp_path: Path, together: int) -> None:
    """Whether runs train together there or not, each note has the name of its run."""
    network = "tests.comparison.networks:Branching"
    cells = small(["standalone"], [0, 1], models=network, engine="vectorized")
    watcher = Hears()
    assert run_cells(cells, tmp_path, jobs=2, together=together, watcher=watcher) == {}
    for cell in cells:
        own = [note for note in watcher.notes if note.startswith(f"{cell.name}: clients with {network} train one")]
        assert len(own) == 1, watcher.notes
        assert own[0].partition(": ")[2] in RunFolder.open(tmp_path / "runs" / cell.name).notes()


@pytest.mark.parametrize("setting", ["engine", "models"])
def test_code_that_only_a_run_s_file_names_is_never_imported(
    tmp_path: Path, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder may come from someone else: what its runs name is trusted only if the plan names it too."""
    (tmp_path / "never_imported.py").write_text("Code = None")
    monkeypatch.syspath_prepend(tmp_path)
    (cell,) = small(["standalone"], [0], rounds=3)
    with pytest.raises(Interrupted):
        run_cells([cell], tmp_path, watcher=StopsAfter(1))
    file = tmp_path / "runs" / cell.name / "config.yaml"
    content = yaml.safe_load(file.read_text())
    file.write_text(yaml.safe_dump({**content, setting: "never_imported:Code"}))
    with pytest.raises(InputError, match=f"holds a run with {setting} never_imported:Code"):
        run_cells([cell], tmp_path)
    assert "never_imported" not in sys.modules


def test_networks_that_follow_from_the_data_are_those_of_the_same_run(tmp_path: Path) -> None:
    """A table has networks of its own if none are named; code that somebody else names is not among them."""
    cells = plan(["standalone"], [0], {"data": "wine", "clients": 2, "rounds": 1, "device": "cpu"})
    lines: list[str] = []
    for _ in range(2):
        assert run_cells(cells, tmp_path, tell=lines.append) == {}
    assert lines == ["1 run to do, 0 already finished", "1 of 1: standalone-seed0 finished"]
    file = tmp_path / "runs" / "standalone-seed0" / "config.yaml"
    file.write_text(file.read_text().replace("models: tabular4", "models: never_imported:Code"))
    with pytest.raises(InputError, match="holds a run with models never_imported:Code, not papers"):
        run_cells(cells, tmp_path)


def test_a_run_whose_code_exits_costs_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one_round = Federation.round

    def exits(self: Federation, number: int) -> Any:
        if self.config.seed == 0:
            sys.exit("enough")
        return one_round(self, number)

    monkeypatch.setattr(Federation, "round", exits)
    failures = run_cells(small(["standalone"], [0, 1], rounds=1), tmp_path)
    assert failures == {"standalone-seed0": "SystemExit: enough"}
    assert RunFolder.open(tmp_path / "runs" / "standalone-seed1").finished
