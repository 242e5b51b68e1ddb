"""A comparison whose files were damaged, or whose folder can't be written: one sentence, and the rest of the tables."""

from __future__ import annotations

import shutil
from pathlib import Path

import pandas as pd
import pytest
import yaml

import polyfed
from polyfed.comparison.compare import Comparison
from polyfed.errors import InputError, RunError
from polyfed.records import disk

RUN = "runs/fedproto-seed1"


def compared(folder: Path) -> Comparison:
    return polyfed.compare(
        ["standalone", "fedproto"], seeds="0-1", out=folder, models="tests.support:Narrow", clients=3, rounds=2,
        batch_size=16, lr=0.1, device="cpu", engine="sequential",
    )  # fmt: skip


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("comparisons") / "here"
    assert compared(folder).failures == {}
    return folder


@pytest.fixture
def here(intact: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(intact, tmp_path / "here"))


@pytest.mark.parametrize("name", ["clients.csv", "evaluations.csv", "events.jsonl", "summary.json", "run.json"])
def test_a_run_with_a_damaged_record_is_named_and_the_table_has_the_others(here: Path, name: str) -> None:
    """A record that lost its last line still looks like one: only its recorded length and hash tell."""
    file = here / RUN / name
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))
    found = compared(here)
    assert list(found.failures) == ["fedproto-seed1"] and name in found.failures["fedproto-seed1"]
    assert found.table["seeds"].tolist() == [2, 1]
    assert "fedproto-seed1 failed" in (here / "comparison.md").read_text()


def test_a_damaged_second_run_costs_only_the_noise_floor(here: Path) -> None:
    (here / "noise/runs/standalone-seed0/summary.json").write_text("{")
    found = compared(here)
    assert list(found.failures) == ["noise/standalone-seed0"]
    assert found.noise is None and found.table["seeds"].tolist() == [2, 2]
    shutil.rmtree(here / "noise")
    (here / "noise").write_text("mine")
    found = compared(here)
    assert "Not a directory" in found.failures["noise/standalone-seed0"] and found.table["seeds"].tolist() == [2, 2]


@pytest.mark.parametrize(
    "plan",
    ["{", "[1]", "", "\x00", "seeds: [a]", "seeds: 3", "methods: {standalone: 3}", "sweeps: {lr: 1}", "settings: [1]"],
)
def test_a_damaged_plan_is_one_sentence_and_nothing_changes(here: Path, plan: str) -> None:
    parsed = yaml.safe_load((here / "comparison.yaml").read_text())
    if ":" in plan:
        plan = yaml.safe_dump(parsed | yaml.safe_load(plan))
    (here / "comparison.yaml").write_text(plan)
    with pytest.raises(InputError, match=r"comparison.yaml' is damaged: put the file back, or choose another folder"):
        compared(here)
    assert (here / "comparison.yaml").read_text() == plan


def test_a_plan_of_which_nothing_has_begun_may_be_damaged(tmp_path: Path) -> None:
    (tmp_path / "comparison.yaml").write_text("{")
    assert compared(tmp_path).failures == {}


def test_a_full_disk_is_one_sentence_and_costs_no_run(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = disk.write

    def full(path: Path, content: bytes | str, **options: bool) -> None:
        if path.name == broken:
            raise OSError(28, "No space left on device")
        write(path, content, **options)

    monkeypatch.setattr(disk, "write", full)
    broken = "curves.csv"
    with pytest.raises(RunError, match=r"tables can't be written to '.*here': No space left on device; .*same command"):
        compared(here)
    broken = "comparison.yaml"
    with pytest.raises(InputError, match="can't write to '.*here': No space left on device"):
        compared(here)
    broken = ""
    before = pd.read_csv(here / "comparison.csv")
    assert before["seeds"].tolist() == [2, 2] and compared(here).failures == {}
