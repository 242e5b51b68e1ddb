"""What is predicted as what: counts of every engine, scores worked out by hand, and the file that a run leaves."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.metrics import balanced_accuracy_score, f1_score

import polyfed
from polyfed import confusion
from polyfed.confusion import Cells, Counts, class_scores, client_scores
from polyfed.engines import SequentialEngine, ThreadsEngine, VectorizedEngine
from polyfed.message import Message
from polyfed.server.federation import Interrupted
from tests import support
from tests.stopping import StopAfterTwo, records

OWN: dict[str, Any] = {"data": support.tiny_dataset(), "models": [support.Wide, support.Narrow]}
SETTINGS: dict[str, Any] = {
    **support.DEFAULTS, "method": "fedproto", "rounds": 4, "split": "6:2:2", "participation": 0.5, "lr": 0.3,
}  # fmt: skip


def frame(cells: Cells) -> pd.DataFrame:
    return pd.DataFrame(list(confusion.rows(1, {0: {"own": cells}})), columns=list(confusion.COLUMNS))


def test_scores_by_hand() -> None:
    """Four samples of class 0: three correct, one predicted as 1. Two of class 1: one correct, one predicted as 5.

    Class 0: accuracy 3/4, F1 = 2·3 / (2·3 + 0 + 1) = 6/7. Class 1: accuracy 1/2, F1 = 2·1 / (2·1 + 1 + 1) = 1/2.
    Class 5 has no test samples and is left out: balanced accuracy (3/4 + 1/2) / 2 = 5/8, macro-F1 (6/7 + 1/2) / 2.
    """
    counts = frame(((0, 0, 3), (0, 1, 1), (1, 1, 1), (1, 5, 1)))
    classes = class_scores(counts)
    assert classes["class"].tolist() == [0, 1]
    assert classes["samples"].tolist() == [4, 2] and classes["correct"].tolist() == [3, 1]
    assert classes["accuracy"].tolist() == [0.75, 0.5]
    assert classes["f1"].tolist() == pytest.approx([6 / 7, 0.5])
    (client,) = client_scores(counts).to_dict("records")
    expected = {
        "round": 1, "rule": "own", "client": 0, "samples": 6, "correct": 4, "accuracy": 4 / 6,
        "balanced_accuracy": 5 / 8, "macro_f1": (6 / 7 + 1 / 2) / 2,
    }  # fmt: skip
    assert client == pytest.approx(expected)


def test_a_class_that_is_never_predicted_correctly_scores_zero() -> None:
    counts = frame(((2, 3, 2), (3, 3, 1)))
    assert class_scores(counts)["accuracy"].tolist() == [0.0, 1.0]
    assert class_scores(counts)["f1"].tolist() == [0.0, pytest.approx(0.5)]


def test_scores_are_those_of_scikit_learn_over_the_classes_with_samples() -> None:
    random = np.random.default_rng(3)
    true, predicted = random.integers(0, 6, 200), random.integers(0, 9, 200)
    (client,) = client_scores(frame(Counts.of(true[None], predicted[None]).cells()[0])).to_dict("records")
    present = np.unique(true)
    assert client["macro_f1"] == pytest.approx(f1_score(true, predicted, labels=present, average="macro"))
    with pytest.warns(UserWarning, match="y_pred contains classes not in y_true"):
        assert client["balanced_accuracy"] == pytest.approx(balanced_accuracy_score(true, predicted))


def test_clients_and_rules_are_scored_apart() -> None:
    counts = {0: {"own": ((0, 0, 1),), "other": ((0, 1, 1),)}, 7: {"own": ((1, 0, 2),), "other": ((1, 1, 2),)}}
    table = pd.DataFrame(list(confusion.rows(3, counts)), columns=list(confusion.COLUMNS))
    found = {(row.rule, row.client): row.accuracy for row in client_scores(table).itertuples()}
    assert found == {("own", 0): 1.0, ("own", 7): 0.0, ("other", 0): 0.0, ("other", 7): 1.0}


@pytest.mark.parametrize("engine", [SequentialEngine, ThreadsEngine, VectorizedEngine])
@pytest.mark.parametrize("models", [(support.Wide, support.Narrow), (support.Normed,)], ids=["stacked", "looped"])
def test_every_engine_counts_what_the_networks_predict(engine: Any, models: Any) -> None:
    """Recounted sample by sample from the clients' networks; a head that says class 1 for everything shows a column."""
    clients = support.population("lg-fedavg", split="4:2:4", classes_per_client=3, models=models)
    running = engine(clients)
    downloads = {client: Message() for client in range(4)}
    head = {n: torch.zeros_like(t) for n, t in running.get_state(0).items() if n.startswith("model.head.")}
    head[next(name for name in head if name.endswith("bias"))][1] = 1.0
    downloads[2] = Message(head)
    scores = running.evaluate(range(4), 1, {2: downloads[2]})
    for client, score in scores.items():
        test = clients.data[client].test
        network = clients.new_network(client).eval()
        x, y = clients.dataset.batch(test)
        predicted = network.model(x).argmax(1) if client != 2 else torch.ones_like(y)
        recounted = dict.fromkeys(zip(y.tolist(), predicted.tolist(), strict=True), 0)
        for pair in zip(y.tolist(), predicted.tolist(), strict=True):
            recounted[pair] += 1
        assert score.confusion == {"classifier": tuple((*pair, n) for pair, n in sorted(recounted.items()))}
        assert score.test == len(test) and score.test_correct["classifier"] == int((predicted == y).sum())
    assert {p for _, p, _ in scores[2].confusion["classifier"]} == {1}
    running.close()


