"""Tables for the terminal, and the same content as plain values for programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import PydanticUndefined
from rich.table import Table

from polyfed.bench import Measurement
from polyfed.data import SOURCES
from polyfed.methods import METHODS
from polyfed.models import GROUP_TITLES, GROUPS, NETWORKS
from polyfed.ranges import describe_range, typed
from polyfed.server.scores import percent
from polyfed.tuning.records import Trial, Tuned

_NEEDS = {"features": "same number of features", "head": "same head", "network": "same network"}


def methods() -> list[dict[str, Any]]:
    """Every method with its paper, what it sends, what clients must have in common, and its options."""
    return [
        {
            "name": method.name,
            "title": method.title,
            "paper": method.paper,
            "sends": method.sends,
            "reveals": method.reveals,
            "requires": list(method.requires),
            "options": [
                {
                    "name": name,
                    "default": None if info.default is PydanticUndefined else info.default,
                    "range": describe_range(method.Config, name),
                    "description": info.description or "",
                }
                for name, info in method.Config.model_fields.items()
            ],
        }
        for method in METHODS.values()
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
    """The methods for people."""
    rows = [[m["name"], f"{m['title']}, {m['paper']}", m["sends"], _needs(m["requires"])] for m in methods()]
    return _table(["name", "method and paper", "what clients send", "must be the same"], rows)


def method_options_table() -> Table:
    """The methods' options for people."""
    rows = []
    for method in methods():
        rows += [[method["name"], "", ""]] if method["options"] else []
        rows += [
            [f"  {o['name']}", typed(o["default"]), f"{o['description']} ({o['range']})"] for o in method["options"]
        ]
    table = _table(["option", "default", "meaning (range)"], rows)
    table.caption, table.caption_justify = "Set an option with --set method.NAME=VALUE.", "left"
    return table


def networks_table() -> Table:
    """The networks and groups for people."""
    rows = [[n["name"], n["kind"], n["description"] + _members(n.get("members"))] for n in networks()]
    return _table(["name", "kind", "description"], rows)


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
    return _table(["name", "title", "classes", "image", "where it comes from"], rows)


def summary_table(summary: Mapping[str, Any]) -> Table:
    """A run's result: accuracy, communication, computation, time."""
    rows = [
        ["accuracy, final", percent(summary["accuracy_final"]), f"round {summary['rounds']}"],
        [
            "accuracy at the round best on validation",
            percent(summary["accuracy_at_best_validation"]),
            f"round {summary['best_validation_round']}"
            if summary["best_validation_round"]
            else "no validation samples",
        ],
        ["accuracy, best on test", percent(summary["accuracy_best"]), f"round {summary['best_round']}"],
        *_test_set(summary.get("test_set", "none")),
        ["communication, up", quantity(summary["upload_floats"]), f"floats, {quantity(summary['upload_bytes'])}B"],
        [
            "communication, down",
            quantity(summary["download_floats"]),
            f"floats, {quantity(summary['download_bytes'])}B",
        ],
        ["computation of the clients", quantity(summary["flops"]), "FLOPs"],
        ["time for training and server", f"{summary['seconds']:.1f}", "seconds"],
    ]
    if "simulated_seconds" in summary:
        rows.append(["simulated time of all rounds", f"{summary['simulated_seconds']:.1f}", "seconds"])
    table = _table([summary["method"], "", ""], rows)
    table.columns[0].no_wrap = False
    table.columns[1].justify = "right"
    return table


def _test_set(choice: str) -> list[list[str]]:
    """A row on the test set that came with the data, if there is one."""
    words = {"apart": "for testing only", "pooled": "with training samples"}
    return [["test set of the data", choice, words[choice]]] if choice in words else []


def measurement_line(result: Measurement) -> str:
    """One measured case in a line, as it comes."""
    ratio = f", {result.ratio:.1f} times the plain loop" if result.ratio else ""
    return f"{result.case}: {result.seconds:.4f} s per round{ratio}"


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
    table = _table(["case (engine)", *columns], rows)
    table.columns[0].no_wrap = False
    for column in table.columns[1:]:
        column.no_wrap, column.justify = True, "right"
    table.caption = (
        f"{machine}. A step is one batch of one client; outside: the share of a round that is not training; "
        "warm-up: by how many seconds the first rounds took longer; plain: the eager loop doing the same steps; "
        "faster: how many times."
    )
    table.caption_justify = "left"
    return table


def trial_line(trial: Trial) -> str:
    """One trial of a search in a line, as it comes."""
    settings = "  ".join(
        f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in trial.settings.items()
    )
    outcome = f"validation {percent(trial.value)}" if trial.state != "failed" else f"failed: {trial.reason}"
    return f"{trial.method} {trial.number + 1}  {outcome}{' (pruned)' * (trial.state == 'pruned')}  {settings}"


def tuned_table(found: Sequence[Tuned]) -> Table:
    """What a search found for each method."""
    rows = [
        [each.method, percent(each.best.value), str(each.best.number + 1), str(each.trials),
         ", ".join(f"{name}={value}" for name, value in each.best.settings.items())]
        for each in found
    ]  # fmt: skip
    return _table(["method", "validation", "best trial", "trials", "settings"], rows)


def quantity(number: float) -> str:
    """
    >>> quantity(2_621_558), quantity(886)
    ('2.62 M', '886 ')
    """
    for limit, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.2f} {unit}"
    return f"{number:.0f} "


def _needs(requires: Sequence[str]) -> str:
    return ", ".join(_NEEDS[need] for need in requires) or "nothing"


def _members(members: Sequence[str] | None) -> str:
    return f" ({', '.join(members)})" if members else ""


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table without lines, so that cells can be copied; names, which come first, stay in one piece."""
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for number, column in enumerate(columns):
        table.add_column(column, overflow="fold", no_wrap=number == 0)
    for row in rows:
        table.add_row(*row)
    return table
