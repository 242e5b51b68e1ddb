"""Several runs, compared."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from polyfed.cli.base import Together, Trust, out_console, watch
from polyfed.cli.options import experiment_options
from polyfed.errors import InputError
from polyfed.yaml_text import parse_values

if TYPE_CHECKING:
    from polyfed.comparison.compare import Comparison


@experiment_options("seed")
def compare(
    methods: Annotated[
        list[str],
        typer.Argument(metavar="METHOD|FILE.yaml...", help="methods' names, or files with a method and its options"),
    ],
    changes: dict[str, Any],
    out: Annotated[str, typer.Option(metavar="FOLDER", help="the comparison's folder; what is finished there stays")],
    seeds: Annotated[str, typer.Option(metavar="0-4|0,3,7", help="the seeds of every method")] = "0-4",
    sweep: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=V1,V2", help="a setting and the values to try; again for more settings"),
    ] = None,
    jobs: Annotated[int, typer.Option(metavar="NUMBER", help="runs side by side, each in a process of its own")] = 1,
    together: Together = None,
    baseline: Annotated[
        str, typer.Option(metavar="METHOD", help="the method that the others are compared with")
    ] = "standalone",
    no_differences: Annotated[bool, typer.Option("--no-differences", help="compare without a baseline")] = False,
    round: Annotated[
        str, typer.Option(metavar="TEXT", help="the round that counts; one of final, best-validation, best-test")
    ] = "final",
    rule: Annotated[
        str | None, typer.Option(metavar="TEXT", help="the rule of prediction (default: each method's own)")
    ] = None,
    target: Annotated[
        float | None, typer.Option(metavar="NUMBER", help="say what it takes to reach this value, such as 0.8")
    ] = None,
    metric: Annotated[
        str,
        typer.Option(
            metavar="TEXT", help="what methods are ranked by; one of accuracy, balanced_accuracy, macro_f1, auc"
        ),
    ] = "accuracy",
    no_noise_floor: Annotated[
        bool, typer.Option("--no-noise-floor", help="don't run one of the runs twice to see how much it varies")
    ] = False,
    trust: Trust = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="print only the comparison's folder")] = False,
) -> None:
    """Compare methods over several seeds. With intervals, p values and costs."""
    from polyfed.comparison.compare import compare as compared  # statistics take a while to import

    if not out.strip():
        raise InputError("--out is empty: name the comparison's folder.")
    sweeps = parse_sweeps(sweep or [])
    found = watch(
        quiet,
        lambda watcher: compared(
            methods, out=out, seeds=seeds, sweeps=sweeps, jobs=jobs, together=together,
            baseline=None if no_differences else baseline, round=round, rule=rule, target=target, metric=metric,
            noise_floor=not no_noise_floor, trust=trust, watcher=watcher,
            tell=(lambda line: None) if quiet else lambda line: out_console.print(line, soft_wrap=True), **changes,
        ),
        lambda watcher: f"stopped; the same command continues in {out}.",
        rounds=jobs == 1 and out_console.is_terminal,  # a line for every round of many runs would bury the rest
    )  # fmt: skip
    if not quiet:
        _show(found)
    out_console.print(out, soft_wrap=True)
    if found.failures:
        raise typer.Exit(1)


def parse_sweeps(pairs: list[str]) -> dict[str, list[Any]]:
    """`clients=10,50` and the like; values that contain commas are written as a YAML list.

    >>> parse_sweeps(["lr=0.1,0.2", "models=[cnn1, 'cnn1,cnn5']"])
    {'lr': [0.1, 0.2], 'models': ['cnn1', 'cnn1,cnn5']}
    """
    sweeps: dict[str, list[Any]] = {}
    for pair in pairs:
        name, separator, text = pair.partition("=")
        if not separator or not name or not text.strip():
            raise InputError(f"--sweep takes NAME=V1,V2, such as --sweep clients=10,50, not '{pair}'.")
        if name in sweeps:
            raise InputError(f"{name} is swept twice: put all its values into one sweep.")
        sweeps[name] = parse_values(text)
    return sweeps


def _show(found: Comparison) -> None:
    from polyfed.comparison.render import terminal

    out_console.print()
    for sheet in found.sheets:
        out_console.print(terminal(sheet))
        out_console.print()
    for line in found.remarks:
        out_console.print(line, soft_wrap=True)
    for name, reason in found.failures.items():
        out_console.print(f"{name} failed: {reason}", soft_wrap=True)
