"""The tables of docs/results.md in Markdown: our means over seeds, with the published numbers beside them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mode

import pandas as pd

from papers.campaign import Beside, Entry, Run
from papers.records import Key, Record
from polyfed.comparison.statistics import Interval, mean_of, spread_of, t_interval
from polyfed.errors import counted
from polyfed.methods import METHODS


@dataclass(frozen=True)
class Comparison:
    """An entry of the campaign, and the records there are of its runs."""

    name: str
    entry: Entry
    order: Sequence[str]
    """All rows, as the tables have them."""
    runs: Sequence[Run]
    records: Mapping[Key, Record]
    few: Mapping[Key, Record]
    """Records of a few clients without partners."""

    @property
    def found(self) -> list[Record]:
        return [self.records[run.key] for run in self.runs if run.key in self.records]

    @property
    def rows(self) -> list[str]:
        """Rows with at least one record."""
        return [row for row in self.order if self.of(row)]

    @property
    def missing(self) -> list[str]:
        """Rows without any record."""
        return [row for row in self.order if not self.of(row)]

    @property
    def compares(self) -> bool:
        """Whether there is anything beside the base."""
        return any(row != self.entry.base for row in self.rows)

    @property
    def complete(self) -> bool:
        return len(self.found) == len(self.runs)

    @property
    def papers(self) -> list[Beside]:
        """The published tables beside ours that have accuracies."""
        return [each for each in self.entry.beside if each.of.compare.what == "accuracy"]

    def of(self, row: str) -> list[Record]:
        return [record for record in self.found if record["method"] == row]

    def rule(self, row: str) -> str:
        """The rule of prediction that is compared."""
        return self.entry.variant(row.partition(" ")[0]).rule or next(iter(self.of(row)[0]["accuracy"]))

    def values(self, row: str, setting: str, average: str = "", when: str = "", rule: str = "") -> dict[int, float]:
        """Accuracy in percent by seed: as compared with the paper, or with another average, choice of round or rule."""
        compare, values = self.entry.of.compare, {}
        for record in self.of(row):
            if record["setting"] == setting:
                by_average = record["accuracy"][rule or self.rule(row)].get(average or compare.average, {})
                values[record["seed"]] = by_average.get(when or compare.round)
        return {seed: 100 * value for seed, value in values.items() if value is not None}

    def own_best(self, row: str, setting: str) -> dict[int, float]:
        """By seed, the mean over clients of each one's best round; runs record it only for the method's own rule."""
        records = [r for r in self.of(row) if r["setting"] == setting and self.rule(row) == next(iter(r["accuracy"]))]
        return {record["seed"]: 100 * record["own_best"] for record in records if record["own_best"] is not None}

    def gains(self, row: str, setting: str, rule: str = "") -> list[float]:
        """The gain over the base with each seed that both have; none for the base itself."""
        ours, base = self.values(row, setting, rule=rule), self.values(self.entry.base, setting)
        itself = row == self.entry.base and not rule
        return [] if itself else [ours[seed] - base[seed] for seed in sorted(ours.keys() & base.keys())]

    def gain(self, row: str, setting: str, rule: str = "") -> str:
        """Their mean, with a 95 % interval from three seeds on, and of how many seeds if the row has more."""
        gains = self.gains(row, setting, rule)
        if not gains:
            return ""
        fewer = len(gains) < len(self.values(row, setting, rule=rule))
        return with_interval(t_interval(gains), self.entry.digits) + f" [{counted(len(gains), 'seed')}]" * fewer

    def spread(self, values: Mapping[int, float]) -> str:
        """Mean and standard deviation over seeds, with this entry's digits."""
        return spread(values, self.entry.digits)

    def has_all(self, row: str) -> bool:
        """Whether all planned runs of a row have been made."""
        runs = [run for run in self.runs if run.row == row]
        return bool(runs) and all(run.key in self.records for run in runs)

    def seeds(self, row: str, setting: str) -> str:
        """How many there are, and of how many if some are missing."""
        done, planned = (
            len({each for each in keys if each[1:3] == (setting, row)})
            for keys in ([r.key for r in self.runs if r.key in self.records], [r.key for r in self.runs])
        )
        return str(done) if done == planned else f"{done} of {planned}"


