"""Searches on a tiny federation: what is chosen, what it is chosen by, and that a stop changes nothing."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml

from polyfed import RunFolder
from polyfed.comparison.plan import plan
from polyfed.config import read_experiment
from polyfed.errors import ClientError, InputError, RunError
from polyfed.records import disk
from polyfed.records.claim import locked
from polyfed.server.federation import Federation, Interrupted, Watcher
from polyfed.tuning import Choices, Range, tune
from polyfed.tuning.pictures import draw_search
from polyfed.tuning.records import Trial
from tests.shell import Shell
from tests.support import Wide, tiny_dataset

pytest.importorskip("optuna", reason="tuning needs the extra polyfed[tune]")

SETTINGS: dict[str, Any] = {
    "clients": 3,
    "rounds": 2,
    "models": "tests.support:Wide",
    "device": "cpu",
    "engine": "sequential",
}
LR = {"training.lr": Choices((0.0001, 0.05))}


def table(folder: Path) -> pd.DataFrame:
    return pd.read_csv(folder / "trials.csv")


def test_the_best_trial_by_validation_becomes_an_experiment_file(tmp_path: Path) -> None:
    """A learning rate of 0.0001 learns nothing in two rounds, 0.05 does."""
    (found,) = tune(["fedproto"], out=tmp_path, trials=2, sampler="grid", search=LR, seeds=[100], **SETTINGS)
    rows = table(tmp_path)
    assert list(rows.columns[:5]) == ["method", "trial", "state", "validation_accuracy", "best_so_far"]
    assert sorted(rows.settings) == ['{"training.lr": 0.0001}', '{"training.lr": 0.05}']
    assert rows.best_so_far.tolist() == rows.validation_accuracy.cummax().tolist()
    best = read_experiment(tmp_path / "best.yaml")
    assert best.training.lr == 0.05 and best.rounds == 2 and best.method["name"] == "fedproto"
    assert found.best.value == rows.validation_accuracy.max()
    assert yaml.safe_load((tmp_path / "best.yaml").read_text())["tuned"]["seeds"] == [100]


def test_the_command_shows_trials_and_notes_but_no_rounds(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those have accuracies on test samples, which must not guide a search."""
    one_round = Federation.round
    monkeypatch.setattr(Federation, "round", lambda self, number: (self.note("slow today"), one_round(self, number))[1])
    given = [part for name, value in SETTINGS.items() for part in (f"--{name}", str(value))]
    search = ("--trials", "1", "--sampler", "grid", "--search", "training.lr=0.05", "--out", str(tmp_path / "search"))
    ended = shell("tune", "standalone", *search, *given)
    assert (ended.status, ended.error) == (0, "note: slow today\n")
    assert ended.output.startswith("standalone 1  validation ")
    assert "round 1" not in ended.output
    both = shell("tune", "standalone", "fedproto", *search, *given)
    assert both.output.endswith(
        f"`polyfed compare {tmp_path}/search/best.yaml --seeds 0-4 --out FOLDER` compares them.\n"
    )


def test_a_value_is_the_mean_validation_accuracy_over_the_seeds(tmp_path: Path) -> None:
    search = {"training.lr": Choices((0.05,))}
    (found,) = tune(
        ["standalone"], out=tmp_path, trials=1, search=search, sampler="grid", seeds="4,7", keep_runs=True, **SETTINGS
    )
    values = []
    for seed in (4, 7):
        rows = RunFolder.open(tmp_path / "runs" / f"standalone-trial0-seed{seed}").evaluations()
        last = rows[(rows.part == "validation") & (rows["round"] == 2)]
        values.append(last.accuracy_mean.iloc[0])
    assert found.best.value == pytest.approx(sum(values) / 2)


def test_every_method_gets_as_many_trials_and_a_file(tmp_path: Path) -> None:
    search = {"training.lr": Range(0.001, 0.1), "method.weight": Choices((0.1, 1.0))}
    tune(["standalone", "fedproto"], out=tmp_path, trials=2, search=search, seeds=[100], **SETTINGS)
    assert table(tmp_path).method.value_counts().to_dict() == {"standalone": 2, "fedproto": 2}
    assert "weight" not in table(tmp_path).query("method == 'standalone'").settings.iloc[0]
    assert read_experiment(tmp_path / "best-standalone.yaml").method["name"] == "standalone"
    assert read_experiment(tmp_path / "best-fedproto.yaml").method["weight"] in (0.1, 1.0)
    assert not any((tmp_path / "runs").iterdir()), "runs of finished trials are removed"


