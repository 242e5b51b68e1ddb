"""The figures of a report, drawn by Altair from data frames; in a notebook they show themselves.

    from polyfed import report
    found = report.read("runs/first", "runs/second")
    report.curves(found.curves, x="floats")

Accuracies are in percent. `methods` fixes the order and the colours where a frame does not have all methods.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from polyfed.report.data import X_AXES
from polyfed.report.looks import BLUES, INK, altair, scales

WIDTH, HEIGHT = 560, 320
_SHORT = "datum.value === 0 ? '0' : format(datum.value, '~s')"
"""How large numbers stand at an axis: each with its own unit."""
_LINEAR = 1000
"""Up to about so many floats an axis is linear: nothing sent is 0, which a logarithm does not have."""
_SIDES = ((0, 1), (0, -1), (1, 0), (-1, 0))
"""Above, below, right, left."""
ROW = 24
"""How high a row is where every method or client has its own."""


def curves(frame: pd.DataFrame, x: str = "round", *, methods: Sequence[str] | None = None) -> Any:
    """Accuracy over rounds, `floats`, `flops` or `simulated_seconds`, with a band of one standard deviation.

    A click on the legend fades the others; with the shift key it adds one.
    """
    alt, look = altair(), scales(_methods(frame, methods))
    picked = alt.selection_point(fields=["method"], bind="legend")
    drawn = frame if x == "round" else frame[frame[x] > 0]
    legend = _legend(drawn, symbolType="stroke", symbolSize=400)
    base = alt.Chart().encode(x=_across(drawn[x], x))
    band = base.mark_area().encode(
        fill=alt.Fill("method:N", scale=look["colour"], legend=None),
        y=alt.Y("low:Q", title="accuracy (%)", scale=alt.Scale(zero=False)),
        y2="high:Q",
        opacity=alt.condition(picked, alt.value(0.1), alt.value(0)),
    )
    line = base.mark_line(strokeWidth=1.8, point={"size": 12, "filled": True} if _short(frame) else False).encode(
        y="accuracy:Q",
        color=alt.Color("method:N", scale=look["colour"], legend=legend),
        strokeDash=alt.StrokeDash("method:N", scale=look["dash"], legend=legend),
        opacity=alt.condition(picked, alt.value(1), alt.value(0.08)),
        tooltip=["method:N", "round:Q", *([] if x == "round" else [alt.Tooltip(f"{x}:Q", format=".3s")]),
                 alt.Tooltip("accuracy:Q", format=".2f")],
    )  # fmt: skip
    return _sized(alt.layer(band, line, data=drawn).resolve_legend(fill="independent").add_params(picked))


def clients(frame: pd.DataFrame, *, methods: Sequence[str] | None = None) -> Any:
    """Every client's accuracy as a tick, a box over the middle half, and the mean as a dot."""
    alt, chosen = altair(), _methods(frame, methods)
    look = scales(chosen)
    base = alt.Chart().encode(
        y=alt.Y("method:N", sort=chosen, title=None),
        color=alt.Color("method:N", scale=look["colour"], legend=None),
    )
    along = alt.X("accuracy:Q", title="accuracy of a client (%)", scale=alt.Scale(zero=False),
                  axis=alt.Axis(tickCount=8))  # fmt: skip
    ticks = base.mark_tick(opacity=0.35, thickness=1.5, size=12).encode(
        x=along, tooltip=["method:N", "seed:N", "client:N", alt.Tooltip("accuracy:Q", format=".2f")]
    )
    box = base.mark_bar(opacity=0.22, size=14).encode(x=alt.X("q1(accuracy):Q"), x2=alt.X2("q3(accuracy):Q"))
    mean = base.mark_point(filled=True, size=60, opacity=1).encode(
        x="mean(accuracy):Q", tooltip=["method:N", alt.Tooltip("mean(accuracy):Q", format=".2f")]
    )
    return _sized(alt.layer(box, ticks, mean, data=frame), ROW * len(chosen) + 40)


