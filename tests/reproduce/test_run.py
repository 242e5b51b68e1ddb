"""Recipes that run: a trial of each, the differences, the folder, and what is refused."""

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from numpy.typing import NDArray
from sklearn.manifold import TSNE
from threadpoolctl import threadpool_info, threadpool_limits
from torch import Tensor

from polyfed import api
from polyfed.engines.together.joint import JointEngine
from polyfed.errors import InputError, RunError
from polyfed.records.claim import locked
from polyfed.reproduce import run as running
from polyfed.reproduce.measures import costs, measured, series
from polyfed.reproduce.recipes import Compare, Recipe, find_recipe, recipes
from polyfed.reproduce.run import COLUMNS, _with_differences, reproduce
from tests.shell import Shell

RECIPES = [recipe for recipe in recipes() if not recipe.entry.not_yet]
NOT_YET = [recipe.name for recipe in recipes() if recipe.entry.not_yet]
FIRST = ("standalone", "n10/cifar10")


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_a_trial_of_every_recipe_runs(recipe: Recipe, tmp_path: Path) -> None:
    """With its first and its last method, which are a baseline and what the paper is about."""
    methods = list(dict.fromkeys([recipe.entry.methods[0], recipe.entry.methods[-1]]))
    methods = methods[-1:] if recipe.entry.series == "features" else methods  # t-SNE takes seconds
    done = reproduce(recipe.name, tmp_path / "out", scale="smoke", methods=methods)
    assert done.failures == {}
    assert list(done.table["method"]) == methods
    assert done.table["ours"].notna().all()
    assert set(done.table["setting"]) == {recipe.settings[0]}
    written = pd.read_csv(tmp_path / "out" / "reproduction.csv")
    assert list(written.columns[: len(COLUMNS)]) == COLUMNS
    if recipe.entry.series in (None, "costs"):
        assert not (tmp_path / "out" / "series.csv").exists()
    else:
        figure = pd.read_csv(tmp_path / "out" / "series.csv")
        assert set(figure["method"]) == set(methods)
        assert figure.notna().all(axis=None)


def row(method: str, setting: str, ours: float, published: float) -> dict[str, object]:
    return {"method": method, "setting": setting, "ours": ours, "published": published, "by_seed": {0: ours}}


def test_gains_are_over_the_baseline_of_the_same_setting() -> None:
    """In n10/cifar10 we gain 3 where the paper gains 1: 2 more. FedProto is below Standalone by 4."""
    rows = [
        row("standalone", "n10/cifar10", 50.0, 90.0),
        row("standalone", "n50/cifar10", 40.0, 80.0),
        row("fedproto", "n10/cifar10", 46.0, 91.5),
        row("fedssa", "n10/cifar10", 53.0, 91.0),
        row("fedssa", "n50/cifar10", 41.0, 85.0),
    ]
    table = _with_differences(rows, find_recipe("fedssa-figure4")).set_index(["method", "setting"])
    own = table.loc[("fedssa", "n10/cifar10")]
    assert (own["ours_minus_standalone"], own["published_minus_standalone"], own["gain_difference"]) == (3, 1, 2)
    assert (own["reference"], own["ours_minus_reference"], own["published_minus_reference"]) == ("fedproto", 7, -0.5)
    assert table.loc[("fedssa", "n50/cifar10"), "gain_difference"] == -4
    assert math.isnan(table.loc[("fedssa", "n50/cifar10"), "ours_minus_reference"])
    assert table.loc[FIRST, ["ours_minus_standalone", "gain_difference"]].isna().all()