class StopAfter(Watcher):
    """Asks for a stop in the first round of the n-th run."""

    def __init__(self, runs: int) -> None:
        self.runs = runs

    def on_start(self, config: Any, first_round: int) -> None:
        self.runs -= 1
        self.stop_requested = self.runs <= 0


def test_a_search_that_was_stopped_ends_with_the_same_trials(tmp_path: Path) -> None:
    def search(folder: Path, watcher: Watcher | None = None) -> None:
        space = {"training.lr": Range(0.001, 0.1)}
        tune(["fedproto"], out=folder, trials=8, search=space, seeds=[100], watcher=watcher, **SETTINGS)

    search(tmp_path / "once")
    for runs in (3, 4):
        with pytest.raises(Interrupted, match="the same command continues the search in '.*stopped'"):
            search(tmp_path / "stopped", StopAfter(runs))
    search(tmp_path / "stopped")
    columns = ["trial", "state", "validation_accuracy", "settings"]
    pd.testing.assert_frame_equal(table(tmp_path / "stopped")[columns], table(tmp_path / "once")[columns])
    assert (tmp_path / "stopped/curves.csv").read_bytes() == (tmp_path / "once/curves.csv").read_bytes()


def test_trials_below_the_median_are_pruned_and_never_win(tmp_path: Path) -> None:
    """Of 25 learning rates 5 are so small that nothing is learned."""
    values = (*(0.05 + n * 0.002 for n in range(20)), *(n * 1e-6 for n in range(1, 6)))
    tune(
        ["standalone"], out=tmp_path, trials=20, search={"training.lr": Choices(values)}, sampler="grid", seeds=[100],
        **{**SETTINGS, "rounds": 3},
    )  # fmt: skip
    rows = table(tmp_path)
    pruned = rows[rows.state == "pruned"]
    assert 0 < len(pruned) < len(rows) - 5, "the first five are never pruned"
    assert pruned.trial.min() >= 5
    assert rows[rows.state == "finished"].validation_accuracy.max() == rows.best_so_far.iloc[-1]


def test_settings_that_diverge_are_a_failed_trial_not_the_end(tmp_path: Path) -> None:
    search = {"training.lr": Choices((1e30, 0.05))}
    (found,) = tune(["standalone"], out=tmp_path, trials=2, search=search, sampler="grid", seeds=[100], **SETTINGS)
    rows = table(tmp_path).set_index("settings")
    assert rows.state['{"training.lr": 1e+30}'] == "failed" and "client" in rows.reason['{"training.lr": 1e+30}']
    assert found.best.settings == {"training.lr": 0.05}


@pytest.mark.parametrize("together", [1, 2])
@pytest.mark.parametrize("error", [SystemExit("enough"), ClientError("enough")])
def test_code_that_exits_or_fails_costs_its_trial_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, together: int, error: BaseException
) -> None:
    one_round = Federation.round

    def fails(self: Federation, number: int) -> Any:
        if self.config.training.lr == 0.0001:
            raise error
        return one_round(self, number)

    monkeypatch.setattr(Federation, "round", fails)
    settings = SETTINGS | {"engine": "vectorized", "rounds": 1}
    asked = {"search": LR, "sampler": "grid", "seeds": [100], "together": together}
    (found,) = tune(["standalone"], out=tmp_path, trials=2, **asked, **settings)
    rows = table(tmp_path).set_index("settings")
    assert rows.reason['{"training.lr": 0.0001}'].endswith("enough")
    assert found.best.settings == {"training.lr": 0.05} and len(rows) == 2


def test_code_that_fails_in_the_first_trial_ends_the_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Federation, number: int) -> Any:
        raise ClientError("enough")

    monkeypatch.setattr(Federation, "round", fails)
    with pytest.raises(ClientError, match="enough"):
        tune(["standalone"], out=tmp_path, trials=2, search=LR, sampler="grid", seeds=[1], **SETTINGS)


