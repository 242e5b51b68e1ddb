"""The folder of a comparison: whose it is, and which methods, seeds and settings its runs have.

comparison.yaml    the plan: what may be added to it, and what may not
runs/              a run folder for every method, seed and point
noise/             one run again, to see what the engine in use leaves to chance
comparison.csv, comparison.md, comparison.tex, curves.csv, and pictures if matplotlib is there
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import yaml

from polyfed.comparison.plan import OWN, Cell, common_settings
from polyfed.config import read_yaml
from polyfed.errors import InputError
from polyfed.ranges import typed
from polyfed.records import disk
from polyfed.records.claim import locked, writable
from polyfed.records.origin import settings_by_name

PLAN = "comparison.yaml"


@contextmanager
def claimed(path: Path, cells: Sequence[Cell]) -> Iterator[None]:
    """Inside, the folder is this comparison's; raises if it is another's, and leaves it as it is."""
    with ExitStack() as held:
        with writable(path):
            disk.make_folder(path)
            held.enter_context(locked(path))
            wanted = _described(cells)
            if (path / PLAN).exists():
                if any((path / "runs").glob("*/run.json")):  # a plan of which nothing has begun binds nobody
                    wanted = _united(path, _read_plan(path / PLAN), wanted)
            elif any(path.iterdir()):
                raise InputError(
                    f"'{path}' is not empty and holds no comparison: choose a new or empty folder (--out)."
                )
            disk.write(path / PLAN, yaml.safe_dump(wanted, sort_keys=False))
        yield


def _described(cells: Sequence[Cell]) -> dict[str, Any]:
    sweeps: dict[str, list[Any]] = {}
    methods: dict[str, dict[str, Any]] = {}
    for cell in cells:
        for name, value in cell.point.items():
            tried = sweeps.setdefault(name, [])
            tried += [] if value in tried else [value]
        swept = ("training.",) if "preset" in cell.point else tuple(cell.point)
        own = {n: v for n, v in settings_by_name(cell.config).items() if n.startswith(OWN)}
        methods.setdefault(cell.method, {n: v for n, v in own.items() if not n.startswith(swept)})
    common = {name: value for name, value in common_settings(cells[0]).items() if name not in sweeps}
    seeds = list(dict.fromkeys(cell.seed for cell in cells))
    return {"methods": methods, "seeds": seeds, "sweeps": sweeps, "settings": common}


def _read_plan(file: Path) -> dict[str, Any]:
    """The plan in a file; raises if it is not one."""
    try:
        content = read_yaml(file)
    except InputError:
        content = {}
    found: dict[str, Any] = {part: content.get(part) for part in ("methods", "seeds", "sweeps", "settings")}
    named = [found["methods"], found["sweeps"], found["settings"]]
    if (
        not all(isinstance(part, Mapping) for part in named)
        or not isinstance(found["seeds"], list)
        or not all(isinstance(seed, int) for seed in found["seeds"])
        or not all(isinstance(own, Mapping) for own in found["methods"].values())
        or not all(isinstance(tried, list) for tried in found["sweeps"].values())
    ):
        raise InputError(f"'{file}' is damaged: put the file back, or choose another folder (--out).")
    return found


def _united(path: Path, known: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Both plans together; raises if they are not parts of one comparison."""
    if set(known["sweeps"]) != set(wanted["sweeps"]):
        was = ", ".join(known["sweeps"]) or "nothing"
        raise _another(path, f"it sweeps {was}, not {', '.join(wanted['sweeps']) or 'nothing'}")
    _check_equal(path, "", known["settings"], wanted["settings"])
    for label, own in wanted["methods"].items():
        _check_equal(path, f" of {label}", known["methods"].get(label, {}), own)
    return {
        "methods": {**known["methods"], **wanted["methods"]},
        "seeds": sorted({*known["seeds"], *wanted["seeds"]}),
        "sweeps": {
            name: [*known["sweeps"][name], *(v for v in tried if v not in known["sweeps"][name])]
            for name, tried in wanted["sweeps"].items()
        },
        "settings": dict(wanted["settings"]),
    }


def _check_equal(path: Path, whose: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    for name, value in now.items():
        if name in before and before[name] != value:
            raise _another(path, f"{name}{whose} is {typed(before[name])} there, not {typed(value)}")


def _another(path: Path, difference: str) -> InputError:
    return InputError(
        f"'{path}' holds another comparison: {difference}; choose another folder (--out), or use its settings."
    )