def test_a_run_leaves_the_counts_of_its_last_round_and_the_best(tmp_path: Path) -> None:
    result = polyfed.run(**SETTINGS, **OWN, out=tmp_path / "run")
    best = result.summary["best_validation_round"]
    counts = result.confusion()
    assert sorted(counts["round"].unique()) == sorted({best, 4})
    assert (
        counts["count"].groupby([counts["round"], counts["rule"]]).sum().unique() == result.clients.test_samples.sum()
    )
    scores = result.client_scores().query("rule == 'prototypes'").set_index(["round", "client"])["accuracy"]
    assert scores[4].tolist() == pytest.approx(result.clients.accuracy_final.tolist())
    assert scores[best].mean() == pytest.approx(result.summary["accuracy_at_best_validation"])
    assert set(result.class_scores().query("client == 1")["class"]) <= set(range(4))


def test_the_ends_are_two_of_every_evaluation(tmp_path: Path) -> None:
    settings = {**SETTINGS, "method": "standalone", "participation": 1.0}
    result = polyfed.run(**settings, **OWN, out=tmp_path / "every", confusion="every")
    best = result.summary["best_validation_round"]
    every = result.confusion()
    assert 0 < best < 4
    assert sorted(every["round"].unique()) == [1, 2, 3, 4]
    ends = polyfed.run(**settings, **OWN, out=tmp_path / "ends").confusion()
    kept = every[every["round"].isin([best, 4])].reset_index(drop=True)
    pd.testing.assert_frame_equal(ends, kept)


def test_no_counts_are_kept_if_none_are_wanted(tmp_path: Path) -> None:
    result = polyfed.run(**SETTINGS, **OWN, out=tmp_path / "run", confusion="none")
    assert (tmp_path / "run" / "confusion.csv").read_text() == "round,rule,client,true,predicted,count\n"
    with pytest.raises(polyfed.InputError, match="has recorded no confusion counts.*'confusion: none'"):
        result.confusion()
    usual = polyfed.run(**SETTINGS, **OWN)
    pd.testing.assert_frame_equal(usual.evaluations, result.evaluations)


@pytest.mark.parametrize("when", ["ends", "every"])
def test_a_run_that_was_stopped_or_made_longer_leaves_the_same_counts(tmp_path: Path, when: str) -> None:
    settings = {**SETTINGS, "confusion": when, "checkpoint_every": 1}
    polyfed.run(**settings, **OWN, out=tmp_path / "whole")
    with pytest.raises(Interrupted):
        polyfed.run(**settings, **OWN, out=tmp_path / "stopped", watcher=StopAfterTwo())
    polyfed.resume(tmp_path / "stopped", **OWN)
    assert records(tmp_path / "stopped") == records(tmp_path / "whole")
    polyfed.run(**{**settings, "rounds": 2}, **OWN, out=tmp_path / "short")
    polyfed.resume(tmp_path / "short", **OWN, rounds=4)
    assert records(tmp_path / "short") == records(tmp_path / "whole")


def test_another_choice_of_counts_is_refused_in_the_middle(tmp_path: Path) -> None:
    polyfed.run(**{**SETTINGS, "rounds": 1}, **OWN, out=tmp_path / "run")
    with pytest.raises(polyfed.InputError, match="confusion can't change in the middle of a run"):
        polyfed.resume(tmp_path / "run", **OWN, rounds=2, settings={"confusion": "every"})
