"""`polyfed show` and `polyfed list`: every folder gets a line or a sentence, whatever state it is in."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

import polyfed
from polyfed.records.claim import is_locked, locked
from polyfed.report.overview import find_runs, read_run
from polyfed.report.plot import plot
from tests import support
from tests.shell import Shell, is_one_sentence

SETTINGS: dict[str, Any] = {"models": [support.Wide, support.Narrow], "clients": 4, "rounds": 3, "device": "cpu"}


class StopAfterOne(polyfed.Watcher):
    def on_round(self, round: int, row: Any) -> None:
        self.stop_requested = True


def run(out: Path, **settings: Any) -> polyfed.Result:
    return polyfed.run("standalone", data=support.tiny_dataset(), out=out, **{**SETTINGS, **settings})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run and an interrupted one."""
    folder = tmp_path_factory.mktemp("runs")
    run(folder / "done")
    with pytest.raises(polyfed.RunError):
        run(folder / "half", watcher=StopAfterOne())
    return folder


@pytest.fixture
def runs(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "runs")
    return tmp_path / "runs"


def test_a_finished_run_shows_result_curve_and_worst_clients(shell: Shell, runs: Path) -> None:
    ended = shell("show", "runs/done")
    assert ended.status == 0 and ended.error == ""
    for words in ("runs/done: finished, 3 of 3 rounds", "standalone on python:tiny, 4 clients, seed 0", "round 1 to 3",
                  "accuracy, final", "worst clients", "polyfed 0."):  # fmt: skip
        assert words in ended.output
    assert "resume" not in ended.output and max(map(len, ended.output.splitlines())) <= 80
    clients = polyfed.resume(runs / "done").clients
    worst = read_run(runs / "done").worst
    assert [c["accuracy_final"] for c in worst] == pytest.approx(sorted(clients["accuracy_final"]))


def test_what_clients_elsewhere_do_not_tell_is_a_dash(shell: Shell, runs: Path) -> None:
    clients = pd.read_csv(runs / "done" / "clients.csv")
    hidden = ["architecture", "parameters", "train_samples", "validation_samples", "test_samples", "classes"]
    clients[hidden] = None
    clients.to_csv(runs / "done" / "clients.csv", index=False)
    output = shell("show", "runs/done").output
    assert "–" in output and "None" not in output and "nan" not in output


def test_an_unfinished_run_shows_what_there_is_and_how_to_continue(shell: Shell, runs: Path) -> None:
    with (runs / "half" / "events.jsonl").open("a") as file:
        for _ in range(2):
            file.write('{"event": "note", "round": 1, "note": "client [red]3[/red]: :b: late"}\n')
    ended = shell("show", "runs/half")
    assert ended.status == 0
    assert "runs/half: interrupted, 1 of 3 rounds" in ended.output and "`polyfed resume runs/half` cont" in ended.output
    assert ended.output.count("round 1: client [red]3[/red]: :b: late") == 1
    assert "worst clients" not in ended.output


def test_json_has_the_same_for_programs(shell: Shell, runs: Path) -> None:
    shown = json.loads(shell("show", "runs/done", "--json").output)
    result = polyfed.resume(runs / "done")
    assert shown["summary"] == result.summary and shown["state"] == "finished" and shown["problem"] is None
    assert [point["accuracy"] for point in shown["curve"]] == pytest.approx(result.rounds["accuracy_mean"].tolist())
    listed = json.loads(shell("list", "--json").output)
    assert [(run["path"], run["state"], run["rounds_done"]) for run in listed] == [
        ("runs/done", "finished", 3), ("runs/half", "interrupted", 1),
    ]  # fmt: skip
    assert listed[0]["accuracy"] == pytest.approx(result.summary["accuracy_final"])


def test_a_run_that_a_process_works_on_is_running(runs: Path) -> None:
    assert is_locked(runs / "half") is False
    with locked(runs / "half"):
        assert is_locked(runs / "half") is True
        assert read_run(runs / "half").state == "running"
        assert read_run(runs / "done").state == "finished"
    with locked(runs / "half"):  # looking has left no lock behind
        pass


def test_a_list_has_a_line_for_every_run_and_names_stay_in_one_piece(shell: Shell, runs: Path) -> None:
    long = "fedclassavg-a_dataset_with_a_very_long_name-and_settings=many-seed12345"
    (runs / "deeper").mkdir()
    shutil.copytree(runs / "done", runs / "deeper" / long)
    lines = shell("list").output.splitlines()
    assert lines[0].split() == ["state", "method", "data", "done", "accuracy", "age", "folder"]
    assert [line.split()[-1] for line in lines[1:]] == [f"deeper/{long}", "done", "half"]
    assert lines[2].split()[:4] == ["finished", "standalone", "python:tiny", "3/3"]
    assert lines[3].split()[:4] == ["interrupted", "standalone", "python:tiny", "1/3"]