def test_without_standalone_gains_are_over_the_method_that_the_paper_compares_with() -> None:
    """FedTGP gains 2 over FedProto where the paper gains 10.6."""
    rows = [row("fedproto", "cifar100", 40.0, 36.34), row("fedtgp", "cifar100", 42.0, 46.94)]
    table = _with_differences(rows, find_recipe("fedtgp-table6")).set_index("method")
    assert table.loc["fedtgp", "gain_difference"] == pytest.approx(2 - 10.6)
    assert math.isnan(table.loc["fedtgp", "ours_minus_standalone"])


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods and two seeds of a table."""
    folder = tmp_path_factory.mktemp("reproduction") / "out"
    reproduce("fedssa-table2", folder, scale="smoke", methods=["standalone", "fedproto"], seeds=[0, 1])
    return folder


def test_ours_is_the_mean_over_seeds_and_std_that_of_a_sample(out: Path) -> None:
    table = pd.read_csv(out / "reproduction.csv", dtype={"seeds": str}).set_index("method")
    each = [measured(path, Compare(), None) for path in sorted((out / "runs").glob("standalone-*"))]
    assert len(each) == 2
    assert table.loc["standalone", "ours"] == pytest.approx(sum(each) / 2, abs=1e-4)
    assert table.loc["standalone", "std"] == pytest.approx(abs(each[0] - each[1]) / math.sqrt(2), abs=1e-4)
    assert table.loc["standalone", "seeds"] == "0 1"


def test_the_rule_of_the_recipe_is_read(out: Path) -> None:
    """FedProto predicts by prototypes; its classifier is another column of the record."""
    path = next((out / "runs").glob("fedproto-*-seed0"))
    records = pd.read_csv(path / "evaluations.csv")
    for rule in ("prototypes", "classifier"):
        expected = records[(records["rule"] == rule) & (records["part"] == "test")]["accuracy_mean"].iloc[-1]
        assert measured(path, Compare(), rule) == pytest.approx(100 * expected)
    weighted = records[(records["rule"] == "classifier") & (records["part"] == "test")]["accuracy_weighted"].iloc[-1]
    assert measured(path, Compare(average="weighted"), "classifier") == pytest.approx(100 * weighted)


def test_clients_of_a_figure_agree_with_the_run_s_own_record(out: Path) -> None:
    path = next((out / "runs").glob("standalone-*-seed0"))
    ours = [client["accuracy"] for client in series("clients", path, Compare(), None)]
    assert ours == pytest.approx(list(pd.read_csv(path / "clients.csv")["accuracy_final"]))


def test_margins_are_distances_to_the_nearest_other_class(out: Path) -> None:
    """Of every client's class means and of the server's prototypes; a class's largest margin among clients counts."""
    path = next((out / "runs").glob("fedproto-*-seed0"))
    result = api.resume(path, progress=False)
    clients: dict[int, list[float]] = {}
    for client, own in result.population.data.items():
        x, y = result.population.dataset.batch(own.train)
        with torch.no_grad():
            features = result.network(client).features(x)
        means = {label: features[y == label].mean(0) for label in y.unique().tolist()}
        for label, margin in nearest(means).items():
            clients.setdefault(label, []).append(margin)
    vectors = result.server.state["prototypes.vectors"]
    together = nearest({label: vectors[label] for label in clients})
    rows = list(series("margins", path, Compare(), None))
    assert [found["class"] for found in rows] == sorted(clients)
    for found in rows:
        assert found["client_margin"] == pytest.approx(max(clients[found["class"]]), rel=1e-3)
        assert found["global_margin"] == pytest.approx(together[found["class"]], rel=1e-3)


