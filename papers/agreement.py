"""How our gains lie to the papers': one table over all comparisons, with a row for each method."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from enum import StrEnum

from papers.tables import Comparison, anchor, markdown, printed_gain, signed, title_of
from polyfed.comparison.statistics import Interval, t_interval
from polyfed.reproduce.published import NOT_CONVERGED


class Verdict(StrEnum):
    """How our gain, with its interval, lies to a printed one. The texts are the heads of the table."""

    AS_PRINTED = "as printed"
    EITHER = "as printed or zero"
    MORE = "more"
    LESS = "less"
    NOT_THERE = "did not converge there"


def verdict(ours: Interval, theirs: float) -> Verdict:
    """
    >>> [verdict(Interval(1.0, 0.5, 1.5), theirs) for theirs in (1.4, 0.2, 2.0)] == [
    ...     Verdict.AS_PRINTED, Verdict.MORE, Verdict.LESS]
    True
    >>> verdict(Interval(1.0, -0.5, 2.5), 2.0) is Verdict.EITHER
    True
    """
    if not ours.low <= theirs <= ours.high:
        return Verdict.MORE if ours.mean > theirs else Verdict.LESS
    return Verdict.AS_PRINTED if ours.excludes_zero else Verdict.EITHER


def is_opposite(ours: Interval, theirs: float) -> bool:
    """Whether our gain has the other sign, and is clear of zero.

    >>> is_opposite(Interval(-3.2, -3.8, -2.5), 0.5), is_opposite(Interval(-0.2, -3.8, 3.4), 0.5)
    (True, False)
    """
    return ours.excludes_zero and ours.mean * theirs < 0


def agreement(comparisons: Iterable[Comparison]) -> str:
    """For each method, in which comparisons its gain is as printed, and in which it is not.

    Only what is complete counts: rows and bases with all seeds, three or more, in one setting of the paper's size. A
    gain that two papers print alike counts once.
    """
    found: dict[str, dict[Verdict, list[str]]] = defaultdict(lambda: defaultdict(list))
    for each in comparisons:
        setting, base = each.entry.points[0], each.entry.base
        if each.entry.smaller or len(each.entry.points) > 1 or not each.has_all(base):
            continue
        link = f"[{each.name}](#{anchor(each.entry.title)})"
        for row in each.rows:
            ours = t_interval(each.gains(row, setting))
            if not each.has_all(row) or math.isnan(ours.low):  # the base, and two seeds, have no interval
                continue
            gains = [printed_gain(paper, row, setting, base) for paper in each.papers]
            for theirs in dict.fromkeys(round(gain, 2) for gain in gains if not math.isnan(gain)):
                text = f"{link} ({signed(theirs, 2)})"
                found[row][verdict(ours, theirs)].append(f"**{text}**" if is_opposite(ours, theirs) else text)
            notes = {paper.number(row, setting).note for paper in each.papers}
            if NOT_CONVERGED in notes:
                found[row][Verdict.NOT_THERE].append(link)
    rows = [[title_of(row), *("; ".join(kinds[kind]) for kind in Verdict)] for row, kinds in found.items()]
    total = ["all", *(str(sum(len(kinds[kind]) for kinds in found.values())) for kind in Verdict)]
    return markdown(["method", *Verdict], [*rows, total] if rows else [], texts=1 + len(Verdict))