def test_a_comparison_is_one_line_and_its_folder_lists_its_runs(shell: Shell, runs: Path) -> None:
    """Two methods, two seeds and two numbers of clients are eight runs; two have begun, one is finished."""
    plan = {"methods": {"standalone": {}, "fedproto": {}}, "seeds": [0, 1], "sweeps": {"clients": [2, 4]},
            "settings": {"data": "digits"}}  # fmt: skip
    (runs / "both" / "runs").mkdir(parents=True)
    (runs / "both" / "comparison.yaml").write_text(yaml.safe_dump(plan))
    for name in ("done", "half"):
        (runs / name).rename(runs / "both" / "runs" / name)
    (line,) = shell("list").output.splitlines()[1:]
    assert line.split()[:4] == ["interrupted", "comparison", "digits", "1/8"]
    assert [each.path.name for each in find_runs(runs / "both")] == ["done", "half"]
    ended = shell("show", "runs/both")
    assert ended.status == 2 and "'runs/both' is a comparison: `polyfed list runs/both`" in ended.error


def damage(folder: Path, what: str) -> None:
    if what == "no run.json":
        (folder / "run.json").unlink()
    elif what == "broken run.json":
        (folder / "run.json").write_text("{")
    elif what == "binary rounds":
        (folder / "rounds.csv").write_bytes(b"\xff\xfe\x00\n")
    elif what == "other columns":
        (folder / "rounds.csv").write_text("a,b\n1,2\n")
    elif what == "no config":
        (folder / "config.yaml").unlink()
    elif what == "old config":
        (folder / "config.yaml").write_text("method: fedproto\nno_longer_a_setting: 3\nclients: many\n")
    elif what == "odd events":
        (folder / "events.jsonl").write_text('{"event": "start"}\n{"event": "note"}\nnonsense\n')
    elif what == "no summary":
        (folder / "summary.json").unlink(missing_ok=True)
        (folder / "clients.csv").unlink(missing_ok=True)
    elif what == "links":
        (folder / "rounds.csv").unlink()
        (folder / "rounds.csv").symlink_to("rounds.csv")
    elif what == "odd end":
        content = json.loads((folder / "run.json").read_text())
        (folder / "run.json").write_text(json.dumps({**content, "finished": {"round": "x"}, "rounds": "y"}))


@pytest.mark.parametrize("name", ["done", "half"])
@pytest.mark.parametrize(
    "what",
    ["no run.json", "broken run.json", "binary rounds", "other columns", "no config", "old config", "odd events",
     "no summary", "links", "odd end"],
)  # fmt: skip
def test_a_damaged_folder_is_a_line_or_a_sentence(shell: Shell, runs: Path, name: str, what: str) -> None:
    damage(runs / name, what)
    listed = shell("list")
    assert listed.status == 0 and f" {name}" in listed.output
    shown = shell("show", f"runs/{name}")
    assert shown.status == 0 or (shown.status == 2 and is_one_sentence(shown.error))
    for command in (("list", "--json"), ("show", f"runs/{name}", "--json")):
        ended = shell(*command)
        assert ended.status == 2 or json.loads(ended.output)


def test_folders_without_runs_get_a_sentence(shell: Shell, tmp_path: Path) -> None:
    missing = shell("list", "nowhere")
    assert missing.status == 2 and is_one_sentence(missing.error) and "'nowhere' is not a folder" in missing.error
    (tmp_path / "empty").mkdir()
    assert shell("list", "empty").output == "There are no runs in 'empty'.\n"
    assert json.loads(shell("list", "empty", "--json").output) == []
    assert "'empty' holds no run: it has no config.yaml" in shell("show", "empty").error


def test_a_plot_shows_long_and_flat_curves() -> None:
    long = plot({number: number / 1000 for number in range(1, 1001)}, 80).splitlines()
    assert max(map(len, long)) == 80 and long[-1].strip() == "round 1 to 1000"
    assert long[0].endswith("█") and long[5][9] == "▁"
    flat = plot({1: 0.5, 2: 0.5}, 80).splitlines()
    assert {line[9:] for line in flat[3:6]} == {"██"} and flat[2][9:].strip() == ""
