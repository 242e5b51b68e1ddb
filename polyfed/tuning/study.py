"""One trial after another: suggest settings, run them with every seed of the search, keep what validation says.

Optuna suggests and prunes; what was tried is kept in trials.csv and told to a fresh study at every start, so that a
search that was stopped continues exactly as if it had not been. Test samples are never looked at.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyfed.comparison.outcomes import check_metric, without
from polyfed.comparison.plan import checked_seeds, nested
from polyfed.comparison.runner import finish
from polyfed.comparison.together import Run, finish_together, grouped, most_together
from polyfed.config import Experiment, merged
from polyfed.config import experiment as checked
from polyfed.data.splits import parse_split
from polyfed.errors import DivergedError, FolderError, InputError, RunError
from polyfed.methods import find_method
from polyfed.metrics import Metric
from polyfed.records import RunFolder
from polyfed.seeds import derive
from polyfed.server.federation import Interrupted, Watcher
from polyfed.tuning.attempts import Attempt, Pruner, validation_curve
from polyfed.tuning.pictures import draw_search
from polyfed.tuning.records import Trial, Tuned, TuneFolder
from polyfed.tuning.space import (
    Choices,
    Domain,
    Sampler,
    Space,
    applied,
    as_space,
    check_space,
    grid_points,
    of_method,
    search_space,
)

if TYPE_CHECKING:
    import optuna

SEEDS = (100, 101)
"""The seeds of a search: not those of a comparison, so that what is reported was not also what was chosen by."""
UNNAMED = {
    "data": "save yours with numpy.savez('mine.npz', x=…, y=…), and give data='npz:mine.npz'",
    "models": "put yours into a module, and give models='module:name'",
}
"""What `polyfed.run` accepts as objects but a search does not, and what to do."""
STARTUP = 5
"""Trials of a method before TPE has something to learn from, and before any is pruned."""


def tune(
    methods: Sequence[str],
    *,
    out: str | Path,
    trials: int = 20,
    seeds: Sequence[int] | str = SEEDS,
    sampler: Sampler = "tpe",
    search: Mapping[str, Domain | Sequence[Any] | str] | None = None,
    metric: str = "accuracy",
    prune: bool = True,
    keep_runs: bool = False,
    together: int | None = None,
    watcher: Watcher | None = None,
    tell: Callable[[Trial], None] = lambda trial: None,
    note: Callable[[str], None] = lambda text: None,
    **settings: Any,
) -> list[Tuned]:
    """Search for the best settings of each method by validation accuracy, with as many trials for each.

    `metric` is what validation samples are scored by: accuracy, balanced_accuracy, macro_f1 or, for two classes, auc.
    `search` maps settings to lists of values or ranges such as `"0.001..0.1"`; without it the common training settings
    and each method's own grid are searched. `out` keeps every trial: the same call continues a search that was stopped,
    and more trials extend it. Up to `together` runs train their clients in the same cohorts: a trial's seeds, and
    trials that don't depend on each other; none: as many as make sense on a GPU. `tell` is called after each trial,
    `watcher` is told of every run.

    >>> tune(["fedproto", "standalone"], out="search", trials=10, rounds=10)           # doctest: +SKIP
    """
    _need_optuna()
    given, seeds = as_space(search or {}, sampler), checked_seeds(seeds)
    _check(methods, trials, given, settings)
    base = checked(**{**settings, "method": "standalone"})
    chosen, together = check_metric(metric, base.data), most_together(base, together)
    plan = {
        "settings": {
            **base.model_dump(mode="json", exclude={"method", "seed"}),
            "method": dict(settings.get("method", {})),
        },
        "seeds": seeds, "sampler": sampler, "search": {name: str(domain) for name, domain in given.items()},
        "prune": prune, "metric": chosen,
    }  # fmt: skip
    with TuneFolder.claimed(Path(out), plan, chosen) as folder:
        spaces = {method: search_space(method, given, sampler, settings) for method in methods}
        studies = [
            _Study(folder, method, space, sampler, seeds, settings, prune, keep_runs, together, watcher or Watcher())
            for method, space in spaces.items()
        ]
        _check_equal(folder, methods, trials)
        try:
            found = [_tuned(study, trials, settings, tell, note) for study in studies]
            contents = {each.method: _best_settings(each.best, settings, seeds, each.trials, chosen) for each in found}
            folder.write_best("best.yaml", contents[methods[0]] if len(methods) == 1 else {"methods": contents})
            draw_search([trial for trial in folder.trials if trial.method in methods], folder.path, chosen)
        except Interrupted as error:  # which names the run in progress, of which the user knows nothing
            raise Interrupted(f"stopped; the same command continues the search in '{folder.path}'.") from error
        except OSError as error:
            raise RunError(
                f"the search can't continue: {error.strerror or error}; when that is fixed, the same command continues."
            ) from error
    return found


def _check_equal(folder: TuneFolder, methods: Sequence[str], trials: int) -> None:
    """Raise if a method has had more trials than the others would get."""
    for method in methods:
        if (had := len(folder.of(method))) > trials:
            raise InputError(
                f"'{folder.path}' has {had} trials of {method} already, and every method must have as many: ask for "
                f"--trials {had} or more, or choose another folder with --out."
            )


def _tuned(
    study: _Study,
    trials: int,
    settings: Mapping[str, Any],
    tell: Callable[[Trial], None],
    note: Callable[[str], None],
) -> Tuned:
    """Run the trials of one method that are left, and write its best settings."""
    folder, method, count = study.folder, study.method, min(trials, study.most)
    if count < trials:
        note(f"{method}: there are only {count} combinations to try.")
    for trial in study.run(count):
        tell(trial)
    best = folder.best(method)
    if best is None:
        reason = next((trial.reason for trial in folder.of(method) if trial.reason), "all were pruned")
        raise RunError(f"no trial of {method} finished ({reason}).")
    content = _best_settings(best, settings, study.seeds, len(folder.of(method)), folder.metric)
    return Tuned(method, best, len(folder.of(method)), folder.write_best(f"best-{_file_name(method)}.yaml", content))


class _Study:
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
        except (DivergedError, InputError) as error:
            # Settings that can't be trained are part of a search; anything else (a full disk, a stop) ends it. So does
            # wrong input as long as nothing shows that any trial could finish: it may be wrong for all of them.
            of_input = isinstance(error, InputError) and self.folder.best(self.method) is None
            if of_input or isinstance(error, FolderError):
                raise
            trial = replace(trial, state="failed", reason=str(error))
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


def _best_settings(
    best: Trial, settings: Mapping[str, Any], seeds: Sequence[int], trials: int, metric: Metric
) -> dict[str, Any]:
    """An experiment: what the search was given, with the best values laid over it, and where they come from."""
    content = merged(of_method(best.method, settings), nested(best.settings))
    origin = {f"validation_{metric}": round(best.value, 6), "trials": trials, "seeds": list(seeds)}
    return {name: value for name, value in content.items() if value not in ({}, None)} | {"tuned": origin}


def _check(methods: Sequence[str], trials: int, given: Mapping[str, Domain], settings: Mapping[str, Any]) -> None:
    if isinstance(methods, str) or not methods or len(set(methods)) != len(methods):
        raise InputError("name the methods to tune in a list, each once.")
    for name, remedy in UNNAMED.items():
        if not isinstance(settings.get(name, ""), str):
            raise InputError(f"a search writes its best settings to files, so {name} must have a name there: {remedy}.")
    if trials < 1:
        raise InputError(f"trials is {trials}, but must be at least 1.")
    for method in methods:
        find_method(method)
    split = str(checked(**{**settings, "method": "standalone"}).split)
    if parse_split(split).validation == 0:
        raise InputError(
            f"split is {split}, so there are no validation samples and nothing to choose by: use a split with a "
            "validation part, such as 8:1:1."
        )
    check_space(methods, given, settings)


def _run_name(method: str, trial: int, seed: int) -> str:
    return f"{_file_name(method)}-trial{trial}-seed{seed}"


def _file_name(method: str) -> str:
    return method.replace(":", ".")


def _text(value: Any) -> str:
    return repr(value)


def _keys(point: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _text(value) for name, value in point.items()}


def _need_optuna() -> None:
    try:
        import optuna  # noqa: F401
    except ImportError as error:
        raise InputError("tuning needs Optuna: install it with `pip install 'polyfed[tune]'`.") from error
