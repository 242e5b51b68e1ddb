"""The picture of a search: whether more trials would help."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from polyfed.metrics import TITLES, Metric
from polyfed.report import drawing
from polyfed.tuning.records import Trial, best_so_far


def draw_search(trials: Sequence[Trial], folder: Path, metric: Metric = "accuracy") -> None:
    """curve.png and curve.pdf: each method's best score on validation over its trials, and every finished trial."""
    methods = list(dict.fromkeys(trial.method for trial in trials))
    if drawing.missing() or not methods:
        return
    figure, axes = drawing.new_figure((6, 3.6))
    for method, look in drawing.looks(methods).items():
        own = [trial for trial in trials if trial.method == method]
        best = [(t.number + 1, 100 * b) for t, b in zip(own, best_so_far(own), strict=True) if b is not None]
        done = [(t.number + 1, 100 * t.value) for t in own if t.state == "finished"]
        if done:
            line = {name: value for name, value in look.items() if name != "marker"}
            axes.plot(*zip(*best, strict=True), label=method, drawstyle="steps-post", linewidth=1.6, **line)
            axes.scatter(*zip(*done, strict=True), color=look["color"], marker=look.get("marker", "x"), s=10, alpha=0.5)
    axes.set(xlabel="trial", ylabel=f"{TITLES[metric]} on validation samples (%)")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    drawing.add_legend(figure, axes)
    drawing.save(figure, folder / "curve")