def test_a_grid_ends_when_all_is_tried(tmp_path: Path) -> None:
    notes: list[str] = []
    tune(["standalone"], out=tmp_path, trials=9, search=LR, sampler="grid", seeds=[1], note=notes.append, **SETTINGS)
    assert len(table(tmp_path)) == 2 and "only 2 combinations" in notes[0]


def test_more_trials_extend_a_search_and_another_search_is_refused(tmp_path: Path) -> None:
    tune(["standalone"], out=tmp_path, trials=1, search=LR, sampler="grid", seeds=[1], **SETTINGS)
    tune(["standalone"], out=tmp_path, trials=2, search=LR, sampler="grid", seeds=[1], **SETTINGS)
    assert table(tmp_path).trial.tolist() == [0, 1]
    before = (tmp_path / "trials.csv").read_bytes()
    with pytest.raises(InputError, match="seeds"):
        tune(["standalone"], out=tmp_path, trials=2, search=LR, sampler="grid", seeds=[2], **SETTINGS)
    with pytest.raises(InputError, match="settings"):
        tune(["standalone"], out=tmp_path, trials=2, search=LR, sampler="grid", seeds=[1], **{**SETTINGS, "clients": 4})
    assert (tmp_path / "trials.csv").read_bytes() == before


def test_a_search_whose_data_have_changed_is_refused_before_anything_runs(tmp_path: Path) -> None:
    """Its trials would have been on other samples than those that are there."""
    data = tiny_dataset()
    pixels, labels = data.images.numpy(), data.labels.numpy()
    file, out = tmp_path / "mine.npz", tmp_path / "search"
    np.savez(file, x=pixels, y=labels)
    given = {**SETTINGS, "rounds": 1, "data": f"npz:{file}", "out": out, "sampler": "grid", "search": LR, "seeds": [1]}
    tune(["standalone"], trials=1, **given)
    np.savez(file, x=255 - pixels, y=labels)
    with pytest.raises(InputError, match="holds a search with the data '120 samples .* choose another folder with --o"):
        tune(["standalone"], trials=2, **given)
    assert len(table(out)) == 1 and not any((out / "runs").iterdir())


def test_data_that_change_during_a_search_were_read_before(tmp_path: Path) -> None:
    data = tiny_dataset()
    file = tmp_path / "mine.npz"
    np.savez(file, x=data.images.numpy(), y=data.labels.numpy())
    given = {**SETTINGS, "rounds": 1, "data": f"npz:{file}", "search": LR, "seeds": [1], "sampler": "grid"}
    tune(["standalone"], trials=2, tell=lambda trial: file.unlink(missing_ok=True), out=tmp_path / "search", **given)
    assert table(tmp_path / "search").state.tolist() == ["finished", "finished"]


def test_a_folder_with_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(InputError, match="not empty"):
        tune(["standalone"], out=tmp_path, trials=1, seeds=[1], **SETTINGS)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize(
    ("search", "words"),
    [
        ({"training.lrr": Choices((0.1,))}, "unknown setting 'training.lrr'"),
        ({"method.nothing": Choices((0.1,))}, "unknown setting 'method.nothing'"),
        ({"seed": Choices((0, 1))}, "seed can't be searched"),
        ({"label": Choices(("a", "b"))}, "label can't be searched: trials on other data"),
        ({"training.lr": Choices((-0.1,))}, "training.lr is -0.1, but must be"),
        ({"training.lr": Range(0.0, 0.1)}, "training.lr is 0"),
    ],
)
def test_what_can_not_be_searched_is_refused_before_anything_runs(
    tmp_path: Path, search: dict[str, Any], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        tune(["fedproto"], out=tmp_path / "new", trials=1, search=search, seeds=[1], **SETTINGS)
    assert not (tmp_path / "new").exists()


def test_a_search_from_python_is_written_as_people_write_it(tmp_path: Path) -> None:
    tune(["standalone"], out=tmp_path, trials=1, search={"training.lr": [0.05]}, seeds="100", **SETTINGS)
    assert table(tmp_path).settings.tolist() == ['{"training.lr": 0.05}']


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (
            {"data": (np.zeros((6, 8, 8), np.uint8), [0, 1, 2] * 2)},
            "data must have a name there: save yours with",
        ),
        ({"models": [Wide]}, "models must have a name there: put yours into a module"),
        ({"methods": "standalone"}, "name the methods to tune in a list"),
        ({"seeds": [1, 1]}, "seed 1 is given twice"),
        ({"method": "fedproto"}, "method can't be set: list the methods to tune"),
        ({"search": {"training.lr": 0.1}}, "search has 0.1 for training.lr: give a list of values, or a range such as"),
    ],
)
def test_what_a_search_from_python_can_not_use_is_refused(tmp_path: Path, changed: dict[str, Any], words: str) -> None:
    given = {"methods": ["standalone"], "trials": 1, "search": LR, "seeds": [1], **SETTINGS, **changed}
    with pytest.raises(InputError, match=words):
        tune(out=tmp_path / "new", **given)
    assert not (tmp_path / "new").exists()


