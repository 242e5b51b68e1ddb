"""The run folder: documented columns, records that a kill cut off, values every program can read."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from polyfed.config import experiment
from polyfed.errors import InputError
from polyfed.records import CLIENT_COLUMNS, EVALUATION_COLUMNS, ROUND_COLUMNS, RunFolder
from polyfed.records.contents import LOGS
from polyfed.server.scores import Best, Progress
from tests import support


def new_folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "run", experiment(method="standalone", confusion="every"))


def row(round: int, **values: Any) -> dict[str, Any]:
    return {**dict.fromkeys(ROUND_COLUMNS, 0.5), "round": round, **values}


def refuse(token: str) -> None:
    raise ValueError(f"{token} is not JSON")


def test_columns_are_the_documented_ones(tmp_path: Path) -> None:
    """Readers rely on these names and this order."""
    federation = support.federation(tmp_path, "fedproto")
    federation.run()
    path = federation.folder.path
    heads = {name: (path / f"{name}.csv").read_text().splitlines()[0] for name in ("rounds", "clients", "evaluations")}
    assert heads["rounds"] == (
        "round,accuracy_mean,accuracy_weighted,accuracy_std,accuracy_worst_decile,loss_mean,participants,replies,"
        "upload_floats,download_floats,upload_bytes,download_bytes,flops,seconds,"
        "balanced_accuracy_mean,macro_f1_mean,auc_mean"
    )
    assert heads["clients"] == (
        "client,architecture,parameters,train_samples,validation_samples,test_samples,classes,accuracy_final,"
        "accuracy_at_best_validation,accuracy_best,balanced_accuracy_final,macro_f1_final,auc_final,largest_class"
    )
    assert heads["evaluations"] == (
        "round,part,rule,accuracy_mean,accuracy_weighted,accuracy_std,accuracy_worst_decile,accuracy_participants,"
        "simulated_seconds,balanced_accuracy_mean,macro_f1_mean,auc_mean"
    )
    assert (",".join(ROUND_COLUMNS), ",".join(CLIENT_COLUMNS)) == (heads["rounds"], heads["clients"])
    assert ",".join(EVALUATION_COLUMNS) == heads["evaluations"]
    assert (path / "confusion.csv").read_text().startswith("round,rule,client,true,predicted,count\n")


def test_the_folder_of_a_finished_run_is_complete(tmp_path: Path) -> None:
    federation = support.federation(tmp_path, "fedproto", rounds=2, clients=3)
    summary = federation.run()
    folder = RunFolder.open(federation.folder.path)
    names = {path.name for path in folder.path.iterdir()}
    assert names == {
        "config.yaml", "run.json", "rounds.csv", "evaluations.csv", "confusion.csv", "clients.csv", "summary.json",
        "events.jsonl", "models",
    }  # fmt: skip
    assert sorted(path.name for path in (folder.path / "models").iterdir()) == [
        *(f"client-000{client}.safetensors" for client in range(3)), "server.safetensors",
    ]  # fmt: skip
    assert (folder.finished, folder.summary()) == (True, summary)
    assert folder.config == federation.config
    own = folder.evaluations().query("part == 'test' and rule == 'prototypes'")
    assert own.accuracy_mean.tolist() == folder.rounds().accuracy_mean.tolist()
    assert sorted(folder.evaluations().rule.unique()) == ["classifier", "own-prototypes", "prototypes"]
    clients = folder.clients()
    assert clients.architecture.tolist() == ["Wide", "Narrow", "Wide"]
    assert clients.accuracy_final.mean() == pytest.approx(summary["accuracy_final"])
    hidden = 16
    assert clients.parameters[0] == 37 * hidden + (hidden + 1) * 6 + 7 * 4


def test_an_existing_run_is_not_touched(tmp_path: Path) -> None:
    folder = new_folder(tmp_path)
    folder.add_round(row(1))
    with pytest.raises(InputError, match="already holds a run; continue it with `polyfed resume"):
        new_folder(tmp_path)
    assert len(folder.rounds()) == 1


def test_a_place_that_can_not_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="can't write to .*file.*choose another folder"):
        RunFolder.create(tmp_path / "file" / "run", experiment(method="standalone"))
    with pytest.raises(InputError, match="holds no run"):
        RunFolder.open(tmp_path)


def add(folder: RunFolder, round: int) -> None:
    """All records of a round."""
    folder.add_round(row(round))
    folder.add_evaluations({**dict.fromkeys(EVALUATION_COLUMNS, 0), "round": round, "part": p} for p in "ab")
    folder.add_confusion((round, "classifier", 0, true, 1, 11) for true in range(3))
    folder.add_event("round", round=round, note="words " * 10)


def save(folder: RunFolder, round: int) -> None:
    folder.save(round, {}, {}, None)


def recorded(folder: RunFolder) -> tuple[list[int], list[int], list[int]]:
    """The rounds of which there are records."""
    events = [event["round"] for event in folder.events()]
    return folder.rounds()["round"].tolist(), folder.evaluations()["round"].tolist(), events


def test_records_of_later_rounds_are_dropped(tmp_path: Path) -> None:
    folder = new_folder(tmp_path)
    for round in (1, 2, 3):
        add(folder, round)
        if round == 2:
            save(folder, 2)
    folder = RunFolder.open(folder.path)
    _, notes = folder.restore()
    assert notes == []
    assert recorded(folder) == ([1, 2], [1, 1, 2, 2], [1, 2])
    add(folder, 3)
    assert recorded(folder) == ([1, 2, 3], [1, 1, 2, 2, 3, 3], [1, 2, 3])


def test_notes_beyond_the_checkpoint_are_kept(tmp_path: Path) -> None:
    """Where a run went on stays known, though it was killed before its next checkpoint."""
    folder = new_folder(tmp_path)
    add(folder, 1)
    save(folder, 1)
    folder.add_event("start", round=1)
    add(folder, 2)
    folder = RunFolder.open(folder.path)
    folder.restore()
    assert [(event["event"], event["round"]) for event in folder.events()] == [("round", 1), ("start", 1)]


@pytest.mark.parametrize("cut", [1, 3, 20, 50])
def test_lines_that_a_kill_left_half_written_are_dropped(tmp_path: Path, cut: int) -> None:
    folder = new_folder(tmp_path)
    add(folder, 1)
    save(folder, 1)
    add(folder, 2)
    for name in ("rounds.csv", "events.jsonl"):
        path = folder.path / name
        path.write_bytes(path.read_bytes()[:-cut])
    folder = RunFolder.open(folder.path)
    assert folder.restore()[1] == []
    assert recorded(folder) == ([1], [1, 1], [1])
    add(folder, 2)
    assert recorded(folder) == ([1, 2], [1, 1, 2, 2], [1, 2])


HARMS: dict[str, Callable[[Path], object]] = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-20]),
    "empty": lambda path: path.write_bytes(b""),
    "deleted": lambda path: path.unlink(),
    "garbled": lambda path: path.write_bytes(path.read_bytes().replace(b"1", b"7")),
    "not text": lambda path: path.write_bytes(b"\xff\xfe" + path.read_bytes()[2:]),
}


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("name", LOGS)
def test_a_damaged_record_is_restored_from_its_copy_and_that_is_said(tmp_path: Path, name: str, harm: str) -> None:
    folder = new_folder(tmp_path)
    for round in (1, 2):
        add(folder, round)
        save(folder, round)
    before = (folder.path / name).read_bytes()
    HARMS[harm](folder.path / name)
    folder = RunFolder.open(folder.path)
    _, notes = folder.restore()
    assert notes == [f"{name} was damaged or incomplete and has been restored from its copy in the checkpoint"]
    assert (folder.path / name).read_bytes() == before
    add(folder, 3)
    save(folder, 3)
    assert RunFolder.open(folder.path).restore()[1] == []


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("name", LOGS)
def test_rows_that_are_lost_for_good_are_counted(tmp_path: Path, name: str, harm: str) -> None:
    folder = new_folder(tmp_path)
    for round in (1, 2):
        add(folder, round)
        save(folder, round)
    for path in (folder.path / name, folder.path / "checkpoint" / name):
        HARMS[harm](path)
    folder = RunFolder.open(folder.path)
    (note,) = folder.restore()[1]
    rows = {"rounds.csv": 2, "evaluations.csv": 4, "events.jsonl": 2, "confusion.csv": 6}[name]
    assert re.fullmatch(rf"{name} and its copy .* are damaged: \d of {rows} rows could be saved", note)
    add(folder, 3)
    assert recorded(folder)[0][-1] == 3
    save(folder, 3)
    assert RunFolder.open(folder.path).restore()[1] == []


def test_names_of_members_are_read_as_they_are(tmp_path: Path) -> None:
    """They look like a missing value and a number."""
    folder = new_folder(tmp_path)
    rows = [{**dict.fromkeys(CLIENT_COLUMNS, 1), "name": name} for name in ("nan", "007")]
    folder.finish(1, {}, {}, rows, None, {"rounds": 1})
    assert folder.clients()["name"].tolist() == ["nan", "007"]


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("name", [*LOGS, "clients.csv", "summary.json"])
def test_a_damaged_record_of_a_finished_run_is_said(tmp_path: Path, name: str, harm: str) -> None:
    folder = new_folder(tmp_path)
    add(folder, 1)
    folder.finish(1, {}, {}, [dict.fromkeys(CLIENT_COLUMNS, 1)], None, {"rounds": 1})
    folder = RunFolder.open(folder.path)
    assert folder.damage() == []
    HARMS[harm](folder.path / name)
    (problem,) = folder.damage()
    assert problem.startswith(name)


def test_a_summary_that_is_not_the_run_s_is_no_result(tmp_path: Path) -> None:
    folder = new_folder(tmp_path)
    folder.finish(1, {}, {}, [], None, {"rounds": 1})
    for content in ("{}", "[1]", '{"rounds": 2}'):
        (folder.path / "summary.json").write_text(content)
        with pytest.raises(InputError, match="summary.json has changed since the run ended; restore it, or run"):
            folder.summary()


@pytest.mark.parametrize("part", ["settings", "facts"])
@pytest.mark.parametrize("value", [3, None, []])
def test_a_run_json_with_parts_of_another_kind_is_refused(tmp_path: Path, part: str, value: Any) -> None:
    path = new_folder(tmp_path).path
    content = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps({**content, part: value}))
    with pytest.raises(InputError, match="run.json' is damaged"):
        RunFolder.open(path)


def test_files_that_are_nested_without_end_are_refused(tmp_path: Path) -> None:
    path = new_folder(tmp_path).path
    (path / "events.jsonl").write_text("[" * 100_000 + "\n")
    assert RunFolder.open(path).events() == []
    (path / "config.yaml").write_text("[" * 3000)
    with pytest.raises(InputError, match="config.yaml' is not valid YAML"):
        _ = RunFolder.open(path).config
    (path / "run.json").write_text("[" * 100_000)
    with pytest.raises(InputError, match="run.json' is damaged"):
        RunFolder.open(path)


@pytest.mark.parametrize("end", [True, {}, [1], {"round": 1}, "x"])
def test_a_run_json_with_a_strange_end_is_refused(tmp_path: Path, end: Any) -> None:
    folder = new_folder(tmp_path)
    content = json.loads((folder.path / "run.json").read_text())
    (folder.path / "run.json").write_text(json.dumps({**content, "finished": end or [0]}))
    folder = RunFolder.open(folder.path)
    for read in (folder.damage, folder.summary, folder.reopen, lambda: folder.model_state(0)):
        with pytest.raises(InputError, match="run.json' is damaged .*: restore the file"):
            read()


def test_a_finished_run_with_a_damaged_record_is_not_changed_unless_asked(tmp_path: Path) -> None:
    folder = new_folder(tmp_path)
    for round in (1, 2, 3):
        add(folder, round)
    folder.finish(3, {}, {}, [], None, {"rounds": 3})
    rows = (folder.path / "rounds.csv").read_text().splitlines(keepends=True)
    (folder.path / "rounds.csv").write_text("".join([*rows[:2], rows[2][:9]]))
    before = {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()}
    with pytest.raises(InputError, match="rounds.csv changed after it had ended; restore that, or .*--repair"):
        RunFolder.open(folder.path).reopen()
    assert {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()} == before
    assert not (folder.path / "checkpoint").exists()
    (note,) = RunFolder.open(folder.path).reopen(repair=True)
    assert "1 of 3 rows could be saved" in note
    assert RunFolder.open(folder.path).rounds()["round"].tolist() == [1]


def test_a_table_that_is_missing_from_a_finished_run_is_not_promised(tmp_path: Path) -> None:
    folder = new_folder(tmp_path)
    folder.finish(1, {}, {}, [], None, {"rounds": 1})
    (folder.path / "clients.csv").unlink()
    with pytest.raises(InputError, match="clients.csv' is missing: restore it"):
        folder.clients()


def test_numbers_survive_the_csv_exactly(tmp_path: Path) -> None:
    folder = new_folder(tmp_path)
    folder.add_round(row(1, accuracy_mean=1 / 3, flops=12_345_678_901_234_567))
    save(folder, 1)
    folder.restore()
    first = folder.rounds().iloc[0]
    assert (first.accuracy_mean, folder.rounds().flops[0]) == (1 / 3, 12_345_678_901_234_567)


def test_json_has_null_where_there_is_no_number(tmp_path: Path) -> None:
    folder = new_folder(tmp_path)
    summary = {"accuracy_at_best_validation": math.nan, "rounds": 3}
    best = Progress(federation=Best(final=math.nan))
    folder.finish(3, {}, best.to_dict(), [], None, summary)
    folder.add_event("round", round=1, loss_mean=math.nan)
    text = (folder.path / "summary.json").read_text()
    assert json.loads(text, parse_constant=refuse) == {"accuracy_at_best_validation": None, "rounds": 3}
    assert json.loads((folder.path / "events.jsonl").read_text(), parse_constant=refuse)["loss_mean"] is None
    assert json.loads((folder.path / "run.json").read_text(), parse_constant=refuse)["finished"]["round"] == 3
    assert math.isnan(Progress.from_dict(best.to_dict()).federation.final)


def test_an_unfinished_run_says_how_to_go_on(tmp_path: Path) -> None:
    folder = new_folder(tmp_path)
    assert not folder.finished
    with pytest.raises(InputError, match="not finished; continue it with `polyfed resume"):
        folder.summary()
    with pytest.raises(InputError, match="no clients.csv yet"):
        folder.clients()


# Runs that started with an earlier version ----------------------------------------------------------------------------


def make_earlier(run: Path) -> None:
    """Turn a run's records into those that polyfed 0.1 wrote: fewer columns, no confusion.csv."""
    (run / "confusion.csv").unlink()
    (run / "checkpoint" / "confusion.csv").unlink(missing_ok=True)
    lines = [line.split(",")[:7] for line in (run / "evaluations.csv").read_text().splitlines()]
    (run / "evaluations.csv").write_text("".join(",".join(line) + "\n" for line in lines))


