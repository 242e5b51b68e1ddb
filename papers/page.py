"""Renders docs/results.md, its pictures, the table on the front page and that of all runs, from records.

python -m papers.page
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from papers.agreement import agreement
from papers.alone import ALONE, alone
from papers.campaign import FOLDER, Campaign, read_campaign
from papers.few import read_alone
from papers.pictures import draw, pictures
from papers.records import RESULTS, check, read_records
from papers.sheet import sheet
from papers.tables import (
    Comparison,
    accuracies,
    anchor,
    costs,
    margins,
    markdown,
    other_rules,
    printed,
    signed,
    sweep,
    title_of,
)
from polyfed.comparison.statistics import t_interval
from polyfed.errors import PolyfedError, counted
from polyfed.records import disk
from polyfed.records.origin import FREE, settings_by_name, shown

BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
ROUNDS = {
    "last": "last round",
    "last-tenth": "mean over the last tenth of the rounds",
    "best": "best round on test samples",
}
LEFT = "Comparisons that are planned, with the number of runs that have not been made yet."
FRONT = """## Beside the papers' numbers

Gains over Standalone in points of accuracy: means over {seeds} seeds ± half of the 95 % interval, and in brackets what
papers print. The first row has Standalone's own accuracy. [All tables, and how to read them](docs/results.md)."""
OWN = """## Beside the papers' numbers

Gains are over Standalone, and there are {seeds} seeds, unless a row says otherwise. The link leads to all methods."""
NOT_YET = "not run yet"
MOST_NAMES = 20
"""How many methods without any run are named; of more, only their number is given."""
NOT_COMPARED = (*(FREE - {"rounds"}), "method", "seed", "eval_every")


def comparisons_of(campaign: Campaign, results: Path) -> list[Comparison]:
    """Every entry with its records, in the campaign's order."""
    records, few = read_records([results]), read_alone(results / ALONE)
    for found in (records, few):
        check(found, campaign)
    return [
        Comparison(name, entry, list(campaign.rows[name]), campaign.runs([name]), records, few)
        for name, entry in campaign.entries.items()
    ]


def page(comparisons: Sequence[Comparison], words: Path) -> str:
    """All of docs/results.md."""
    left = [
        [f"`{each.name}`", each.entry.title, f"{len(each.runs) - len(each.found)} of {len(each.runs)}"]
        for each in comparisons
        if not each.complete
    ]
    todo = f"## Runs left\n\n{LEFT}\n\n{markdown(['entry', 'what', 'runs left'], left, texts=2)}" if left else ""
    sections = [section(each, words) for each in comparisons if each.compares]
    table = agreement(comparisons)
    summary = [_words(words, "agreement"), table] if table else []
    return _blocks([_words(words, "intro"), *summary, *sections, todo, _words(words, "earlier")]) + "\n"


def section(given: Comparison, words: Path) -> str:
    """An entry's part of the page."""
    title, setting = given.entry.title, given.entry.points[0]
    if len(given.entry.points) > 1:
        tables, more = [sweep(given), differences(given, setting)], []
    else:
        drawn = [f"![{each.title}](pictures/{each.file})" for each in pictures(given)]
        tables = [accuracies(given, setting), differences(given, setting), *drawn]
        more = [alone(given, setting), other_rules(given, setting), margins(given), costs(given)]
    parts = [f"## {title}", status(given), *tables, _words(words, given.name), *more, noted(given), origin(given)]
    return _blocks(parts)


def status(given: Comparison) -> str:
    """How many runs there are, and what the numbers mean."""
    done, planned, compare = len(given.found), len(given.runs), given.entry.of.compare
    state = f"All {planned} runs." if given.complete else f"**Not complete: {done} of {planned} runs.**"
    reduced = ", ".join(f"{name} {shown(value)}" for name, value in given.entry.smaller.items())
    what = "test sample" if compare.average == "weighted" else "client"
    numbers = f"Accuracy in percent, {ROUNDS[compare.round]}; every {what} counts the same."
    return " ".join([state, *missing(given), *([f"**Reduced: {reduced}.**"] if reduced else []), numbers])


def missing(given: Comparison) -> list[str]:
    """Which rows the tables do not have yet, in sentences."""
    rows, base = given.missing, given.entry.base
    if not rows:
        return []
    few = len(rows) <= MOST_NAMES
    names = "; ".join(title_of(row) for row in rows) if few else f"{len(rows)} of {len(given.order)} rows"
    return [f"No run yet: {names}.", *([f"Without {title_of(base)} there are no gains."] if base in rows else [])]


def differences(given: Comparison, setting: str) -> str:
    """Which of our settings differ from those of the papers' tables beside ours."""
    sentences = []
    for each in given.entry.beside:
        rows = [row for row in given.rows if each.named(row) in each.of.entry.methods]
        same = [run for run in given.runs if run.setting == setting and run.row in rows]
        if not same or each.of.compare.what == "floats":
            continue
        run = same[0]
        theirs = settings_by_name(each.of.experiment(each.named(run.row), each.setting or setting, "paper"))
        ours = settings_by_name(run.config).items()
        other = [(n, v) for n, v in ours if n.partition(".")[0] not in NOT_COMPARED and theirs[n] != v]
        told = ", ".join(f"{name} {shown(value)} instead of {shown(theirs[name])}" for name, value in other)
        sentences += [f"Unlike {each.label}: {told}."] if told else []
    return " ".join(sentences)


