"""The table of a comparison, from outcomes made up so that its numbers can be worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from polyfed.comparison import pictures, render
from polyfed.comparison.outcomes import COSTS, Outcome
from polyfed.comparison.plan import Cell, plan
from polyfed.comparison.table import Question, check_same_federation, notes_on, shared_accuracies, table_of
from polyfed.errors import InputError

FACTS = {"the data": "digits", "the partition": "one"}


def outcome(
    final: float, clients: list[float], curve: list[float] | None = None, lowest: float = math.nan, **changes: Any
) -> Outcome:
    """A run whose every round costs 10 of everything."""
    accuracies = curve or [final]
    choices = ("final", "best-validation", "best-test")
    rounds = np.arange(1, len(accuracies) + 1)
    vector = np.array(clients)
    values: dict[str, Any] = {
        "rule": "classifier", "rules": ("classifier",), "accuracy_final": final,
        "accuracy_at_best_validation": final - 0.1, "accuracy_best": final + 0.1, "best_validation": 0.5,
        "worst_deciles": dict.fromkeys(choices, vector.min() if clients else lowest),
        "clients": dict.fromkeys(choices, vector),
        "curve": pd.DataFrame({"round": rounds, "accuracy": accuracies, **dict.fromkeys(COSTS, 10.0 * rounds)}),
        "totals": {name: 10.0 * len(rounds) for name in COSTS}, "replies_left_out": 0, "facts": FACTS,
    }  # fmt: skip
    return Outcome(**{**values, **changes})


CELLS = plan(["standalone", "fedproto", "lg-fedavg"], [0, 1, 2])
ALONE = [outcome(0.50, [0.4, 0.6]), outcome(0.60, [0.5, 0.7]), outcome(0.70, [0.6, 0.8])]
PROTO = [outcome(0.52, [0.4, 0.64]), outcome(0.63, [0.4, 0.86]), outcome(0.74, [0.7, 0.78])]
LG = [outcome(0.40, [0.3, 0.5]), outcome(0.60, [0.5, 0.7]), outcome(0.50, [0.4, 0.6])]
OUTCOMES = dict(zip([cell.name for cell in CELLS], [*ALONE, *PROTO, *LG], strict=True))


def row(table: pd.DataFrame, method: str) -> Any:
    return table[table["method"] == method].iloc[0]


def test_the_contract_of_columns() -> None:
    table = table_of(CELLS, OUTCOMES, Question())
    assert {
        "method", "seeds", "accuracy_final_mean", "accuracy_final_std", "accuracy_at_best_validation_mean",
        "difference_mean", "difference_low", "difference_high", "p_holm", "worst_decile_mean", "clients_worse",
        "upload_floats", "download_floats", "flops", "seconds",
    } <= set(table)  # fmt: skip
    assert table["method"].tolist() == ["standalone", "fedproto", "lg-fedavg"]
    assert "accuracy_best_on_test_mean" not in table  # only if it was asked for
    assert "accuracy_best_on_test_mean" in table_of(CELLS, OUTCOMES, Question("best-test"))


def test_differences_are_paired_by_seed() -> None:
    """FedProto: 0.02, 0.03, 0.04; mean 0.03, spread 0.01, half width 4.302653 · 0.01 / sqrt(3) = 0.024841.

    Unpaired, the spread of 0.1 within either method would hide it. p = 1 - t / sqrt(2 + t²) with t = 5.196152:
    0.035099. LG-FedAvg: -0.1, 0, -0.2; t = -1.732051, p = 0.225403. Holm: 2 · 0.035099 = 0.070198, 0.225403.
    """
    table = table_of(CELLS, OUTCOMES, Question())
    found = row(table, "fedproto")
    assert found[["difference_mean", "difference_low", "difference_high"]].tolist() == pytest.approx(
        [0.03, 0.03 - 0.024841, 0.03 + 0.024841], abs=1e-6
    )
    assert table["p_holm"].tolist()[1:] == pytest.approx([0.070198, 0.225403], abs=1e-5)
    assert math.isnan(row(table, "standalone")["difference_mean"]) and math.isnan(row(table, "standalone")["p_holm"])
    assert found["accuracy_final_mean"] == pytest.approx(0.63)
    assert found["accuracy_final_std"] == pytest.approx(0.11)
    assert found["clearly_best"]  # 0.02, 0.03, 0.04 ahead of standalone, the second best
    assert table["clearly_best"].sum() == 1


def test_clients_are_paired_by_seed_and_number() -> None:
    """FedProto: a tie and a better one; a worse and a better one; a better and a worse one: two of six are worse.

    The worst of two clients: 0.4, 0.4, 0.7 have the mean 0.5.
    """
    found = row(table_of(CELLS, OUTCOMES, Question()), "fedproto")
    assert found["clients_worse"] == pytest.approx(2 / 6)
    assert found["worst_decile_mean"] == pytest.approx(0.5)
    assert found["worst_decile_low"] <= 0.5 <= found["worst_decile_high"]


def test_a_missing_run_leaves_the_pairs_that_there_are() -> None:
    outcomes = {name: found for name, found in OUTCOMES.items() if name not in ("standalone-seed0", "fedproto-seed2")}
    table = table_of(CELLS, outcomes, Question())
    found = row(table, "fedproto")
    assert (found["seeds"], row(table, "lg-fedavg")["seeds"]) == (2, 3)
    assert found["difference_mean"] == pytest.approx(0.03)
    assert math.isnan(found["difference_low"]) and math.isnan(found["p_holm"])
    notes = " ".join(notes_on(CELLS, outcomes, Question()))
    assert "fewer than 3 seeds" in notes and "Some runs are missing" in notes
    other = {name: found for name, found in OUTCOMES.items() if name[-1] != ("0" if "proto" in name else "1")}
    assert "means are over different seeds" in " ".join(notes_on(CELLS, other, Question()))  # though as many
    nothing = table_of(CELLS, {}, Question())
    assert nothing["seeds"].tolist() == [0, 0, 0] and nothing["accuracy_final_mean"].isna().all()


def test_to_reach_a_target() -> None:
    """Seeds reach 0.5 in rounds 2 and 3: 2.5 rounds, 50 bytes (10 up and 10 down per round), 25 FLOPs.

    The other method never reaches it with one of its seeds, so there is no mean, but it is said that one did.
    """
    cells = plan(["standalone", "fedproto"], [0, 1])
    runs = [[0.1, 0.5, 0.4], [0.1, 0.2, 0.6], [0.5], [0.4]]
    outcomes = {cell.name: outcome(c[-1], [0.5], c) for cell, c in zip(cells, runs, strict=True)}
    table = table_of(cells, outcomes, Question(target=0.5))
    alone, proto = row(table, "standalone"), row(table, "fedproto")
    assert alone[["rounds_to_target", "bytes_to_target", "flops_to_target"]].tolist() == [2.5, 50, 25]
    assert (alone["seeds_reaching_target"], proto["seeds_reaching_target"]) == (2, 1)
    assert math.isnan(proto["rounds_to_target"]) and math.isnan(alone["simulated_seconds_to_target"])


def test_another_rule_has_no_clients_but_says_so() -> None:
    strange = outcome(0.5, [], lowest=0.3, rules=("prototypes", "classifier"))
    other = {name: strange if "fedproto" in name else found for name, found in OUTCOMES.items()}
    found = row(table_of(CELLS, other, Question(rule="classifier")), "fedproto")
    assert found["worst_decile_mean"] == pytest.approx(0.3)  # the federation's, from its records
    assert math.isnan(found["clients_worse"]) and math.isnan(found["worst_decile_low"])
    assert "only by the method's own rule" in " ".join(notes_on(CELLS, other, Question(rule="classifier")))


def test_the_worst_decile_is_of_the_round_that_counts() -> None:
    """Alone, each client's own best round would give 0.9, where the round that is best for all has 0.4.

    A rule that is not the method's own has no single clients, so the two columns would not be comparable.
    """
    own = {"final": np.array([0.2, 0.9]), "best-validation": np.array([0.9, 0.95])}
    alone = replace(outcome(0.5, []), clients=own, worst_deciles={"final": 0.2, "best-validation": 0.4})
    other = outcome(0.5, [], rules=("prototypes", "classifier"), worst_deciles={"final": 0.3, "best-validation": 0.35})
    found = {cell.name: other if cell.method == "fedproto" else alone for cell in CELLS}
    table = table_of(CELLS, found, Question("best-validation", rule="classifier"))
    assert row(table, "standalone")["worst_decile_mean"] == pytest.approx(0.4)
    assert row(table, "fedproto")["worst_decile_mean"] == pytest.approx(0.35)
    assert table["worst_decile_low"].isna().all()
    words = render.legend(table, Question("best-validation"), None)[0]
    assert "worst decile are of the round best on validation" in words and "its own round best on validation" in words
    final = table_of(CELLS, found, Question())
    assert row(final, "standalone")["worst_decile_mean"] == pytest.approx(0.2)
    assert "clients worse off are of the last round." in render.legend(final, Question(), None)[0]


def test_a_swept_option_has_a_table_for_every_value() -> None:
    """Standalone has no weight and stands in both tables with the same run."""
    cells = plan(["standalone", "fedproto"], [0], {}, {"method.weight": [1, 2]})
    outcomes = {cell.name: outcome(0.1 * number, [0.5]) for number, cell in enumerate(cells, 1)}
    table = table_of(cells, outcomes, Question())
    shown = table[["method", "method.weight", "accuracy_final_mean"]].to_numpy().tolist()
    assert shown == [
        ["standalone", "1", 0.1], ["fedproto", "1", 0.2], ["standalone", "2", 0.1],
        ["fedproto", "2", pytest.approx(0.3)],
    ]  # fmt: skip
    titles = [sheet.title for sheet in render.sheets(table, ["method.weight"], Question())]
    assert titles[0] == "accuracy in percent, method.weight = 1"
    assert titles[3] == "accuracy in percent, method.weight = 2"


def test_runs_on_other_data_do_not_belong_together() -> None:
    for fact, first in (("the data", "standalone-seed0"), ("the partition", "standalone-seed1")):
        strange = OUTCOMES | {"fedproto-seed1": outcome(0.5, [0.5], facts=FACTS | {fact: "another"})}
        with pytest.raises(InputError, match=f"{fact} of fedproto-seed1 and of {first} are not the same"):
            check_same_federation(CELLS, strange)
    check_same_federation(CELLS, OUTCOMES)


@pytest.mark.parametrize("data", ["npz:mine.npz", "folder:mine", "table:mine.csv?label=kind", "hf:mine", "wine"])
def test_seeds_must_have_the_same_data(data: str) -> None:
    cells = plan(["standalone"], [0, 1], {"data": data})
    facts = [{"the data": "a", "the partition": "one"}, {"the data": "b", "the partition": "two"}]
    outcomes = {cell.name: outcome(0.5, [0.5], facts=own) for cell, own in zip(cells, facts, strict=True)}
    with pytest.raises(InputError, match="the data of standalone-seed1"):
        check_same_federation(cells, outcomes)


def test_only_a_clear_lead_is_bold_in_every_format() -> None:
    table = table_of(CELLS, OUTCOMES, Question())
    sheet = render.sheets(table, [], Question())[0]
    assert sheet.bold == {(1, 2)}
    assert "**63.00 ± 11.00**" in render.markdown(sheet)
    assert r"\textbf{63.00 $\pm$ 11.00}" in render.latex(sheet)
    assert render.latex(sheet).count(r"\textbf") == render.markdown(sheet).count("**") / 2 == 1
    for line in (r"\toprule", r"\midrule", r"\bottomrule"):
        assert line in render.latex(sheet)
    by_validation = render.sheets(
        table_of(CELLS, OUTCOMES, Question("best-validation")), [], Question("best-validation")
    )
    assert by_validation[0].bold == {(1, 3)}


def test_ten_seeds_bring_wilcoxon_and_a_diagram_of_ranks(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    cells: list[Cell] = plan(["standalone", "fedproto"], list(range(10)))
    outcomes = {c.name: outcome(0.5 + (c.method == "fedproto") * (0.01 + 0.001 * c.seed), [0.5]) for c in cells}
    table = table_of(cells, outcomes, Question())
    assert row(table, "fedproto")["p_wilcoxon"] == pytest.approx(2 / 1024)
    found = {m: {c.seed: outcomes[c.name] for c in cells if c.method == m} for m in ("standalone", "fedproto")}
    accuracies = shared_accuracies(found, Question())
    assert accuracies.shape == (2, 10)
    pictures.draw_ranks(accuracies.iloc[:, :9], tmp_path)
    assert not list(tmp_path.iterdir())
    pictures.draw_ranks(accuracies, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"critical-difference.png", "critical-difference.pdf"}


def test_groups_that_ranks_can_t_tell_apart() -> None:
    """Within 1: 1 to 2 and 1.8 to 2.5; the pair 2 to 2.5 is part of the second. 4 stands alone."""
    assert pictures.indistinct(np.array([1.0, 1.8, 2.0, 2.5, 4.0]), 1.0) == [(1.0, 2.0), (1.8, 2.5)]
