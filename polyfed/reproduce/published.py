"""The numbers that the papers print."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from functools import cache

from polyfed.reproduce.recipes import FOLDER, Recipe

NOT_APPLICABLE = "not applicable"
NOT_CONVERGED = "did not converge"


@dataclass(frozen=True)
class Published:
    """A cell of a paper's table; NaN where nothing is printed."""

    value: float = math.nan
    std: float = math.nan
    note: str = ""


@cache
def _all() -> dict[tuple[str, str, str], Published]:
    with (FOLDER / "published.csv").open() as file:
        return {
            (row["recipe"], row["method"], row["setting"]): Published(
                float(row["value"] or "nan"), float(row["std"] or "nan"), row["note"]
            )
            for row in csv.DictReader(file)
        }


def published(recipe: Recipe, method: str, setting: str) -> Published:
    """What the paper has in that cell.

    >>> from polyfed.reproduce.recipes import find_recipe
    >>> published(find_recipe("fedssa-table2"), "fedssa", "n100/cifar100").value
    57.29
    """
    return _all().get((recipe.entry.published or recipe.name, method, setting), Published())


def applicable(recipe: Recipe, method: str, setting: str) -> bool:
    """Whether the method can run there: some need what the setting's networks do not have."""
    return published(recipe, method, setting).note != NOT_APPLICABLE