def test_a_picture_of_features_is_made_by_one_thread(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them round differently, which gives another picture."""
    threads: set[int] = set()

    def picture(self: TSNE, points: NDArray[np.float32]) -> NDArray[np.float32]:
        threads.update(pool["num_threads"] for pool in threadpool_info())
        return points[:, :2]

    monkeypatch.setattr(TSNE, "fit_transform", picture)
    with threadpool_limits(2):
        assert len(list(series("features", next((out / "runs").glob("fedproto-*-seed0")), Compare(), None))) > 10
    assert threads == {1}


def test_the_decay_of_a_figure_is_that_of_the_method(tmp_path: Path) -> None:
    """Half of the rows at first, stable from round 20: 0.5·(1 − 1/20) in round 1 along a line."""
    done = reproduce("fedssa-figure3", tmp_path / "out", scale="smoke", methods=["fedssa-linear", "fedssa"])
    first = done.series[done.series["round"] == 1].set_index("method")["own_share"]
    assert first["fedssa-linear"] == pytest.approx(0.475)
    assert first["fedssa"] == pytest.approx(0.5 * math.cos(math.pi / 40))


def nearest(points: dict[int, Tensor]) -> dict[int, float]:
    return {
        label: min(float((point - other).norm()) for name, other in points.items() if name != label)
        for label, point in points.items()
    }


def test_communication_is_both_ways_in_millions(out: Path) -> None:
    path = next((out / "runs").glob("fedproto-*-seed0"))
    last = pd.read_csv(path / "rounds.csv").iloc[-1]
    expected = (last["upload_floats"] + last["download_floats"]) / 1e6
    assert measured(path, Compare(what="floats"), None) == pytest.approx(expected)
    assert expected > 0


def test_costs_count_up_to_the_round_that_reaches_the_target(out: Path) -> None:
    path = next((out / "runs").glob("fedproto-*-seed0"))
    first = pd.read_csv(path / "rounds.csv").iloc[0]
    reached = costs(path, 0.0, "classifier")
    assert reached["rounds_to_target"] == 1
    assert reached["floats_to_target"] == first["upload_floats"] + first["download_floats"]
    assert reached["flops_to_target"] == pytest.approx(first["flops"])
    assert all(math.isnan(value) for value in costs(path, 100.0, "classifier").values())


def test_the_same_command_uses_finished_runs_again(out: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in (out / "runs").glob("*/summary.json")}
    told: list[str] = []
    again = reproduce(
        "fedssa-table2", out, scale="smoke", methods=["standalone", "fedproto"], seeds=[0, 1], tell=told.append
    )
    assert {path: path.stat().st_mtime_ns for path in (out / "runs").glob("*/summary.json")} == before
    assert len(again.table) == 2
    assert told[0].startswith("NOT THE PAPER'S SETTING")


def test_seeds_that_train_together_give_the_same_table(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two seeds of a method are a group of 8 clients. Stopped in the second group, the command repeats only that."""
    trained: list[int] = []
    answers = JointEngine.answers

    def counted(self: JointEngine, round: int, downloads: Any) -> Any:
        trained.append(len(downloads))
        if len(trained) == 2:
            raise KeyboardInterrupt
        return answers(self, round, downloads)

    monkeypatch.setattr(JointEngine, "answers", counted)
    asked = ("fedssa-table2", "--scale", "smoke", "--methods", "standalone,fedproto", "--seeds", "0-1")
    asked = (*asked, "--device", "cpu", "--engine", "vectorized")
    ended = shell("reproduce", *asked, "--out", str(tmp_path / "alone"))
    assert ended.status == 0 and "round 1" not in ended.output  # lines of rounds are for a terminal
    assert trained == []
    joint = ("reproduce", *asked, "--together", "2", "--out", str(tmp_path / "joint"))
    assert shell(*joint).status == 130
    finished = sorted(path.parent.name[:10] for path in (tmp_path / "joint").glob("runs/*/summary.json"))
    assert finished == ["standalone", "standalone"]
    assert shell(*joint).status == 0
    assert trained == [8, 8, 8]
    alone, together = (pd.read_csv(tmp_path / way / "reproduction.csv") for way in ("alone", "joint"))
    pd.testing.assert_frame_equal(together, alone, check_exact=False, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("more", "together"), [((), None), (("--together", "1"), 1)])
def test_how_many_runs_train_together_is_left_to_polyfed_or_the_user(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...], together: int | None
) -> None:
    asked = []

    def run_cells(*given: Any, **rest: Any) -> dict[str, str]:
        asked.append(rest["together"])
        raise InputError("that is all.")

    monkeypatch.setattr(running, "run_cells", run_cells)
    shell("reproduce", "fedssa-table2", "--scale", "smoke", "--out", str(tmp_path / "out"), *more)
    assert asked == [together]