def noted(given: Comparison) -> str:
    """What runs noted about themselves, such as that clients trained one after another."""
    notes = Counter(note.replace("`", "'") for record in given.found for note in record.get("notes", []))
    total = sum("notes" in record for record in given.found)  # the first records were made without
    return "\n".join(f"- Noted by {number} of {counted(total, 'run')}: `{note}`" for note, number in notes.items())


def origin(given: Comparison) -> str:
    """The command, versions, machines and days."""
    places = {f"polyfed {r['polyfed']} ({r['commit']}), torch {r['torch']}, {r['machine']}": 0 for r in given.found}
    days = sorted({record["date"] for record in given.found})
    when = " to ".join(dict.fromkeys([days[0], days[-1]]))
    return f"`python -m papers.run {given.name}`; {'; '.join(places)}; {when}."


def all_runs(comparisons: Iterable[Comparison]) -> str:
    """All of papers/results/runs.csv."""
    return sheet(record for each in comparisons for record in each.found).to_csv(index=False, lineterminator="\n")


def front(campaign: Campaign, comparisons: Sequence[Comparison], words: Path) -> str:
    """Our gains and the published ones, and a summary below.

    An entry has a column when more than half of these methods have all their seeds, among them its base.
    """
    entries, methods, rows = campaign.front.get("entries", []), campaign.front.get("methods", []), []
    complete = {
        each.name: [row for row in methods if each.has_all(row)] for each in comparisons if each.name in entries
    }
    chosen = [
        each
        for each in comparisons
        if each.entry.base in (known := complete.get(each.name, [])) and 2 * len(known) > len(methods)
    ]
    for row in methods:
        cells = []
        for each in chosen:
            setting, base = each.entry.points[0], each.entry.base
            papers = [printed(beside, row, setting, base) for beside in each.papers]
            ours = short(each, row) if row in complete[each.name] else NOT_YET if row in each.order else ""
            # The gains if any paper has one; otherwise why not: it did not converge.
            gains = dict.fromkeys(text for pair in papers if (text := pair[row != base]))
            theirs = "; ".join(gains) or next((value for value, _ in papers if value and not value[:1].isdigit()), "")
            cells.append(f"{ours} ({theirs})" if ours and theirs else ours)
        rows.append([title_of(row), *cells])
    titles = [each.entry.title + ", reduced" * bool(each.entry.smaller) for each in chosen]
    parts = FRONT.format(seeds=len(campaign.seeds)), markdown(["method", *titles], rows), _words(words, "front")
    return _blocks(parts) if chosen else ""


def of_method(name: str, campaign: Campaign, comparisons: Sequence[Comparison]) -> str:
    """A method's rows of all tables, for its own page."""
    rows = []
    for each in comparisons:
        setting, base = each.entry.points[0], each.entry.base
        title = each.entry.title + ", reduced" * bool(each.entry.smaller)
        for row in each.rows if each.compares and len(each.entry.points) == 1 else ():
            if campaign.method(each.name, row) != name:
                continue
            seeds = each.seeds(row, setting)
            link = f"[{title}](../results.md#{anchor(each.entry.title)})" + f", `{row}`" * (row != name)
            link += f", {seeds} seeds" * (seeds != str(len(campaign.seeds)))
            link += f", gains over {title_of(base)}" * (base not in ("standalone", row))
            pairs = dict.fromkeys(printed(paper, row, setting, base) for paper in each.papers)
            theirs = "; ".join(value + f" ({more})" * bool(more) for value, more in pairs if value)
            rows.append([link, each.spread(each.values(row, setting)), each.gain(row, setting), theirs])
    head = ["setting", "accuracy in percent", "gain", "printed (and gain)"]
    return f"{OWN.format(seeds=len(campaign.seeds))}\n\n{markdown(head, rows)}" if rows else ""


def short(given: Comparison, row: str) -> str:
    """A row's gain with half of its interval, or the base's accuracy."""
    setting = given.entry.points[0]
    if row == given.entry.base:
        return given.spread(given.values(row, setting)).partition(" ")[0]
    gains = given.gains(row, setting)
    found = t_interval(gains)
    half = "" if math.isnan(found.low) else f" ± {found.high - found.mean:.{given.entry.digits}f}"
    return signed(found.mean, given.entry.digits) + half if gains else ""


def with_table(text: str, table: str) -> str:
    """A page with the table between its two markers; a page without markers stays as it is."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table}\n{END}{after}" if begin and end else text


def _words(folder: Path, name: str) -> str:
    path = folder / f"{name}.md"
    return path.read_text().strip() if path.exists() else ""


def _blocks(parts: Iterable[str]) -> str:
    return "\n\n".join(part for part in parts if part)


def main(root: Path = FOLDER.parent, papers: Path = FOLDER) -> None:
    """Write the page, its pictures, the tables on the front page and on the methods' pages, and that of all runs."""
    campaign = read_campaign(papers / "campaign.yaml")
    comparisons = comparisons_of(campaign, papers / RESULTS.name)
    disk.write(papers / RESULTS.name / "runs.csv", all_runs(comparisons))
    disk.write(root / "docs" / "results.md", page(comparisons, papers / "words"))
    readme = root / "README.md"
    disk.write(readme, with_table(readme.read_text(), front(campaign, comparisons, papers / "words")))
    for path in sorted((root / "docs" / "methods").glob("*.md")):
        disk.write(path, with_table(path.read_text(), of_method(path.stem, campaign, comparisons)))
    for each in comparisons:
        for picture in pictures(each):
            draw(each, picture.rows, root / "docs" / "pictures" / picture.file)


if __name__ == "__main__":
    try:
        main()
    except PolyfedError as error:
        sys.exit(f"error: {error}")
