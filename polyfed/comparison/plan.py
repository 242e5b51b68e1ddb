"""Which runs a comparison consists of: every method with every seed, at every point of the swept settings."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from polyfed.addresses import trusting
from polyfed.config import GROUPS, Experiment, experiment, merged, named_by, read_yaml
from polyfed.errors import InputError
from polyfed.methods import find_method
from polyfed.methods.base import Method
from polyfed.normal_form import SHORTCUTS, normal_form
from polyfed.ranges import typed
from polyfed.records import disk
from polyfed.records.origin import settings_by_name
from polyfed.resuming import check_trusted

MethodChoice = str | Path | type[Method] | Mapping[str, Any]
"""A name, an address, a file, a class, or a mapping with a name, options and perhaps a label."""
OWN = ("method.", "training.")
"""Settings that may differ between the methods of a comparison; all others must be the same."""
HARMLESS = ("seed", "workers", "memory_budget", "checkpoint_every", "data_folder", "ray", "tracker")
"""Settings that may differ between any two runs: they have no influence on numbers, or are the comparison's own."""
LONGEST_NAME = 120
"""Bytes of a folder's name without its seed."""
MOST_SEEDS = 10_000
"""More in one range are a slip of the hand."""
FILES = (".yaml", ".yml")


@dataclass(frozen=True)
class Cell:
    """One run of a comparison."""

    method: str
    """Its label: the method's name, or that of the file with its options."""
    seed: int
    point: Mapping[str, Any]
    """The swept settings that concern this method."""
    config: Experiment

    @property
    def name(self) -> str:
        """The name of its folder."""
        return folder_name(self.method, self.seed, self.point)


@dataclass(frozen=True)
class Entry:
    """A method of the comparison with what its file says."""

    label: str
    content: Mapping[str, Any]
    source: Path | None = None


def folder_name(method: str, seed: int, point: Mapping[str, Any]) -> str:
    """A name that every file system accepts; one that had to be changed for that ends with a hash of what it was.

    >>> folder_name("fedproto", 0, {"method.weight": 0.5})
    'fedproto-method.weight=0.5-seed0'
    """
    swept = "".join(f"-{name}={typed(value)}" for name, value in point.items())
    plain = f"{method}{swept}"
    safe = disk.file_name(plain).encode()[:LONGEST_NAME].decode(errors="ignore")
    if safe != plain or safe.startswith("."):
        safe = f"{safe.lstrip('.')}-{hashlib.blake2b(plain.encode(), digest_size=3).hexdigest()}"
    return f"{safe}-seed{seed}"


def plan(
    methods: Sequence[MethodChoice],
    seeds: Iterable[int] | str,
    settings: Mapping[str, Any] | None = None,
    sweeps: Mapping[str, Sequence[Any]] | None = None,
    *,
    trust: bool = False,
) -> list[Cell]:
    """All runs, checked before any of them begins.

    Swept options of a method (`method.weight`) concern the methods that have them; another method runs once for all
    their values. `trust` allows files to name code.

    >>> [cell.name for cell in plan(["standalone", "fedproto"], [0], {}, {"method.weight": [0.5, 1]})]
    ['standalone-seed0', 'fedproto-method.weight=0.5-seed0', 'fedproto-method.weight=1-seed0']
    """
    if isinstance(methods, str):
        raise InputError(f"methods is '{methods}', but must be a list, such as ['standalone', 'fedproto'].")
    entries = [entry for method in methods for entry in _entries(method)]
    _check_unrepeated("method", [entry.label for entry in entries])
    if not entries:
        raise InputError("there is no method to compare: name at least one, such as fedproto.")
    seeds = checked_seeds(seeds)
    _check_unseen(entries, seeds)
    given = normal_form(settings or {})
    if "seed" in given:
        raise InputError("seed can't be set in a comparison: use --seeds, such as --seeds 0-4.")
    values = _canonical(sweeps or {}, given)
    cells = [
        Cell(entry.label, seed, point, config)
        for entry in entries
        for point, config in _points(entry, given, values, trust)
        for seed in seeds
        for config in [config.model_copy(update={"seed": seed})]
    ]
    _check_concerned(entries, cells, given, values)
    _check_belong_together(cells)
    return cells


