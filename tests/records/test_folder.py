"""The run folder: documented columns, records that a kill cut off, values every program can read."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from polyfed.config import experiment
from polyfed.errors import InputError
from polyfed.records import CLIENT_COLUMNS, EVALUATION_COLUMNS, ROUND_COLUMNS, RunFolder
from tests import support


def new_folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "run", experiment(method="standalone"))


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
        "upload_floats,download_floats,upload_bytes,download_bytes,flops,seconds"
    )
    assert heads["clients"] == (
        "client,architecture,parameters,train_samples,validation_samples,test_samples,classes,accuracy_final,"
        "accuracy_at_best_validation,accuracy_best"
    )
    assert heads["evaluations"] == (
        "round,part,rule,accuracy_mean,accuracy_weighted,accuracy_std,accuracy_worst_decile"
    )
    assert (",".join(ROUND_COLUMNS), ",".join(CLIENT_COLUMNS)) == (heads["rounds"], heads["clients"])
    assert ",".join(EVALUATION_COLUMNS) == heads["evaluations"]


def test_the_folder_of_a_finished_run_is_complete(tmp_path: Path) -> None:
    federation = support.federation(tmp_path, "fedproto", rounds=2, clients=3)
    summary = federation.run()
    folder = RunFolder.open(federation.folder.path)
    names = {path.name for path in folder.path.iterdir()}
    assert names == {
        "config.yaml", "rounds.csv", "evaluations.csv", "clients.csv", "summary.json", "events.jsonl", "models",
    }  # fmt: skip
    assert sorted(path.name for path in (folder.path / "models").iterdir()) == [
        f"client-000{client}.safetensors" for client in range(3)
    ]
    assert (folder.finished, folder.summary()) == (True, summary)
    assert folder.config == federation.config
    own = folder.evaluations().query("part == 'test' and rule == 'prototypes'")
    assert own.accuracy_mean.tolist() == folder.rounds().accuracy_mean.tolist()
    assert sorted(folder.evaluations().rule.unique()) == ["classifier", "prototypes"]
    clients = folder.clients()
    assert clients.architecture.tolist() == ["Wide", "Narrow", "Wide"]
    assert clients.accuracy_final.mean() == pytest.approx(summary["accuracy_final"])
    hidden = 16
    assert clients.parameters[0] == 37 * hidden + (hidden + 1) * 6 + 7 * 4


def test_an_existing_run_is_not_touched(tmp_path: Path) -> None:
    folder = new_folder(tmp_path)
    folder.add_round(row(1))
    with pytest.raises(InputError, match="already holds a run; go on with `polyfed resume"):
        new_folder(tmp_path)
    assert len(folder.rounds()) == 1


def test_a_place_that_can_not_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="can't write to .*file.*choose another folder"):
        RunFolder.create(tmp_path / "file" / "run", experiment(method="standalone"))
    with pytest.raises(InputError, match="holds no run"):
        RunFolder.open(tmp_path)


def test_records_of_later_rounds_are_dropped(tmp_path: Path) -> None:
    folder = new_folder(tmp_path)
    for round in (1, 2, 3):
        folder.add_round(row(round))
        folder.add_evaluations({**dict.fromkeys(EVALUATION_COLUMNS, 0), "round": round, "part": p} for p in "ab")
        folder.add_event("round", round=round)
    folder.keep_until(2)
    assert folder.rounds()["round"].tolist() == [1, 2]
    assert folder.evaluations()["round"].tolist() == [1, 1, 2, 2]
    assert [event["round"] for event in folder.events()] == [1, 2]
    folder.add_round(row(3))
    assert folder.rounds()["round"].tolist() == [1, 2, 3]


@pytest.mark.parametrize("cut", [1, 3, 20, 50])
def test_lines_that_a_kill_left_half_written_are_dropped(tmp_path: Path, cut: int) -> None:
    folder = new_folder(tmp_path)
    for round in (1, 2):
        folder.add_round(row(round))
        folder.add_event("round", round=round, note="words " * 10)
    for name in ("rounds.csv", "events.jsonl"):
        path = folder.path / name
        path.write_bytes(path.read_bytes()[:-cut])
    folder.keep_until(1)
    assert folder.rounds()["round"].tolist() == [1]
    assert [event["round"] for event in folder.events()] == [1]
    folder.add_round(row(2))
    assert folder.rounds()["round"].tolist() == [1, 2]


def test_numbers_survive_the_csv_exactly(tmp_path: Path) -> None:
    folder = new_folder(tmp_path)
    folder.add_round(row(1, accuracy_mean=1 / 3, flops=12_345_678_901_234_567))
    folder.keep_until(1)
    first = folder.rounds().iloc[0]
    assert (first.accuracy_mean, folder.rounds().flops[0]) == (1 / 3, 12_345_678_901_234_567)


def test_json_has_null_where_there_is_no_number(tmp_path: Path) -> None:
    folder = new_folder(tmp_path)
    folder.write_summary({"accuracy_at_best_validation": math.nan, "rounds": 3})
    folder.add_event("round", round=1, loss_mean=math.nan)
    text = (folder.path / "summary.json").read_text()
    assert json.loads(text, parse_constant=refuse) == {"accuracy_at_best_validation": None, "rounds": 3}
    assert json.loads((folder.path / "events.jsonl").read_text(), parse_constant=refuse)["loss_mean"] is None


def test_an_unfinished_run_says_how_to_go_on(tmp_path: Path) -> None:
    folder = new_folder(tmp_path)
    assert not folder.finished
    with pytest.raises(InputError, match="not finished; go on with `polyfed resume"):
        folder.summary()
    with pytest.raises(InputError, match="no clients.csv yet"):
        folder.clients()
