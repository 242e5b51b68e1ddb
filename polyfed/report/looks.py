"""How figures look: colours, dashes and shapes of methods, on a page and in a paper."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from polyfed.errors import InputError
from polyfed.report.drawing import COLOURS

INK = "currentColor"
"""On a page, the colour of the text around a figure, in light and in dark; black in a paper."""
DASHES = ([1, 0], [7, 2], [2, 2], [9, 2, 2, 2], [12, 4])
"""Five, while there are six colours: thirty methods have pairs of their own."""
SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down")
BLUES = ("#f3f7fb", "#c6dbef", "#6baed6", "#2171b5", "#08306b")
COLUMN, PAGE = 240, 500
"""Points: about as wide are a column of a two-column paper, and both columns together."""
FLAT = 0.6
"""How much lower a figure is in a paper."""


def altair() -> Any:
    """Altair, or a sentence on how to get it."""
    if find_spec("altair") is None or find_spec("vl_convert") is None:
        raise InputError("reports need altair and vl-convert-python: pip install 'polyfed[report]'.")
    import altair

    return altair


def scales(methods: Sequence[str]) -> dict[str, Any]:
    """Colour, dash and shape of each method: alone in the colour of the text, the others in colour-blind safe colours.

    Neighbours differ in their dashes too, so lines can be told apart in grey.
    """
    alt = altair()
    others = [method for method in methods if method != "standalone"]
    place = {method: number for number, method in enumerate(others)}
    colours = [COLOURS[place[m] % len(COLOURS)] if m in place else INK for m in methods]
    dashes = [DASHES[place[m] % len(DASHES)] if m in place else [4, 4] for m in methods]
    shapes = [SHAPES[place[m] % len(SHAPES)] if m in place else "stroke" for m in methods]
    domain = list(methods)
    return {
        "colour": alt.Scale(domain=domain, range=colours),
        "dash": alt.Scale(domain=domain, range=dashes),
        "shape": alt.Scale(domain=domain, range=shapes),
    }


def styled(chart: Any, *, paper: bool, wide: bool = False) -> dict[str, Any]:
    """The chart as a Vega-Lite specification for a page, or for one or both columns of a paper."""
    size = 8 if paper else 12
    ink = "black" if paper else INK
    text = {"labelColor": ink, "titleColor": ink, "labelFontSize": size, "titleFontSize": size}
    text |= {"titleFontWeight": "normal"}
    spec: dict[str, Any] = chart.to_dict()
    spec.pop("$schema", None)  # an address, though nothing would load it
    spec["config"] = {
        "background": "white" if paper else "transparent",
        "font": "Liberation Sans, Arial, Helvetica, sans-serif" if paper else "system-ui, sans-serif",
        "view": {"stroke": None},
        "axis": {**text, "gridColor": ink, "gridOpacity": 0.12, "domainColor": ink, "domainOpacity": 0.4,
                 "tickColor": ink, "tickOpacity": 0.4, "labelLimit": 110 if paper else 160},
        "legend": {**text, "symbolSize": 40 if paper else 90, "labelLimit": 150, "columns": 3 if paper else 5,
                   "columnPadding": 4 if paper else 10},
        "title": {"color": ink, "fontSize": size},
        "text": {"color": ink, "fontSize": size},
    }  # fmt: skip
    spec["autosize"] = {"type": "fit-x", "contains": "padding"}
    spec["width"] = "container"
    if paper:
        spec |= {"padding": 2, "width": PAGE if wide else COLUMN, "height": round(FLAT * spec["height"])}
    return spec
