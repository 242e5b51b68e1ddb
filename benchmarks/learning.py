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
import math
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
from curves import draw_all
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from polyfed import METHODS
from polyfed.cli import parse_settings  # so that --set means here what it means there
from polyfed.config import PRESETS, experiment, merged
from polyfed.data import load_dataset
from polyfed.errors import InputError, PolyfedError
from polyfed.records import RunFolder

PASSED_ON: dict[str, Any] = {
    "rounds": 30, "data": "cifar10", "clients": 10, "participation": 1.0, "classes_per_client": 2, "models": "papers",
    "device": "auto", "engine": "auto", "eval_every": 1,
}  # fmt: skip
"""Options that go to `polyfed run` as they are, with their defaults."""
TRAINING: dict[str, Any] = {"batch_size": 64, "lr": 0.01, "epochs": 1}
"""The same, where no preset says otherwise."""

NOT_NUMBERS = {"data_folder", "engine", "device", "workers", "memory_budget", "checkpoint_every"}
"""Settings that may differ between a run and the one that is asked for: they only say where and how it runs."""

ACCURACIES = {
    "accuracy_final": "final", "accuracy_at_best_validation": "best on\nvalidation", "accuracy_best": "best on\ntest",
    "accuracy_classifier": "classifier\nalone", "validation_final": "validation\nat the end",
}  # fmt: skip
FLOATS = {"upload_floats": "floats\nup", "download_floats": "floats\ndown"}

console = Console(width=150, highlight=False)  # wide enough for all columns, so that no number is cut


@dataclass(frozen=True)
class Job:
    """One run."""

    label: str
    """The method, or the value that is tried."""
    method: str
    seed: int
    folder: Path
    given: dict[str, Any]
    """Settings with an option of `polyfed run`."""
    sets: list[str]
    """Settings without, as NAME=VALUE."""

    @property
    def begun(self) -> bool:
        return (self.folder / "config.yaml").exists()

    @property
    def finished(self) -> bool:
        return (self.folder / "summary.json").exists()

    def command(self) -> list[str]:
        """A new run, or the rest of one that was interrupted."""
        options = [f"--{name.replace('_', '-')}={value}" for name, value in self.given.items()]
        options += [f"--set={pair}" for pair in self.sets] + [f"--out={self.folder}"]
        words = ["resume", str(self.folder)] if self.begun else ["run", self.method, *options]
        return [sys.executable, "-m", "polyfed", *words, "--quiet"]

    def check(self) -> None:
        """Raise if the run is impossible, or if its folder holds one with other settings."""
        values = {"method": {"name": self.method}, **self.given}
        wanted = experiment(**merged(values, parse_settings(self.sets))).model_dump()
        found = RunFolder.open(self.folder).config.model_dump() if self.begun else wanted
        different = [name for name in wanted if name not in NOT_NUMBERS and found[name] != wanted[name]]
        if different:
            problem = f"holds a run with another {' and '.join(different)}"
            raise InputError(f"'{self.folder}' {problem}; delete it or choose another folder (--out).")


def new_jobs(options: argparse.Namespace) -> list[Job]:
    """All runs that are asked for, in order."""
    option, _, values = (options.tune or "").partition("=")
    sets = [f"workers={options.cores}", *options.set]
    if options.data_folder:
        sets.insert(0, f"data_folder={options.data_folder}")
    jobs = []
    for method, value, seed in product(options.methods, dict.fromkeys(values.split(",")), options.seeds):
        given = passed_on(options) | {"seed": seed}
        tried = [f"{option if '.' in option else f'method.{option}'}={value}"] if option else []
        name = re.sub(r"[^\w.+-]", "_", f"{method}-{option}-{value}-seed{seed}" if option else f"{method}-seed{seed}")
        jobs.append(Job(value or method, method, seed, options.out / name, given, sets + tried))
    return jobs


def passed_on(options: argparse.Namespace) -> dict[str, Any]:
    """The setting, as `polyfed run` takes it."""
    names = [*PASSED_ON, "preset"] if options.preset else [*PASSED_ON, *TRAINING]
    return {name: getattr(options, name) for name in names}