def test_an_earlier_finished_run_can_be_read(tmp_path: Path) -> None:
    federation = support.federation(tmp_path, "standalone")
    federation.run()
    run = federation.folder.path
    make_earlier(run)
    content = json.loads((run / "run.json").read_text())
    del content["finished"]["records"]["confusion.csv"]
    (run / "run.json").write_text(json.dumps(content))
    folder = RunFolder.open(run)
    assert folder.summary()["rounds"] == 2
    assert "accuracy_participants" not in folder.evaluations()
    assert folder.damage() == ["evaluations.csv has changed since the run ended, with 4 rows then"]  # by this test
    with pytest.raises(InputError, match="has recorded no confusion counts"):
        folder.confusion()


@pytest.mark.parametrize(("name", "known"), [("evaluations", EVALUATION_COLUMNS[:9]), ("rounds", ROUND_COLUMNS[:14])])
def test_a_run_without_metrics_beside_accuracy_keeps_its_columns(
    tmp_path: Path, name: str, known: tuple[str, ...]
) -> None:
    folder = new_folder(tmp_path)
    (folder.path / f"{name}.csv").write_text(",".join(known) + "\n")
    folder = RunFolder.open(folder.path)
    folder.restore()
    add(folder, 1)
    found = folder.evaluations() if name == "evaluations" else folder.rounds()
    assert found.columns.tolist() == list(known)
    assert len(found) == (2 if name == "evaluations" else 1)


def test_rows_of_an_earlier_run_keep_its_columns(tmp_path: Path) -> None:
    folder = new_folder(tmp_path)
    make_earlier(folder.path)
    folder = RunFolder.open(folder.path)
    folder.restore()
    add(folder, 1)
    assert folder.evaluations().columns.tolist() == list(EVALUATION_COLUMNS[:7])
    assert len(folder.evaluations()) == 2
    save(folder, 1)
    assert RunFolder.open(folder.path).restore()[1] == []
