"""Tables for the terminal, and the same content as plain values for programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined
from rich.table import Table

from polyfed.config import GROUPS as SETTING_GROUPS
from polyfed.config import Experiment
from polyfed.data import SOURCES
from polyfed.methods import METHODS
from polyfed.methods.base import Method
from polyfed.models import GROUP_TITLES, GROUPS, NETWORKS
from polyfed.normal_form import PRESET_TITLES, PRESETS, SHORTCUTS
from polyfed.ranges import describe_range, typed
from polyfed.report.summary import quantity, summary_rows
from polyfed.server.scores import percent

if TYPE_CHECKING:
    from polyfed.bench import Measurement
    from polyfed.tuning.records import Trial, Tuned

_NEEDS = {"features": "same number of features", "head": "same head", "network": "same network"}


def methods() -> list[dict[str, Any]]:
    """Every method with its paper, what it sends, what clients must have in common, and its options."""
    return [about_method(method) for method in METHODS.values()]


def about_method(method: type[Method]) -> dict[str, Any]:
    """One method, likewise."""
    return {
        "name": method.name,
        "title": method.title,
        "paper": method.paper,
        "sends": method.sends,
        "reveals": method.reveals,
        "requires": list(method.requires),
        "options": fields(method.Config),
    }


def settings() -> list[dict[str, Any]]:
    """Every setting of an experiment; those in groups by their full names."""
    found = []
    for setting in fields(Experiment):
        group = SETTING_GROUPS.get(setting["name"])
        inner = [] if group is None else fields(group)
        found += [{**one, "name": f"{setting['name']}.{one['name']}"} for one in inner] or [setting]
    titles = "; ".join(f"{name}: {title}" for name, title in PRESET_TITLES.items())
    preset = {
        "name": "preset",
        "default": None,
        "range": f"one of {', '.join(PRESETS)}",
        "description": f"values for training by one name; {titles}",
    }
    return [*found, preset]


def fields(model: type[BaseModel]) -> list[dict[str, Any]]:
    """The settings of a group, each with its default, its range and its meaning."""
    return [
        {
            "name": name,
            "default": None if info.default is PydanticUndefined else info.default,
            "range": describe_range(model, name),
            "description": info.description or "",
        }
        for name, info in model.model_fields.items()
    ]


def networks() -> list[dict[str, Any]]:
    """Every network and group by name."""
    single = [{"name": name, "kind": "network", "description": title} for name, title in NETWORKS.items()]
    groups = [
        {"name": name, "kind": "group", "description": GROUP_TITLES[name], "members": list(members)}
        for name, members in GROUPS.items()
    ]
    return single + groups


def datasets() -> list[dict[str, Any]]:
    """Every source of data by name."""
    return [
        {
            "name": source.name,
            "title": source.title,
            "classes": source.classes,
            "input_shape": list(source.input_shape) if source.input_shape else None,
            "obtained": source.obtained,
        }
        for source in SOURCES.values()
    ]


def methods_table() -> Table:
    """The methods for people, each in a line."""
    table = plain_table(["name", "what clients send"], [[m["name"], m["sends"]] for m in methods()])
    return _captioned(
        table, "`polyfed methods NAME` shows a method's paper, its options and what clients must have in common."
    )


def method_table(method: Mapping[str, Any]) -> Table:
    """One method for people, without its options."""
    rows = [
        ["paper", method["paper"]],
        ["clients send", method["sends"]],
        *([["which reveals", method["reveals"]]] if method["reveals"] else []),
        ["clients need", _needs(method["requires"])],
    ]
    if method["name"] in METHODS.own:
        rows.append(["explained in", f"docs/methods/{method['name']}.md"])
    return plain_table([method["name"], method["title"]], rows)


def options_table(method: Mapping[str, Any]) -> Table:
    """A method's options for people."""
    if not method["options"]:
        return plain_table(["It has no options."], [])
    table = plain_table(["option", "default", "meaning (range)"], _setting_rows(method["options"]))
    return _captioned(table, "Set an option with --set method.NAME=VALUE.")


def settings_table() -> Table:
    """The settings of an experiment for people."""
    table = plain_table(["setting", "default", "meaning (range)"], _setting_rows(settings()))
    words = ", ".join(SHORTCUTS)
    return _captioned(
        table,
        f"In a file as NAME: VALUE, on the command line with --set NAME=VALUE. {words} may do without 'training.'. "
        "`polyfed methods NAME` lists a method's options. `polyfed init FILE.yaml` writes a file to start from.",
    )


