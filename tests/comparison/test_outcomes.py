"""What is read of a finished run agrees with its own records."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

import polyfed
from polyfed.comparison.outcomes import COSTS, read_outcome
from polyfed.errors import InputError
from tests.support import Narrow, tiny_dataset


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> polyfed.Result:
    return polyfed.run(
        "fedproto", data=tiny_dataset(), models=[Narrow], clients=4, rounds=5, eval_every=2, batch_size=8, lr=0.1,
        device="cpu", engine="sequential", out=tmp_path_factory.mktemp("runs") / "run",
    )  # fmt: skip


def test_by_the_method_s_own_rule_it_is_the_run_s_summary(run: polyfed.Result) -> None:
    found = read_outcome(run.folder.path)
    assert (found.rule, found.rules[0]) == ("prototypes", "prototypes")
    for name in ("accuracy_final", "accuracy_at_best_validation", "accuracy_best"):
        assert getattr(found, name) == pytest.approx(run.summary[name], abs=1e-12)
    assert found.accuracy("best-validation") == found.accuracy_at_best_validation
    assert found.clients["final"] == pytest.approx(run.clients["accuracy_final"].to_numpy())
    assert np.mean(found.clients["final"]) == pytest.approx(found.accuracy_final)
    assert found.worst_deciles["final"] == pytest.approx(run.clients["accuracy_final"].min())


def test_costs_are_cumulated_over_all_rounds_evaluated_or_not(run: polyfed.Result) -> None:
    """Rounds 2, 4 and 5 are evaluated; what rounds 1 and 3 cost counts too."""
    found = read_outcome(run.folder.path)
    assert found.curve["round"].tolist() == [2, 4, 5]
    for name in COSTS:
        assert found.curve[name].iloc[-1] == pytest.approx(run.summary[name])
        assert found.totals[name] == pytest.approx(run.summary[name])
    assert found.curve["upload_floats"].tolist() == pytest.approx(
        [run.summary["upload_floats"] * share / 5 for share in (2, 4, 5)]
    )
    assert found.seconds == run.summary["seconds"]


def test_another_rule_comes_from_the_evaluations(run: polyfed.Result) -> None:
    found = read_outcome(run.folder.path, "classifier")
    own = run.evaluations.query("rule == 'classifier'")
    test, validation = (own[own["part"] == part].set_index("round")["accuracy_mean"] for part in ("test", "validation"))
    assert found.accuracy_final == test[5]
    assert found.accuracy_at_best_validation == test[validation.idxmax()]
    assert found.best_validation == validation.max()
    assert len(found.clients["final"]) == 0
    with pytest.raises(InputError, match="has no rule 'ensemble'; it predicts by prototypes and by classifier"):
        read_outcome(run.folder.path, "ensemble")


def test_without_validation_samples_there_is_no_best_round(tmp_path: Path) -> None:
    polyfed.run(
        "standalone", data=tiny_dataset(), models=[Narrow], clients=2, rounds=1, split="8:0:2", device="cpu",
        out=tmp_path / "run",
    )  # fmt: skip
    found = read_outcome(tmp_path / "run")
    assert math.isnan(found.accuracy_at_best_validation) and math.isnan(found.best_validation)
    assert math.isnan(found.worst_deciles["best-validation"])
