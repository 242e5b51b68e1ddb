"""Whether the methods learn on real data: accuracy after some rounds, against clients that train alone.

Runs every method with several seeds through the command line, `polyfed run METHOD … --out DIR/METHOD-seedS`, and
prints accuracy (mean ± sample standard deviation over seeds) and communication. Finished runs are reused and
interrupted ones resumed, so the same command goes on after a stop. --summary writes tables and pictures.

    python benchmarks/learning.py --methods standalone,fedproto --data digits --rounds 5
    python benchmarks/learning.py --data cifar10 --jobs 12 --summary results/cifar10
    python benchmarks/learning.py --methods fedavg,standalone --models cnn1
    python benchmarks/learning.py --methods fedproto --tune weight=0.1,1,10

--tune tries values of one option of one method and reports accuracy on validation samples only, so that a value can be
chosen without looking at the test samples. NAME is an option of the method; training.NAME is a training setting.
"""

from __future__ import annotations

import argparse
import io
import math
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from rich.console import Console
from rich.table import Table

from polyfed import METHODS, __version__
from polyfed.assemble import find_device
from polyfed.cli import _settings as parse_settings  # so that --set means here what it means there
from polyfed.config import Experiment, experiment, merged
from polyfed.data import load_dataset
from polyfed.errors import InputError, PolyfedError
from polyfed.methods import find_method
from polyfed.records import RunFolder

PASSED_ON = (
    "data", "clients", "participation", "classes_per_client", "models", "rounds", "batch_size", "lr", "epochs",
    "device", "engine",
)  # fmt: skip
"""Options that go to `polyfed run` as they are."""

NOT_NUMBERS = {"data_folder", "engine", "device", "workers", "memory_budget", "checkpoint_every"}
"""Settings that may differ between a run and the one that is asked for: they only say where and how it runs."""

ACCURACIES = {
    "accuracy_final": "final",
    "accuracy_at_best_validation": "best on\nvalidation",
    "accuracy_best": "best on\ntest",
    "accuracy_classifier": "classifier\nalone",
    "validation_final": "validation\nat the end",
}
FLOATS = {"upload_floats": "floats\nup", "download_floats": "floats\ndown"}
DIFFERENCE = "final minus\nstandalone"

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
"""Okabe and Ito's, which colour-blind people can tell apart, without the black and the pale yellow."""
STYLES = (("-", "o"), ("-.", "s"), (":", "^"))
"""Lines and marks; after six methods the colours come again with the next of them."""

console = Console(width=132, highlight=False)


@dataclass(frozen=True)
class Job:
    """One run."""

    label: str
    """The method, or the value that is tried."""
    method: str
    seed: int
    folder: Path
    arguments: tuple[str, ...]
    """The command line after `polyfed run METHOD`."""
    wanted: Experiment

    def __str__(self) -> str:
        return self.folder.name

    @property
    def finished(self) -> bool:
        return (self.folder / "summary.json").exists()

    def command(self) -> list[str]:
        """A new run, or the rest of one that was interrupted."""
        begun = (self.folder / "config.yaml").exists()
        words = ["resume", str(self.folder)] if begun else ["run", self.method, *self.arguments]
        return [sys.executable, "-m", "polyfed", *words, "--quiet"]

    def check(self) -> None:
        """Raise if the folder holds a run with other settings."""
        if not (self.folder / "config.yaml").exists():
            return
        found, wanted = RunFolder.open(self.folder).config.model_dump(), self.wanted.model_dump()
        different = [name for name in wanted if name not in NOT_NUMBERS and found[name] != wanted[name]]
        if different:
            raise InputError(
                f"'{self.folder}' holds a run with another {' and '.join(different)}; delete it or choose another --out."
            )


def new_job(options: argparse.Namespace, method: str, seed: int, tried: tuple[str, str] | None = None) -> Job:
    """The run of one method with one seed; `tried` is an option and its value."""
    sets = [f"workers={cores_each(options)}"]
    sets += [f"data_folder={options.data_folder}"] if options.data_folder else []
    sets += options.set
    name = f"{method}-seed{seed}"
    if tried:
        option, value = tried
        sets.append(f"{option if '.' in option else f'method.{option}'}={value}")
        name = re.sub(r"[^\w.+-]", "_", f"{method}-{option}-{value}-seed{seed}")
    folder = options.out / name
    given = {option: getattr(options, option) for option in PASSED_ON} | {"seed": seed}
    arguments = [f"--{option.replace('_', '-')}={value}" for option, value in given.items()]
    arguments += [f"--set={pair}" for pair in sets] + [f"--out={folder}"]
    wanted = experiment(**merged({"method": {"name": method}, **given}, parse_settings(sets)))
    return Job(tried[1] if tried else method, method, seed, folder, tuple(arguments), wanted)