def test_without_validation_samples_there_is_nothing_to_choose_by(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="split is 8:0:2, .*no validation samples.*such as 8:1:1"):
        tune(["standalone"], out=tmp_path / "new", trials=1, search=LR, seeds=[1], **{**SETTINGS, "split": "8:0:2"})
    assert not (tmp_path / "new").exists()


def test_input_that_is_wrong_for_all_trials_ends_the_search_and_leaves_no_trial(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="unknown dataset 'digit'"):
        tune(["standalone"], out=tmp_path, trials=3, search=LR, seeds=[1], **SETTINGS, data="digit")
    assert not (tmp_path / "trials.csv").exists()


def test_a_full_disk_ends_the_search_in_one_sentence_and_the_same_command_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a run that can't begin nor a trial that can't be recorded counts as a trial that failed."""
    write = disk.write

    def full(path: Path, content: bytes | str, **options: bool) -> None:
        if path.match(broken):
            raise OSError(28, "No space left on device")
        write(path, content, **options)

    monkeypatch.setattr(disk, "write", full)
    broken = "trials.csv"
    with pytest.raises(RunError, match=r"search can't continue: No space left.*same command continues"):
        tune(["standalone"], out=tmp_path, trials=2, search=LR, sampler="grid", seeds=[1], **SETTINGS)
    broken = "*trial1*/config.yaml"
    with pytest.raises(InputError, match="can't write to '.*': No space left"):
        tune(["standalone"], out=tmp_path, trials=2, search=LR, sampler="grid", seeds=[1], **SETTINGS)
    broken = "nothing"
    tune(["standalone"], out=tmp_path, trials=2, search=LR, sampler="grid", seeds=[1], **SETTINGS)
    assert table(tmp_path).state.tolist() == ["finished", "finished"]


def test_what_is_set_is_not_searched(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="training.lr is both set and searched: keep one of them"):
        tune(["standalone"], out=tmp_path, trials=1, search=LR, seeds=[1], **SETTINGS, lr=0.2)
    settings = {**SETTINGS, "training": {"epochs": 1}, "method": {"weight": 0.3}}
    tune(["fedproto"], out=tmp_path, trials=1, seeds=[1], **settings)
    (tried,) = table(tmp_path).settings
    assert set(json.loads(tried)) == {"training.lr", "training.batch_size"}
    best = read_experiment(tmp_path / "best.yaml")
    assert (best.training.epochs, best.method["weight"]) == (1, 0.3)


def test_no_method_gets_fewer_trials_than_another_has_had(tmp_path: Path) -> None:
    tune(["standalone"], out=tmp_path, trials=2, search=LR, sampler="grid", seeds=[1], **SETTINGS)
    with pytest.raises(InputError, match="has 2 trials of standalone already, .*--trials 2 or more"):
        tune(["standalone", "fedproto"], out=tmp_path, trials=1, search=LR, sampler="grid", seeds=[1], **SETTINGS)


def test_only_one_process_searches_in_a_folder(tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(InputError, match="another process is working on"):
        tune(["standalone"], out=tmp_path, trials=1, search=LR, seeds=[1], **SETTINGS)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match="can't write to '.*file'"):
        tune(["standalone"], out=tmp_path / "file", trials=1, search=LR, seeds=[1], **SETTINGS)


@pytest.mark.parametrize(
    ("old", "new"),
    [("0.05", "0.06"), ("training.lr", "training.ls"), (",0,", ",1,"), ("finished", "done"), ("{", "[{"), ("{", "7{")],
)
def test_damaged_trials_are_one_sentence_and_stay_as_they_are(tmp_path: Path, old: str, new: str) -> None:
    search = {"training.lr": Choices((0.05,))}
    tune(["standalone"], out=tmp_path, trials=1, search=search, sampler="grid", seeds=[1], **SETTINGS)
    file = tmp_path / "trials.csv"
    file.write_text(file.read_text().replace(old, new))
    before = file.read_bytes()
    with pytest.raises(InputError, match="the trials in '.*' can't be read .*restore trials.csv"):
        tune(["standalone"], out=tmp_path, trials=1, search=search, sampler="grid", seeds=[1], **SETTINGS)
    assert file.read_bytes() == before


def test_a_curve_that_was_cut_off_prunes_nothing(tmp_path: Path) -> None:
    search = {"training.lr": Choices((0.05,))}
    tune(["standalone"], out=tmp_path, trials=1, search=search, sampler="grid", seeds=[1], **SETTINGS)
    file = tmp_path / "curves.csv"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(InputError, match="curve of trial 1 of standalone is not complete.*restore .* curves.csv"):
        tune(["standalone"], out=tmp_path, trials=1, search=search, sampler="grid", seeds=[1], **SETTINGS)


def test_a_picture_shows_the_best_value_over_trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    drawn: list[Any] = []
    monkeypatch.setattr("polyfed.report.drawing.save", lambda figure, stem: drawn.append((figure, stem)))
    trials = [
        Trial("fedproto", 0, {}, "failed"), Trial("fedproto", 1, {}, "finished", 0.5),
        Trial("fedproto", 2, {}, "pruned", 0.9), Trial("fedproto", 3, {}, "finished", 0.4),
        Trial("fedproto", 4, {}, "finished", 0.7),
    ]  # fmt: skip
    draw_search(trials, tmp_path)
    ((figure, stem),) = drawn
    line = figure.axes[0].get_lines()[0]
    assert stem == tmp_path / "curve" and line.get_label() == "fedproto"
    assert list(line.get_xdata()) == [2, 3, 4, 5] and list(line.get_ydata()) == [50, 50, 50, 70]
    monkeypatch.undo()
    tune(["standalone"], out=tmp_path / "new", trials=1, search=LR, seeds=[1], **SETTINGS)
    assert all((tmp_path / f"new/curve.{kind}").stat().st_size > 1000 for kind in ("png", "pdf"))


def test_a_comparison_uses_what_a_search_found_with_other_seeds(tmp_path: Path) -> None:
    tune(["standalone", "fedproto"], out=tmp_path, trials=1, search=LR, sampler="grid", seeds=[100], **SETTINGS)
    given = tmp_path / "best.yaml"
    cells = plan([given, "fedproto"], [0, 1], SETTINGS, trust=True)
    assert {cell.method for cell in cells} == {"standalone-tuned", "fedproto-tuned", "fedproto"}
    chosen = read_experiment(tmp_path / "best-fedproto.yaml").training.lr
    assert {cell.config.training.lr for cell in cells if cell.method == "fedproto-tuned"} == {chosen}
    with pytest.raises(InputError, match="tuned with seed 100"):
        plan([given], [99, 100], SETTINGS, trust=True)


def test_a_run_that_someone_replaced_is_refused_and_its_code_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "never_imported.py").write_text("Code = None")
    monkeypatch.syspath_prepend(modules)
    tmp_path = tmp_path / "search"
    search = {"training.lr": Choices((0.05,))}
    with pytest.raises(Interrupted):
        tune(["standalone"], out=tmp_path, trials=1, search=search, seeds=[1], watcher=StopAfter(1), **SETTINGS)
    file = tmp_path / "runs/standalone-trial0-seed1/config.yaml"
    content = yaml.safe_load(file.read_text())
    file.write_text(yaml.safe_dump({**content, "engine": "never_imported:Code"}))
    with pytest.raises(InputError, match="holds a run with engine"):
        tune(["standalone"], out=tmp_path, trials=1, search=search, seeds=[1], **SETTINGS)
    assert "never_imported" not in sys.modules