def test_the_command_prints_ours_beside_theirs(shell: Shell, out: Path) -> None:
    arguments = ("fedssa-table2", "--scale", "smoke", "--methods", "standalone,fedproto", "--seeds", "0-1")
    ended = shell("reproduce", *arguments, "--out", str(out))
    assert ended.status == 0
    assert "96.53" in ended.output
    assert re.search(r"fedproto +\S+ ± \S+ +96.51 +\S+ +-0.02 +\S+\n", ended.output)
    assert "Gain: over standalone" in ended.output
    assert "NOT THE PAPER'S SETTING" in ended.output
    assert "data digits instead of cifar10" in ended.output
    assert "5 of 6 settings were not run." in ended.output
    printed = json.loads(shell("reproduce", *arguments, "--out", str(out), "--json").output)
    assert [cell["published"] for cell in printed] == [96.53, 96.51]


def test_the_list_names_every_recipe_and_its_sources(shell: Shell) -> None:
    listed = json.loads(shell("reproduce", "--list", "--json").output)
    by_name = {recipe["name"]: recipe for recipe in listed}
    assert by_name["fedssa-table2"]["given"]["lr"] == 0.01
    assert by_name["fedssa-table2"]["ours"]["batch_size"] == 64
    assert by_name["pfedes-arxiv-figure7"]["not_yet"]
    assert "fedssa-table2" in shell("reproduce", "--list").output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["fedsa-table2"], "did you mean 'fedssa-table2'"),
        (["fedssa-table2", "--methods", "fedsa"], "unknown method 'fedsa': did you mean 'fedssa'"),
        (["fedssa-table2", "--methods", "pfedes"], "fedssa-table2 has no method 'pfedes'; it has standalone"),
        (["fedssa-table2", "--methods", ""], "--methods is empty"),
        (["fedssa-table2", "--settings", "n20"], "fedssa-table2 has no setting 'n20'; it has n10/cifar10"),
        (["fedssa-table2", "--scale", "smal"], "unknown scale 'smal': did you mean 'small'"),
        (["fedssa-table2", "--seeds", "0..2"], "seeds are '0..2', but must be numbers"),
        (["fedssa-table2", "--seeds", "1,1"], "seed 1 is given twice"),
        (["fedssa-table2", "--jobs", "0"], "jobs is 0"),
        (["fedssa-table2", "--scale", "smoke", "--together", "0"], "together is 0, but must be"),
        (["fedssa-table2", "--scale", "smoke", "--device", "cpu", "--together", "2"], "only the vectorized engine"),
        (["fedssa-table2", "--out", ""], "--out is empty"),
        ([NOT_YET[0]], f"{NOT_YET[0]} can't be reproduced yet"),
        ([], "reproduce needs the name of a recipe"),
    ],
)
def test_what_is_wrong_is_one_sentence(shell: Shell, arguments: list[str], words: str) -> None:
    ended = shell("reproduce", *arguments)
    assert ended.status == 2
    assert words in ended.error
    assert len(ended.error.strip().splitlines()) == 1
    assert not any(Path().iterdir()), "nothing is written"


def test_a_folder_of_another_reproduction_is_refused(shell: Shell, out: Path) -> None:
    ended = shell("reproduce", "fedssa-table1", "--scale", "smoke", "--out", str(out))
    assert ended.status == 2
    assert f"'{out}' holds fedssa-table2 at scale smoke, not fedssa-table1 at scale smoke" in ended.error
    ended = shell("reproduce", "fedssa-table2", "--scale", "small", "--out", str(out))
    assert ended.status == 2