def run_all(jobs: Sequence[Job], options: argparse.Namespace) -> dict[str, str]:
    """Bring all runs to their end, several side by side; returns what went wrong, by run."""
    failures: dict[str, str] = {}

    def fail(job: Job, error: str) -> None:
        failures[job.folder.name] = error
        console.print(f"{job.folder.name} failed: {error}", style="red", markup=False, soft_wrap=True)

    left: list[Job] = []
    for job in jobs:
        try:
            job.check()
            left += [] if job.finished else [job]
        except PolyfedError as problem:
            fail(job, str(problem))
    console.print(f"{len(left)} runs to do, {len(jobs) - len(left) - len(failures)} already finished")
    if not left:
        return failures
    load_dataset(options.data, options.data_folder)  # fetched once, before several runs look for it at the same time
    pool = ThreadPoolExecutor(options.jobs)
    try:
        futures = {pool.submit(run_one, job, options.cores): job for job in left}
        for number, future in enumerate(as_completed(futures), 1):
            console.print(f"{number} of {len(left)}: {futures[future].folder.name}", soft_wrap=True)
            if future.result():
                fail(futures[future], future.result())
    finally:  # at Ctrl-C no other run begins; those under way hear of it too and end their round with a checkpoint
        pool.shutdown(cancel_futures=True)
    return failures


def run_one(job: Job, cores: int) -> str:
    """Run or resume; returns what went wrong, if anything did."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(cores)}
    done = subprocess.run(job.command(), env=environment, capture_output=True, text=True)
    if done.returncode:
        return "\n".join(done.stderr.strip().splitlines()[-20:]) or f"exit status {done.returncode}"
    return ""


def result_of(job: Job) -> dict[str, Any]:
    """A finished run in a few numbers."""
    folder = RunFolder.open(job.folder)
    summary, config, rounds = folder.summary(), folder.config, folder.rounds()
    row: dict[str, Any] = {"method": job.method, "seed": job.seed}
    row |= {name: summary[name] for name in ACCURACIES if name in summary}
    row |= accuracies_of(folder.evaluations())
    row |= {name: summary[name] / (config.participants * config.rounds) for name in FLOATS}
    row["seconds"] = summary["seconds"]
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


def results_of(jobs: Sequence[Job]) -> pd.DataFrame:
    """A row per method and seed."""
    runs = pd.DataFrame([result_of(job) for job in jobs]).astype(dict.fromkeys(ACCURACIES, float))
    alone = runs[runs["method"] == "standalone"].set_index("seed")["accuracy_final"]
    runs["difference_to_standalone"] = runs["accuracy_final"] - runs["seed"].map(alone).astype(float)
    return runs


def curves_of(jobs: Sequence[Job]) -> pd.DataFrame:
    """Accuracy over rounds, mean and standard deviation over seeds."""
    frames = [RunFolder.open(job.folder).rounds().assign(method=job.method) for job in jobs]
    grouped = pd.concat(frames).groupby(["method", "round"], sort=False)["accuracy_mean"]
    return grouped.agg(accuracy="mean", std="std").reset_index()


def spread(values: pd.Series, sign: str = "") -> str:
    """Percent, with the standard deviation over seeds."""
    known = values.dropna()
    if known.empty:
        return "–"
    return f"{100 * known.mean():{sign}.2f}" + (f" ± {100 * known.std():.2f}" if len(known) > 1 else "")


def rows_of(runs: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    """Header and cells of the table, a row per method."""
    header = ["method", "seeds", *ACCURACIES.values(), *FLOATS.values(), "final minus\nstandalone"]
    rows = []
    for method, own in runs.groupby("method", sort=False):
        difference = "–" if method == "standalone" else spread(own["difference_to_standalone"], "+")
        accuracies = [spread(own[name]) for name in ACCURACIES]
        floats = [f"{own[name].mean():,.0f}" for name in FLOATS]
        rows.append([str(method), str(len(own)), *accuracies, *floats, difference])
    return header, rows


def show(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(title=title, box=SIMPLE)
    for position, column in enumerate(header):
        table.add_column(column, justify="right" if position else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def setting(options: argparse.Namespace) -> str:
    """The setting in words."""
    return f"{options.data}, {options.clients} clients, networks {options.models}, {options.rounds} rounds"


def write_summary(options: argparse.Namespace, jobs: Sequence[Job], runs: pd.DataFrame, failed: dict[str, str]) -> None:
    """learning.csv, learning.md, curves.csv and the pictures."""
    folder: Path = options.summary
    folder.mkdir(parents=True, exist_ok=True)
    runs.to_csv(folder / "learning.csv", index=False, float_format="%.6g")
    machines = {RunFolder.open(job.folder).origin() for job in jobs}
    (folder / "learning.md").write_text(markdown(options, runs, machines, failed), encoding="utf-8")
    curves = curves_of(jobs)
    curves.to_csv(folder / "curves.csv", index=False, float_format="%.6g")
    draw_all(curves, folder, setting(options), options.data)
    console.print(f"results are in {folder}", soft_wrap=True)


def markdown(options: argparse.Namespace, runs: pd.DataFrame, machines: set[str], failures: dict[str, str]) -> str:
    """The table with all that is needed to get it again."""
    header, rows = rows_of(runs)
    lines = [[cell.replace("\n", " ") for cell in header], ["---"] + ["---:"] * (len(header) - 1), *rows]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    failed = "".join(f"\n- {name} failed: {error.splitlines()[-1]}" for name, error in failures.items())
    return f"""# Do the methods learn?

