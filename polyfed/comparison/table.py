"""The table of a comparison: a row per method at every point of the swept settings, and notes on what it rests on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from polyfed.comparison import statistics
from polyfed.comparison.outcomes import COSTS, ROUNDS, SIMULATED, Outcome, RoundChoice
from polyfed.comparison.plan import Cell, concerns, grid
from polyfed.errors import InputError
from polyfed.metrics import METRICS, TITLES, Metric
from polyfed.ranges import typed
from polyfed.seeds import numpy_generator

BySeed = Mapping[int, Outcome]
TARGETS = {
    "rounds_to_target": ("round",),
    "bytes_to_target": ("upload_bytes", "download_bytes"),
    "flops_to_target": ("flops",),
    "simulated_seconds_to_target": (SIMULATED,),
}
"""What it takes to reach a target accuracy, and the columns of a curve that add up to it."""


@dataclass(frozen=True)
class Question:
    """What is asked of the runs."""

    round: RoundChoice = "final"
    """The round whose accuracies are compared."""
    rule: str | None = None
    """The rule of prediction; none: each method's own."""
    baseline: str | None = "standalone"
    """The method that the others are compared with; none: no differences."""
    target: float | None = None
    """The accuracy, or value of the metric, for which to say when it was reached."""
    metric: Metric = "accuracy"
    """What methods are ranked by."""


def table_of(cells: Sequence[Cell], outcomes: Mapping[str, Outcome], question: Question) -> pd.DataFrame:
    """All rows, point after point, methods in the order in which they were given. Failed runs have no outcome."""
    rows = []
    for point in grid(cells):
        rows += rows_at(point, by_method(point, cells, outcomes), question)
    return pd.DataFrame(rows)


def notes_on(cells: Sequence[Cell], outcomes: Mapping[str, Outcome], question: Question) -> list[str]:
    """What a reader of the table must know."""
    points = [by_method(point, cells, outcomes) for point in grid(cells)]
    seeds = {frozenset(own) for found in points for own in found.values()}
    notes = []
    fewest = statistics.FEWEST_SEEDS
    if any(len(own) < fewest for own in seeds):
        notes.append(
            f"No interval and no p value where there are fewer than {fewest} seeds: so few say nothing about how much "
            "results vary."
        )
    if len(seeds) > 1:
        notes.append(
            "Some runs are missing, so means are over different seeds; differences are over the seeds that both have."
        )
    left_out = {cell.name: outcomes[cell.name].replies_left_out for cell in cells if cell.name in outcomes}
    notes += [f"In {name}, {number} replies were left out." for name, number in left_out.items() if number]
    other = sorted({o.rule for o in outcomes.values() if o.rule != o.rules[0]})
    if other:
        notes.append(
            f"A run keeps each client's accuracy only by the method's own rule, so clients worse off and the interval "
            f"of the worst decile are missing where the rule {' or '.join(other)} is another one."
        )
    if question.metric != "accuracy" and question.round != "final":
        notes.append(
            f"A run keeps each client's {TITLES[question.metric]} of the last round only, so clients worse off and the "
            "worst decile are missing."
        )
    if question.round == "best-test":
        notes.append("The round was chosen by looking at the test samples, so these accuracies are too optimistic.")
    return notes


def check_same_federation(cells: Sequence[Cell], outcomes: Mapping[str, Outcome]) -> None:
    """Raise if two runs at one point began with other data, or two of one seed with another partition."""
    for point in grid(cells):
        first: dict[tuple[str, int | None], tuple[str, Outcome]] = {}
        for cell in cells:
            if cell.name not in outcomes or not concerns(cell, point):
                continue
            found = outcomes[cell.name]
            for fact, seed in (("the data", None), ("the partition", cell.seed)):
                name, other = first.setdefault((fact, seed), (cell.name, found))
                if other.facts.get(fact) != found.facts.get(fact):
                    raise InputError(
                        f"{fact} of {cell.name} and of {name} are not the same, so they can't be compared: move the "
                        "runs with the wrong data away, and compare again."
                    )


def by_method(
    point: Mapping[str, Any], cells: Sequence[Cell], outcomes: Mapping[str, Outcome]
) -> dict[str, dict[int, Outcome]]:
    """The outcomes that belong to a point's table, by method and seed; a method whose runs all failed has none."""
    found: dict[str, dict[int, Outcome]] = {}
    for cell in cells:
        if concerns(cell, point):
            own = found.setdefault(cell.method, {})
            if cell.name in outcomes:
                own[cell.seed] = outcomes[cell.name]
    return found


def rows_at(point: Mapping[str, Any], found: Mapping[str, BySeed], question: Question) -> list[dict[str, Any]]:
    """The rows of one point, from its outcomes by method and seed."""
    rows: list[dict[str, Any]] = []
    for method, own in found.items():
        alone = found.get(question.baseline or "", {}) if method != question.baseline else {}
        rows.append(
            {
                "method": method,
                **{name: typed(value) for name, value in point.items()},
                "rule": next((outcome.rule for outcome in own.values()), ""),
                "round": question.round,
                "metric": question.metric,
                "seeds": len(own),
                **_accuracies(own, question),
                **_differences(own, alone, question),
                **_clients(method, own, alone, question),
                **_beside(own),
                **_costs(own),
                **_target(own, question),
            }
        )
    for row, corrected in zip(rows, statistics.holm([row["p"] for row in rows]), strict=True):
        row["p_holm"] = corrected
    _mark_best(rows, found, question)
    return rows


