"""A report as one HTML file that loads nothing from anywhere, and its figures as files for a paper."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

import polyfed
from polyfed.comparison.render import latex
from polyfed.errors import InputError
from polyfed.records import disk
from polyfed.report import html
from polyfed.report.data import Material
from polyfed.report.looks import altair, scales, styled
from polyfed.report.sections import Figure, Section, sections

POLICY = "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; img-src data:"
"""The browser itself refuses whatever would be loaded. Vega compiles its expressions, hence the eval."""
DOTS = 300
"""Per inch, of pictures for a paper."""


def write_report(material: Material, path: str | Path, *, trust: bool = False) -> None:
    """Write the report of these runs as one HTML file."""
    altair()
    _write(Path(path), page(material, list(sections(material, trust=trust))))


def write_figures(material: Material, folder: str | Path, *, trust: bool = False) -> list[Path]:
    """Write every figure as PDF, PNG and SVG, and the tables as LaTeX; returns the files."""
    altair()
    import vl_convert

    folder = Path(folder)
    try:
        disk.make_folder(folder)
    except OSError as error:
        raise InputError(f"can't write to '{folder}': {error.strerror}; choose another folder (--figures).") from error
    written: dict[Path, str | bytes] = {}
    for figure in (figure for section in sections(material, trust=trust) for figure in section.figures):
        spec = styled(figure.chart, paper=True, wide=figure.wide)
        written[folder / f"{figure.name}.pdf"] = vl_convert.vegalite_to_pdf(spec)
        written[folder / f"{figure.name}.png"] = vl_convert.vegalite_to_png(spec, scale=DOTS / 72, ppi=72)
        written[folder / f"{figure.name}.svg"] = vl_convert.vegalite_to_svg(spec)
    tables = [latex(sheet) for source in material.sources for sheet in source.sheets]
    written[folder / "tables.tex"] = "% needs \\usepackage{booktabs}\n" + "\n".join(tables)
    for file, content in written.items():
        _write(file, content)
    return list(written)


def page(material: Material, parts: Sequence[Section]) -> str:
    """The page as a text."""
    import vl_convert

    title = f"polyfed report: {', '.join(material.names[:4])}{' and others' if len(material.names) > 4 else ''}"
    count = "1 run" if len(material.runs) == 1 else f"{len(material.runs)} runs"
    links = "".join(f'<li><a href="#{_anchor(part.title)}">{escape(part.title)}</a></li>' for part in parts)
    body = "".join(_section(part, material) for part in parts)
    bundle = vl_convert.javascript_bundle().replace("</script", "<\\/script")
    here = files("polyfed.report")
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{escape(title)}</title><link rel="icon" href="data:,">'
        f"<style>{(here / 'page.css').read_text()}</style></head><body>"
        f'<a class="skip" href="#main">Skip to the content</a><header><h1>{escape(title)}</h1>'
        f"<p>{count}, {date.today().isoformat()}, polyfed {polyfed.__version__}.</p>"
        f'<nav aria-label="Sections"><ul>{links}</ul></nav></header>'
        '<noscript><p class="note">Figures need JavaScript; the tables below them hold their numbers.</p></noscript>'
        f'<main id="main">{_switches(material)}{body}</main>'
        f"<script>{bundle}</script><script>{(here / 'page.js').read_text()}</script></body></html>\n"
    )


def _section(part: Section, material: Material) -> str:
    name = _anchor(part.title)
    drawn = "".join(_figure(figure) for figure in part.figures)
    return (
        f'<section id="{name}" aria-labelledby="{name}-title"><h2 id="{name}-title">{escape(part.title)}</h2>'
        f"{part.before}{drawn}{part.after}</section>"
    )


def _figure(figure: Figure) -> str:
    spec = styled(figure.chart, paper=False)
    spec["description"] = f"{figure.title}. {figure.sentence}"
    if figure.by_method:
        spec["params"] = [*spec.get("params", []), {"name": "hidden", "value": []}]
        spec["transform"] = [{"filter": "indexof(hidden, datum.method) < 0"}, *spec.get("transform", [])]
    name = f"figure-{escape(figure.name)}"
    numbers = html.details("Numbers of this figure", html.frame(figure.numbers, figure.title))
    return (
        f'<figure aria-labelledby="{name}-title"><h3 id="{name}-title">{escape(figure.title)}</h3>'
        f'<figcaption>{escape(figure.sentence)}</figcaption><div class="chart" id="{name}"></div>'
        f'<script type="application/json" id="{name}-spec">{html.data(spec)}</script>{numbers}</figure>'
    )


def _switches(material: Material) -> str:
    """A box to tick for every method: it is shown in all figures, or in none."""
    if len(material.names) < 2:
        return ""
    colours = scales(material.names)["colour"].to_dict()["range"]
    boxes = "".join(
        f'<label><input type="checkbox" checked value="{escape(name)}"> '
        f'<svg width="14" height="10" aria-hidden="true"><rect width="14" height="10" fill="{colour}"/></svg> '
        f"{escape(name)}</label>"
        for name, colour in zip(material.names, colours, strict=True)
    )
    return f'<fieldset id="shown"><legend>Shown in figures</legend>{boxes}</fieldset>'


def _anchor(title: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in title.lower())


def _write(path: Path, content: Any) -> None:
    try:
        disk.write(path, content)
    except OSError as error:
        raise InputError(f"can't write '{path}': {error.strerror}; choose another place (--out, --figures).") from error