{", ".join(f"{name} {value}" for name, value in passed_on(options).items()).replace("_", " ")}.

Accuracy in percent, mean over clients, then mean ± sample standard deviation over seeds. "Best on test" picks the round
by looking at the test samples, so it is too kind; "classifier alone" stands where a method itself predicts in another
way. Floats are per participant and round, averaged over all rounds.

{table}
{failed and failed + chr(10)}
```sh
{shlex.join(["python", "benchmarks/learning.py", *sys.argv[1:]])}
```

{chr(10).join(sorted(machines))}
"""


def seeds(text: str) -> list[int]:
    return list(dict.fromkeys(int(seed) for seed in text.split(",")))


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = ",".join(name for name in METHODS if name != "fedavg")
    parser.add_argument("--methods", default=default, metavar="A,B,…", help="default: all but fedavg")
    parser.add_argument("--seeds", type=seeds, default=[0, 1, 2], metavar="0,1,…", help="default: 0,1,2")
    for name, value in (PASSED_ON | TRAINING).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, help="default: %(default)s")
    parser.add_argument("--preset", choices=PRESETS, help="training settings of the papers, instead of the three above")
    parser.add_argument("--data-folder", type=Path, help="where datasets are; default: $POLYFED_DATA or ./data")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side; about 12 on a GPU with 16 cores")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="as of polyfed run")
    parser.add_argument("--out", type=Path, default=Path("runs/learning"), help="where the run folders are")
    parser.add_argument("--summary", type=Path, help="folder for tables and pictures; default: print only")
    parser.add_argument("--tune", metavar="NAME=V1,V2,…", help="try values of one option, on validation samples")
    options = parser.parse_args()
    options.methods = list(dict.fromkeys(options.methods.split(",")))
    if options.jobs < 1:
        parser.error("--jobs must be at least 1")
    options.cores = max(1, (os.cpu_count() or 1) // options.jobs)  # that one of the runs may keep busy
    if options.tune and (len(options.methods) != 1 or not re.fullmatch(r"[\w.-]+=[^,]+(,[^,]+)*", options.tune)):
        parser.error("--tune takes NAME=V1,V2,… and one method (--methods fedproto)")
    if options.summary and not options.tune and not find_spec("matplotlib"):
        parser.error("--summary draws pictures and needs matplotlib: pip install 'polyfed[pictures]'")
    return options


def report_tuning(options: argparse.Namespace, jobs: Sequence[Job]) -> None:
    """Accuracy on validation samples by value; the test samples stay out of it."""
    frame = pd.DataFrame([{"value": job.label, **result_of(job)} for job in jobs])
    columns = ("validation_final", "validation_best")
    groups = frame.groupby("value", sort=False)
    rows = [[str(value), str(len(own)), *(spread(own[name]) for name in columns)] for value, own in groups]
    title = f"{options.methods[0]}: accuracy on validation samples (%)\n{setting(options)}"
    show(title, [options.tune.partition("=")[0], "seeds", "at the end", "at its best round"], rows)


def report(options: argparse.Namespace, jobs: Sequence[Job], failures: dict[str, str]) -> None:
    """The table, and the summary where one is asked for."""
    runs = results_of(jobs)
    show(f"accuracy (%) and floats per participant and round\n{setting(options)}", *rows_of(runs))
    for row in runs[runs["replies_left_out"] > 0].itertuples():
        console.print(f"note: {row.method} seed {row.seed}: {row.replies_left_out} replies were left out", style="red")
    if options.summary:
        write_summary(options, jobs, runs, failures)


def main() -> None:
    options = read_options()
    try:
        jobs = new_jobs(options)
        failures = run_all(jobs, options)
        finished = [job for job in jobs if job.finished and job.folder.name not in failures]
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
