"""The runs behind the comparisons with the papers: the entries of campaign.yaml as experiments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator
from yaml import YAMLError

from polyfed.comparison.plan import Cell
from polyfed.config import Experiment, experiment, merged
from polyfed.errors import InputError, first_line, unknown_name
from polyfed.methods import METHODS
from polyfed.ranges import typed
from polyfed.records.origin import FREE, settings_by_name
from polyfed.reproduce.published import Published, applicable, published
from polyfed.reproduce.recipes import Recipe, ScaleName, Variant, find_recipe, recipes
from polyfed.yaml_text import parse_yaml

FOLDER = Path(__file__).parent
UNTOLD = (FREE - {"rounds"}) | {"seed"}
"""Settings that a record leaves out: they say where a run took place, or are elsewhere in the record."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Beside(_Strict):
    """A table of a paper whose numbers are shown beside ours."""

    recipe: str
    setting: str | None = None
    """What the table calls the setting; None: as the entry does."""
    rows: dict[str, str] = {}
    """What the table calls our rows, where its names differ."""

    @property
    def of(self) -> Recipe:
        return find_recipe(self.recipe)

    @property
    def label(self) -> str:
        """
        >>> Beside(recipe="fedssa-table2").label
        'FedSSA, Table 2'
        """
        return f"{self.of.paper.paper.partition(' (')[0]}, {self.of.entry.title.partition(',')[0]}"

    def named(self, row: str) -> str:
        """The table's name of a row of ours."""
        return self.rows.get(row, row)

    def number(self, row: str, setting: str) -> Published:
        """What the paper prints for a row of ours."""
        return published(self.of, self.named(row), self.setting or setting)


