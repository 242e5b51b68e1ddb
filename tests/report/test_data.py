"""The frames of a report say what the runs' records say."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pandas as pd
import pytest
import torch

from polyfed.comparison.compare import compare
from polyfed.errors import InputError
from polyfed.records import RunFolder
from polyfed.report import data, learned
from tests.report.conftest import unfinished
from tests.support import DEFAULTS, Narrow, Wide, tiny_dataset


def test_curves_are_means_over_seeds_with_costs_so_far(four: list[Path]) -> None:
    found = data.read(*four).curves
    own = found[found["method"] == "fedproto"].set_index("round")
    rounds = [RunFolder.open(path).rounds().set_index("round") for path in four if path.name.startswith("fedproto")]
    both = pd.concat([each["accuracy_mean"] for each in rounds], axis=1)
    assert own.loc[3, "accuracy"] == pytest.approx(100 * both.loc[3].mean())
    assert own.loc[3, "high"] - own.loc[3, "low"] == pytest.approx(200 * both.loc[3].std())
    sent = sum((each["upload_floats"] + each["download_floats"]).loc[:3].sum() for each in rounds) / 2
    assert own.loc[3, "floats"] == sent
    assert (found["seeds"] == 2).all() and (found["simulated_seconds"] > 0).all()


def test_gain_is_over_the_same_client_of_the_same_seed(four: list[Path]) -> None:
    clients = data.read(*four).clients.set_index(["method", "seed", "client"])["accuracy"]
    gains = data.read(*four).clients.set_index(["method", "seed", "client"])["gain"]
    for seed in (0, 1):
        for client in range(4):
            difference = clients["fedproto", seed, client] - clients["standalone", seed, client]
            assert gains["fedproto", seed, client] == pytest.approx(difference)
            assert math.isnan(gains["standalone", seed, client])


def test_confusion_counts_every_test_sample_once(four: list[Path]) -> None:
    material = data.read(*four)
    pairs = material.confusions[material.confusions["method"] == "standalone"]
    assert pairs.groupby(["client", "true"])["share"].sum().round(6).eq(100).all()
    tested = RunFolder.open(four[-1]).clients()["test_samples"]
    assert pairs.loc[pairs["client"] == "all", "count"].sum() == tested.sum()
    assert material.holdings.groupby("client")["samples"].sum().tolist() == tested.tolist()


def test_every_client_has_a_curve_where_rounds_are_recorded(four: list[Path]) -> None:
    curves = data.read(*four).client_curves
    assert curves.groupby(["method", "client"]).size().eq(4).all() and len(curves) == 2 * 4 * 4


def test_runs_of_one_method_with_other_settings_keep_their_folders_names(four: list[Path], tmp_path: Path) -> None:
    """The same seed twice would otherwise be averaged as if it were two."""
    again = tmp_path / "again"
    shutil.copytree(four[0], again)
    assert set(data.read(*four, again).names) == {"fedproto", "again", "standalone-0", "standalone-1"}


def test_runs_with_different_partitions_are_not_compared(four: list[Path], tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(next(path for path in four if path.name == "fedproto-0"), other)
    text = (other / "run.json").read_text()
    start = text.index("one with hash ") + len("one with hash ")
    (other / "run.json").write_text(text[:start] + "0" * 16 + text[start + 16 :])
    standalone = next(path for path in four if path.name == "standalone-0")
    (source,) = data.read(standalone, other).sources
    assert source.question.baseline is None and "different data or partitions" in source.remarks[-1]


def test_comparison_has_the_table_of_its_own_files(tmp_path: Path) -> None:
    """A sweep concerns fedproto only: standalone stands in the tables of both values."""
    found = compare(
        ["standalone", "fedproto"], out=tmp_path, seeds=[0, 1], sweeps={"method.weight": [0.1, 1.0]}, noise_floor=False,
        data=tiny_dataset(), models=[Wide, Narrow], **DEFAULTS,
    )  # fmt: skip
    material = data.read(tmp_path)
    (source,) = material.sources
    pd.testing.assert_frame_equal(source.table, found.table.drop(columns="noise_floor"))
    assert material.names == ["standalone", "fedproto, method.weight=0.1", "fedproto, method.weight=1.0"]
    assert material.clients.groupby("method")["gain"].apply(lambda gain: gain.isna().all()).sum() == 1


def test_prototypes_distances_and_margins(four: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Prototypes at 0, 3 and 7, of classes 0, 1 and 3: distances 3, 7 and 4, margins 3, 3 and 4."""
    state = {
        "state.prototypes.vectors": torch.tensor([[0.0], [3.0], [99.0], [7.0]]),
        "state.prototypes.known": torch.tensor([True, True, False, True]),
    }
    monkeypatch.setattr(RunFolder, "server_state", lambda self: state)
    found = learned.prototypes(data.read(four[0]).runs[0])
    assert found is not None
    apart = found.set_index(["class", "other"])
    assert [apart.loc[pair, "distance"] for pair in ((0, 1), (0, 3), (1, 3))] == [3, 7, 4]
    assert found.drop_duplicates("class")["margin"].tolist() == [3, 3, 4]


def test_a_line_that_is_being_written_is_not_read(four: list[Path], tmp_path: Path) -> None:
    running = unfinished(four[0], tmp_path)
    with (running / "evaluations.csv").open("a") as file:
        file.write("5,test,cla")
    material = data.read(running)
    assert material.curves["round"].tolist() == [1, 2, 3, 4] and material.clients.empty


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("run.json", "{", "run.json' is damaged"),
        ("evaluations.csv", "a,b\n1,2\n", "evaluations|records"),
        ("evaluations.csv", "", "evaluations.csv has changed since the run ended"),
    ],
)
def test_broken_folder_is_a_sentence(four: list[Path], tmp_path: Path, name: str, content: str, words: str) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(four[0], broken)
    (broken / name).write_text(content)
    with pytest.raises(InputError, match=words):
        data.read(broken)


def test_broken_run_of_a_comparison_is_left_out_with_a_note(tmp_path: Path) -> None:
    compare(
        ["standalone", "fedproto"], out=tmp_path, seeds=[0], noise_floor=False, data=tiny_dataset(),
        models=[Wide, Narrow], **DEFAULTS,
    )  # fmt: skip
    (tmp_path / "runs" / "fedproto-seed0" / "evaluations.csv").write_text("round\n")
    material = data.read(tmp_path)
    assert material.names == ["standalone"] and material.sources[0].remarks[-1].startswith("Left out: the run in")


def test_no_run_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no folder"):
        data.read(tmp_path / "nowhere")
    with pytest.raises(InputError, match="holds no run"):
        data.read(tmp_path)