def signed(value: float, digits: int = 1) -> str:
    """
    >>> signed(-0.26), signed(1.0), signed(-0.01)
    ('−0.3', '+1.0', '0.0')
    """
    text = f"{value:+.{digits}f}"
    return text.lstrip("+-") if float(text) == 0 else text.replace("-", "−")


def with_interval(found: Interval, digits: int = 1) -> str:
    """
    >>> with_interval(Interval(2, -0.5, 4.5)), with_interval(Interval(2, math.nan, math.nan), digits=2)
    ('+2.0 (−0.5 to +4.5)', '+2.00')
    >>> with_interval(Interval(math.nan, math.nan, math.nan))
    ''
    """
    interval = "" if math.isnan(found.low) else f" ({signed(found.low, digits)} to {signed(found.high, digits)})"
    return "" if math.isnan(found.mean) else signed(found.mean, digits) + interval


def spread(values: Mapping[int, float], digits: int = 1) -> str:
    """
    >>> spread({0: 50.0, 1: 51.0}), spread({0: 50.0}, digits=2), spread({})
    ('50.5 ± 0.7', '50.00', '')
    """
    numbers = list(values.values())
    mean = f"{mean_of(numbers):.{digits}f}" if numbers else ""
    return mean + (f" ± {spread_of(numbers):.{digits}f}" if len(numbers) > 1 else "")


def method_of(row: str) -> str | None:
    """The method that a row is named after.

    >>> method_of("dc-pfl-600"), method_of("fedssa stable_round=4"), method_of("nothing known")
    ('dc-pfl', 'fedssa', None)
    """
    name = row.partition(" ")[0]
    return max((each for each in METHODS if f"{name}-".startswith(f"{each}-")), key=len, default=None)


def title_of(row: str) -> str:
    """
    >>> title_of("fedssa"), title_of("dc-pfl-600"), title_of("dc-pfl-without-al"), title_of("fedssa stable_round=4")
    ('FedSSA', 'DC-PFL, 600', 'DC-PFL, without AL', 'FedSSA stable_round=4')
    """
    name, space, rest = row.partition(" ")
    own = method_of(row)
    if own is None:
        return row
    parts = name.removeprefix(own).strip("-").split("-")  # of a variant; short ones are the papers' abbreviations
    variant = " ".join(part if len(part) > 3 else part.upper() for part in parts)
    return METHODS[own].title + f", {variant}" * bool(variant) + space + rest


def anchor(title: str) -> str:
    """The address of a heading in its page.

    >>> anchor("CIFAR-10, Dirichlet 0.1")
    'cifar-10-dirichlet-01'
    """
    return "".join(letter for letter in title.lower() if letter.isalnum() or letter in " -").replace(" ", "-")


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]], texts: int = 1) -> str:
    """A table, or nothing without rows. The first `texts` columns are text, the others numbers.

    Columns without any entry are left out.
    """
    kept = [place for place in range(len(head)) if place == 0 or any(row[place] for row in rows)]
    lines = [head, [*["---"] * texts, *["---:"] * (len(head) - texts)], *rows] if rows else []
    return "\n".join(f"| {' | '.join(line[place] for place in kept)} |" for line in lines)


def printed_gain(beside: Beside, row: str, setting: str, base: str) -> float:
    """A paper's gain over its own base; NaN if it does not print both."""
    return beside.number(row, setting).value - beside.number(base, setting).value


def printed(beside: Beside, row: str, setting: str, base: str) -> tuple[str, str]:
    """What a paper prints, and its gain over its own base."""
    number = beside.number(row, setting)
    gain = math.nan if row == base else printed_gain(beside, row, setting, base)
    value = number.note if math.isnan(number.value) else f"{number.value:.2f}"
    return value, "" if math.isnan(gain) else signed(gain, 2)


