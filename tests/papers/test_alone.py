"""What clients gain without partners, beside what they gain among all."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from papers.alone import ALONE, alone
from papers.campaign import Run, read_campaign
from papers.few import read_alone, record_of
from papers.page import comparisons_of, page
from papers.tables import Comparison
from polyfed.errors import InputError
from tests.papers.tiny import TINY, record, written

SETTING = "n10/cifar10"


@pytest.fixture
def fedgh(papers: Path) -> Path:
    """The small campaign with a method that predicts by its classifier too."""
    (papers / "campaign.yaml").write_text(
        TINY.replace("[standalone, fedproto]\n    changes", "[standalone, fedgh]\n    changes")
    )
    return papers


def compared(papers: Path) -> Comparison:
    (found,) = comparisons_of(read_campaign(papers / "campaign.yaml"), papers / "results")
    return found


def recorded(papers: Path, curve: Callable[[str, int, int], float], clients: int = 2, **more: Any) -> None:
    """Records of all runs whose clients have this accuracy in the one round that is left of them."""
    (papers / "results" / ALONE).mkdir(exist_ok=True)
    lines = []
    for run in read_campaign(papers / "campaign.yaml").runs():
        found = {c: {run.config.rounds: curve(run.row, run.seed, c)} for c in range(clients)}
        lines.append(json.dumps(record_of(run, found, commit=None) | more) + "\n")
    (papers / "results" / ALONE / "tiny.jsonl").write_text("".join(lines))


def test_gains_by_hand(fedgh: Path) -> None:
    """
    Three seeds, two clients. Without partners they gain 1 and 3 points, so 2 ± 2.571 · √1.2 / √6 = 2 ± 1.15; among
    all, where they are the last two of three, always 5; and all clients gain 4.
    """

    def among(run: Run) -> dict[str, Any]:
        more = 0.05 if run.row == "fedgh" else 0.0
        return record(run, 0.54 if more else 0.5, clients=[0.4 + more, 0.6 + more, 0.9])

    written(fedgh, lambda run: {**among(run), "accuracy": {"classifier": among(run)["accuracy"]["classifier"]},
                                "curves": {"classifier": [0.5]}})  # fmt: skip
    gains = {"standalone": (0.0, 0.0), "fedgh": (0.01, 0.03)}
    recorded(fedgh, lambda row, seed, client: 0.4 + seed / 10 + client / 100 + gains[row][client])
    *_, head, _, row = alone(compared(fedgh), SETTING).splitlines()
    assert head == ("| minus Standalone | clients | without partners | the same among all, last round | all clients |")
    assert row == "| FedGH | 6 (3 seeds) | +2.0 (+0.9 to +3.1) | +5.0 | +4.0 (+4.0 to +4.0) |"
    assert row in page([compared(fedgh)], fedgh / "words")


def test_only_clients_that_both_have_are_compared(fedgh: Path) -> None:
    written(fedgh, lambda run: record(run, 0.5, clients=[0.4, 0.6]))
    recorded(fedgh, lambda row, seed, client: 0.5 if row == "standalone" else 0.5 + client / 100)
    path = fedgh / "results" / ALONE / "tiny.jsonl"
    kept = [json.loads(line) for line in path.read_text().splitlines()]
    for each in kept:
        if each["method"] == "standalone":
            del each["curves"]["0"]
    path.write_text("".join(json.dumps(each) + "\n" for each in kept if (each["method"], each["seed"]) != ("fedgh", 2)))
    assert "| FedGH | 2 (2 seeds) | +1.0 |" in alone(compared(fedgh), SETTING)


@pytest.mark.parametrize("missing", ["standalone", "fedgh"])
def test_clients_whose_runs_among_all_are_missing_have_their_own_gain_only(fedgh: Path, missing: str) -> None:
    written(fedgh, lambda run: record(run, 0.5, clients=[0.4, 0.6]) if (run.row, run.seed) != (missing, 1) else None)
    recorded(fedgh, lambda row, seed, client: 0.5 if row == "standalone" else 0.5 + client / 100)
    shown = alone(compared(fedgh), SETTING)
    assert "| FedGH | 6 (3 seeds) | +0.5 (−0.1 to +1.1) |" in shown and "the same among all" not in shown


def test_last_accuracies_by_another_rule_are_not_shown(papers: Path) -> None:
    """FedProto's runs keep each client's accuracy by prototypes, and its classifier is compared elsewhere."""
    written(papers, lambda run: record(run, 0.5, clients=[0.4, 0.6]))
    recorded(papers, lambda row, seed, client: 0.5)
    shown = alone(compared(papers), SETTING)
    assert "the same among all" not in shown and shown.count("FedProto") == 1


def test_without_records_there_is_no_table(papers: Path) -> None:
    written(papers, lambda run: record(run, 0.5))
    assert alone(compared(papers), SETTING) == ""
    recorded(papers, lambda row, seed, client: 0.5)
    path = papers / "results" / ALONE / "tiny.jsonl"
    path.write_text("".join(line + "\n" for line in path.read_text().splitlines() if '"standalone"' not in line))
    assert alone(compared(papers), SETTING) == ""


def test_wrong_records_are_refused(papers: Path) -> None:
    written(papers, lambda run: record(run, 0.5))
    recorded(papers, lambda row, seed, client: 0.5, settings={"training.lr": 0.5})
    with pytest.raises(InputError, match="is recorded with .*, but the campaign has"):
        compared(papers)
    recorded(papers, lambda row, seed, client: 0.5, rounds=[7])
    with pytest.raises(InputError, match="recorded up to round 7"):
        compared(papers)
    recorded(papers, lambda row, seed, client: 0.5, entry="other")
    with pytest.raises(InputError, match="in other, n10/cifar10 is recorded but not in the campaign"):
        compared(papers)
    path = papers / "results" / ALONE / "tiny.jsonl"
    for text, said in (
        (path.read_text() * 2, "read before"),
        ("{}\n", "no record"),
        ("cut\n", "line 1 of .* is no record"),
    ):
        path.write_text(text)
        with pytest.raises(InputError, match=said):
            read_alone(path.parent)
    path.write_text("cut off")
    assert read_alone(path.parent) == {}
