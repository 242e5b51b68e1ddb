"""Metrics beside accuracy: hand-computed values, the same on every engine, and shown where accuracy says little."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from rich.console import Console
from torch import Tensor

import polyfed
from polyfed import confusion, report
from polyfed.comparison.compare import Comparison
from polyfed.comparison.outcomes import _further, read_outcome
from polyfed.confusion import Cells, Counts
from polyfed.data import Dataset
from polyfed.engines import SequentialEngine, ThreadsEngine, VectorizedEngine
from polyfed.engines.hosts import Host, HostTraits
from polyfed.errors import InputError
from polyfed.evaluation import Evaluation, Score
from polyfed.methods.parts.network import ClientNetwork
from polyfed.methods.standalone import Standalone
from polyfed.metrics import auc, checked_metric, from_counts, margins
from polyfed.population import Population
from polyfed.records import RunFolder
from polyfed.report.overview import read_run
from polyfed.report.runs import run_parts
from polyfed.report.sections import sections
from polyfed.report.summary import summary_rows
from polyfed.server.scores import about_balance, further_means
from polyfed.tuning.records import TuneFolder
from polyfed.tuning.space import Choices
from tests import support

BLIND = ((0, 0, 98), (1, 0, 2))
"""2 of 100 samples are positive, and all are predicted as negative."""


def evaluation(test: dict[str, Cells], validation: dict[str, Cells], aucs: Any = None) -> Evaluation:
    """That of one client."""
    test_counts, validation_counts = (
        {rule: Counts.of_cells([cells]) for rule, cells in part.items()} for part in (test, validation)
    )
    areas = aucs and {part: {rule: [area] for rule, area in own.items()} for part, own in aucs.items()}
    return Evaluation.of(test_counts, validation_counts, areas)[0]


def rare(per_client: int = 30, clients: int = 4, positive: int = 3) -> Dataset:
    """Two classes, one in ten positive, as images with a brighter corner."""
    whole = support.tiny_dataset(2, clients * per_client)
    ones = clients * positive
    rows = torch.cat([torch.arange(clients * per_client - ones), clients * per_client + torch.arange(ones)])
    return Dataset("rare", whole.images[rows], whole.labels[rows], 2, whole.mean, whole.std)


def test_a_classifier_that_never_says_positive_is_found_out() -> None:
    """Accuracy 0.98; recalls 1 and 0; F1 of class 0: 2·98 / (98 + 100), of class 1: 0."""
    score = evaluation({"classifier": BLIND}, {"classifier": ()})
    assert score.accuracy() == 0.98
    assert score.measure("balanced_accuracy") == 0.5
    assert score.measure("macro_f1") == pytest.approx(98 / 198)
    assert score.largest_class == 0.98 and score.imbalanced
    assert math.isnan(score.measure("macro_f1", "validation")) and math.isnan(score.measure("auc"))


def test_a_class_without_samples_counts_only_against_the_true_class() -> None:
    """Class 0: 3 of 5 right, two predicted as 2, of which there is none. Class 1: 1 of 1 right. F1: 6 / 8 and 1."""
    found = from_counts(*Counts.of_cells([((0, 0, 3), (0, 2, 2), (1, 1, 1))]).by_class())[0]
    assert found == {"balanced_accuracy": pytest.approx(0.8), "macro_f1": pytest.approx(0.875)}


def test_a_client_s_scores_do_not_depend_on_whose_are_computed_with_them() -> None:
    """Another client without samples, and one with more classes: the same to the last digit.

    Of these twenty some would differ by a sum in another order.
    """
    random = np.random.default_rng(0)
    true = random.integers(0, 30, (20, 97))
    predicted = np.where(random.random(true.shape) < 0.5, true, random.integers(0, 30, true.shape))
    alone = [Counts.of(*pair) for pair in zip(true[:, None], predicted[:, None], strict=True)]
    more: list[Cells] = [(), *Counts.of(true, predicted).cells(), ((40, 3, 2), (99, 99, 1))]
    found = Evaluation.of({"own": Counts.of_cells(more)}, {"own": Counts.of_cells(more)})
    assert found[1:-1] == [Evaluation.of({"own": own}, {"own": own})[0] for own in alone]
    assert (found[0].test, found[0].test_classes, found[-1].test_classes) == (0, (0, 0), (2, 2))
    assert found[0].further["test"]["own"] == {"balanced_accuracy": None, "macro_f1": None}


def test_they_are_those_that_follow_from_confusion_csv() -> None:
    cells = ((0, 0, 3), (0, 2, 2), (1, 1, 1), (2, 0, 4), (2, 2, 1))
    frame = pd.DataFrame(list(confusion.rows(1, {0: {"classifier": cells}})), columns=list(confusion.COLUMNS))
    expected = confusion.client_scores(frame).iloc[0]
    found = from_counts(*Counts.of_cells([cells]).by_class())[0]
    assert (found["balanced_accuracy"], found["macro_f1"]) == (
        pytest.approx(expected.balanced_accuracy),
        pytest.approx(expected.macro_f1),
    )


@pytest.mark.parametrize(
    ("true", "margin", "expected"),
    [
        ([0, 0, 1, 1], [0.1, 0.4, 0.35, 0.8], 0.75),  # of four pairs, 0.35 < 0.4 is the wrong one
        ([0, 1, 0, 1], [2.0, 1.0, 4.0, 3.0], 0.25),
        ([0, 1], [1.0, 1.0], 0.5),
        ([0, 0, 1], [1.0, 3.0, 3.0], 0.75),  # one pair right, one tie
        ([0, 1, 1, 0], [-math.inf, math.inf, 0.0, 0.0], 0.875),
        ([0, 1, -1], [0.0, 1.0, -9.0], 1.0),  # the last is padding
        ([1, 1], [0.0, 1.0], None),
        ([0, 0], [0.0, 1.0], None),
        ([], [], None),
        ([0, 1], [0.0, math.nan], None),
    ],
)
def test_auc_counts_pairs_in_the_right_order(true: list[int], margin: list[float], expected: float | None) -> None:
    assert auc(np.array(true), np.array(margin)) == expected


def test_samples_that_differ_by_rounding_are_tied() -> None:
    assert auc(np.array([0, 1, 1]), np.array([1.0, 1.0 - 1e-7, 1.0 + 1e-7])) == 0.5
    assert auc(np.array([0, 1]), np.array([1.0, 1.001])) == 1.0
    assert auc(np.array([0, 1, 0]), np.array([1.0, 1.001, 1e9])) == 0.5  # an outlier hides no difference


def test_auc_agrees_with_scikit_learn() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    draw = np.random.default_rng(0)
    true, margin = draw.integers(0, 2, 200), draw.integers(0, 20, 200) / 4
    assert auc(true, margin) == pytest.approx(metrics.roc_auc_score(true, margin))


def test_the_margin_is_that_of_class_one_and_unknown_prototypes_prefer_none() -> None:
    inf = math.inf
    scores = torch.tensor([[1.0, 3.0], [3.0, 1.0], [-inf, -inf], [-inf, 0.0]])
    assert margins(scores).tolist() == [2.0, -2.0, 0.0, inf]


def test_means_are_over_the_clients_that_have_the_class() -> None:
    """AUC of 0.5 and 1 where both classes are there; the third client has one class."""
    one, both = {"own": ((0, 0, 1),)}, {"own": ((0, 0, 1), (1, 1, 1))}
    aucs = [0.5, 1.0, None]
    scores: dict[int, Score] = {
        client: evaluation(one if value is None else both, {"own": ()}, {"test": {"own": value}, "validation": {}})
        for client, value in enumerate(aucs)
    }
    assert further_means(scores) == {"balanced_accuracy_mean": 1.0, "macro_f1_mean": 1.0, "auc_mean": 0.75}
    assert all(math.isnan(mean) for mean in further_means(scores, "validation").values())
    assert about_balance(scores, 2)["largest_class_mean"] == pytest.approx(2 / 3)


def test_an_evaluation_survives_a_checkpoint_and_what_is_told_has_no_counts() -> None:
    aucs: Any = {"test": {"classifier": 0.25}, "validation": {"classifier": None}}
    score = evaluation({"classifier": BLIND}, {"classifier": ((0, 0, 2),)}, aucs)
    assert Score.from_dict(json.loads(json.dumps(score.to_dict()))) == score
    bare = score.without_confusion()
    assert (bare.measure("balanced_accuracy"), bare.measure("auc"), bare.largest_class) == (0.5, 0.25, 0.98)
    told = json.loads(json.dumps(score.told()))
    assert told == {
        "test": {"classifier": 0.98},
        "validation": {"classifier": 1.0},
        "further": {
            "test": {"classifier": {"balanced_accuracy": 0.5, "macro_f1": pytest.approx(98 / 198), "auc": 0.25}},
            "validation": {"classifier": {"balanced_accuracy": 1.0, "macro_f1": 1.0, "auc": None}},
        },
    }
    shares = Score.from_dict(told)
    assert shares.measure("auc") == 0.25 and math.isnan(shares.measure("auc", "validation"))
    assert math.isnan(shares.largest_class) and not shares.imbalanced


def test_a_checkpoint_of_an_earlier_version_has_no_metrics_beside_accuracy() -> None:
    score = Score.from_dict({"test": 4, "validation": 0, "test_correct": {"own": 2}, "validation_correct": {"own": 0}})
    assert score.accuracy() == 0.5
    assert math.isnan(score.measure("auc")) and math.isnan(score.largest_class) and not score.imbalanced


class Corner(Standalone):
    """Scores by the brightness of a corner: the same on every engine, with hand-made ties."""

    def predict(self, net: ClientNetwork, x: Tensor) -> dict[str, Tensor]:
        level = x.flatten(1)[:, :9].mean(1).mul(2).round()
        flat = net(x)[:, :1] * 0
        return {"classifier": net(x), "corner": torch.cat([level[:, None], -level[:, None]], 1) + flat}


def people(**settings: Any) -> Population:
    return support.population("standalone", data=rare(), partition="iid", split="4:3:3", **settings)


def test_engines_agree_on_metrics_and_auc_uses_scores() -> None:
    """Class 0 has the brighter first corner, so the rule by that corner separates the classes perfectly or not at all.

    All engines start from the same weights; a pass with padding (clients of different sizes) changes nothing.
    """
    clients = people()
    clients.method.__class__ = Corner
    short = clients.data[1]
    clients.data[1] = type(short)(short.train, short.validation[:4], short.test[:5])
    expected = SequentialEngine(clients).evaluate(range(4), 1)
    for engine in (ThreadsEngine(clients, workers=2), VectorizedEngine(clients)):
        found = engine.evaluate(range(4), 1)
        engine.close()
        for client, score in expected.items():
            assert found[client].confusion == score.confusion
            for part in ("test", "validation"):
                for rule, own in score.further[part].items():
                    assert found[client].further[part][rule] == pytest.approx(own)
    assert Host(clients, HostTraits()).evaluate(range(4), 1, {}) == expected
    labels = clients.dataset.labels
    for client, score in expected.items():
        two = labels[clients.data[client].test].unique().numel() == 2
        assert score.further["test"]["corner"]["auc"] == (1.0 if two else None)
    assert any(score.further["test"]["corner"]["auc"] == 1.0 for score in expected.values())


def test_more_than_two_classes_have_no_auc() -> None:
    score = SequentialEngine(support.population("standalone")).evaluate([0], 1)[0]
    assert score.further["test"]["classifier"].keys() == {"balanced_accuracy", "macro_f1"}


def test_a_run_on_rare_positives_shows_that_accuracy_says_nothing(tmp_path: Path) -> None:
    run = support.federation(tmp_path, "standalone", dataset=rare(), partition="iid", split="4:3:3", lr=1e-6)
    summary = run.run()
    clients = run.folder.clients()
    assert summary["classes"] == 2 and summary["largest_class_mean"] == pytest.approx(clients.largest_class.mean())
    assert summary["auc_final"] == pytest.approx(clients.auc_final.mean())
    assert summary["balanced_accuracy_final"] == pytest.approx(clients.balanced_accuracy_final.mean())
    last = run.folder.rounds().iloc[-1]
    test = run.folder.evaluations().query("round == 2 and part == 'test'").iloc[0]
    for name in ("balanced_accuracy", "macro_f1", "auc"):
        assert last[f"{name}_mean"] == test[f"{name}_mean"] == pytest.approx(summary[f"{name}_final"])
    shown = [row[0] for row in summary_rows(read_run(run.folder.path).summary)]
    assert shown[3:7] == [
        "always predicting the largest class", "balanced accuracy, final", "macro-F1, final", "AUC, final",
    ]  # fmt: skip


def test_every_worst_client_is_shown_with_what_it_would_reach_by_guessing(tmp_path: Path) -> None:
    run = support.federation(tmp_path, "standalone", dataset=rare(), partition="iid", split="4:3:3", rounds=1)
    run.run()
    console = Console(width=120, file=io.StringIO())
    for part in run_parts(read_run(run.folder.path), 80):
        console.print(part)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    (header,) = [line for line in lines if line.startswith("worst clients")]
    assert header.split()[-4:] == ["accuracy", "balanced", "largest", "class"]
    client = run.folder.clients().sort_values("accuracy_final").iloc[0]
    first = lines[lines.index(header) + 1].split()
    assert first[-6::2] == [f"{100 * client[c]:.2f}" for c in ("accuracy_final", "balanced_accuracy_final",
                                                              "largest_class")]  # fmt: skip


def compared(out: Path, **settings: Any) -> Comparison:
    return polyfed.compare(
        ["standalone", "fedproto"], out=out, data=settings.pop("data", rare()), models=[support.Narrow], clients=3,
        rounds=2, split="4:3:3", batch_size=8, seeds=settings.pop("seeds", "0"), device="cpu", engine="sequential",
        partition=settings.pop("partition", "iid"), noise_floor=False, **settings,
    )  # fmt: skip


def test_a_comparison_ranks_by_the_metric_and_shows_the_others(tmp_path: Path) -> None:
    found = compared(tmp_path / "c", metric="auc", target=0.01)
    row = found.table.set_index("method").loc["fedproto"]
    outcome = read_outcome(tmp_path / "c/runs/fedproto-seed0")
    alone = read_outcome(tmp_path / "c/runs/standalone-seed0")
    own = outcome.rules[0]
    last = RunFolder.open(tmp_path / "c/runs/fedproto-seed0").evaluations()
    expected = last.query(f"round == 2 and part == 'test' and rule == '{own}'").auc_mean.iloc[0]
    assert row.metric == "auc" and row.auc_final_mean == expected == outcome.value("auc")
    assert row.difference_mean == pytest.approx(outcome.value("auc") - alone.value("auc"))
    assert row.worst_decile_mean == pytest.approx(np.nanmin(outcome.further_clients["auc"]))
    assert row.accuracy_final_mean == outcome.accuracy_final
    assert [sheet.title for sheet in found.sheets[:2]] == ["AUC in percent", "beside AUC, in percent"]
    assert found.sheets[1].header == ["method", "accuracy", "balanced accuracy", "macro-F1", "largest class"]
    assert "auc" in found.curves and row.rounds_to_target == 1
    again = compared(tmp_path / "c")  # the same runs by accuracy
    assert [s.title for s in again.sheets[:2]] == ["accuracy in percent", "beside accuracy, in percent"]
    assert again.table.accuracy_final_mean.tolist() == found.table.accuracy_final_mean.tolist()


def test_a_report_has_them_in_its_tables(tmp_path: Path) -> None:
    pytest.importorskip("altair", reason="figures need the extra polyfed[report]")
    compared(tmp_path / "c")
    material = report.read(tmp_path / "c")
    summary, _, clients = (section for section, _ in zip(sections(material), range(3), strict=False))
    assert "Beside accuracy, in percent" in summary.before and "AUC" in summary.before
    assert "balanced accuracy (%)" in clients.after and "largest class (%)" in clients.after


def test_the_round_that_counts_is_best_on_validation_by_the_metric() -> None:
    """AUC on validation is best in round 1, where it is 0.9 on test; a run of an earlier version knows none."""
    test = pd.DataFrame({"auc_mean": [0.9, 0.4, 0.95]}, index=[1, 2, 3])
    validation = pd.DataFrame({"auc_mean": [0.8, 0.3, 0.7]}, index=[1, 2, 3])
    assert _further(test, validation) == {"auc": {"final": 0.95, "best-validation": 0.9, "best-test": 0.95}}
    assert _further(pd.DataFrame({"accuracy_mean": [1.0]}), pd.DataFrame({"accuracy_mean": [1.0]})) == {}


def test_a_metric_that_the_data_can_not_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="metric is auc, which is for two classes, but the data have 4: use one of"):
        compared(tmp_path / "c", metric="auc", data=support.tiny_dataset(), partition="shares")
    assert not (tmp_path / "c").exists()
    with pytest.raises(InputError, match="unknown metric 'f1'"):
        compared(tmp_path / "c", metric="f1")
    with pytest.raises(InputError, match="recorded no AUC: it needs two classes, and clients with samples of both"):
        compared(tmp_path / "d", metric="auc", partition="shares", classes_per_client=1)


def test_a_search_scores_trials_by_the_metric(tmp_path: Path) -> None:
    pytest.importorskip("optuna", reason="tuning needs the extra polyfed[tune]")
    x, y = rare().images.numpy(), rare().labels.numpy()
    np.savez(tmp_path / "rare.npz", x=x, y=y)
    given: dict[str, Any] = {
        "search": {"training.lr": Choices((0.05, 0.001))}, "sampler": "grid", "trials": 2, "seeds": [100], "rounds": 1,
        "data": f"npz:{tmp_path / 'rare.npz'}", "models": "tests.support:Wide", "clients": 3, "partition": "iid",
        "split": "4:3:3", "device": "cpu", "engine": "sequential",
    }  # fmt: skip
    (found,) = polyfed.tune(["standalone"], out=tmp_path / "s", metric="auc", keep_runs=True, **given)
    trials = pd.read_csv(tmp_path / "s/trials.csv")
    for number, value in zip(trials.trial, trials.validation_auc, strict=True):
        rows = RunFolder.open(tmp_path / f"s/runs/standalone-trial{number}-seed100").evaluations()
        assert value == rows[rows.part == "validation"].auc_mean.iloc[-1]
    assert found.best.value == trials.validation_auc.max()
    assert "validation_auc" in found.file.read_text()
    again = polyfed.tune(["standalone"], out=tmp_path / "s", metric="auc", **given)
    assert again[0].best.value == found.best.value
    with pytest.raises(InputError, match="holds a search with metric 'auc', not 'accuracy'"):
        polyfed.tune(["standalone"], out=tmp_path / "s", **given)


def test_a_search_that_began_before_there_were_metrics_is_one_by_accuracy(tmp_path: Path) -> None:
    (tmp_path / "tune.yaml").write_text("prune: true\n")
    with TuneFolder.claimed(tmp_path, {"prune": True, "metric": "accuracy"}):
        pass
    with (
        pytest.raises(InputError, match="metric 'accuracy', not 'auc'"),
        TuneFolder.claimed(tmp_path, {"prune": True, "metric": "auc"}, "auc"),
    ):
        pass


def test_a_balanced_run_keeps_its_table(tmp_path: Path) -> None:
    run = support.federation(tmp_path, "standalone", rounds=1)
    summary = run.run()
    assert summary["classes"] == 4 and not summary["imbalanced"]
    assert not any("balanced" in row[0] or "AUC" in row[0] for row in summary_rows(summary))
    assert any("balanced" in row[0] for row in summary_rows({**summary, "imbalanced": True}))


def test_an_unknown_metric_is_refused() -> None:
    with pytest.raises(InputError, match="unknown metric 'acuracy': did you mean 'accuracy'"):
        checked_metric("acuracy")