def _setting_rows(listed: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    # An experiment has no default for the method.
    return [[one["name"], "–" if one["name"] == "method" else typed(one["default"]), described(one)] for one in listed]


def described(setting: Mapping[str, Any]) -> str:
    """What a setting means, and its range where that says more than that it is text."""
    words, values = setting["description"] or setting["name"], setting["range"]
    return words if values in ("", "text") else f"{words} ({values})"


def networks_table() -> Table:
    """The networks and groups for people."""
    rows = [[n["name"], n["kind"], n["description"] + _members(n.get("members"))] for n in networks()]
    return plain_table(["name", "kind", "description"], rows)


def datasets_table() -> Table:
    """The datasets for people."""
    rows = [
        [
            d["name"],
            d["title"],
            str(d["classes"] or "any"),
            "×".join(map(str, d["input_shape"])) if d["input_shape"] else "any",
            d["obtained"],
        ]
        for d in datasets()
    ]
    return plain_table(["name", "what", "classes", "shape", "where it comes from"], rows)


def summary_table(summary: Mapping[str, Any]) -> Table:
    """A run's result: accuracy, communication, computation, time."""
    table = plain_table([summary["method"], "", ""], summary_rows(summary))
    table.columns[0].no_wrap = False
    table.columns[1].justify = "right"
    return table


def measurement_line(result: Measurement) -> str:
    """One measured case in a line, as it comes, with a line for each note of the engine."""
    ratio = f", {result.ratio:.1f} times the plain loop" if result.ratio else ""
    return "\n".join([f"{result.case}: {result.seconds:.4f} s per round{ratio}", *_notes_of(result)])


def _notes_of(result: Measurement) -> list[str]:
    return [f"note on {result.case}: {note}" for note in result.notes]


def measurements_table(machine: str, results: Sequence[Measurement]) -> Table:
    """All measured cases for people."""
    rows = [
        [
            f"{r.case} ({r.engine})",
            f"{r.seconds:.4f}",
            f"{r.steps_per_second:.0f}",
            f"{100 * r.outside:.1f} %",
            f"{r.warm_up:.1f}",
            f"{quantity(r.memory)}B" if r.memory else "",
            f"{r.plain_seconds:.3f}" if r.plain_seconds else "",
            f"{r.ratio:.1f}" if r.ratio else "",
        ]
        for r in results
    ]
    columns = ["s/round", "steps/s", "outside", "warm-up", "memory", "plain s", "faster"]
    table = plain_table(["case (engine)", *columns], rows)
    table.columns[0].no_wrap = False
    for column in table.columns[1:]:
        column.no_wrap, column.justify = True, "right"
    notes = "".join(f"\n{note}" for result in results for note in _notes_of(result))
    return _captioned(
        table,
        f"{machine}. A step is one batch of one client; outside: the share of a round that is not training; "
        "warm-up: by how many seconds the first rounds took longer; plain: the eager loop doing the same steps; "
        f"faster: how many times.{notes}",
    )


def trial_line(trial: Trial) -> str:
    """One trial of a search in a line, as it comes."""
    settings = "  ".join(_assigned(trial))
    outcome = f"validation {percent(trial.value)}" if trial.state != "failed" else f"failed: {trial.reason}"
    return f"{trial.method} {trial.number + 1}  {outcome}{' (pruned)' * (trial.state == 'pruned')}  {settings}"


def _assigned(trial: Trial) -> list[str]:
    """Its settings, rounded so that a line has room for them; files have all digits."""
    return [
        f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in trial.settings.items()
    ]


def tuned_table(found: Sequence[Tuned]) -> Table:
    """What a search found for each method."""
    rows = [
        [each.method, percent(each.best.value), str(each.best.number + 1), str(each.trials),
         ", ".join(_assigned(each.best))]
        for each in found
    ]  # fmt: skip
    return plain_table(["method", "validation", "best trial", "trials", "settings"], rows)


def _needs(requires: Sequence[str]) -> str:
    return ", ".join(_NEEDS[need] for need in requires) or "nothing"


def _members(members: Sequence[str] | None) -> str:
    return f" ({', '.join(members)})" if members else ""


def _captioned(table: Table, words: str) -> Table:
    table.caption, table.caption_justify = words, "left"
    return table


def plain_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table without lines, so that cells can be copied; names, which come first, stay in one piece."""
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for number, column in enumerate(columns):
        table.add_column(column, overflow="fold", no_wrap=number == 0)
    for row in rows:
        table.add_row(*row)
    return table
