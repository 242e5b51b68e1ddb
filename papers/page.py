"""Renders docs/results.md, its pictures and the table on the front page, from records and published numbers.

python -m papers.page
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from pathlib import Path

import pandas as pd

from papers.campaign import FOLDER, Campaign, read_campaign
from papers.records import RESULTS, check, read_records
from papers.tables import (
    Comparison,
    accuracies,
    costs,
    margins,
    markdown,
    other_rules,
    printed,
    spread,
    sweep,
    title_of,
)
from polyfed.comparison.pictures import draw_lines
from polyfed.records import disk
from polyfed.records.origin import FREE, settings_by_name, shown
from polyfed.report import drawing

BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
ROUNDS = {
    "last": "last round",
    "last-tenth": "mean over the last tenth of the rounds",
    "best": "best round on test samples",
}
LEFT = "Comparisons that are planned, with the number of runs that have not been made yet."
NOT_COMPARED = (*(FREE - {"rounds"}), "method", "seed", "eval_every")


def comparisons_of(campaign: Campaign, results: Path) -> list[Comparison]:
    """Every entry with its records, in the campaign's order."""
    records = read_records([results])
    check(records, campaign)
    return [
        Comparison(name, entry, list(campaign.rows[name]), campaign.runs([name]), records)
        for name, entry in campaign.entries.items()
    ]


def page(comparisons: Sequence[Comparison], words: Path) -> str:
    """All of docs/results.md."""
    left = [[f"`{c.name}`", c.entry.title, str(len(c.runs) - len(c.found))] for c in comparisons if not c.complete]
    todo = f"## Runs left\n\n{LEFT}\n\n{markdown(['entry', 'what', 'runs'], left, texts=2)}" if left else ""
    sections = [section(each, words) for each in comparisons if each.found]
    return _blocks([_words(words, "intro"), *sections, todo, _words(words, "earlier")]) + "\n"


def section(given: Comparison, words: Path) -> str:
    """An entry's part of the page."""
    title, setting = given.entry.title, given.entry.points[0]
    if len(given.entry.points) > 1:
        tables = [sweep(given), differences(given, setting)]
    else:
        picture = f"![{title}](pictures/results-{given.name}.png)"
        tables = [accuracies(given, setting), differences(given, setting), other_rules(given, setting)]
        tables += [margins(given), picture, costs(given)]
    return _blocks([f"## {title}", status(given), _words(words, given.name), *tables, origin(given)])


def status(given: Comparison) -> str:
    """How many runs there are, and what the numbers mean."""
    done, planned, compare = len(given.found), len(given.runs), given.entry.of.compare
    state = f"All {planned} runs." if given.complete else f"**Not complete: {done} of {planned} runs.**"
    reduced = ", ".join(f"{name} {shown(value)}" for name, value in given.entry.smaller.items())
    what = "test sample" if compare.average == "weighted" else "client"
    numbers = f"Accuracy in percent, {ROUNDS[compare.round]}; every {what} counts the same."
    return " ".join([state, *([f"**Reduced: {reduced}.**"] if reduced else []), numbers])


def differences(given: Comparison, setting: str) -> str:
    """Which of our settings differ from those of the papers' tables beside ours."""
    sentences = []
    for each in given.entry.beside:
        same = [run for run in given.runs if run.setting == setting and each.named(run.row) in each.of.entry.methods]
        if not same or each.of.compare.what == "floats":
            continue
        run = same[0]
        theirs = settings_by_name(each.of.experiment(each.named(run.row), each.setting or setting, "paper"))
        ours = settings_by_name(run.config).items()
        other = [(n, v) for n, v in ours if n.partition(".")[0] not in NOT_COMPARED and theirs[n] != v]
        told = ", ".join(f"{name} {shown(value)} instead of {shown(theirs[name])}" for name, value in other)
        sentences += [f"Unlike {each.label}: {told}."] if told else []
    return " ".join(sentences)


def origin(given: Comparison) -> str:
    """Versions, machines and days."""
    places = {f"polyfed {r['polyfed']} ({r['commit']}), torch {r['torch']}, {r['machine']}": 0 for r in given.found}
    days = sorted({record["date"] for record in given.found})
    return f"{'; '.join(places)}; {' to '.join(dict.fromkeys([days[0], days[-1]]))}."


def front(campaign: Campaign, comparisons: Sequence[Comparison]) -> str:
    """At most ten lines: our gains and the first published ones, for entries with all seeds of these methods."""
    entries, methods, rows = campaign.front.get("entries", []), campaign.front.get("methods", []), []
    chosen = [
        each
        for each in comparisons
        if each.name in entries and not any(" of " in each.seeds(row, each.entry.points[0]) for row in methods)
    ]
    for row in methods:
        cells = []
        for each in chosen:
            setting, base = each.entry.points[0], each.entry.base
            theirs = [gain for beside in each.entry.beside for _, gain in [printed(beside, row, setting, base)] if gain]
            ours = spread(each.values(row, setting)) if row == base else each.gain(row, setting).partition(" ")[0]
            cells.append(f"{ours} ({theirs[0]})" if ours and theirs else ours)
        rows.append([title_of(row), *cells])
    titles = [each.entry.title + ", reduced" * bool(each.entry.smaller) for each in chosen]
    return markdown(["gain over Standalone (published)", *titles], rows) if chosen else ""


def with_front(text: str, table: str) -> str:
    """A page with the table between its two markers; a page without markers stays as it is."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table}\n{END}{after}" if begin and end else text


def draw(given: Comparison, path: Path) -> None:
    """Mean accuracy by the compared rule over rounds, with a band of one standard deviation."""
    curves = pd.concat(
        pd.DataFrame({"method": title_of(row), "round": r["rounds"], "accuracy": r["curves"][given.rule(row)]})
        for row in given.rows
        for r in given.of(row)
    )
    frame = curves.groupby(["method", "round"], sort=False)["accuracy"].agg(accuracy="mean", std="std").reset_index()
    looks = drawing.looks(title_of(row) for row in given.rows if row != "standalone") | {"Standalone": drawing.ALONE}
    figure, axes = drawing.new_figure((8, 4.5))
    draw_lines(axes, frame, "round", "accuracy", looks)
    axes.set(xlabel="round", ylabel="accuracy on test samples (%)")
    drawing.add_legend(figure, axes)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png")
    disk.write(path, drawn.getvalue())


def _words(folder: Path, name: str) -> str:
    path = folder / f"{name}.md"
    return path.read_text().strip() if path.exists() else ""


def _blocks(parts: Iterable[str]) -> str:
    return "\n\n".join(part for part in parts if part)


def main(root: Path = FOLDER.parent, papers: Path = FOLDER) -> None:
    """Write the page, its pictures and the table on the front page."""
    campaign = read_campaign(papers / "campaign.yaml")
    comparisons = comparisons_of(campaign, papers / RESULTS.name)
    disk.write(root / "docs" / "results.md", page(comparisons, papers / "words"))
    readme = root / "README.md"
    disk.write(readme, with_front(readme.read_text(), front(campaign, comparisons)))
    for each in comparisons:
        if each.found and len(each.entry.points) == 1:
            draw(each, root / "docs" / "pictures" / f"results-{each.name}.png")


if __name__ == "__main__":
    main()