def client_curves(frame: pd.DataFrame, *, methods: Sequence[str] | None = None) -> Any:
    """A line for each client over rounds; the one under the pointer stands out."""
    alt, chosen = altair(), _methods(frame, methods)
    hover = alt.selection_point(fields=["method", "client"], on="pointerover", empty=False, clear="pointerout")
    return _sized(
        alt.Chart(frame)
        .mark_line(strokeWidth=1.5)
        .encode(
            x=alt.X("round:Q", axis=alt.Axis(format="d")),
            y=alt.Y("accuracy:Q", title="accuracy of a client (%)", scale=alt.Scale(zero=False)),
            detail="client:N",
            color=alt.Color("method:N", scale=scales(chosen)["colour"], legend=_legend(frame)),
            opacity=alt.condition(hover, alt.value(1), alt.value(0.25)),
            strokeWidth=alt.condition(hover, alt.value(4), alt.value(1.2)),
            tooltip=["method:N", "client:N", "round:Q", alt.Tooltip("accuracy:Q", format=".2f")],
        )
        .add_params(hover)
    )


def holdings(frame: pd.DataFrame) -> Any:
    """Who holds how many test samples of which class: a bubble for each."""
    alt = altair()
    return _sized(
        alt.Chart(frame)
        .mark_circle(color="#0072B2", opacity=0.75)
        .encode(
            x=alt.X("client:O", axis=_numbers(frame["client"])),
            y=alt.Y("class:O", axis=_numbers(frame["class"]), sort="descending"),
            size=alt.Size("samples:Q", title="test samples", scale=alt.Scale(range=[8, 260]),
                          legend=alt.Legend(orient="bottom", symbolFillColor=INK, values=_few(frame["samples"]))),
            tooltip=["client:O", "class:O", "samples:Q"],
        ),
        min(520, 90 + 20 * frame["class"].nunique()),
    )  # fmt: skip


