"""What a federation's accuracy is, worked out by hand."""

import json
import math

import pytest

from polyfed.errors import InputError
from polyfed.evaluation import Evaluation, Score, Shares
from polyfed.server.scores import Best, Progress, summarise


def score(correct: int, samples: int, rule: str = "own") -> Evaluation:
    return Evaluation(samples, samples, {rule: correct}, {rule: 0})


def test_means_spread_and_worst_decile() -> None:
    """Accuracies 1/2, 1 and 0, of 2, 4 and 4 samples: mean 1/2, weighted 5/10, std √(1/6); the worst has 0."""
    found = summarise({0: score(1, 2), 1: score(4, 4), 2: score(0, 4)}, "test", "own")
    assert found == pytest.approx(
        {
            "accuracy_mean": 0.5, "accuracy_weighted": 0.5, "accuracy_std": math.sqrt(1 / 6),
            "accuracy_worst_decile": 0.0,
        }
    )  # fmt: skip


def test_the_weighted_mean_counts_samples() -> None:
    found = summarise({0: score(1, 1), 1: score(0, 9)}, "test", "own")
    assert (found["accuracy_mean"], found["accuracy_weighted"]) == (0.5, 0.1)


def test_the_worst_decile_of_twenty_is_the_mean_of_two() -> None:
    found = summarise({client: score(client, 19) for client in range(20)}, "test", "own")
    assert found["accuracy_worst_decile"] == pytest.approx(0.5 / 19)


def test_clients_without_samples_are_left_out() -> None:
    found = summarise({0: score(0, 0), 1: score(3, 4)}, "test", "own")
    assert (found["accuracy_mean"], found["accuracy_std"]) == (0.75, 0.0)
    assert all(math.isnan(value) for value in summarise({0: score(0, 0)}, "test", "own").values())


def test_shares_give_the_same_means_but_no_weighted_one() -> None:
    """As above with shares alone: 1/3 and 1 have the mean 2/3, bit by bit, and nobody knows of how many samples."""
    counted = {0: score(1, 3), 1: score(4, 4), 2: score(0, 0)}
    shares = {client: Score.from_dict(json.loads(json.dumps(each.told()))) for client, each in counted.items()}
    found, expected = (summarise(each, "test", "own") for each in (shares, counted))
    assert math.isnan(found.pop("accuracy_weighted")) and expected.pop("accuracy_weighted") == 5 / 7
    assert found == expected and found["accuracy_mean"] == (1 / 3 + 1) / 2
    assert math.isnan(summarise({**counted, 3: shares[0]}, "test", "own")["accuracy_weighted"])


def test_validation_and_other_rules_are_counted_apart() -> None:
    both = Evaluation(4, 2, {"own": 4, "other": 1}, {"own": 1, "other": 2})
    assert summarise({0: both}, "test", "other")["accuracy_mean"] == 0.25
    assert summarise({0: both}, "validation", "own")["accuracy_mean"] == 0.5
    assert (both.accuracy(), both.accuracy("other"), both.validation_accuracy()) == (1.0, 0.25, 0.5)


def test_which_round_counts() -> None:
    """Validation is best in rounds 2 and 3, the first of which counts; test is best in round 1; round 4 is final."""
    best = Best()
    for round, (test, validation) in enumerate([(0.9, 0.5), (0.7, 0.8), (0.8, 0.8), (0.6, 0.7)], start=1):
        best.add(round, test, validation)
    assert (best.final, best.best, best.best_round) == (0.6, 0.9, 1)
    assert (best.at_best_validation, best.best_validation_round) == (0.7, 2)


def test_the_first_of_equally_good_rounds_counts() -> None:
    best = Best()
    for round, (test, validation) in enumerate([(0.5, 0.4), (0.9, 0.8), (0.9, 0.8), (0.7, 0.8)], start=1):
        best.add(round, test, validation)
    assert (best.best, best.best_round) == (0.9, 2)
    assert (best.at_best_validation, best.best_validation_round) == (0.9, 2)


def test_without_validation_no_round_is_best_on_it() -> None:
    best = Best()
    best.add(1, 0.5, math.nan)
    assert math.isnan(best.at_best_validation)
    assert (best.best_validation_round, best.best) == (0, 0.5)


def test_progress_survives_json() -> None:
    progress = Progress()
    progress.add_costs({"flops": 5, "seconds": 0.5})
    progress.add_costs({"flops": 7, "seconds": 0.5})
    progress.latest[3] = score(1, 2)
    progress.latest[4] = Shares({"own": 0.5}, {"own": 0.25})
    progress.engine = {"missed": {"3": [1]}}
    progress.clients[3] = Best()
    progress.clients[3].add(2, 0.5, 0.25)
    progress.federation.add(2, 0.5, 0.25)
    progress.stale = {4, 1}
    again = Progress.from_dict(json.loads(json.dumps(progress.to_dict())))
    assert again == progress
    assert again.totals == {"flops": 12, "seconds": 1.0}


@pytest.mark.parametrize("content", [{}, {"federation": 3}, {**Progress().to_dict(), "latest": {"a": {}}}])
def test_a_progress_that_is_none_is_refused(content: dict[str, object]) -> None:
    with pytest.raises(InputError, match="holds no progress of a run .*--from"):
        Progress.from_dict(content)
