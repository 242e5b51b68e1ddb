"""What it takes to repeat a table or a figure of a paper: which runs, with which settings, compared with what."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import product
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from polyfed.config import Experiment, experiment, merged
from polyfed.errors import unknown_name
from polyfed.methods import find_method
from polyfed.yaml_text import parse_yaml

ScaleName = Literal["paper", "small", "smoke"]
SCALES: dict[ScaleName, str] = {
    "paper": "the paper's setting",
    "small": "fewer rounds and epochs, or smaller networks",
    "smoke": "a trial on digits: does everything run?",
}
FOLDER = files("polyfed") / "papers"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class Sources(_Strict):
    """Settings, and whether they are the paper's or ours."""

    given: dict[str, Any] = {}
    """What the paper says."""
    ours: dict[str, Any] = {}
    """What it leaves open or gives only as a range."""

    @model_validator(mode="after")
    def _one_source(self) -> Sources:
        both = self.given.keys() & self.ours.keys()
        if both:
            raise ValueError(f"{', '.join(sorted(both))} can't be both given and ours")
        return self

    @property
    def settings(self) -> dict[str, Any]:
        """All of them; a preset that is ours does not replace what is given."""
        return merged(self.ours, self.given)


class Variant(Sources):
    """A row of a table: a method with options."""

    method: str | None = None
    """Its name in polyfed; none: that of the row."""
    printed: str | None = None
    """Its name in the paper, where that is another one."""
    rule: str | None = None
    """The rule of prediction that is compared; none: the method's own."""


class Compare(_Strict):
    """Which number of a run is put beside the published one."""

    what: Literal["accuracy", "floats"] = "accuracy"
    """Accuracy in percent, or numbers sent in the last round in millions."""
    average: Literal["mean", "weighted"] = "mean"
    """Every client counts the same, or every test sample."""
    round: Literal["last", "last-tenth", "best"] = "last"
    """The last round, the mean over the last tenth of the rounds, or the round that is best on test samples."""


class Scale(_Strict):
    """How a setting is made smaller."""

    settings: dict[str, Any] = {}
    visits: int | None = None
    """How often a client takes part on average."""
    most: dict[str, int] = {}
    """Upper limits of settings."""
    options: dict[str, Any] = {}
    """Options of methods, for those that have them."""
    points: int | None = None
    """Only so many of the recipe's settings."""


SMOKE = Scale(
    settings={
        "data": "digits", "split": "1:1:2", "models": "cnn4,cnn5", "features": 16, "auxiliary": "cnn5", "rounds": 1,
        "epochs": 1, "batch_size": 64, "lr": 0.05, "eval_every": 1, "training": {"augment": False},
        "engine": "sequential", "device": "cpu",
    },
    most={"clients": 4, "classes_per_client": 10},
    options={"proxy_epochs": 1, "server_epochs": 5, "server_steps": 5, "mixing_epochs": 1},
    points=1,
)  # fmt: skip


class Entry(Sources):
    """A recipe as its paper's file has it."""

    title: str
    shows: str
    methods: list[str] = []
    grid: list[str] = []
    """Axes of the paper; the recipe's settings are their product."""
    compare: dict[str, Any] = {}
    reference: str | None = None
    """The method that the paper compares its own with, beside Standalone."""
    published: str | None = None
    """The recipe whose published numbers apply here too."""
    series: Literal["rounds", "clients", "costs", "margins", "features", "decay"] | None = None
    """What a figure needs beside one number per cell."""
    targets: dict[str, float] = {}
    """Accuracy in percent up to which costs are counted, by setting."""
    small: Scale | None = None
    smoke: dict[str, Any] = {}
    not_yet: str | None = Field(None, alias="not-yet")
    """Why polyfed can't repeat it."""


class Paper(Sources):
    """What the recipes of one paper have in common."""

    paper: str
    trials: int
    compare: dict[str, Any] = {}
    small: Scale
    methods: dict[str, Variant] = {}
    axes: dict[str, dict[str, Sources]] = {}
    recipes: dict[str, Entry]


