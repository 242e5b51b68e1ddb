"""A search: as many trials for each method, each judged on validation samples, and the settings that were best."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from polyfed.assemble import data_facts, data_kept, named_data
from polyfed.comparison.outcomes import check_metric
from polyfed.comparison.plan import checked_seeds, nested
from polyfed.comparison.together import most_together
from polyfed.config import Experiment, merged
from polyfed.config import experiment as checked
from polyfed.data.splits import parse_split
from polyfed.errors import InputError, RunError
from polyfed.methods import find_method
from polyfed.metrics import Metric
from polyfed.records import disk
from polyfed.resuming import enough_memory
from polyfed.server.federation import Interrupted, Watcher
from polyfed.tuning.pictures import draw_search
from polyfed.tuning.records import DATA, Trial, Tuned, TuneFolder
from polyfed.tuning.space import Domain, Sampler, as_space, check_space, of_method, search_space, set_by_user
from polyfed.tuning.study import Study

SEEDS = (100, 101)
"""The seeds of a search: not those of a comparison, so that what is reported was not also what was chosen by."""
UNNAMED = {
    "data": "save yours with numpy.savez('mine.npz', x=…, y=…), and give data='npz:mine.npz'",
    "models": "put yours into a module, and give models='module:name'",
}
"""What `polyfed.run` accepts as objects but a search does not, and what to do."""


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
    # What was hashed is what all trials have, even if the file changes meanwhile.
    with data_kept(), TuneFolder.claimed(Path(out), plan | _facts(base), chosen) as folder:
        spaces = {method: search_space(method, given, sampler, settings) for method in methods}
        studies = [
            Study(folder, method, space, sampler, seeds, settings, prune, keep_runs, together, watcher or Watcher())
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


def _facts(base: Experiment) -> dict[str, str]:
    """The hash of the data, by which a search that continues recognises them."""
    with enough_memory("the data"):
        return {DATA: data_facts(named_data(base), [])[DATA]}


def _check_equal(folder: TuneFolder, methods: Sequence[str], trials: int) -> None:
    """Raise if a method has had more trials than the others would get."""
    for method in methods:
        if (had := len(folder.of(method))) > trials:
            raise InputError(
                f"'{folder.path}' has {had} trials of {method} already, and every method must have as many: ask for "
                f"--trials {had} or more, or choose another folder with --out."
            )


def _tuned(
    study: Study,
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
    file = folder.write_best(f"best-{disk.file_name(method)}.yaml", content)
    return Tuned(method, best, len(folder.of(method)), file)


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
    if "method.name" in set_by_user(settings):
        raise InputError("method can't be set: list the methods to tune, and set only their options.")
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


def _need_optuna() -> None:
    try:
        import optuna  # noqa: F401
    except ImportError as error:
        raise InputError("tuning needs Optuna: install it with `pip install 'polyfed[tune]'`.") from error