class Entry(_Strict):
    """One comparison: a recipe's setting, or several, with methods and seeds."""

    title: str
    recipe: str
    settings: list[str] | Literal["all"]
    methods: list[str]
    """Methods, rows of the papers' recipes (dc-pfl-600), or groups."""
    lists: dict[str, dict[str, list[Any]]] = {}
    """Values of options to try, by method; each combination is a row."""
    beside: list[Beside] = []
    base: str = "standalone"
    """The row that gains are computed against."""
    seeds: list[int] = []
    changes: dict[str, Any] = {}
    """Settings that differ from the recipe's where the paper leaves them open."""
    reduced: dict[str, Any] = {}
    """Settings that make the runs smaller than the paper's."""
    scale: ScaleName = "paper"
    margins: list[str] = []
    """Rows for which the margins of prototypes are recorded."""
    digits: int = 1
    """Digits after the point of our accuracies and gains in percent."""

    @field_validator("beside", mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        return [{"recipe": each} if isinstance(each, str) else each for each in value]

    @property
    def of(self) -> Recipe:
        return find_recipe(self.recipe)

    @property
    def points(self) -> list[str]:
        """The recipe's settings that are run."""
        return self.of.settings if self.settings == "all" else self.settings

    @property
    def smaller(self) -> dict[str, Any]:
        """All that makes the runs smaller than the paper's."""
        return {**self.reduced, **({} if self.scale == "paper" else {"scale": self.scale})}

    def variant(self, row: str) -> Variant:
        """The method and options of a row: from its recipe, or else a table beside it, or else the method's paper."""
        own = [recipe for recipe in recipes() if row.startswith(recipe.name.partition("-table")[0])]
        papers = (recipe.paper for recipe in (self.of, *(each.of for each in self.beside), *own))
        return next((paper.methods[row] for paper in papers if row in paper.methods), Variant())


@dataclass(frozen=True)
class Run:
    """One run of the campaign."""

    entry: str
    setting: str
    row: str
    seed: int
    config: Experiment

    @property
    def key(self) -> tuple[str, str, str, int]:
        return self.entry, self.setting, self.row, self.seed

    @property
    def cell(self) -> Cell:
        """The run as one of `polyfed compare`; its folder has the cell's name."""
        return Cell(f"{self.entry}-{self.setting.replace('/', '-')}-{self.row}", self.seed, {}, self.config)

    @property
    def told(self) -> dict[str, Any]:
        """All settings that are recorded, also those with polyfed's defaults: a default may change later."""
        return _told(self.config)

    @property
    def usual(self) -> dict[str, Any]:
        """The same settings with polyfed's defaults of today."""
        return _told(experiment(method=self.config.method["name"]))


def _told(config: Experiment) -> dict[str, Any]:
    return {n: v for n, v in settings_by_name(config).items() if n.partition(".")[0] not in UNTOLD}


class Campaign(_Strict):
    """All entries, in the order in which they are run."""

    seeds: list[int]
    groups: dict[str, list[str]] = {}
    effort: dict[str, float] = {}
    """About how many times as long as Standalone a method takes."""
    front: dict[Literal["methods", "entries"], list[str]] = {}
    """The rows and columns of the table on the front page."""
    entries: dict[str, Entry]

    @cached_property
    def rows(self) -> dict[str, dict[str, dict[str, Any]]]:
        """By entry, its rows in the order of the tables, each with the options that the entry's lists add."""
        found: dict[str, dict[str, dict[str, Any]]] = {}
        for name, entry in self.entries.items():
            found[name] = {row: {} for each in entry.methods for row in self.groups.get(each, [each])}
            for method, lists in entry.lists.items():
                points = [dict(zip(lists, values, strict=True)) for values in product(*lists.values())]
                found[name] |= {_listed(method, point): point for point in points}
        return found

    def runs(self, names: Sequence[str] | None = None, **machine: Any) -> list[Run]:
        """The runs of these entries, or of all: entry by entry, newer methods last, the longest runs first.

        Seeds of the same run are next to each other.
        """
        for name in names or ():
            if name not in self.entries:
                raise unknown_name("entry", name, self.entries)
        return [
            Run(name, setting, row, seed, config.model_copy(update={"seed": seed}))
            for name in (names if names is not None else self.entries)
            for row in sorted(self.rows[name], key=lambda row, name=name: self._turn(name, row))  # type: ignore[misc]
            for setting in self.entries[name].points
            if applicable(self.entries[name].of, row, setting)
            for config in [self._config(name, row, setting, machine)]
            for seed in self.entries[name].seeds or self.seeds
        ]

    def method(self, entry: str, row: str) -> str:
        """The name of the method behind a row."""
        plain = row.partition(" ")[0]
        return self.entries[entry].variant(plain).method or plain

    def _turn(self, entry: str, row: str) -> tuple[bool, float]:
        return row in self.groups.get("newer", []), -self.effort.get(self.method(entry, row), 1.0)

    def _config(self, name: str, row: str, setting: str, machine: Mapping[str, Any]) -> Experiment:
        entry, method, plain = self.entries[name], self.method(name, row), row.partition(" ")[0]
        if method not in METHODS:
            raise unknown_name(f"method of {name}", method, METHODS)
        known, variant = plain in entry.of.paper.methods, entry.variant(plain)
        settings = {**entry.changes, **entry.reduced, **machine}
        config = entry.of.experiment(plain if known else method, setting, entry.scale, **settings)
        foreign = {} if known else {**variant.ours, **variant.given}
        return experiment(**merged(config.given, {"method": {"name": method, **foreign, **self.rows[name][row]}}))


def _listed(method: str, point: Mapping[str, Any]) -> str:
    """
    >>> _listed("pfedes", {"weight": 0.5, "proxy_epochs": 20})
    'pfedes weight=0.5 proxy_epochs=20'
    """
    return " ".join([method, *(f"{name}={typed(value)}" for name, value in point.items())])


def read_campaign(path: Path = FOLDER / "campaign.yaml") -> Campaign:
    """The campaign in a file."""
    try:
        return Campaign(**parse_yaml(path.read_text()))
    except OSError as error:
        raise InputError(f"can't read '{path}': {error.strerror}; name a campaign's file (--campaign).") from error
    except (YAMLError, TypeError, ValidationError) as error:
        raise InputError(f"'{path}' is not a campaign ({first_line(error)}): see papers/campaign.yaml.") from error
