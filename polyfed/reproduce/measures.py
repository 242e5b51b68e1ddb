"""What is read from finished runs: the number that is compared, and what figures need beside it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from polyfed import api
from polyfed.comparison.outcomes import read_outcome
from polyfed.engines.client.round import collect, evaluate
from polyfed.methods.fedssa import FedSSA
from polyfed.records import RunFolder
from polyfed.reproduce.recipes import Compare
from polyfed.seeds import derive

MILLION = 1e6
SAMPLES_SHOWN = 100
"""Test samples of each client in a picture of features; t-SNE of all of them would take hours."""


def measured(path: Path, compare: Compare, rule: str | None) -> float:
    """The number of a run that is put beside the published one."""
    if compare.what == "floats":
        last = RunFolder.open(path).rounds().iloc[-1]
        return float(last["upload_floats"] + last["download_floats"]) / MILLION
    return 100 * chosen_round(accuracies(path, compare, rule), compare)


def chosen_round(curve: pd.DataFrame, compare: Compare) -> float:
    """One number for a curve.

    >>> curve = pd.DataFrame({"round": [10, 19, 20], "accuracy": [0.9, 0.5, 0.7]})
    >>> [round(chosen_round(curve, Compare(round=which)), 3) for which in ("last", "last-tenth", "best")]
    [0.7, 0.6, 0.9]
    """
    values = curve["accuracy"]
    late = values[curve["round"] > 0.9 * curve["round"].iloc[-1]]
    return float({"last": values.iloc[-1], "last-tenth": late.mean(), "best": values.max()}[compare.round])


def accuracies(path: Path, compare: Compare, rule: str | None) -> pd.DataFrame:
    """Rounds and accuracies on test samples."""
    rows = RunFolder.open(path).evaluations()
    rows = rows[(rows["part"] == "test") & (rows["rule"] == (rule or rows["rule"].iloc[0]))]
    return rows[["round", f"accuracy_{compare.average}"]].set_axis(["round", "accuracy"], axis=1)


def costs(path: Path, target: float, rule: str | None) -> dict[str, float]:
    """What it took until the mean accuracy first reached the target, in percent; NaN if it never did."""
    curve = read_outcome(path, rule).curve
    reached = curve[curve["accuracy"] >= target / 100]
    if reached.empty:
        return dict.fromkeys(("rounds_to_target", "floats_to_target", "flops_to_target"), math.nan)
    first = reached.iloc[0]
    return {
        "rounds_to_target": float(first["round"]),
        "floats_to_target": float(first["upload_floats"] + first["download_floats"]),
        "flops_to_target": float(first["flops"]),
    }


def series(kind: str | None, path: Path, compare: Compare, rule: str | None) -> Iterator[Mapping[str, Any]]:
    """The rows that a run contributes to a figure's data."""
    if kind == "rounds":
        for row in accuracies(path, compare, rule).itertuples():
            yield {"round": row.round, "accuracy": row.accuracy}
    elif kind == "clients":
        yield from _clients(api.resume(path, progress=False), rule)
    elif kind == "margins":
        yield from _margins(api.resume(path, progress=False))
    elif kind == "features":
        yield from features(api.resume(path, progress=False))
    elif kind == "decay":
        yield from _decay(api.resume(path, progress=False))


def _clients(result: api.Result, rule: str | None) -> Iterator[dict[str, Any]]:
    """Every client's accuracy at the end; the run's own records have only the method's own rule."""
    population = result.population
    for client in population.clients:
        score = evaluate(population, client, result.network(client).to(population.device))
        network = population.architectures[client].name
        yield {"client": client, "architecture": network, "accuracy": score.accuracy(rule)}


def _margins(result: api.Result) -> Iterator[dict[str, Any]]:
    """By class, the margin of the global prototypes and the largest one among clients'."""
    population, state = result.population, result.server.state
    largest: dict[int, float] = {}
    with torch.no_grad():
        for client in population.clients:
            network = result.network(client).to(population.device)
            own = collect(population, population.data[client], network)
            assert own is not None
            for label, margin in zip(own.labels.tolist(), margins(own.means).tolist(), strict=True):
                largest[label] = max(largest.get(label, -math.inf), margin)
    known = state["prototypes.known"].nonzero().flatten()
    ours = margins(state["prototypes.vectors"][known])
    for label, margin in zip(known.tolist(), ours.tolist(), strict=True):
        if math.isfinite(largest.get(label, math.inf)):  # a client with one class has no margin
            yield {"class": label, "client_margin": largest[label], "global_margin": margin}


def features(result: api.Result, most: int | None = None) -> Iterator[dict[str, Any]]:
    """All clients' features of some of their test samples, in two dimensions; of about `most` samples if given."""
    from sklearn.manifold import TSNE  # slow to import, and only this needs it
    from threadpoolctl import threadpool_limits

    population = result.population
    each = SAMPLES_SHOWN if most is None else max(1, min(SAMPLES_SHOWN, most // len(population.clients)))
    rows: list[dict[str, Any]] = []
    vectors = []
    # One thread: the smallest difference in rounding gives another picture, and for so few points threads wait longer
    # for each other than they work.
    with torch.no_grad(), threadpool_limits(1):
        for client in population.clients:
            x, y = population.dataset.batch(population.data[client].test[:each], population.device)
            vectors.append(result.network(client).to(population.device).features(x).cpu())
            name = population.architectures[client].name
            rows += [{"client": client, "architecture": name, "class": label} for label in y.tolist()]
        points = torch.cat(vectors).numpy()
        reduced = TSNE(
            perplexity=min(30, (len(points) - 1) / 3), random_state=derive(population.seed, "features shown") % 2**32
        ).fit_transform(points)
    for row, (across, up) in zip(rows, reduced.tolist(), strict=True):
        yield {**row, "x": across, "y": up}


def _decay(result: api.Result) -> Iterator[dict[str, Any]]:
    """How much of its own rows a client adds, by round."""
    method = result.population.method
    assert isinstance(method, FedSSA)
    for round in range(1, result.summary["rounds"] + 1):
        yield {"round": round, "own_share": method.own_share(round)}


def margins(prototypes: Tensor) -> Tensor:
    """How far each prototype is from the nearest other one; infinitely far if there is none.

    >>> margins(torch.tensor([[0.0], [3.0], [7.0]])).tolist()
    [3.0, 3.0, 4.0]
    """
    apart = torch.cdist(prototypes, prototypes, compute_mode="donot_use_mm_for_euclid_dist")
    return apart.fill_diagonal_(torch.inf).amin(1)
