"""What a GPU does in a step of training in the papers' setting: how long it is busy, and which kernels take longest.

Ten clients of every run, batch 64, with momentum, decay, clipping and augmented images; the clients of all runs train
together. A step is one batch of every client. Kernels of different cohorts run at the same time: "busy" counts the time
in which any of them runs, "sum" adds up all of them, and "of" is the whole time, with what surrounds training.

    python benchmarks/step_kernels.py [--models papers] [--runs 1 3 5] [--method standalone] [--steps 50] [--rows 12]
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from polyfed import api
from polyfed.bench import noise
from polyfed.compute import machine_name
from polyfed.engines.together import Group
from polyfed.server.federation import Watcher

CLIENTS, BATCH = 10, 64
WARM_UP, MEASURED = 6, 3
"""Rounds; one more follows, because a run writes its models at its end."""
TRAINING = {"momentum": 0.9, "weight_decay": 1e-3, "clip": 50.0, "augment": True}


class Window(Watcher):
    """Profiles the rounds after the warm-up."""

    def __init__(self) -> None:
        self.profile = profile(activities=[ProfilerActivity.CUDA])

    def on_round(self, round: int, row: Mapping[str, Any] | None) -> None:
        if round in (WARM_UP, WARM_UP + MEASURED):
            torch.cuda.synchronize()
            self.profile.start() if round == WARM_UP else self.profile.stop()


def busy(spans: Iterable[tuple[int, int]]) -> int:
    """The length of the union of these spans.

    >>> busy([(0, 4), (2, 5), (7, 8)])
    6
    """
    total = end = 0
    for first, last in sorted(spans):
        total += max(0, last - max(first, end))
        end = max(end, last)
    return total


def measure(runs: int, given: argparse.Namespace) -> None:
    """Print one table."""
    window = Window()
    data = noise(CLIENTS * given.steps * BATCH)

    def one(number: int, folder: str) -> None:
        api.run(
            given.method, data=data, models=given.models, clients=CLIENTS, partition="iid", split="1:0:0", seed=number,
            rounds=WARM_UP + MEASURED + 1, batch_size=BATCH, lr=0.01, training=TRAINING, engine="vectorized",
            device="cuda", eval_every=10_000, checkpoint_every=10_000, out=Path(folder) / str(number), progress=False,
            watcher=window if number == 0 else Watcher(),
        )  # fmt: skip

    with tempfile.TemporaryDirectory() as folder:
        for error in Group().run({f"{n}": lambda n=n: one(n, folder) for n in range(runs)}).values():
            raise error
    result = window.profile.profiler.kineto_results  # type: ignore[union-attr]
    events = [event for event in result.events() if event.device_type() == torch.autograd.DeviceType.CUDA]
    steps = MEASURED * given.steps
    spans = [(event.start_ns(), event.start_ns() + event.duration_ns()) for event in events]
    times, counts = Counter[str](), Counter[str]()
    for event in events:
        times[event.name()] += event.duration_ns()
        counts[event.name()] += 1
    whole = max(last for _, last in spans) - min(first for first, _ in spans)
    shown = [f"{each / steps / 1e6:.3f}" for each in (busy(spans), whole, sum(times.values()))]
    print(
        f"{given.method}, {given.models}, {runs * CLIENTS} clients: {len(events) / steps:.0f} kernels and copies "
        f"a step, busy {shown[0]} of {shown[1]} ms, sum {shown[2]} ms"
    )
    for name, time in times.most_common(given.rows):
        print(f"{time / steps / 1e3:9.1f} µs {counts[name] / steps:7.2f} x  {name[:100]}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="standalone")
    parser.add_argument("--models", default="papers")
    parser.add_argument("--runs", type=int, nargs="+", default=[1, 3, 5])
    parser.add_argument("--steps", type=int, default=50, help="of a round")
    parser.add_argument("--rows", type=int, default=12, help="kernels that are listed")
    given = parser.parse_args()
    print(machine_name(torch.device("cuda")))
    for runs in given.runs:
        measure(runs, given)


if __name__ == "__main__":
    main()
