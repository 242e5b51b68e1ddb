"""Search for good settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from polyfed.cli.base import Together, error_console, out_console, watch
from polyfed.cli.options import experiment_options
from polyfed.errors import InputError, unknown_name
from polyfed.report import tables
from polyfed.tuning.records import Trial
from polyfed.tuning.space import Sampler, parse_search


@experiment_options("seed")
def tune(
    methods: Annotated[list[str], typer.Argument(metavar="METHOD...", help="methods to tune")],
    changes: dict[str, Any],
    trials: Annotated[int, typer.Option(metavar="NUMBER", help="trials of each method")] = 20,
    seeds: Annotated[
        str, typer.Option(metavar="SEEDS", help="seeds of the search; a comparison must use others")
    ] = "100-101",
    search: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUES",
            help="a setting to search, as VALUE,VALUE or LOW..HIGH; default: training and the method's own grid",
        ),
    ] = None,
    sampler: Annotated[str, typer.Option(help="tpe (learns from earlier trials) or grid (tries every combination)")] = (
        "tpe"
    ),
    metric: Annotated[
        str,
        typer.Option(
            metavar="TEXT",
            help="what validation samples are scored by; one of accuracy, balanced_accuracy, macro_f1, auc",
        ),
    ] = "accuracy",
    prune: Annotated[
        bool, typer.Option(help="stop a trial that is worse than the median of its method's earlier ones")
    ] = True,
    keep_runs: Annotated[bool, typer.Option("--keep-runs", help="keep the run folder of every trial")] = False,
    together: Together = None,
    out: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="the search's folder; what is finished there stays  [required]")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="print only the files with the best settings")] = False,
) -> None:
    """Search for a method's best settings. By validation accuracy or another metric, as many trials for each."""
    from polyfed.tuning import tune as search_for

    if out is None or not out.strip():
        raise InputError("name the folder of the search with --out: it keeps every trial, and continues from there.")
    if sampler not in get_args(Sampler):
        raise unknown_name("sampler", sampler, get_args(Sampler))
    chosen: Sampler = "grid" if sampler == "grid" else "tpe"

    def tell(trial: Trial) -> None:
        if not quiet:
            out_console.print(tables.trial_line(trial), soft_wrap=True)

    # Rounds are not shown: their accuracies are those on test samples, which must not guide a search.
    found = watch(
        quiet,
        lambda watcher: search_for(
            methods, out=out, trials=trials, seeds=seeds, sampler=chosen,
            search=parse_search(search or [], chosen), metric=metric, prune=prune, keep_runs=keep_runs,
            together=together, watcher=watcher, tell=tell,
            note=lambda text: error_console.print(text, soft_wrap=True), **changes,
        ),
        lambda watcher: _stopped(out),
        rounds=False,
    )  # fmt: skip
    if not quiet:
        out_console.print(tables.tuned_table(found))
        if "standalone" not in methods:
            out_console.print(
                "Standalone was not tuned: before you compare with it, tune it with as many trials.", soft_wrap=True
            )
    for each in found:
        out_console.print(str(each.file), soft_wrap=True)
    if len(found) > 1 and not quiet:
        best = Path(out) / "best.yaml"
        out_console.print(f"`polyfed compare {best} --seeds 0-4 --out FOLDER` compares them.", soft_wrap=True)


def _stopped(out: str) -> str:
    return f"stopped; the same command continues the search in '{Path(out)}'."
