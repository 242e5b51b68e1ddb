"""What clients confuse: how many samples of a class are predicted as which class, and the scores that follow.

A client's counts are sparse: of all pairs of classes only those that occur. A class of which a client has no test
samples has no score there and is left out of that client's means, even if it is predicted by mistake; the mistake
counts against the true class.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

Cells: TypeAlias = tuple[tuple[int, int, int], ...]
"""True class, predicted class and how many samples, in rising order; pairs that do not occur are left out."""
Table: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
COLUMNS = ("round", "rule", "client", "true", "predicted", "count")
GROUP = ["round", "rule", "client"]


@dataclass(frozen=True, eq=False)
class Counts:
    """The counts of several clients; an entry for each pair of classes that occurs, in rising order."""

    clients: int
    client: Table
    true: Table
    predicted: Table
    count: Table

    @classmethod
    def of(cls, true: Table, predicted: Table) -> Counts:
        """From a row per client and a column per sample, with a true class of −1 where a client has fewer.

        >>> Counts.of(np.array([[3, 3, 5], [0, -1, -1]]), np.array([[3, 4, 3], [0, 0, 0]])).cells()
        [((3, 3, 1), (3, 4, 1), (5, 3, 1)), ((0, 0, 1),)]
        """
        rows, columns = np.nonzero(true >= 0)
        classes, width = (int(table.max(initial=0)) + 1 for table in (true, predicted))
        keys = (rows * classes + true[rows, columns]) * width + predicted[rows, columns]
        found, counts = np.unique(keys, return_counts=True)
        return cls(len(true), found // (classes * width), found // width % classes, found % width, counts)

    @classmethod
    def of_cells(cls, clients: Sequence[Cells]) -> Counts:
        """The same from what `cells` gave."""
        listed = [(client, *cell) for client, own in enumerate(clients) for cell in own]
        return cls(len(clients), *np.array(listed, dtype=np.int64).reshape(-1, 4).T)

    def cells(self) -> list[Cells]:
        """The counts of each client."""
        edges = np.searchsorted(self.client, np.arange(self.clients + 1)).tolist()
        cells = list(zip(self.true.tolist(), self.predicted.tolist(), self.count.tolist(), strict=True))
        return [tuple(cells[begin:end]) for begin, end in zip(edges, edges[1:], strict=False)]

    def by_class(self) -> tuple[Table, Table, Table]:
        """Of each client's samples [clients, classes]: those of a class, those of them predicted so, all predicted so.

        >>> [table.tolist() for table in Counts.of_cells([((0, 0, 3), (0, 1, 1), (1, 0, 2))]).by_class()]
        [[[4, 2]], [[3, 0]], [[5, 1]]]
        """
        classes = 1 + max(int(table.max(initial=0)) for table in (self.true, self.predicted))
        hits = np.where(self.true == self.predicted, self.count, 0)

        def summed(of: Table, counts: Table) -> Table:
            sums = np.bincount(self.client * classes + of, counts, self.clients * classes)
            return sums.astype(np.int64).reshape(self.clients, classes)

        return summed(self.true, self.count), summed(self.true, hits), summed(self.predicted, self.count)


def as_text(cells: Cells) -> str:
    """Counts as one short text, for a checkpoint.

    >>> as_text(((3, 3, 1), (3, 4, 2)))
    '3 3 1 3 4 2'
    """
    return " ".join(str(number) for cell in cells for number in cell)


def from_text(text: str) -> Cells:
    """What `as_text` gave.

    >>> from_text("3 3 1 3 4 2")
    ((3, 3, 1), (3, 4, 2))
    """
    numbers = [int(number) for number in text.split()]
    return tuple(zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True))


def rows(round: int, counts: Mapping[int, Mapping[str, Cells]]) -> Iterator[tuple[int | str, ...]]:
    """The rows of confusion.csv for one round, from the counts by client and rule."""
    rules = dict.fromkeys(rule for own in counts.values() for rule in own)
    for rule in rules:
        for client, own in sorted(counts.items()):
            yield from ((round, rule, client, *cell) for cell in own.get(rule, ()))


def class_scores(counts: pd.DataFrame) -> pd.DataFrame:
    """Scores of each class of which a client has test samples, from the rows of confusion.csv.

    `accuracy` is the share of the class's own samples that are predicted correctly. `f1` is 2·TP / (2·TP + FP + FN):
    TP samples of the class are predicted as it, FN as others, and FP samples of others are predicted as this class.
    """
    hits = counts[counts["true"] == counts["predicted"]]
    keys = [*GROUP, "class"]
    own = _summed(counts, "true", keys, "samples")
    table = own.join(_summed(hits, "true", keys, "correct")).join(_summed(counts, "predicted", keys, "predicted"))
    table = table.fillna(0).astype("int64")
    table["accuracy"] = table["correct"] / table["samples"]
    table["f1"] = 2 * table["correct"] / (table["samples"] + table.pop("predicted"))
    return table.reset_index()


def client_scores(counts: pd.DataFrame) -> pd.DataFrame:
    """Scores of each client: accuracy, and the plain means over its classes of accuracy (balanced) and F1 (macro)."""
    by_client = class_scores(counts).groupby(GROUP, sort=False)
    totals, means = by_client[["samples", "correct"]].sum(), by_client[["accuracy", "f1"]].mean()
    totals["accuracy"] = totals["correct"] / totals["samples"]
    return totals.join(means.set_axis(["balanced_accuracy", "macro_f1"], axis=1)).reset_index()


def _summed(counts: pd.DataFrame, by: str, keys: list[str], name: str) -> pd.DataFrame:
    """How many samples there are of each class, by its true or by its predicted class."""
    return counts.rename(columns={by: "class"}).groupby(keys, sort=False)["count"].sum().to_frame(name)