def grid(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Every point of the swept settings, over all methods; a single empty one without sweeps."""
    values: dict[str, list[Any]] = {}
    for cell in cells:
        for name, value in cell.point.items():
            known = values.setdefault(name, [])
            if value not in known:
                known.append(value)
    return [dict(zip(values, point, strict=True)) for point in product(*values.values())]


def concerns(cell: Cell, point: Mapping[str, Any]) -> bool:
    """Whether this run belongs to the table of a point."""
    return all(point.get(name) == value for name, value in cell.point.items())


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by dotted names as an experiment has them.

    >>> nested({"method.weight": 1, "clients": 5})
    {'method': {'weight': 1}, 'clients': 5}
    """
    result: dict[str, Any] = {}
    for name, value in settings.items():
        group, _, inner = name.rpartition(".")
        if group:
            result.setdefault(group, {})[inner] = value
        else:
            result[inner] = value
    return result


def _entries(method: MethodChoice) -> Iterator[Entry]:
    if isinstance(method, Path) or isinstance(method, str) and method.endswith(FILES):
        yield from _from_file(Path(method))
    elif isinstance(method, Mapping):
        options = {name: value for name, value in method.items() if name != "label"}
        yield Entry(str(method.get("label", _named(options.get("name")))), {"method": options})
    else:
        yield Entry(_named(method), {"method": {"name": method}})


def _named(method: object) -> str:
    return str(getattr(method, "name", method))


def _from_file(path: Path) -> Iterator[Entry]:
    """One method, labelled by the file's name, or several: `methods` with settings for each, such as a tuning gives."""
    content = read_yaml(path)
    several = content.get("methods")
    if several is None:
        yield Entry(_tuned_name(content) or path.stem, content, path)
        return
    if "method" in content or not isinstance(several, Mapping):
        raise InputError(f"'{path}' must have either one method or, under methods, a name with settings for each.")
    rest = {name: value for name, value in content.items() if name != "methods"}
    for name, own in several.items():
        if not isinstance(own, Mapping | None):
            raise InputError(f"'{path}' gives {name} {own!r}, but it needs settings, such as 'method.weight: 0.5'.")
        settings = merged({"method": str(name), **rest}, nested(own or {}))
        yield Entry(_tuned_name(settings) or str(name), settings, path)


def _tuned_name(content: Mapping[str, Any]) -> str | None:
    """The label of a method whose settings a search has found, so that it can stand beside the untuned one."""
    method = normal_form(content).get("method")
    return f"{_named(method['name'])}-tuned" if "tuned" in content and method and "name" in method else None


def _check_unseen(entries: Sequence[Entry], seeds: Sequence[int]) -> None:
    """What was chosen by a seed's data looks better there than it is."""
    for entry in entries:
        tuned = entry.content.get("tuned")
        searched = tuned.get("seeds") if isinstance(tuned, Mapping) else None
        both = sorted({*seeds} & {*searched}) if isinstance(searched, list) else []
        if both:
            raise InputError(
                f"{entry.label} was tuned with seed {both[0]}, so it can't be compared with that seed: use seeds that "
                f"the search did not use ({', '.join(map(str, searched or []))})."
            )


def _check_unrepeated(what: str, names: Sequence[Any]) -> None:
    repeated = next((name for position, name in enumerate(names) if name in names[:position]), None)
    if repeated is None:
        return
    remedy = "; the same method with other options needs a YAML file, whose name is its label" * (what == "method")
    raise InputError(f"{what} {repeated} is given twice: give it once{remedy}.")


def parse_seeds(text: str) -> list[int]:
    """Seeds as people write them.

    >>> parse_seeds("0-2,7")
    [0, 1, 2, 7]
    """
    seeds: list[int] = []
    for part in text.split(","):
        ends = re.fullmatch(r"\s*(\d{1,18})\s*(?:-\s*(\d{1,18})\s*)?", part)
        first, last = (int(ends[1]), int(ends[2] or ends[1])) if ends else (0, -1)
        if last < first:
            raise InputError(f"seeds are '{text}', but must be numbers and ranges, such as 0-4 or 0,3,7.")
        if last - first >= MOST_SEEDS:
            raise InputError(f"{part.strip()} are {last - first + 1} seeds, but must be at most {MOST_SEEDS}.")
        seeds += range(first, last + 1)
    return seeds


def checked_seeds(seeds: Iterable[int] | str) -> list[int]:
    """Seeds as a list; raises unless there are some, each of them once."""
    if not isinstance(seeds, Iterable):
        raise InputError(f"seeds is {seeds!r}, but must be a list such as [0, 1, 2], or text such as '0-2'.")
    found = parse_seeds(seeds) if isinstance(seeds, str) else list(seeds)
    if not found:
        raise InputError("there is no seed: give at least one, such as --seeds 0-4.")
    for seed in found:
        if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
            raise InputError(f"seed {seed!r} must be a whole number at least 0.")
    _check_unrepeated("seed", found)
    return found


def _canonical(sweeps: Mapping[str, Sequence[Any]], given: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The swept settings by their full names, each with values to try and none of them set to something else."""
    values: dict[str, list[Any]] = {}
    for written, tried in sweeps.items():
        name = written.replace("-", "_")
        name = f"training.{name}" if name in SHORTCUTS else name
        group, _, inner = name.rpartition(".")
        if group not in ("", "method", *GROUPS):
            raise InputError(
                f"'{written}' can't be swept: name a setting, such as clients, training.lr, method.weight."
            )
        if name in ("seed", "method", "method.name", *GROUPS):
            remedy = {"seed": "use --seeds"}.get(name, "list methods as arguments" if "method" in name else "name one")
            raise InputError(f"'{written}' can't be swept: {remedy}.")
        if isinstance(tried, str) or not isinstance(tried, Sequence) or not tried:
            raise InputError(f"the sweep of {written} needs values, such as {written}=1,2.")
        if name in values:
            raise InputError(f"{written} is swept twice: put all its values into one sweep.")
        _check_unrepeated(f"value of {written}", tried)
        if inner in (given.get(group, {}) if group else given):
            raise InputError(f"{written} is both set and swept: keep one of them.")
        values[name] = list(tried)
    return values


def _points(
    entry: Entry, given: Mapping[str, Any], values: Mapping[str, Sequence[Any]], trust: bool
) -> list[tuple[dict[str, Any], Experiment]]:
    """The method's experiment at each of the points that concern it."""
    typed_here = {*named_by(given), *values}
    with trusting(trust or entry.source is None, typed_here):
        method = normal_form(entry.content).get("method") or {}
        name = method.get("name")
        options = set((find_method(name) if isinstance(name, str) else name).Config.model_fields) if name else set()
        own = {swept: tried for swept, tried in values.items() if _has(options, swept)}
        changes = {**given, "method": {n: v for n, v in given.get("method", {}).items() if n in options}}
        points = [dict(zip(own, point, strict=True)) for point in product(*own.values())]
        configs = [_experiment(entry, changes, point) for point in points]
    for config in configs if entry.source else ():
        check_trusted(config, entry.source or Path(), trust=trust, given=typed_here)
    for number, config in enumerate(configs):
        if config in configs[:number]:
            raise InputError(f"the sweep changes nothing for {entry.label}: {_shown(points[number])} is not in effect.")
    return list(zip(points, configs, strict=True))


def _has(options: set[str], swept: str) -> bool:
    return not swept.startswith("method.") or swept.removeprefix("method.") in options


def _experiment(entry: Entry, changes: Mapping[str, Any], point: Mapping[str, Any]) -> Experiment:
    """What the file says, a swept preset, what was set, what is swept; the later wins."""
    preset = {name: value for name, value in point.items() if name == "preset"}
    rest = {name: value for name, value in point.items() if name != "preset"}
    content = merged(merged(merged(entry.content, preset), changes), nested(rest))
    return experiment(**{name: value for name, value in content.items() if name != "seed"})


def _check_concerned(
    entries: Sequence[Entry], cells: Sequence[Cell], given: Mapping[str, Any], values: Mapping[str, Any]
) -> None:
    """An option that no method has would be ignored without anybody noticing."""
    names = ", ".join(entry.label for entry in entries)
    if "name" in given.get("method", {}):
        raise InputError("method can't be set: list methods as arguments.")
    for option in [*(f"method.{name}" for name in given.get("method", {})), *values]:
        if option.startswith("method.") and all(option.removeprefix("method.") not in c.config.method for c in cells):
            inner = option.removeprefix("method.")
            raise InputError(f"none of {names} has an option '{inner}'; `polyfed methods` lists the options.")


def _check_belong_together(cells: Sequence[Cell]) -> None:
    """Methods are comparable only on the same federation: same data, partition, networks, rounds, evaluation."""
    first = cells[0]
    expected = common_settings(first)
    for cell in cells[1:]:
        for name, value in common_settings(cell).items():
            if name not in {*first.point, *cell.point} and expected.get(name) != value:
                raise InputError(
                    f"{name} is {typed(expected.get(name))} for {first.method} and {typed(value)} for {cell.method}, "
                    f"so they can't be compared: give one value for all (--set {name}=VALUE)."
                )


def common_settings(cell: Cell) -> dict[str, Any]:
    """The settings that all methods of a comparison have in common."""
    settings = settings_by_name(cell.config)
    return {n: v for n, v in settings.items() if n.partition(".")[0] not in HARMLESS and not n.startswith(OWN)}


def _shown(point: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={typed(value)}" for name, value in point.items())
