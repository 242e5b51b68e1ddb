"""One trial after another: suggest settings, run them with every seed of the search, keep what validation says.

Optuna suggests and prunes; what was tried is kept in trials.csv and told to a fresh study at every start, so that a
search that was stopped continues exactly as if it had not been. Test samples are never looked at.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyfed.comparison.outcomes import without
from polyfed.comparison.runner import finish, reason_of
from polyfed.comparison.together import Run, finish_together, grouped
from polyfed.config import Experiment
from polyfed.config import experiment as checked
from polyfed.errors import ClientError, DivergedError, FolderError, InputError, RunError
from polyfed.records import RunFolder, disk
from polyfed.seeds import derive
from polyfed.server.federation import Interrupted, Watcher
from polyfed.tuning.attempts import Attempt, Pruner, validation_curve
from polyfed.tuning.records import Trial, TuneFolder
from polyfed.tuning.space import Choices, Sampler, Space, applied, grid_points, of_method

if TYPE_CHECKING:
    import optuna

STARTUP = 5
"""Trials of a method before TPE has something to learn from, and before any is pruned."""


class Study:
    """The search of one method."""

    def __init__(
        self,
        folder: TuneFolder,
        method: str,
        space: Space,
        sampler: Sampler,
        seeds: Sequence[int],
        settings: Mapping[str, Any],
        prune: bool,
        keep_runs: bool,
        together: int,
        watcher: Watcher,
    ) -> None:
        self.folder, self.method, self.space, self.seeds, self.together = folder, method, space, seeds, together
        self.settings, self.keep_runs, self.watcher = of_method(method, settings), keep_runs, watcher
        self.points = grid_points(space, seeds[0], method) if sampler == "grid" else None
        self.prune = prune
        self.study = _new_study()
        rounds = checked(**self.settings).rounds
        for trial in folder.of(method):
            if set(trial.settings) != set(space):
                raise folder.unreadable(f"trial {trial.number + 1} of {method} has other settings than are searched")
            if trial.state == "finished" and max(trial.curve, default=0) != rounds:  # later ones are pruned by it
                raise folder.unreadable(f"the curve of trial {trial.number + 1} of {method} is not complete")
            try:
                self._told(trial)
            except (ValueError, TypeError) as error:  # Optuna's complaints
                raise folder.unreadable(error) from error

    @property
    def most(self) -> int | float:
        """How many trials there can be."""
        if self.points is not None:
            return len(self.points)
        return 1 if not self.space else math.inf

    def run(self, count: float) -> Any:
        """Run trials until there are that many; yields each."""
        while (first := len(self.folder.of(self.method))) < count:
            begin = time.perf_counter()
            attempts = [self._attempt(number) for number in self._at_once(first, count)]
            self._run_together(attempts)
            shared = (time.perf_counter() - begin) / len(attempts)
            for attempt in attempts:
                trial = self._trial(attempt)
                trial = replace(trial, seconds=trial.seconds + shared)
                self.folder.add(trial)
                self._told(trial)
                if not self.keep_runs:
                    self._remove_runs(trial.number)
                yield trial

    def _at_once(self, first: int, count: float) -> list[int]:
        """The next trials that can run at the same time: those whose settings and end do not depend on each other."""
        numbers = [first]
        for number in range(first + 1, first + max(1, self.together // len(self.seeds))):
            starting = number < STARTUP
            if number >= count or not (starting or (self.points is not None and not self.prune)):
                break
            numbers.append(number)
        return numbers

    def _attempt(self, number: int) -> Attempt:
        asked, values = self._suggest(number)
        first = Pruner(self.watcher, asked if self.prune and number >= STARTUP else None, self.folder.metric)
        others = {seed: Pruner(self.watcher, None, self.folder.metric, first) for seed in self.seeds[1:]}
        try:
            config: Experiment | InputError = applied(self.settings, values)
        except InputError as error:
            config = error
        return Attempt(number, values, config, {self.seeds[0]: first, **others})

    def _run_together(self, attempts: Sequence[Attempt]) -> None:
        """Do the runs of these trials that can train together; all others are left."""
        runs = [run for attempt in attempts for run in attempt.runs(self.seeds)]
        for group in grouped(runs, lambda run: run[1], self.together):
            if len(group) == 1:
                continue
            named: dict[str, tuple[Attempt, int]] = {}
            works: dict[str, Run] = {}
            for attempt, config in group:
                path = self._path(attempt.number, config.seed)
                attempt.watchers[config.seed].call(path.name, leads=not works)
                works[path.name] = Run(config, path, attempt.watchers[config.seed])
                named[path.name] = attempt, config.seed
            errors = finish_together(works, finish)
            for name, (attempt, seed) in named.items():
                attempt.outcomes[seed] = errors.get(name)

    def _trial(self, attempt: Attempt) -> Trial:
        begin = time.perf_counter()
        trial = Trial(self.method, attempt.number, attempt.values, "finished")
        try:
            if isinstance(attempt.config, InputError):
                raise attempt.config
            scores: list[float] = []
            curve: dict[int, float] = {}
            for _, config in attempt.runs(self.seeds):
                curve_of_seed = self._run(attempt, config)
                curve = curve or curve_of_seed
                scores.append(curve_of_seed[max(curve_of_seed)])
                if attempt.watchers[config.seed].pruned:
                    trial = replace(trial, state="pruned")
                    break
            trial = replace(trial, value=sum(scores) / len(scores), curve=curve)
        except (DivergedError, InputError, ClientError, SystemExit) as error:
            # Settings that can't be trained are part of a search, and with them code of the user's that fails or exits;
            # anything else (a full disk, a stop) ends it. So does wrong input or code as long as nothing shows that any
            # trial could finish: it may be wrong for all of them.
            of_all = isinstance(error, InputError | ClientError) and self.folder.best(self.method) is None
            if of_all or isinstance(error, FolderError):
                raise
            trial = replace(trial, state="failed", reason=reason_of(error))
        return replace(trial, seconds=time.perf_counter() - begin)

    def _path(self, number: int, seed: int) -> Path:
        path = self.folder.path / "runs" / _run_name(self.method, number, seed)
        path.parent.mkdir(exist_ok=True)
        return path

    def _run(self, attempt: Attempt, config: Experiment) -> dict[int, float]:
        """Validation accuracy by round of one run, which continues if it was interrupted."""
        path, watcher = self._path(attempt.number, config.seed), attempt.watchers[config.seed]
        try:
            if config.seed not in attempt.outcomes:
                finish(config, path, watcher)
            elif (error := attempt.outcomes[config.seed]) is not None:
                raise error
        except Interrupted:
            if not watcher.pruned:
                raise
        found = validation_curve(RunFolder.open(path), self.folder.metric)
        if not found or math.isnan(found[max(found)]):
            if self.folder.metric == "auc":
                raise without(path, self.folder.metric)
            raise RunError(
                "clients have no validation samples, so there is nothing to choose by: use a split with a validation "
                "part, such as 8:1:1."
            )
        return found

    def _suggest(self, number: int) -> tuple[optuna.trial.Trial, dict[str, Any]]:
        import optuna

        if self.points is not None:
            self.study.enqueue_trial(_keys(self.points[number]))
        # A seed for each trial, so that what is suggested depends only on the trials before it.
        seed = derive(self.seeds[0], "tune", "suggest", self.method, number) % 2**32
        self.study.sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=STARTUP, multivariate=True)
        asked = self.study.ask(self._distributions())
        return asked, {name: self._value(name, asked.params[name]) for name in self.space}

    def _told(self, trial: Trial) -> None:
        """Let the study know a trial as it is recorded."""
        import optuna
        from optuna.trial import TrialState

        states = {"finished": TrialState.COMPLETE, "pruned": TrialState.PRUNED, "failed": TrialState.FAIL}
        for open_trial in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            self.study.tell(open_trial.number, state=TrialState.FAIL)
        self.study.add_trial(
            optuna.trial.create_trial(
                state=states[trial.state],
                params={name: self._key(name, trial.settings[name]) for name in self.space},
                distributions=self._distributions(),
                value=trial.value if trial.state == "finished" else None,
                intermediate_values=dict(trial.curve),
            )
        )

    def _distributions(self) -> dict[str, optuna.distributions.BaseDistribution]:
        from optuna import distributions

        found: dict[str, Any] = {}
        for name, domain in self.space.items():
            if isinstance(domain, Choices):
                found[name] = distributions.CategoricalDistribution([_text(value) for value in domain.values])
            elif domain.whole:
                found[name] = distributions.IntDistribution(int(domain.low), int(domain.high), log=domain.log)
            else:
                found[name] = distributions.FloatDistribution(domain.low, domain.high, log=domain.log)
        return found

    def _value(self, name: str, key: Any) -> Any:
        """A setting's value from what the study calls it: choices go by their texts, which may stand for anything."""
        domain = self.space[name]
        return key if not isinstance(domain, Choices) else {_text(value): value for value in domain.values}[key]

    def _key(self, name: str, value: Any) -> Any:
        return _text(value) if isinstance(self.space[name], Choices) else value

    def _remove_runs(self, number: int) -> None:
        """Remove the runs of a finished trial: models of hundreds of trials would fill a disk."""
        for seed in self.seeds:
            path = self.folder.path / "runs" / _run_name(self.method, number, seed)
            if (path / "run.json").is_file():
                shutil.rmtree(path)


def _new_study() -> optuna.Study:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    pruner = optuna.pruners.MedianPruner(n_startup_trials=STARTUP, n_warmup_steps=1)
    return optuna.create_study(direction="maximize", pruner=pruner)


def _run_name(method: str, trial: int, seed: int) -> str:
    return f"{disk.file_name(method)}-trial{trial}-seed{seed}"


def _text(value: Any) -> str:
    return repr(value)


def _keys(point: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _text(value) for name, value in point.items()}