@dataclass(frozen=True)
class Recipe:
    """A table or a figure."""

    name: str
    paper: Paper
    entry: Entry

    @property
    def compare(self) -> Compare:
        return Compare(**{**self.paper.compare, **self.entry.compare})

    @property
    def given(self) -> dict[str, Any]:
        """The paper's settings that apply to all cells."""
        return {n: v for n, v in {**self.paper.given, **self.entry.given}.items() if n not in self.entry.ours}

    @property
    def ours(self) -> dict[str, Any]:
        """Our settings that apply to all cells."""
        return {n: v for n, v in {**self.paper.ours, **self.entry.ours}.items() if n not in self.given}

    @property
    def settings(self) -> list[str]:
        """The names of its settings, in the paper's order."""
        return list(self._points())

    def variant(self, method: str) -> Variant:
        """What a row of the table stands for."""
        return self.paper.methods.get(method, Variant())

    def seeds(self, scale: ScaleName) -> list[int]:
        """As many as the paper has trials; one where it is not the paper's setting anyway."""
        return list(range(self.paper.trials if scale == "paper" else 1))

    def point(self, setting: str) -> dict[str, str]:
        """A setting by the axes of its grid."""
        return dict(zip(self.entry.grid, setting.split("/"), strict=True)) if self.entry.grid else {}

    @property
    def base(self) -> str:
        """What gains are over: Standalone, or else the method that the paper compares with."""
        return "standalone" if "standalone" in self.entry.methods else "reference"

    def sources(self, setting: str) -> Sources:
        """What a setting adds to what all cells have in common."""
        parts = self._points()[setting]
        return Sources(
            given={name: value for part in parts for name, value in part.given.items()},
            ours={name: value for part in parts for name, value in part.ours.items()},
        )

    def settings_at(self, scale: ScaleName) -> list[str]:
        """The settings that a scale includes."""
        return self.settings[: self._scale(scale).points]

    def experiment(self, method: str, setting: str, scale: ScaleName, **machine: Any) -> Experiment:
        """The experiment behind a cell."""
        variant, smaller = self.variant(method), self._scale(scale)
        values: dict[str, Any] = {}
        for part in (self.paper, self.entry, self.sources(setting)):
            values = merged(values, part.settings)
        name = variant.method or method
        known = find_method(name).Config.model_fields
        fewer = {option: value for option, value in smaller.options.items() if option in known}
        options = {**variant.ours, **variant.given, **values.pop("method", {}), **fewer}
        values = merged(_made_smaller(values, smaller), machine)
        return experiment(**values, method={"name": name, **options})

    def _scale(self, scale: ScaleName) -> Scale:
        if scale == "small":
            return self.entry.small or self.paper.small
        if scale == "smoke":
            return SMOKE.model_copy(update={"settings": {**SMOKE.settings, **self.entry.smoke}})
        return Scale()

    def _points(self) -> dict[str, tuple[Sources, ...]]:
        axes = [self.paper.axes[axis].items() for axis in self.entry.grid]
        return {setting_of(name for name, _ in point): tuple(part for _, part in point) for point in product(*axes)}


def setting_of(point: Iterable[str]) -> str:
    """The name of a setting.

    >>> setting_of(["n10", "cifar10"]), setting_of([])
    ('n10/cifar10', 'all')
    """
    return "/".join(point) or "all"


def _made_smaller(values: Mapping[str, Any], scale: Scale) -> dict[str, Any]:
    """
    >>> _made_smaller({"rounds": 500, "clients": 100, "participation": 0.1}, Scale(visits=10, most={"clients": 20}))
    {'rounds': 100, 'clients': 20, 'participation': 0.1, 'training': {}, 'ray': {}}
    """
    result = merged(values, scale.settings)
    for name in scale.most.keys() & result.keys():
        result[name] = min(result[name], scale.most[name])
    if scale.visits is not None:
        result["rounds"] = min(result["rounds"], math.ceil(scale.visits / result.get("participation", 1.0) - 1e-9))
    return result


@cache
def papers() -> tuple[Paper, ...]:
    """The papers, as they came out."""
    names = ("pfedes-arxiv", "fedtgp", "fedssa", "dc-pfl", "pfedes")
    return tuple(Paper(**parse_yaml((FOLDER / f"{name}.yaml").read_text())) for name in names)


def recipes() -> Iterator[Recipe]:
    """All tables and figures."""
    for paper in papers():
        for name, entry in paper.recipes.items():
            yield Recipe(name, paper, entry)


def find_recipe(name: str) -> Recipe:
    """The recipe of that name.

    >>> find_recipe("fedssa-table2").entry.title
    'Table 2, five different networks'
    """
    known = {recipe.name: recipe for recipe in recipes()}
    if name.lower() not in known:
        raise unknown_name("recipe", name, known)
    return known[name.lower()]