def class_accuracies(frame: pd.DataFrame, *, methods: Sequence[str] | None = None) -> Any:
    """A cell for each method and class, darker where more samples are predicted correctly."""
    alt, chosen = altair(), _methods(frame, methods)
    return _sized(
        alt.Chart(frame)
        .mark_rect()
        .encode(
            x=alt.X("class:O", axis=_numbers(frame["class"])),
            y=alt.Y("method:N", sort=chosen, title=None),
            color=_shade("accuracy", "accuracy (%)", bottom=10 * (frame["accuracy"].min() // 10)),
            tooltip=["method:N", "class:O", alt.Tooltip("accuracy:Q", format=".1f"), "samples:Q"],
        ),
        ROW * len(chosen) + 90,
    )


def confusion(frame: pd.DataFrame) -> Any:
    """What one client, or all together, predict for samples of each class; method and client can be chosen."""
    alt = altair()
    names, numbers = list(frame["method"].unique()), list(frame["client"].astype(str).unique())
    method = alt.param(name="method", value=names[0], bind=alt.binding_select(options=names, name="Method "))
    client = alt.param(name="client", value=numbers[0], bind=alt.binding_select(options=numbers, name="Client "))
    classes = sorted({*frame["true"], *frame["predicted"]})
    scale = alt.Scale(domain=classes)
    return _sized(
        alt.Chart(frame)
        .transform_filter("datum.method === method && datum.client === client")
        .mark_rect()
        .encode(
            x=alt.X("predicted:O", title="predicted class", scale=scale, axis=_numbers(pd.Series(classes))),
            y=alt.Y("true:O", title="true class", scale=scale, axis=_numbers(pd.Series(classes))),
            color=_shade("share", "share of the true class (%)"),
            tooltip=["true:O", "predicted:O", "count:Q", alt.Tooltip("share:Q", format=".1f")],
        )
        .add_params(method, client),
        min(560, 90 + 24 * len(classes)),
    )


def trade_off(frame: pd.DataFrame, *, methods: Sequence[str] | None = None) -> Any:
    """Accuracy over floats sent, with the clients' computation as the size of a bubble."""
    alt, chosen = altair(), _methods(frame, methods)
    edge = max(0.5, 0.12 * (frame["accuracy"].max() - frame["accuracy"].min()))
    high = [frame["accuracy"].min() - edge, frame["accuracy"].max() + edge]
    wide = [-1.5 * _LINEAR, 3 * max(frame["floats"].max(), _LINEAR)]
    placed = frame.assign(side=_sides(frame, wide, high))
    base = alt.Chart().encode(
        x=alt.X("floats:Q", title=X_AXES["floats"],
                scale=alt.Scale(type="symlog", constant=_LINEAR, domain=wide, nice=False),
                axis=alt.Axis(labelExpr=_SHORT, values=[0, *(10**power for power in range(4, 13))])),
        y=alt.Y("accuracy:Q", title="accuracy (%)", axis=alt.Axis(tickCount=6),
                scale=alt.Scale(domain=high, nice=False)),
    )  # fmt: skip
    few = alt.Legend(orient="bottom", format=".2s", symbolFillColor=INK, values=_few(frame["flops"]))
    bubbles = base.mark_circle(opacity=0.55).encode(
        size=alt.Size("flops:Q", title=X_AXES["flops"], scale=alt.Scale(range=[40, 900]), legend=few),
        color=alt.Color("method:N", scale=scales(chosen)["colour"], legend=None),
        tooltip=["method:N", alt.Tooltip("accuracy:Q", format=".2f"), alt.Tooltip("floats:Q", format=".3s"),
                 alt.Tooltip("flops:Q", format=".3s")],
    )  # fmt: skip
    names = [
        base.mark_text(dx=14 * across, dy=-15 * up, align={-1: "right", 0: "center", 1: "left"}[across])
        .encode(text="method:N")
        .transform_filter(f"datum.side === {number}")
        for number, (across, up) in enumerate(_SIDES)
    ]
    return _sized(alt.layer(bubbles, *names, data=placed), 380)


def _sides(frame: pd.DataFrame, wide: Sequence[float], high: Sequence[float]) -> list[int]:
    """On which side of its bubble each name stands, so that names cover neither each other nor bubbles if possible."""
    first, last = (_symlog(edge) for edge in wide)
    x = WIDTH * (_symlog(frame["floats"]) - first) / (last - first)
    y = 380 * (frame["accuracy"] - high[0]) / (high[1] - high[0])
    taken = [(a - 11, b - 11, a + 11, b + 11) for a, b in zip(x, y, strict=True)]
    sides = []
    for a, b, name in zip(x, y, frame["method"], strict=True):
        length = 7.0 * len(name)
        boxes = []
        for across, up in _SIDES:
            left = a - length / 2 + across * (14 + length / 2)
            boxes.append((left, b + 15 * up - 7, left + length, b + 15 * up + 7))
        covered = [sum(_overlap(box, other) for other in taken) + 99 * (box[2] > WIDTH) for box in boxes]
        sides.append(int(np.argmin(covered)))
        taken.append(boxes[sides[-1]])
    return sides


def _symlog(value: Any) -> Any:
    return np.sign(value) * np.log1p(np.abs(value) / _LINEAR)


def _overlap(one: Sequence[float], other: Sequence[float]) -> float:
    width, height = (min(one[i + 2], other[i + 2]) - max(one[i], other[i]) for i in (0, 1))
    return max(0.0, width) * max(0.0, height)


def distances(frame: pd.DataFrame) -> Any:
    """How far the global prototypes of two classes are from each other: a cell for each pair."""
    alt = altair()
    return _sized(
        alt.Chart(frame)
        .mark_rect()
        .encode(
            x=alt.X("class:O", axis=_numbers(frame["class"])),
            y=alt.Y("other:O", title="class", axis=_numbers(frame["class"])),
            color=_shade("distance", "distance of prototypes", top=None),
            tooltip=["class:O", "other:O", alt.Tooltip("distance:Q", format=".3f")],
        ),
        min(560, 90 + 22 * frame["class"].nunique()),
    )


def margins(frame: pd.DataFrame, *, methods: Sequence[str] | None = None) -> Any:
    """For each class, how far its global prototype is from the nearest other one."""
    alt, chosen = altair(), _methods(frame, methods)
    look = scales(chosen)
    return _sized(
        alt.Chart(frame)
        .mark_point(size=60, filled=True)
        .encode(
            x=alt.X("class:O", axis=_numbers(frame["class"])),
            y=alt.Y("margin:Q", title="distance to the nearest prototype"),
            color=alt.Color("method:N", scale=look["colour"], legend=_legend(frame)),
            shape=alt.Shape("method:N", scale=look["shape"], legend=_legend(frame)),
            tooltip=["method:N", "class:O", alt.Tooltip("margin:Q", format=".3f")],
        ),
        240,
    )


def features(frame: pd.DataFrame) -> Any:
    """Features of test samples in two dimensions (t-SNE), coloured by class and shaped by network."""
    alt = altair()
    hidden = alt.Axis(labels=False, ticks=False, title=None, grid=False, domain=False)
    return _sized(
        alt.Chart(frame)
        .mark_point(size=26, opacity=0.8)
        .encode(
            x=alt.X("x:Q", axis=hidden),
            y=alt.Y("y:Q", axis=hidden),
            color=alt.Color("class:N", scale=alt.Scale(scheme="tableau10"), legend=alt.Legend(orient="bottom")),
            shape=alt.Shape("architecture:N", title="network", legend=alt.Legend(orient="bottom")),
            tooltip=["class:N", "client:N", "architecture:N"],
        ),
        420,
    )


def pictures(frame: pd.DataFrame) -> Any:
    """Pictures side by side: a row for each kind, a column for each sample. `url` holds the picture itself."""
    alt = altair()
    kinds = list(frame["kind"].unique())
    side = alt.expr(f"min(48, 0.9 * width / {frame['sample'].nunique()}, 0.9 * height / {len(kinds)})")
    return _sized(
        alt.Chart(frame)
        .mark_image(width=side, height=side)
        .encode(
            x=alt.X("sample:O", title="test sample", axis=alt.Axis(labelAngle=0)),
            y=alt.Y("kind:N", sort=kinds, title=None),
            url="url:N",
        ),
        58 * len(kinds) + 40,
    )


def _across(values: pd.Series, x: str) -> Any:
    """The axis of rounds or costs; floats that differ a thousandfold are on a logarithmic one."""
    alt = altair()
    if x != "floats" or values.max() < 1000 * values.min():
        return alt.X(f"{x}:Q", title=X_AXES[x], axis=alt.Axis(labelExpr=_SHORT, tickCount=6))
    axis = alt.Axis(labelExpr=_SHORT, values=[10**power for power in range(13)])
    return alt.X(f"{x}:Q", title=f"{X_AXES[x]} (logarithmic)", axis=axis, scale=alt.Scale(type="log", nice=False))


def _methods(frame: pd.DataFrame, methods: Sequence[str] | None) -> list[str]:
    return list(methods) if methods is not None else list(dict.fromkeys(frame["method"]))


def _short(frame: pd.DataFrame) -> bool:
    """A line of few points shows them; a single one would be invisible otherwise."""
    return bool(frame.groupby("method").size().max() <= 12)


def _legend(frame: pd.DataFrame, **look: Any) -> Any:
    """Of the methods that are in the frame; colours are those of all."""
    shown = list(dict.fromkeys(frame["method"]))
    return altair().Legend(orient="bottom", title=None, values=shown, symbolStrokeWidth=2, **look)


def _shade(field: str, title: str, bottom: float = 0, top: float | None = 100) -> Any:
    alt = altair()
    scale = alt.Scale(range=list(BLUES), domain=[bottom, top]) if top else alt.Scale(range=list(BLUES))
    return alt.Color(f"{field}:Q", title=title, scale=scale, legend=alt.Legend(orient="bottom", gradientLength=160))


def _numbers(values: pd.Series) -> Any:
    """An axis of numbers that are names: upright, and only some of many."""
    known = sorted(values.unique())
    step = -(-len(known) // 25)
    return altair().Axis(labelAngle=0, values=known[::step], grid=False)


def _few(values: pd.Series) -> list[float]:
    """The smallest and the largest value, and one between them, for a legend."""
    low, high = float(values.min()), float(values.max())
    return [low] if low == high else [low, (low + high) / 2, high]


def _sized(chart: Any, height: int = HEIGHT) -> Any:
    return chart.properties(width=WIDTH, height=height).configure_legend(columns=4)
