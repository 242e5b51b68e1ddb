"""How much longer several runs take than one, if their clients train together, and if they run one after another.

Ten clients with the five CNNs, 640 CIFAR-sized images each, batch 64, one epoch; FedProto and Standalone. A round is
everything that belongs to it: messages, server, evaluation, records. Rounds that compile and capture are left out,
and so is the last one, at whose end models are written.

    python benchmarks/stacked_runs.py [--device cuda] [--runs 5] [--rounds 20] [--differ lr] [--json]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from polyfed import api
from polyfed.bench import noise
from polyfed.compute import machine_name
from polyfed.data import Dataset
from polyfed.engines.together import Group
from polyfed.records import RunFolder
from polyfed.server.federation import Watcher

CLIENTS, IMAGES, BATCH = 10, 640, 64
WARM_UP = 8
"""Rounds in which kernels are compiled, steps captured, and smaller cohorts get graphs of their own."""
METHODS = ("standalone", "fedproto")


class Clock(Watcher):
    """When each round ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_round(self, round: int, row: Mapping[str, Any] | None) -> None:
        self.ends.append(time.perf_counter())


def run(method: str, number: int, data: Dataset, folder: Path, options: argparse.Namespace, clock: Clock) -> None:
    """One run, with the seed or the learning rate of its number."""
    seed, lr = (0, 0.01 * (1 + number / 10)) if options.differ == "lr" else (number, 0.01)
    api.run(
        method, data=data, models="papers", clients=CLIENTS, partition="iid", split="8:1:1", seed=seed, lr=lr,
        rounds=WARM_UP + options.rounds + 1, batch_size=BATCH, engine="vectorized", device=options.device,
        eval_every=options.eval_every, checkpoint_every=10_000, out=folder / f"{method}-{number}", watcher=clock,
        progress=False,
    )  # fmt: skip


def notes_of(folder: Path) -> list[str]:
    """What the engine noted in the runs of a folder, such as that clients of a network train one after another."""
    return list(dict.fromkeys(note for path in sorted(folder.iterdir()) for note in RunFolder.open(path).notes()))


def check_together(notes: Sequence[str]) -> None:
    """Raise if runs did not train with the others, because the comparison would be of something else."""
    for note in notes:
        if "together" in note:
            raise RuntimeError(note)


def seconds_per_round(clocks: Sequence[Clock]) -> float:
    """The mean time of a round after the warm-up, until the last run has had it.

    Without the last round, at whose end a run writes its models while the others wait.
    """
    ends = [max(each) for each in zip(*(clock.ends for clock in clocks), strict=True)][:-1]
    return (ends[-1] - ends[WARM_UP - 1]) / (len(ends) - WARM_UP)


def measure(method: str, data: Dataset, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds per round of one run, of all together, and of all one after another."""
    with tempfile.TemporaryDirectory() as folder:
        alone = [Clock() for _ in range(options.runs)]
        for number, clock in enumerate(alone):
            run(method, number, data, Path(folder) / "alone", options, clock)
        clocks = [Clock() for _ in range(options.runs)]
        works = {
            f"run {number}": lambda number=number, clock=clock: run(
                method, number, data, Path(folder) / "together", options, clock
            )
            for number, clock in enumerate(clocks)
        }
        failed = Group().run(works)
        for error in failed.values():
            raise error
        check_together(notes_of(Path(folder) / "together"))
        notes = dict.fromkeys(note for way in ("alone", "together") for note in notes_of(Path(folder) / way))
    one_by_one = [seconds_per_round([clock]) for clock in alone]
    one, together = sorted(one_by_one)[len(one_by_one) // 2], seconds_per_round(clocks)
    return {
        "method": method,
        "one run": one,
        f"{options.runs} together": together,
        f"{options.runs} one after another": sum(one_by_one),
        "together ÷ one run": together / one,
        "one after another ÷ together": sum(one_by_one) / together,
        "notes": list(notes),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=20, help="measured rounds, after the warm-up")
    parser.add_argument("--eval-every", type=int, default=1, help="rounds between two evaluations")
    parser.add_argument("--differ", choices=("seed", "lr"), default="seed", help="what differs between runs")
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--images", type=int, default=IMAGES, help="training images of each client")
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    options = parser.parse_args()
    data = noise(CLIENTS * options.images * 10 // 8)
    rows = [measure(method, data, options) for method in options.methods]
    console = Console()
    if options.json:
        console.print_json(json.dumps({"machine": machine_name(torch.device(options.device)), "rows": rows}))
        return
    table = Table(title=f"seconds per round, {machine_name(torch.device(options.device))}")
    notes = [f"note on {row['method']}: {note}" for row in rows for note in row.pop("notes")]
    for name in rows[0]:
        table.add_column(name, justify="left" if name == "method" else "right")
    for row in rows:
        table.add_row(*(f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values()))
    console.print(table)
    for note in notes:
        console.print(note, markup=False, soft_wrap=True)


if __name__ == "__main__":
    main()