def _accuracies(own: BySeed, question: Question) -> dict[str, float]:
    """Of all rounds that count accuracy and the metric; best on test is named only if it was asked for."""
    columns: dict[str, float] = {}
    for metric in dict.fromkeys(("accuracy", question.metric)):
        for choice in ROUNDS:
            if choice != "best-test" or question.round == choice:
                columns |= _spread(own, metric, choice)
    return columns


def column_of(metric: Metric, choice: RoundChoice) -> str:
    """What a metric in a round is called in the table, before `_mean` and `_std`.

    >>> column_of("auc", "best-validation"), column_of("accuracy", "best-test")
    ('auc_at_best_validation', 'accuracy_best_on_test')
    """
    return metric + ("_best_on_test" if choice == "best-test" else ROUNDS[choice].removeprefix("accuracy"))


def _spread(own: BySeed, metric: Metric, choice: RoundChoice) -> dict[str, float]:
    values, name = [outcome.value(metric, choice) for outcome in own.values()], column_of(metric, choice)
    return {f"{name}_mean": statistics.mean_of(values), f"{name}_std": statistics.spread_of(values)}


def _beside(own: BySeed) -> dict[str, Any]:
    """All metrics in the last round, what always predicting the largest class reaches, and whether they are needed."""
    columns: dict[str, Any] = {}
    for metric in METRICS:
        columns |= _spread(own, metric, "final")
    columns["largest_class_mean"] = statistics.mean_of([outcome.largest_class for outcome in own.values()])
    return {**columns, "metrics_tell_more": any(outcome.tells_more for outcome in own.values())}


def _differences(own: BySeed, alone: BySeed, question: Question) -> dict[str, float]:
    """To the baseline, seed by seed."""
    shared = [seed for seed in own if seed in alone]
    asked = question.metric, question.round
    paired = [own[seed].value(*asked) - alone[seed].value(*asked) for seed in shared]
    interval = statistics.t_interval(paired)
    return {
        "difference_mean": interval.mean,
        "difference_low": interval.low,
        "difference_high": interval.high,
        "p": statistics.t_test(paired),
        "p_holm": math.nan,
        "p_wilcoxon": statistics.wilcoxon(paired),
    }


def _clients(method: str, own: BySeed, alone: BySeed, question: Question) -> dict[str, float]:
    """The worst tenth, and who would have done better alone."""
    asked = question.metric, question.round
    vectors = [outcome.client_values(*asked) for outcome in own.values()]
    # In any round but the last, clients are known only in their own best rounds, which are not the one that counts.
    known = question.round == "final" and all(len(vector) for vector in vectors)
    deciles = [statistics.worst_decile(vector) for vector in vectors]
    if not known:
        deciles = [outcome.worst_decile(*asked) for outcome in own.values()]
    low, high = math.nan, math.nan
    if known:
        low, high = statistics.bootstrap_worst_decile(vectors, numpy_generator(0, "comparison", "worst decile", method))
    pairs = [(own[seed].client_values(*asked), alone[seed].client_values(*asked)) for seed in own if seed in alone]
    pairs = [(ours, theirs) for ours, theirs in pairs if len(ours) and len(ours) == len(theirs)]
    return {
        "worst_decile_mean": statistics.mean_of(deciles),
        "worst_decile_low": low,
        "worst_decile_high": high,
        "clients_worse": statistics.share_worse([ours for ours, _ in pairs], [theirs for _, theirs in pairs]),
    }


def _costs(own: BySeed) -> dict[str, float]:
    """Of a whole run, mean over seeds."""
    names = [*COSTS, *([SIMULATED] if any(SIMULATED in outcome.totals for outcome in own.values()) else [])]
    return {
        name: statistics.mean_of([float(outcome.totals.get(name, math.nan)) for outcome in own.values()])
        for name in names
    }


def _target(own: BySeed, question: Question) -> dict[str, float]:
    """What it took to reach the target, mean over seeds; NaN unless all of them reached it."""
    target = question.target
    if target is None:
        return {}
    places = {seed: statistics.first_reaching(o.curve[question.metric].to_numpy(), target) for seed, o in own.items()}
    reached = [(own[seed].curve, place) for seed, place in places.items() if place is not None]
    columns: dict[str, float] = {"seeds_reaching_target": len(reached)}
    for name, parts in TARGETS.items():
        values = [
            sum(float(curve[part].iloc[place]) for part in parts) if set(parts) <= set(curve) else math.nan
            for curve, place in reached
        ]
        columns[name] = statistics.mean_of(values) if len(values) == len(own) else math.nan
    return columns


def shared_accuracies(found: Mapping[str, BySeed], question: Question) -> pd.DataFrame:
    """The values that are compared: a row per method that has runs, a column per seed that all of these have."""
    present = {method: own for method, own in found.items() if own}
    shared = sorted(set.intersection(*(set(own) for own in present.values()))) if present else []
    asked = question.metric, question.round
    values = {method: [own[seed].value(*asked) for seed in shared] for method, own in present.items()}
    return pd.DataFrame.from_dict(values, orient="index", columns=pd.Index(shared), dtype=float)


def _mark_best(rows: Sequence[dict[str, Any]], found: Mapping[str, BySeed], question: Question) -> None:
    accuracies = shared_accuracies(found, question)
    best = statistics.clear_best(accuracies.to_numpy())
    for row in rows:
        row["clearly_best"] = best is not None and row["method"] == accuracies.index[best]
