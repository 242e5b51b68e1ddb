"""A run dies at any file operation, or loses power there, and still gives the numbers that it would have given."""

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import polyfed
from polyfed.records import RunFolder
from polyfed.server.federation import Watcher
from tests import support
from tests.faults.disk_faults import Journal, Killed
from tests.stopping import records

METHOD = "fedproto"
SETTINGS: dict[str, Any] = {
    **support.DEFAULTS, "method": METHOD, "rounds": 3, "participation": 0.5, "checkpoint_every": 1, "split": "6:2:2",
}  # fmt: skip


class Notes(Watcher):
    """Remembers what a run says."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def on_note(self, note: str) -> None:
        self.said.append(note)


def own() -> dict[str, Any]:
    return {"data": support.tiny_dataset(), "models": [support.Wide, support.Narrow]}


def start(path: Path) -> None:
    polyfed.run(**SETTINGS, **own(), out=path)


def lengthen(path: Path) -> None:
    polyfed.resume(path, **own(), rounds=5)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "run"
    polyfed.run(**SETTINGS, **own(), out=path)
    return path


def operations(root: Path, work: Callable[[Path], None]) -> int:
    """How many file operations a run has."""
    root.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        journal = Journal(root, patch)
        work(root / "run")
    return journal.operations


def broken_run(root: Path, die_at: int, work: Callable[[Path], None] = start) -> Journal:
    """A run that dies at that operation."""
    root.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        journal = Journal(root, patch, die_at)
        with pytest.raises(Killed):
            work(root / "run")
    return journal


def go_on(run: Path) -> list[str]:
    """Resume the run, or start it if it had not begun; returns what it said."""
    notes = Notes()
    if (run / "config.yaml").exists():
        polyfed.resume(run, **own(), watcher=notes)
    else:
        polyfed.run(**SETTINGS, **own(), out=run, watcher=notes)
    assert RunFolder.open(run).damage() == []
    left = {path.name for path in run.iterdir()}
    assert not [name for name in left if name.endswith(".new") or name == "checkpoint"]
    return notes.said


def points(count: int, most: int) -> list[int]:
    """At which operations to die: all, or some of them drawn anew each time, and always the last ones.

    A failure shows the seed of the draw.
    """
    if most >= count:
        return list(range(count))
    return sorted({*random.sample(range(count), most), count - 1, count - 2})


def check_kills(tmp_path: Path, whole: Path, most: int) -> None:
    for number in points(operations(tmp_path / "count", start), most):
        broken_run(tmp_path / str(number), number)
        said = go_on(tmp_path / str(number) / "run")
        assert said == [], number
        assert records(tmp_path / str(number) / "run") == records(whole), number


def check_power_cuts(tmp_path: Path, whole: Path, most: int) -> None:
    for number in points(operations(tmp_path / "count", start), most):
        journal = broken_run(tmp_path / str(number), number)
        journal.after_power_cut(tmp_path / f"{number}-cut")
        journal.with_names_kept(tmp_path / f"{number}-names")
        for name in ("cut", "names"):
            go_on(tmp_path / f"{number}-{name}" / "run")
            assert records(tmp_path / f"{number}-{name}" / "run") == records(whole), (number, name)


def check_lengthening(tmp_path: Path, whole: Path, most: int) -> None:
    """A finished run of three rounds dies while it continues to five."""
    start(tmp_path / "whole")
    lengthen(tmp_path / "whole")
    shutil.copytree(whole, tmp_path / "count" / "run")
    for number in points(operations(tmp_path / "count", lengthen), most):
        run = tmp_path / str(number) / "run"
        shutil.copytree(whole, run)
        broken_run(run.parent, number, lengthen)
        lengthen(run)
        assert records(run) == records(tmp_path / "whole"), number


def test_a_run_killed_while_it_is_made_longer(tmp_path: Path, whole: Path) -> None:
    check_lengthening(tmp_path, whole, 8)


@pytest.mark.long
def test_a_run_killed_at_every_file_operation_while_it_is_made_longer(tmp_path: Path, whole: Path) -> None:
    check_lengthening(tmp_path, whole, 10_000)


def test_a_run_killed_at_some_file_operations(tmp_path: Path, whole: Path) -> None:
    check_kills(tmp_path, whole, 12)


def test_a_power_cut_at_some_file_operations(tmp_path: Path, whole: Path) -> None:
    check_power_cuts(tmp_path, whole, 8)


@pytest.mark.long
def test_a_run_killed_at_every_file_operation(tmp_path: Path, whole: Path) -> None:
    check_kills(tmp_path, whole, 10_000)


@pytest.mark.long
def test_a_power_cut_at_every_file_operation(tmp_path: Path, whole: Path) -> None:
    check_power_cuts(tmp_path, whole, 10_000)


def test_the_forgetful_disk_forgets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that were never synced are gone after a power cut, and so is a file whose folder was not synced."""
    root = tmp_path / "disk"
    root.mkdir()
    journal = Journal(root, monkeypatch)
    for name, synced in (("kept", True), ("lost", False)):
        file = os.open(root / name, os.O_WRONLY | os.O_CREAT)
        os.write(file, b"synced")
        os.fsync(file)
        os.write(file, b" and not")
        os.close(file)
        if synced:
            folder = os.open(root, os.O_RDONLY)
            os.fsync(folder)
            os.close(folder)
    journal.after_power_cut(tmp_path / "cut")
    assert {path.name: path.read_bytes() for path in (tmp_path / "cut").iterdir()} == {"kept": b"synced"}
    journal.with_names_kept(tmp_path / "names")
    found = {path.name: path.read_bytes() for path in (tmp_path / "names").iterdir()}
    assert found == {"kept": b"synced", "lost": b"synced"}
