"""What a round costs on Ray's actors, against the threads engine in the same run: seconds, and bytes moved.

    python benchmarks/ray_round.py --clients 100 --hosts 2

The same clients train with both engines, in turn. "Cost of the actors" is the time that `train` takes beyond what the
slowest host works: packing, sending, waiting, and the copies of states in some rounds.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import mean, median
from typing import Any

from polyfed.assemble import assemble
from polyfed.bench import noise
from polyfed.config import RaySettings, experiment
from polyfed.engines import Engine, RayEngine, ThreadsEngine
from polyfed.records import RunFolder
from polyfed.server.federation import Federation


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="fedproto")
    parser.add_argument("--models", default="papers")
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--samples", type=int, default=64, help="of each client")
    parser.add_argument("--hosts", type=int, default=None)
    parser.add_argument("--rounds", type=int, default=25)
    given = parser.parse_args()
    config = experiment(
        method=given.method, data="python:noise", models=given.models, clients=given.clients, partition="iid",
        split="1:0:0", rounds=10_000, batch_size=64, lr=0.01, device="cpu", eval_every=10_000, checkpoint_every=10_000,
    )  # fmt: skip

    def people() -> Any:
        return assemble(config, noise(given.clients * given.samples))

    hosts, threads = people(), people()
    begin = time.perf_counter()
    with ExitStack() as stack:
        ray = stack.enter_context(closing(RayEngine(hosts, settings=RaySettings(hosts=given.hosts))))
        plain = stack.enter_context(closing(ThreadsEngine(threads)))
        print(f"Ray and {len(ray._actors)} hosts were ready after {time.perf_counter() - begin:.1f} s")
        measure(config, {ray: hosts, plain: threads}, given.rounds)
        sent, received = ray.sent / given.rounds / 1e6, ray.received / given.rounds / 1e6
        print(f"moved per round: {sent:.2f} MB down, {received:.2f} MB up")


def measure(config: Any, engines: dict[Engine, Any], rounds: int) -> None:
    """Run rounds of the engines in turn and print the medians."""
    times: dict[str, list[float]] = {engine.name: [] for engine in engines}
    costs: list[float] = []
    copies: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        runs = [
            Federation(config, clients.method, engine, RunFolder.create(Path(folder) / engine.name, config))
            for engine, clients in engines.items()
        ]
        for number in range(1, rounds + 1):
            for run in runs:
                before = run.engine.copying if isinstance(run.engine, RayEngine) else 0.0
                begin = time.perf_counter()
                run.round(number)
                times[run.engine.name].append(time.perf_counter() - begin)
                if isinstance(run.engine, RayEngine):
                    trained = [event["training_seconds"] for event in run.folder.events() if event["event"] == "round"]
                    costs.append(trained[-1] - run.engine.busy)
                    copies.append(run.engine.copying - before)
    for name, all_times in times.items():
        later = all_times[2:]
        print(f"{name:8} {median(later):.4f} s per round (of {len(later)}; {min(later):.4f} to {max(later):.4f})")
    print(f"cost of the actors: median {median(costs[2:]):.4f} s, mean {mean(costs[2:]):.4f} s per round")
    copied = ", ".join(str(number) for number, seconds in enumerate(copies, 1) if seconds)
    print(f"of it copies of states: {sum(copies):.4f} s in rounds {copied or 'none'}")


if __name__ == "__main__":
    main()
