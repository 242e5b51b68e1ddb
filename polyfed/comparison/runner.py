"""Brings all runs of a comparison to their end, new or interrupted, one by one or several side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from polyfed import api
from polyfed.addresses import PYTHON, names_code, trusting
from polyfed.comparison.crew import Crew
from polyfed.comparison.plan import Cell
from polyfed.comparison.together import Run, finish_together, grouped, most_together, named_watchers
from polyfed.compute import gpu_has_failed
from polyfed.config import Experiment, read_yaml
from polyfed.data import Dataset, load_dataset, parse_address
from polyfed.errors import FolderError, InputError, PolyfedError, first_line
from polyfed.methods import METHODS
from polyfed.models import Models
from polyfed.records import RunFolder
from polyfed.records.origin import FREE, shown
from polyfed.registry import ENGINES
from polyfed.server.federation import Interrupted, Watcher


@dataclass
class Errors:
    """What went wrong, by run."""

    reasons: dict[str, str] = field(default_factory=dict)
    of_input: set[str] = field(default_factory=set)
    """Runs that failed because of what was asked for."""

    def add(self, name: str, reason: str, *, of_input: bool) -> None:
        self.reasons[name] = reason
        if of_input:
            self.of_input.add(name)


def run_cells(
    cells: Sequence[Cell],
    folder: Path,
    *,
    jobs: int = 1,
    together: int | None = None,
    tell: Callable[[str], None] = lambda line: None,
    watcher: Watcher | None = None,
    data: Dataset | None = None,
    models: Models | None = None,
) -> dict[str, str]:
    """Finish every run under `folder`/runs and return the reason of each that failed, by its name.

    Finished runs stay as they are, interrupted ones are resumed, and a failed one does not stop the others, unless the
    GPU has failed with it in this process. `jobs` runs at a time are in processes of their own; a single one in this
    process. Up to `together` runs of one kind train their clients in the same cohorts; none: as many as make sense on a
    GPU. `tell` gets a line per finished run, `watcher` hears of the rounds in this process and of all notes, and may
    ask to stop. Raises `Interrupted` after Ctrl-C and where the GPU has failed, with the failures until then, and
    `InputError` if all runs fail for the same wrong input. `data` and
    `models` are those that came from Python.
    """
    if jobs < 1:
        raise InputError(f"jobs is {jobs}, but must be a whole number at least 1.")
    if jobs > 1:
        check_portable(cells)
    paths = {cell.name: folder / "runs" / cell.name for cell in cells}
    if len(paths) < len(cells):
        raise InputError("two runs of the comparison have the same name: give their methods other labels.")
    errors, watcher = Errors(), watcher or Watcher()
    for cell in cells:
        most_together(cell.config, together)  # refuses what can't be, before anything runs
    left = grouped(_unfinished(cells, paths, errors, tell), lambda cell: cell.config, together)
    try:
        if left and jobs == 1:
            _one_by_one(left, paths, errors, tell, watcher, data, models)
        elif left:
            _side_by_side(left, paths, min(jobs, len(left)), errors, tell, watcher)
    except Interrupted as stop:
        stop.failures = errors.reasons
        raise
    reasons = list(errors.reasons.values())
    if reasons and len(errors.of_input) == len(cells) and len(set(reasons)) == 1:
        raise InputError(reasons[0])
    return errors.reasons


def finish(
    config: Experiment,
    path: Path,
    watcher: Watcher | None = None,
    data: Dataset | None = None,
    models: Models | None = None,
) -> None:
    """Run, or resume, one experiment in its folder."""
    if is_finished(config, path):
        return
    if (path / "config.yaml").exists():
        # Its settings were just found to be those of the plan, so whatever code they name is what the user named.
        api.resume(path, watcher=watcher, progress=False, trust=True, data=data, models=models)
        return
    values = config.given
    values |= {} if data is None else {"data": data}
    values |= {} if models is None else {"models": models}
    with trusting(True):
        api.run(**values, out=path, watcher=watcher, progress=False)


def finish_group(
    runs: Mapping[str, tuple[Experiment, Path]],
    watcher: Watcher,
    data: Dataset | None = None,
    models: Models | None = None,
) -> dict[str, BaseException]:
    """Run, or resume, experiments that can train together; returns what went wrong with which."""
    work = partial(finish, data=data, models=models)
    if len(runs) > 1:
        watchers = named_watchers(watcher, list(runs))
        return finish_together({name: Run(*run, watchers[name]) for name, run in runs.items()}, work)
    ((name, run),) = runs.items()
    try:
        work(*run, watcher)
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        return {name: error}
    return {}


FROM_DATA = ("partition", "clients", "models")
"""Settings that follow from the data unless the user says otherwise."""


def is_finished(config: Experiment, path: Path) -> bool:
    """Whether this run has been finished; raises if the folder holds another run."""
    if not (path / "config.yaml").exists():
        return False
    found, wanted = read_yaml(path / "config.yaml"), config.model_dump(mode="json")
    for name, value in wanted.items():
        # Settings that may change are no other run's, but code that only the file names must not be trusted.
        binding = name not in FREE or name == "rounds" or names_code(found.get(name))
        if name in FROM_DATA and name not in config.model_fields_set and ":" not in str(found.get(name)):
            continue
        if binding and name in found and found[name] != value:
            raise FolderError(
                f"'{path}' holds a run with {name} {shown(found[name])}, not {shown(value)}: move it away, or use "
                "another folder (--out)."
            )
    return RunFolder.open(path).finished


def check_portable(cells: Sequence[Cell]) -> None:
    """Raise if a run needs what only this process has."""
    for cell in cells:
        for registry, name in ((METHODS, cell.config.method["name"]), (ENGINES, cell.config.engine)):
            if not registry.is_found_elsewhere(name):
                raise InputError(
                    f"the {registry.kind} '{name}' is known only to this process: use jobs=1, or name it by its "
                    "address, package.module:Class."
                )
        for name, value in (("data", cell.config.data), ("models", cell.config.models)):
            if value.startswith(PYTHON):
                raise InputError(
                    f"{name} from Python can't be given to other processes: use jobs=1, or name them by a file or an "
                    "address, such as npz:PATH or package.module:factory."
                )


def _unfinished(
    cells: Sequence[Cell], paths: Mapping[str, Path], errors: Errors, tell: Callable[[str], None]
) -> list[Cell]:
    """The runs that are left; one whose folder holds another run has failed."""
    left = []
    for cell in cells:
        try:
            left += [] if is_finished(cell.config, paths[cell.name]) else [cell]
        except PolyfedError as error:
            errors.add(cell.name, str(error), of_input=True)
            tell(f"{cell.name} failed: {error}")
    if left:
        done = len(cells) - len(left) - len(errors.reasons)
        tell(f"{len(left)} {'run' if len(left) == 1 else 'runs'} to do, {done} already finished")
    return left


def _one_by_one(
    groups: Sequence[Sequence[Cell]],
    paths: Mapping[str, Path],
    errors: Errors,
    tell: Callable[[str], None],
    watcher: Watcher,
    data: Dataset | None,
    models: Models | None,
) -> None:
    done, total = 0, sum(map(len, groups))
    left = list(groups)
    while left:
        if watcher.stop_requested:
            raise _stopped(done, total)
        group = next((each for each in left if watcher.may_begin([cell.name for cell in each])), None)
        if group is None:
            raise _stopped(done, total)
        left.remove(group)
        try:
            found = finish_group({c.name: (c.config, paths[c.name]) for c in group}, watcher, data, models)
        except KeyboardInterrupt as error:
            raise _stopped(done, total) from error
        stopped = {name for name, error in found.items() if isinstance(error, Interrupted | KeyboardInterrupt)}
        for cell in group:
            if cell.name in stopped:
                continue
            done += 1
            problem = found.get(cell.name)
            if problem is not None:  # one run's failure must not cost the others
                errors.add(cell.name, reason_of(problem), of_input=isinstance(problem, InputError))
            _tell_end(tell, done, total, cell, errors)
        if stopped:
            raise _stopped(done, total) from found[min(stopped)]
        if found and left and gpu_has_failed(group[0].config.device):
            stop = _stopped(done, total, " because this process can't use its GPU any more")
            stop.exit_status = 1
            raise stop


def _side_by_side(
    groups: Sequence[Sequence[Cell]],
    paths: Mapping[str, Path],
    jobs: int,
    errors: Errors,
    tell: Callable[[str], None],
    watcher: Watcher,
) -> None:
    cells = [cell for group in groups for cell in group]
    _fetch_data(cells)
    tasks = {
        group[0].name: {c.name: {"config": _portable(c.config), "path": str(paths[c.name])} for c in group}
        for group in groups
    }
    by_task = {group[0].name: group for group in groups}

    def may_begin(task: str) -> bool:
        return watcher.may_begin([cell.name for cell in by_task[task]])

    done = 0
    with Crew(jobs) as crew:
        try:
            for task, answer in crew.work(tasks, lambda: watcher.stop_requested, may_begin):
                if "note" in answer:
                    watcher.on_note(answer["note"])
                    continue
                for cell in by_task[task]:
                    found = answer.get("runs", {}).get(cell.name, answer)  # a worker that died answers for all
                    if found.get("stopped"):
                        continue
                    done += 1
                    if found.get("reason"):
                        errors.add(cell.name, str(found["reason"]), of_input=bool(found.get("of_input")))
                    _tell_end(tell, done, len(cells), cell, errors)
        except KeyboardInterrupt:
            tell("Stopping after the rounds in progress, with checkpoints; press Ctrl-C again to stop at once.")
            with suppress(KeyboardInterrupt):
                crew.stop()
            raise _stopped(done, len(cells)) from None
    if done < len(cells):
        raise _stopped(done, len(cells))


def _fetch_data(cells: Sequence[Cell]) -> None:
    """Download what must be downloaded once, before several processes try to at the same time."""
    for data, folder in {(cell.config.data, cell.config.data_folder) for cell in cells}:
        if parse_address(data) is None:
            with suppress(PolyfedError):  # every run will say what is wrong
                load_dataset(data, folder)


def _portable(config: Experiment) -> dict[str, Any]:
    return config.model_dump(mode="json", exclude_unset=True)


def _tell_end(tell: Callable[[str], None], number: int, total: int, cell: Cell, errors: Errors) -> None:
    problem = errors.reasons.get(cell.name)
    tell(f"{number} of {total}: {cell.name} {f'failed: {problem}' if problem else 'finished'}")


def _stopped(done: int, total: int, why: str = "") -> Interrupted:
    return Interrupted(f"stopped with {done} of {total} runs done{why}; the same command continues with the others.")


def reason_of(error: BaseException) -> str:
    """Why a run failed, in one line."""
    return str(error) if isinstance(error, PolyfedError) else f"{type(error).__name__}: {first_line(error)}"