def test_a_folder_with_other_files_is_refused(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    ended = shell("reproduce", "fedssa-table2", "--scale", "smoke", "--out", str(tmp_path))
    assert ended.status == 2
    assert "is not a reproduction" in ended.error


def test_a_failed_run_is_named_and_the_others_count(shell: Shell, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    reproduce("fedssa-table2", folder, scale="smoke", methods=["standalone"])
    config = next(folder.glob("runs/*/config.yaml"))
    config.write_text(config.read_text().replace("clients: 4", "clients: 3"))
    ended = shell(
        "reproduce", "fedssa-table2", "--scale", "smoke", "--methods", "standalone,fedssa", "--out", str(folder)
    )
    assert ended.status == 1
    assert "1 of the runs failed, standalone-" in ended.error
    table = pd.read_csv(folder / "reproduction.csv").set_index("method")
    assert math.isnan(table.loc["standalone", "ours"])
    assert "clients" in table.loc["standalone", "note"]
    assert not math.isnan(table.loc["fedssa", "ours"])


def test_gains_are_over_the_seeds_that_both_have(out: Path, tmp_path: Path) -> None:
    """Without Standalone's second run, the gain is that of the first seed alone."""
    folder = tmp_path / "out"
    shutil.copytree(out, folder)
    missing = next(folder.glob("runs/standalone-*-seed1/config.yaml"))
    missing.write_text(missing.read_text().replace("clients: 4", "clients: 3"))
    done = reproduce("fedssa-table2", folder, scale="smoke", methods=["standalone", "fedproto"], seeds=[0, 1])
    table = done.table.set_index("method")
    assert table["seeds"].tolist() == ["0", "0 1"]
    proto, alone = (measured(next(folder.glob(f"runs/{m}-*-seed0")), Compare(), None) for m in table.index[::-1])
    assert table.loc["fedproto", "ours_minus_standalone"] == pytest.approx(proto - alone, abs=1e-4)


@pytest.mark.parametrize("record", ["evaluations.csv", "rounds.csv"])
@pytest.mark.parametrize("wrong", ["1,test,prototypes,0.99", ""], ids=["edited", "cut off"])
def test_a_run_whose_records_were_changed_has_failed(out: Path, tmp_path: Path, record: str, wrong: str) -> None:
    folder = tmp_path / "out"
    shutil.copytree(out, folder)
    file = next(folder.glob("runs/fedproto-*-seed1")) / record
    lines = file.read_text().splitlines()
    file.write_text("\n".join([lines[0], *([re.sub(r"^[^.]*[.][0-9]+", wrong, lines[1])] if wrong else [])]) + "\n")
    done = reproduce("fedssa-table2", folder, scale="smoke", methods=["standalone", "fedproto"], seeds=[0, 1])
    ((name, reason),) = done.failures.items()
    assert name.startswith("fedproto") and f"{record} has changed since the run ended" in reason
    assert done.table.set_index("method")["seeds"].tolist() == ["0 1", "0"]


def test_a_folder_that_can_not_be_written_to_is_one_sentence(out: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match="can't write to .*file/out"):
        reproduce("fedssa-table2", tmp_path / "file" / "out", scale="smoke", methods=["standalone"])
    with pytest.raises(InputError, match="is not a reproduction"):
        reproduce("fedssa-table2", tmp_path / "file", scale="smoke", methods=["standalone"])
    folder = tmp_path / "out"
    shutil.copytree(out, folder)
    (folder / "reproduction.csv").unlink()
    (folder / "reproduction.csv").mkdir()
    with pytest.raises(RunError, match="the table can't be written to .* all runs are kept"):
        reproduce("fedssa-table2", folder, scale="smoke", methods=["standalone"])


def test_another_process_can_not_work_in_the_same_folder(out: Path) -> None:
    with locked(out), pytest.raises(InputError, match="another process is working on"):
        reproduce("fedssa-table2", out, scale="smoke", methods=["standalone"], seeds=[0])