def cores_each(options: argparse.Namespace) -> int:
    """Processor cores that one of the runs side by side may keep busy."""
    return max(1, (os.cpu_count() or 1) // options.jobs)


# Running --------------------------------------------------------------------------------------------------------


def new_jobs(options: argparse.Namespace, failures: dict[str, str]) -> list[Job]:
    """All runs that are possible; the others are failures."""
    option, _, values = (options.tune or "").partition("=")
    trials = [(option, value) for value in values.split(",")] if options.tune else [None]
    jobs = []
    for method in options.methods:
        for tried in trials:
            for seed in options.seeds:
                try:
                    job = new_job(options, method, seed, tried)
                    job.check()
                    jobs.append(job)
                except PolyfedError as error:
                    name = f"{method} {'='.join(tried)} seed {seed}" if tried else f"{method} seed {seed}"
                    failures[name] = str(error)
                    report_failure(name, str(error))
    return jobs


def run_all(jobs: Sequence[Job], options: argparse.Namespace, failures: dict[str, str]) -> None:
    """Bring all runs to their end, several side by side; a failure does not stop the others."""
    left = [job for job in jobs if not job.finished]
    if len(left) < len(jobs):
        console.print(f"{len(jobs) - len(left)} of {len(jobs)} runs are already finished")
    if not left:
        return
    load_dataset(options.data, options.data_folder)  # fetched once, before several runs look for it at the same time
    with waiting_for(ThreadPoolExecutor(options.jobs)) as pool:
        futures = {pool.submit(run_one, job, cores_each(options)): job for job in left}
        for number, future in enumerate(as_completed(futures), 1):
            job, (seconds, error) = futures[future], future.result()
            if error:
                failures[str(job)] = error
                report_failure(str(job), error)
            else:
                console.print(f"{job} finished after {seconds:.0f} s ({number} of {len(left)})", soft_wrap=True)


@contextmanager
def waiting_for(pool: ThreadPoolExecutor) -> Iterator[ThreadPoolExecutor]:
    """At Ctrl-C no new run begins; those under way hear of it too and end their round with a checkpoint."""
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def run_one(job: Job, cores: int) -> tuple[float, str]:
    """Seconds, and what went wrong if anything did."""
    begin = time.perf_counter()
    environment = {**os.environ, "OMP_NUM_THREADS": str(cores)}
    done = subprocess.run(job.command(), env=environment, capture_output=True, text=True)
    lines = done.stderr.strip().splitlines()
    error = "\n".join(lines[-20:]) or f"exit status {done.returncode}"
    return time.perf_counter() - begin, error if done.returncode else ""


def report_failure(name: str, error: str) -> None:
    console.print(f"{name} failed: {error}", style="red", markup=False, soft_wrap=True)


# Results --------------------------------------------------------------------------------------------------------


def result_of(job: Job) -> dict[str, Any]:
    """A finished run in a few numbers."""
    folder = RunFolder.open(job.folder)
    summary, config, rounds = folder.summary(), folder.config, folder.rounds()
    row: dict[str, Any] = {"method": job.method, "seed": job.seed}
    row |= {name: number(summary[name]) for name in ACCURACIES if name in summary}
    row |= accuracies_of(folder.evaluations())
    row |= {name: summary[name] / (config.participants * config.rounds) for name in FLOATS}
    row["replies_left_out"] = int((rounds["participants"] - rounds["replies"]).sum())
    return row


def accuracies_of(evaluations: pd.DataFrame) -> dict[str, float]:
    """What only evaluations.csv knows; the rule by which a method itself predicts comes first there."""
    own = evaluations["rule"].iloc[0]
    table = evaluations.pivot(index="round", columns=["part", "rule"], values="accuracy_mean")
    other = own != "classifier" and ("test", "classifier") in table
    return {
        "accuracy_classifier": table["test", "classifier"].iloc[-1] if other else math.nan,
        "validation_final": table["validation", own].iloc[-1],
        "validation_best": table["validation", own].max(),
    }


def number(value: float | None) -> float:
    return math.nan if value is None else value


def results_of(jobs: Sequence[Job]) -> pd.DataFrame:
    """A row per method and seed."""
    runs = pd.DataFrame([result_of(job) for job in jobs])
    alone = runs[runs["method"] == "standalone"].set_index("seed")["accuracy_final"]
    runs["difference_to_standalone"] = runs["accuracy_final"] - runs["seed"].map(alone).astype(float)
    return runs


def curves_of(jobs: Sequence[Job]) -> pd.DataFrame:
    """Accuracy over rounds, mean and standard deviation over seeds."""
    frames = [RunFolder.open(job.folder).rounds().assign(method=job.method) for job in jobs]
    grouped = pd.concat(frames).groupby(["method", "round"], sort=False)["accuracy_mean"]
    return grouped.agg(accuracy="mean", std="std").reset_index()


def spread(values: pd.Series, sign: str = "") -> str:
    """Percent with the standard deviation over seeds.

    >>> spread(pd.Series([0.5, 0.6]))
    '55.00 ± 7.07'
    """
    known = values.dropna()
    if known.empty:
        return "–"
    return f"{100 * known.mean():{sign}.2f}" + (f" ± {100 * known.std():.2f}" if len(known) > 1 else "")


def rows_of(runs: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    """Header and cells of the table, a row per method."""
    header = ["method", "seeds", *ACCURACIES.values(), *FLOATS.values(), DIFFERENCE]
    rows = []
    for method, own in runs.groupby("method", sort=False):
        difference = "–" if method == "standalone" else spread(own["difference_to_standalone"], "+")
        accuracies = [spread(own[name]) for name in ACCURACIES]
        rows.append(
            [str(method), str(len(own)), *accuracies, *(f"{own[name].mean():,.0f}" for name in FLOATS), difference]
        )
    return header, rows


def show(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(title=title)
    for position, column in enumerate(header):
        table.add_column(column, justify="right" if position else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def setting(options: argparse.Namespace) -> str:
    """The setting in words."""
    return (
        f"{options.data}, {options.clients} clients, participation {options.participation:g}, networks "
        f"{options.models}, {options.rounds} rounds"
    )


# Summary --------------------------------------------------------------------------------------------------------


def write_summary(options: argparse.Namespace, jobs: Sequence[Job], runs: pd.DataFrame, failed: dict[str, str]) -> None:
    """learning.csv, learning.md, curves.csv and the pictures."""
    folder: Path = options.summary
    folder.mkdir(parents=True, exist_ok=True)
    runs.to_csv(folder / "learning.csv", index=False, float_format="%.6g")
    (folder / "learning.md").write_text(markdown(options, runs, failed), encoding="utf-8")
    curves = curves_of(jobs)
    curves.to_csv(folder / "curves.csv", index=False, float_format="%.6g")
    methods = list(curves["method"].unique())
    looks = [look(position) for position in range(len(methods))]
    styles = dict(zip([m for m in methods if m != "standalone"], looks, strict=False))
    styles["standalone"] = {"color": "black", "linestyle": "--"}
    draw(curves, methods, styles, folder / "curves.png", (9, 6), setting(options))
    for method in methods:
        if method != "standalone":
            shown = [name for name in ("standalone", method) if name in methods]
            draw(curves, shown, styles, folder / f"curve-{method}.png", (6, 3.6), f"{method} on {options.data}")
    console.print(f"results are in {folder}", soft_wrap=True)


def markdown(options: argparse.Namespace, runs: pd.DataFrame, failures: dict[str, str]) -> str:
    header, rows = rows_of(runs)
    lines = [[cell.replace("\n", " ") for cell in header], ["---"] + ["---:"] * (len(header) - 1), *rows]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    failed = "".join(f"\n- {name} failed: {error.splitlines()[-1]}" for name, error in failures.items())
    return f"""# Do the methods learn?

{setting(options)}. Accuracy in percent, mean over clients, then mean ± sample standard deviation over seeds. "Best on
test" picks the round by looking at the test samples, so it is too kind; "classifier alone" stands where a method itself
predicts in another way. Floats are per participant and round.

{table}
{failed and failed + chr(10)}
    {shlex.join(["python", "benchmarks/learning.py", *sys.argv[1:]])}

polyfed {__version__}, torch {torch.__version__}, {device_name(options.device)}, {date.today().isoformat()}
"""


def device_name(device: str) -> str:
    """The GPU's name, or the processor's."""
    found = find_device(device)
    if found.type == "cuda":
        return torch.cuda.get_device_name(found)
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{os.cpu_count()} cores of {names[0] if names else platform.processor() or platform.machine()}"


def look(position: int) -> dict[str, Any]:
    """Colour, line and mark of the method at that place."""
    line, mark = STYLES[position // len(COLOURS) % len(STYLES)]
    return {"color": COLOURS[position % len(COLOURS)], "linestyle": line, "marker": mark, "markersize": 4}


def draw(
    curves: pd.DataFrame, methods: Sequence[str], styles: dict[str, Any], path: Path, inches: tuple[float, float],
    title: str,
) -> None:  # fmt: skip
    """Accuracy over rounds as a small PNG, 100 pixels to an inch."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator
    from PIL import Image

    figure, axes = pyplot.subplots(figsize=inches, dpi=100, layout="constrained")
    for method in methods:
        own = curves[curves["method"] == method]
        middle, around, style = 100 * own["accuracy"], 100 * own["std"].fillna(0), styles[method]
        axes.plot(own["round"], middle, label=method, linewidth=1.6, markevery=max(1, len(own) // 8), **style)
        axes.fill_between(own["round"], middle - around, middle + around, color=style["color"], alpha=0.1, linewidth=0)
    axes.set(xlabel="round", ylabel="accuracy on test samples (%)")
    axes.set_title(title, fontsize=10)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right center", frameon=False, handlelength=3)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png")
    pyplot.close(figure)
    Image.open(drawn).convert("RGB").quantize(64).save(path, optimize=True)


# Command line ---------------------------------------------------------------------------------------------------


def names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def seeds(text: str) -> list[int]:
    return [int(seed) for seed in names(text)]


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = [name for name in METHODS if name != "fedavg"]
    parser.add_argument(
        "--methods", type=names, default=default, help="default: all but fedavg, which needs one network"
    )
    parser.add_argument("--seeds", type=seeds, default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--data-folder", type=Path, help="where datasets are; default: $POLYFED_DATA or ./data")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--participation", type=float, default=1.0)
    parser.add_argument("--classes-per-client", type=int, default=2)
    parser.add_argument("--models", default="papers")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side; about 12 on a GPU with 16 cores")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="as of polyfed run")
    parser.add_argument("--out", type=Path, default=Path("runs/learning"), help="where the run folders are")
    parser.add_argument("--summary", type=Path, help="folder for tables and pictures; default: print only")
    parser.add_argument("--tune", metavar="NAME=V1,V2,…", help="try values of one option, on validation samples")
    options = parser.parse_args()
    if options.jobs < 1:
        parser.error("--jobs must be at least 1")
    if options.tune and (len(options.methods) != 1 or not re.fullmatch(r"[\w.-]+=[^,]+(,[^,]+)*", options.tune)):
        parser.error("--tune takes NAME=V1,V2,… and one method (--methods fedproto)")
    if options.summary and not options.tune and not find_spec("matplotlib"):
        parser.error("--summary draws pictures and needs matplotlib: pip install 'polyfed[pictures]'")
    return options


def report_tuning(options: argparse.Namespace, jobs: Sequence[Job]) -> None:
    """Accuracy on validation samples by value; the test samples stay out of it."""
    frame = pd.DataFrame([{"value": job.label, **result_of(job)} for job in jobs])
    rows = [
        [str(value), str(len(own)), spread(own["validation_final"]), spread(own["validation_best"])]
        for value, own in frame.groupby("value", sort=False)
    ]
    name = options.tune.partition("=")[0]
    title = f"{options.methods[0]}: accuracy on validation samples (%)\n{setting(options)}"
    show(title, [name, "seeds", "at the end", "at its best round"], rows)


def report(options: argparse.Namespace, jobs: Sequence[Job], failures: dict[str, str]) -> None:
    """The table, and the summary where one is asked for."""
    runs = results_of(jobs)
    title = f"accuracy (%) and floats per participant and round\n{setting(options)}"
    show(title, *rows_of(runs))
    for row in runs[runs["replies_left_out"] > 0].itertuples():
        console.print(f"note: {row.method} seed {row.seed}: {row.replies_left_out} replies were left out", style="red")
    if options.summary:
        write_summary(options, jobs, runs, failures)


def main() -> None:
    options = read_options()
    failures: dict[str, str] = {}
    try:
        for method in options.methods:
            find_method(method)
        jobs = new_jobs(options, failures)
        run_all(jobs, options, failures)
        finished = [job for job in jobs if job.finished]
        if finished:
            report_tuning(options, finished) if options.tune else report(options, finished, failures)
    except PolyfedError as error:
        sys.exit(f"learning: {error}")
    except KeyboardInterrupt:
        console.print("Stopped; the same command goes on.")
        sys.exit(130)
    if failures:
        console.print(f"{len(failures)} failed: {', '.join(failures)}", style="red", soft_wrap=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
