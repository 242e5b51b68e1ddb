"""The figures of a report, drawn by Altair from data frames; in a notebook they show themselves.

    from polyfed import report
    found = report.read("runs/first", "runs/second")
    report.curves(found.curves, x="floats")

Accuracies are in percent. `methods` fixes the order and the colours where a frame does not have all methods.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from polyfed.report.data import X_AXES
from polyfed.report.looks import BLUES, INK, altair, scales

WIDTH, HEIGHT = 560, 320
ROW = 24
"""How high a row is where every method or client has its own."""


def curves(frame: pd.DataFrame, x: str = "round", *, methods: Sequence[str] | None = None) -> Any:
    """Accuracy over rounds, `floats`, `flops` or `simulated_seconds`, with a band of one standard deviation.

    A click on the legend fades the others; with the shift key it adds one.
    """
    alt, chosen, legend = altair(), _methods(frame, methods), _legend()
    look = scales(chosen)
    picked = alt.selection_point(fields=["method"], bind="legend")
    drawn = frame if x == "round" else frame[frame[x] > 0]
    across = alt.X(f"{x}:Q", title=X_AXES[x], axis=alt.Axis(format="d" if x == "round" else "~s", tickCount=6))
    colour = alt.Color("method:N", scale=look["colour"], legend=legend)
    base = alt.Chart().encode(x=across, color=colour)
    band = base.mark_area().encode(
        y=alt.Y("low:Q", title="accuracy (%)", scale=alt.Scale(zero=False)),
        y2="high:Q",
        opacity=alt.condition(picked, alt.value(0.1), alt.value(0)),
    )
    line = base.mark_line(strokeWidth=1.8, point={"size": 12, "filled": True} if _short(frame) else False).encode(
        y="accuracy:Q",
        strokeDash=alt.StrokeDash("method:N", scale=look["dash"], legend=legend),
        opacity=alt.condition(picked, alt.value(1), alt.value(0.08)),
        tooltip=["method:N", "round:Q", *([] if x == "round" else [alt.Tooltip(f"{x}:Q", format=".3s")]),
                 alt.Tooltip("accuracy:Q", format=".2f")],
    )  # fmt: skip
    return _sized(alt.layer(band, line, data=drawn).add_params(picked))


def clients(frame: pd.DataFrame, *, methods: Sequence[str] | None = None) -> Any:
    """Every client's accuracy as a tick, a box over the middle half, and the mean as a dot."""
    alt, chosen = altair(), _methods(frame, methods)
    look = scales(chosen)
    base = alt.Chart().encode(
        y=alt.Y("method:N", sort=chosen, title=None),
        color=alt.Color("method:N", scale=look["colour"], legend=None),
    )
    along = alt.X("accuracy:Q", title="accuracy of a client (%)", scale=alt.Scale(zero=False))
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
            color=alt.Color("method:N", scale=scales(chosen)["colour"], legend=_legend()),
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
            size=alt.Size("samples:Q", title="test samples", legend=alt.Legend(orient="bottom", symbolFillColor=INK),
                          scale=alt.Scale(range=[8, 260])),
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
            color=_shade("accuracy", "accuracy (%)"),
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
    look = scales(chosen)
    spread = frame["accuracy"].max() - frame["accuracy"].min()
    edge = max(0.5, 0.12 * spread)
    base = alt.Chart().encode(
        x=alt.X("floats:Q", title=X_AXES["floats"], scale=alt.Scale(type="symlog", constant=1000),
                axis=alt.Axis(format="~s", values=[0, *(10**power for power in range(4, 13))])),
        y=alt.Y("accuracy:Q", title="accuracy (%)", scale=alt.Scale(
            domain=[frame["accuracy"].min() - edge, frame["accuracy"].max() + edge])),
        color=alt.Color("method:N", scale=look["colour"], legend=None),
    )  # fmt: skip
    few = alt.Legend(orient="bottom", format=".2s", symbolFillColor=INK, values=_few(frame["flops"]))
    size = alt.Size("flops:Q", title=X_AXES["flops"], scale=alt.Scale(range=[40, 900]), legend=few)
    tips = ["method:N", alt.Tooltip("accuracy:Q", format=".2f"), alt.Tooltip("floats:Q", format=".3s")]
    bubbles = base.mark_circle(opacity=0.45).encode(size=size, tooltip=[*tips, alt.Tooltip("flops:Q", format=".3s")])
    names = base.mark_text(dy=-12).encode(text="method:N")
    return _sized(alt.layer(bubbles, names, data=frame), 380)


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
            color=alt.Color("method:N", scale=look["colour"], legend=_legend()),
            shape=alt.Shape("method:N", scale=look["shape"], legend=_legend()),
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
            color=alt.Color("class:N", scale=alt.Scale(scheme="tableau10"), legend=_legend("class")),
            shape=alt.Shape("architecture:N", legend=_legend("network")),
            tooltip=["class:N", "client:N", "architecture:N"],
        ),
        420,
    )


def pictures(frame: pd.DataFrame) -> Any:
    """Pictures side by side: a row for each kind, a column for each sample. `url` holds the picture itself."""
    alt = altair()
    kinds = list(frame["kind"].unique())
    return _sized(
        alt.Chart(frame)
        .mark_image(width=48, height=48)
        .encode(
            x=alt.X("sample:O", title="test sample", axis=alt.Axis(labelAngle=0)),
            y=alt.Y("kind:N", sort=kinds, title=None),
            url="url:N",
        ),
        58 * len(kinds) + 40,
    )


def _methods(frame: pd.DataFrame, methods: Sequence[str] | None) -> list[str]:
    return list(methods) if methods is not None else list(dict.fromkeys(frame["method"]))


def _short(frame: pd.DataFrame) -> bool:
    """A line of few points shows them; a single one would be invisible otherwise."""
    return bool(frame.groupby("method").size().max() <= 12)


def _legend(title: str | None = None) -> Any:
    return altair().Legend(orient="bottom", title=title, symbolStrokeWidth=2)


def _shade(field: str, title: str, top: float | None = 100) -> Any:
    alt = altair()
    scale = alt.Scale(range=list(BLUES), domain=[0, top]) if top else alt.Scale(range=list(BLUES))
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