def accuracies(given: Comparison, setting: str) -> str:
    """Our accuracies, other ways to read the same runs, and what the papers print."""
    entry, base, shown = given.entry, title_of(given.entry.base), given.spread
    papers = given.papers
    head = ["method", "seeds", "ours", f"minus {base}", "last round", "own best", "participants", "validation"]
    head += [text for each in papers for text in (each.label, f"minus its {base}")]
    rows = [
        [
            title_of(row), given.seeds(row, setting), shown(given.values(row, setting)), given.gain(row, setting),
            shown(given.values(row, setting, when="last")), shown(given.own_best(row, setting)),
            shown(given.values(row, setting, "participants")),
            shown(given.values(row, setting, "validation")) if entry.lists else "",
            *(text for each in papers for text in printed(each, row, setting, entry.base)),
        ]
        for row in given.rows
    ]  # fmt: skip
    return markdown(head, rows)


def other_rules(given: Comparison, setting: str) -> str:
    """The accuracies of the same runs by the methods' other rules of prediction."""
    shown = given.spread
    rows = [
        [f"{title_of(row)}, by {rule}", shown(given.values(row, setting, rule=rule)), given.gain(row, setting, rule)]
        for row in given.rows
        for rule in given.of(row)[0]["accuracy"]
        if rule != given.rule(row)
    ]
    return markdown(["other rules of prediction", "ours", f"minus {title_of(given.entry.base)}"], rows)


def costs(given: Comparison) -> str:
    """What a round costs with all its participants; means over seeds. Times are those of the machine with most runs."""
    usual = mode(record["machine"] for record in given.found)
    papers = [each for each in given.entry.beside if each.of.compare.what == "floats"]
    head = ["per round", "kB up", "kB down", "GFLOPs", "million numbers", *(each.label for each in papers), "s per run"]
    rows = []
    for row in given.rows:
        own = pd.DataFrame([record["costs"] for record in given.of(row)]).mean()
        seconds = [record["seconds"] for record in given.of(row) if record["machine"] == usual]
        numbers = [each.number(row, given.entry.points[0]).value for each in papers]
        sent = [f"{own[f'{name}_bytes_per_round'] / 1e3:.1f}" for name in ("upload", "download")]
        billions = own["flops_per_round"] / 1e9
        computed = f"{billions:{'.3g' if billions < 999.5 else '.0f'}}", f"{own['floats_last_round'] / 1e6:.3g}"
        theirs = ["" if math.isnan(number) else f"{number:g}" for number in numbers]
        rows.append([title_of(row), *sent, *computed, *theirs, f"{mean_of(seconds):.0f}" if seconds else ""])
    return markdown(head, rows)


def sweep(given: Comparison) -> str:
    """An entry with several settings, a column for each; with the number of seeds where some are missing."""
    rows, points = [], given.entry.points
    for row in given.rows:
        ours = [(given.spread(given.values(row, point)), given.seeds(row, point)) for point in points]
        rows.append([title_of(row), *(v + f" ({seeds})" * (bool(v) and " of " in seeds) for v, seeds in ours)])
        for each in given.entry.beside:
            theirs = [printed(each, row, point, given.entry.base)[0] for point in points]
            rows += [[f"{title_of(row)}, {each.label}", *theirs]] if any(theirs) else []
    return markdown(["method", *points], rows)


def margins(given: Comparison) -> str:
    """How far prototypes are from the nearest other one, for FedTGP's Figure 1."""
    pairs = {row: [pair for r in given.of(row) for pair in r.get("margins", [])] for row in given.entry.margins}
    rows = [
        [title_of(row), *(f"{mean_of([pair[place] for pair in own]):.2f}" for place in (0, 1))]
        for row, own in pairs.items()
        if own
    ]
    return markdown(["margin, mean over classes and seeds", "largest among clients", "global"], rows)
