"""`polyfed compare` and `polyfed.compare` on small runs: files, exit statuses, what is refused and what continues."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

import polyfed
from polyfed.comparison.outcomes import ROUNDS
from polyfed.comparison.plan import parse_seeds
from polyfed.errors import InputError
from polyfed.server.federation import Federation
from tests.shell import Shell, is_one_sentence
from tests.support import Narrow, Wide, tiny_dataset

SMALL = (
    "--models", "tests.support:Narrow", "--clients", "3", "--rounds", "2", "--device", "cpu", "--engine", "sequential",
    "--batch-size", "16", "--lr", "0.1",
)  # fmt: skip
QUICK = (*SMALL, "--no-noise-floor", "-q")


def test_a_comparison_writes_its_tables_and_continues_with_more(shell: Shell, tmp_path: Path) -> None:
    ended = shell("compare", "standalone", "fedproto", "--seeds", "0-2", *SMALL, "--out", "here", "--target", "0.99")
    assert (ended.status, ended.error) == (0, "")
    assert ended.output.splitlines()[-1] == "here"
    assert "6 runs to do" in ended.output and "minus" in ended.output and "Noise floor:" in ended.output
    assert max(map(len, ended.output.split("\nMean over")[0].splitlines())) <= 80 and "…" not in ended.output
    table = pd.read_csv(tmp_path / "here/comparison.csv")
    assert table["method"].tolist() == ["standalone", "fedproto"] and table["seeds"].tolist() == [3, 3]
    assert (table["noise_floor"] == 0).all()  # a CPU leaves nothing to chance
    final = [
        polyfed.RunFolder.open(tmp_path / f"here/runs/fedproto-seed{seed}").summary()["accuracy_final"]
        for seed in range(3)
    ]
    assert table["accuracy_final_mean"][1] == pytest.approx(sum(final) / 3)
    for name in ("comparison.md", "comparison.tex", "curves.csv", "comparison.yaml"):
        assert (tmp_path / "here" / name).stat().st_size > 0
    curves = pd.read_csv(tmp_path / "here/curves.csv")
    assert len(curves) == 4 and set(curves) == {"method", "round", "accuracy", "std"}

    more = shell("compare", "standalone", "fedproto", "lg-fedavg", "--seeds", "0-3", *SMALL, "--out", "here")
    assert more.status == 0 and "6 runs to do, 6 already finished" in more.output
    plan = yaml.safe_load((tmp_path / "here/comparison.yaml").read_text())
    assert plan["seeds"] == [0, 1, 2, 3] and list(plan["methods"]) == ["standalone", "fedproto", "lg-fedavg"]

    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "here").rglob("*") if path.is_file()}
    for other, words in (
        (("standalone", "--lr", "0.2"), "training.lr of standalone is 0.1 there, not 0.2"),
        (("standalone", "--clients", "4"), "clients is 3 there, not 4"),
        (("standalone", "--sweep", "alpha=1,2"), "it sweeps nothing, not alpha"),
    ):
        given = dict(zip(SMALL[::2], SMALL[1::2], strict=True)) | dict([other[1:]])
        options = [word for pair in given.items() for word in pair]
        refused = shell("compare", other[0], "--seeds", "0", *options, "--out", "here", "-q")
        assert refused.status == 2 and is_one_sentence(refused.error), refused.error
        assert f"'here' holds another comparison: {words}" in refused.error
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "here").rglob("*") if path.is_file()}


def test_a_note_of_several_runs_is_printed_once(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a terminal no rounds are shown, but what a user should know is."""
    one_round = Federation.round
    monkeypatch.setattr(Federation, "round", lambda self, number: (self.note("slow today"), one_round(self, number))[1])
    few = [*SMALL, "--no-noise-floor", "--seeds", "0-1", "--no-differences"]
    assert shell("compare", "standalone", *few, "--out", "here").error == "note: slow today\n"
    assert shell("compare", "standalone", *few, "--out", "there", "-q").error == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("standalone", "fedprot"), "unknown method 'fedprot': did you mean 'fedproto'"),
        (("fedproto",), "no standalone to compare with: add standalone .*--baseline fedproto.*--no-differences"),
        (
            ("fedproto", "--baseline", "fedavg"),
            "the baseline 'fedavg' is not one of the methods: choose one of fedproto",
        ),
        (("standalone", "--seeds", "0,1,0"), "seed 0 is given twice"),
        (("standalone", "--seeds", "0-3,2"), "seed 2 is given twice"),
        (("standalone", "--seeds", "4-2"), "seeds are '4-2', but must be numbers and ranges"),
        (("standalone", "--seeds", "x"), "seeds are 'x', but must be numbers and ranges"),
        (("standalone", "--seed", "1"), "no such option:? .?--seed"),
        (("standalone", "--set", "seed=1"), "seed can't be set in a comparison: use --seeds"),
        (("standalone", "--sweep", "clinets=2,3"), "unknown setting 'clinets': did you mean 'clients'"),
        (("standalone", "--sweep", "method.weight=2,3"), "none of standalone has an option 'weight'"),
        (("standalone", "--sweep", "clients"), "--sweep takes NAME=V1,V2, .* not 'clients'"),
        (("standalone", "--sweep", "lr=1", "--sweep", "lr=2"), "lr is swept twice"),
        (("standalone", "--round", "last"), "round is 'last', but must be one of final, best-validation, best-test"),
        (("standalone", "--target", "80"), "target is 80, but must be a share"),
        (("standalone", "--jobs", "0"), "jobs is 0, but must be a whole number at least 1"),
        (("standalone", "--data", "digit"), "unknown dataset 'digit'"),
        (("standalone", "--out", ""), "--out is empty"),
        (("standalone", "--out", "full"), "'full' is not empty and holds no comparison"),
        (("standalone", "--out", "full/file"), "can't write to 'full/file'"),
        (("standalone", "other.yaml"), "clients is 10 for standalone and 7 for other, so they can't be compared"),
        (("standalone", "missing.yaml"), "can't read the experiment 'missing.yaml'"),
    ],
)
def test_bad_input_is_one_sentence_and_status_2(
    shell: Shell, tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").write_text("mine")
    (tmp_path / "other.yaml").write_text("method: fedproto\nclients: 7\n")
    out = () if "--out" in arguments else ("--out", "here")
    ended = shell("compare", *arguments, "--rounds", "1", "--no-noise-floor", *out)
    assert ended.status == 2, ended
    assert re.search(words, ended.error), ended.error
    assert is_one_sentence(ended.error), ended.error
    assert (tmp_path / "full/file").read_text() == "mine"
    assert not list(tmp_path.glob("here/runs/*"))


def test_a_mistake_does_not_claim_the_folder(shell: Shell, tmp_path: Path) -> None:
    """A comparison of which no run has begun makes room for the corrected one."""
    assert shell("compare", "standalone", *QUICK, "--data", "digit", "--seeds", "0", "--out", "here").status == 2
    assert shell("compare", "standalone", *QUICK, "--seeds", "0", "--out", "here").status == 0


def test_failed_runs_are_named_and_the_table_has_the_rest(shell: Shell, tmp_path: Path) -> None:
    two = ("tests.support:Narrow,tests.support:Wide",)
    ended = shell(
        "compare", "standalone", "fedavg", "--seeds", "0-1", *SMALL[:1], *two, *SMALL[2:], "--no-noise-floor",
        "--out", "here",
    )  # fmt: skip
    assert ended.status == 1
    assert re.search("fedavg-seed0 failed: .*needs the same network", ended.output)
    table = pd.read_csv(tmp_path / "here/comparison.csv")
    assert table["seeds"].tolist() == [2, 0] and table["accuracy_final_mean"].notna().tolist() == [True, False]
    assert "fedavg-seed1 failed" in (tmp_path / "here/comparison.md").read_text()
    assert "No interval and no p value" in ended.output


def test_a_sweep_draws_curves_and_a_table_for_every_point(shell: Shell, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    settings = [word for word in SMALL if word not in ("--lr", "0.1")]
    ended = shell(
        "compare", "standalone", "lg-fedavg", "--seeds", "0", *settings, "--sweep", "lr=0.1,0.2", "--no-noise-floor",
        "--out", "here",
    )  # fmt: skip
    assert ended.status == 0, ended.error
    table = pd.read_csv(tmp_path / "here/comparison.csv")
    assert table["training.lr"].tolist() == [0.1, 0.1, 0.2, 0.2]
    assert table["accuracy_final_mean"][0] != table["accuracy_final_mean"][2]
    for name in ("curves.png", "curves.pdf", "sweep.png", "sweep.pdf"):
        assert (tmp_path / "here" / name).stat().st_size > 1000


def test_without_matplotlib_there_is_a_note(shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyfed.report.drawing.missing", lambda: True)
    options = [word for word in QUICK if word != "-q"]
    ended = shell("compare", "standalone", *options, "--seeds", "0", "--out", "here")
    assert ended.status == 0 and "Pictures need matplotlib: pip install 'polyfed[pictures]'." in ended.output
    assert not list((tmp_path / "here").glob("*.png"))


def test_a_rule_that_a_method_does_not_have_is_refused_and_nothing_is_lost(shell: Shell, tmp_path: Path) -> None:
    ended = shell("compare", "standalone", "fedproto", *QUICK, "--seeds", "0", "--rule", "prototypes", "--out", "here")
    assert ended.status == 2 and is_one_sentence(ended.error)
    assert "has no rule 'prototypes'; it predicts by classifier" in ended.error
    assert len(list(tmp_path.glob("here/runs/*/summary.json"))) == 2
    ended = shell("compare", "standalone", "fedproto", *QUICK, "--seeds", "0", "--rule", "classifier", "--out", "here")
    assert ended.status == 0
    assert pd.read_csv(tmp_path / "here/comparison.csv")["rule"].tolist() == ["classifier", "classifier"]


def test_files_bring_options_and_another_baseline_is_possible(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "light.yaml").write_text("method: {name: fedproto, weight: 0.1}\n")
    ended = shell(
        "compare", "light.yaml", "fedproto", *QUICK, "--seeds", "0", "--baseline", "light", "--round", "best-test",
        "--out", "here",
    )  # fmt: skip
    assert ended.status == 0, ended.error
    table = pd.read_csv(tmp_path / "here/comparison.csv")
    assert table["method"].tolist() == ["light", "fedproto"]
    assert table["difference_mean"].notna().tolist() == [False, True]
    assert table["accuracy_best_on_test_mean"].notna().all()
    assert "too optimistic" in (tmp_path / "here/comparison.md").read_text()


def test_from_python_with_data_networks_and_methods_of_one_s_own(tmp_path: Path) -> None:
    found = polyfed.compare(
        ["standalone", {"name": "fedproto", "weight": 0.5, "label": "half"}], seeds=[0, 1], out=tmp_path / "here",
        data=tiny_dataset(), models=[Wide, Narrow], clients=4, rounds=1, batch_size=8, device="cpu",
        engine="sequential", noise_floor=False,
    )  # fmt: skip
    assert isinstance(found, polyfed.Comparison)
    assert found.failures == {} and found.table["method"].tolist() == ["standalone", "half"]
    assert found.noise is None and found.table["noise_floor"].isna().all()


def test_other_data_of_the_same_name_are_refused_before_anything_runs(tmp_path: Path) -> None:
    """Seeds that were added would have other samples than those that are there."""
    data = tiny_dataset()
    given: dict[str, Any] = {
        "models": [Narrow],
        "clients": 4,
        "rounds": 1,
        "batch_size": 8,
        "device": "cpu",
        "out": tmp_path / "out",
    }
    polyfed.compare(["standalone"], seeds=[0], data=data, noise_floor=False, **given)
    with pytest.raises(InputError, match="standalone-seed0 in .* has other data than are given now"):
        polyfed.compare(["standalone"], seeds=[0, 1], data=replace(data, images=255 - data.images), **given)
    assert [path.name for path in (tmp_path / "out" / "runs").iterdir()] == ["standalone-seed0"]


def test_seeds_as_people_write_them() -> None:
    assert parse_seeds("0-4") == [0, 1, 2, 3, 4]
    assert parse_seeds("0, 3,7-8") == [0, 3, 7, 8]
    for wrong in ("", "1-", "-1", "1..3", "0,,1", "1" * 5000):
        with pytest.raises(InputError, match="must be numbers and ranges"):
            parse_seeds(wrong)
    with pytest.raises(InputError, match="0-99999999999 are 100000000000 seeds, but must be at most 10000"):
        parse_seeds("0-99999999999")


def test_help_names_every_round_that_can_count(shell: Shell) -> None:
    words = " ".join(shell("compare", "--help").output.split()).replace("- ", "-")  # lines may end at a hyphen
    assert f"one of {', '.join(ROUNDS)}" in words
    assert "--batch-size" in words and "--seed " not in words
