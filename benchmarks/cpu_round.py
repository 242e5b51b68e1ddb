"""How fast a round is on a CPU, against a plain eager PyTorch loop that does the same steps in the same run.

Ten clients with the five CNNs, 640 CIFAR-sized images each, batch 64, one epoch. Prints seconds per round (best of
several), the ratio to the plain loop, the share of time outside training, and peak memory.

    python benchmarks/cpu_round.py [--repeats 5] [--json]
    python benchmarks/cpu_round.py --workers 1,2,4,8,16     # how a round's time falls with the number of workers
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from polyfed.assemble import assemble
from polyfed.bench import noise
from polyfed.compute import available_cores, machine_name
from polyfed.config import experiment
from polyfed.data import Dataset
from polyfed.engines import new_engine
from polyfed.engines.base import EngineSettings
from polyfed.models import Models
from polyfed.population import Population
from polyfed.records import RunFolder
from polyfed.server.federation import Federation

CLIENTS, IMAGES, BATCH, LR, CLASSES = 10, 640, 64, 0.01, 10


def setting(method: str, engine: str, images: int = IMAGES, models: Models | None = None) -> tuple[Any, Population]:
    """The experiment and its clients."""
    config = experiment(
        method=method, data="python:noise", models="papers", clients=CLIENTS, partition="iid", split="1:0:0",
        rounds=1000, batch_size=BATCH, lr=LR, engine=engine, device="cpu", eval_every=10_000, checkpoint_every=10_000,
    )  # fmt: skip
    return config, assemble(config, noise(CLIENTS * images), models)


def plain_round(clients: Population, method: str) -> Callable[[], None]:
    """The same steps as a person would write them: one client after another, on all cores."""
    networks = [clients.new_network(client).model for client in range(CLIENTS)]
    width = clients.task.feature_size
    prototypes = torch.zeros(CLASSES, width)
    scale, shift = 1 / (255 * 0.25), -0.5 / 0.25

    def batch(indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return clients.dataset.images[indices].float() * scale + shift, clients.dataset.labels[indices]

    def one_round() -> None:
        sums, counts = torch.zeros(CLASSES, width), torch.zeros(CLASSES)
        for client, network in enumerate(networks):
            samples = clients.data[client].train
            optimiser = torch.optim.SGD(network.parameters(), LR)
            network.train()
            for chunk in samples[torch.randperm(len(samples))].split(BATCH):
                x, y = batch(chunk)
                features = network.features(x)
                loss = nn.functional.cross_entropy(network.head(features), y)
                if method == "fedproto":
                    loss = loss + 0.1 * (features - prototypes[y]).norm(dim=1).mean()
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
            if method == "fedproto":
                network.eval()
                with torch.no_grad():
                    for chunk in samples.split(256):
                        x, y = batch(chunk)
                        sums.index_add_(0, y, network.features(x))
                        counts += torch.bincount(y, minlength=CLASSES)
        if method == "fedproto":
            prototypes.copy_(sums / counts[:, None])

    return one_round


class BatchTimer:
    """Adds up the time that all threads spend on making batches."""

    def __init__(self, dataset: Dataset) -> None:
        self.seconds = 0.0
        self._lock = threading.Lock()
        self._batch = dataset.batch

    def __call__(self, *arguments: Any) -> Any:
        begin = time.perf_counter()
        made = self._batch(*arguments)
        with self._lock:
            self.seconds += time.perf_counter() - begin
        return made


def polyfed_round(
    method: str, engine: str, folder: Path, workers: int | None = None
) -> tuple[Callable[[], None], Callable[[], dict[str, float]]]:
    """A whole round of polyfed with its records, and what was measured inside the last one."""
    config, clients = setting(method, engine)
    runner = new_engine(engine, clients, EngineSettings(workers=workers))
    federation = Federation(config, clients.method, runner, RunFolder.create(folder, config))
    timer = BatchTimer(runner.population.dataset)  # type: ignore[attr-defined]
    object.__setattr__(runner.population.dataset, "batch", timer)  # type: ignore[attr-defined]
    inside = {"train": 0.0, "round": 0.0, "data": 0.0}
    train = runner.train

    def timed_train(*arguments: Any, **options: Any) -> Any:
        begin = time.perf_counter()
        replies = train(*arguments, **options)
        inside["train"] = time.perf_counter() - begin
        return replies

    runner.train = timed_train  # type: ignore[method-assign]
    number = 0

    def one_round() -> None:
        nonlocal number
        number += 1
        timer.seconds = 0.0
        begin = time.perf_counter()
        federation.round(number)
        inside["round"] = time.perf_counter() - begin
        inside["data"] = timer.seconds / (min(CLIENTS, workers or available_cores()) if engine == "threads" else 1)

    return one_round, lambda: dict(inside)


def measure(method: str, repeats: int) -> list[dict[str, Any]]:
    """Rows of the table for one method; contenders take turns so that a busy moment hits all of them."""
    _, clients = setting(method, "sequential")
    plain = plain_round(clients, method)
    with tempfile.TemporaryDirectory() as folder:
        contenders = {e: polyfed_round(method, e, Path(folder) / e) for e in ("sequential", "threads")}
        plain()
        for one_round, _ in contenders.values():
            one_round()
        times: dict[str, list[float]] = {"plain loop": [], "sequential": [], "threads": []}
        best: dict[str, dict[str, float]] = {}
        for _ in range(repeats):
            begin = time.perf_counter()
            plain()
            times["plain loop"].append(time.perf_counter() - begin)
            for name, (one_round, inside) in contenders.items():
                one_round()
                seen = inside()
                if not times[name] or seen["round"] < min(times[name]):
                    best[name] = seen
                times[name].append(seen["round"])
    reference = min(times["plain loop"])
    rows = []
    for name, seconds in times.items():
        row: dict[str, Any] = {
            "method": method,
            "engine": name,
            "seconds": min(seconds),
            "ratio": min(seconds) / reference,
        }
        if name in best:
            seen = best[name]
            row["training_ratio"] = seen["train"] / reference
            row["outside"] = (seen["round"] - seen["train"] + seen["data"]) / seen["round"]
        rows.append(row)
    return rows


def scaling(method: str, workers: list[int], repeats: int) -> list[dict[str, Any]]:
    """A round's time with so many workers, each with its ratio to one worker and to a plain loop on all cores.

    With more workers than clients, or than cores, nothing more can be gained.
    """
    _, clients = setting(method, "sequential")
    with tempfile.TemporaryDirectory() as folder:
        contenders = {"plain loop": plain_round(clients, method)}
        for number in workers:
            contenders[str(number)] = polyfed_round(method, "threads", Path(folder) / str(number), number)[0]
        times = best_times(contenders, repeats)
    first, reference = times[str(workers[0])], times["plain loop"]
    return [
        {"method": method, "workers": name, "seconds": t, "speed-up": first / t, "ratio": t / reference}
        for name, t in times.items()
    ]


def best_times(contenders: Mapping[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    """The shortest time of each after a first one that does not count; they take turns."""
    for one_round in contenders.values():
        one_round()
    best = dict.fromkeys(contenders, float("inf"))
    for _ in range(repeats):
        for name, one_round in contenders.items():
            begin = time.perf_counter()
            one_round()
            best[name] = min(best[name], time.perf_counter() - begin)
    return best


def memory(kind: str) -> dict[str, float]:
    """Peak memory of three FedProto rounds, of `polyfed` or the `plain` loop, against data plus models.

    It counts from a process that has already trained a tiny federation in the same way and given back what was free,
    so code that is loaded on first use is left out and all that grows with data, networks, batches and workers counts.
    `peak` is what is allocated at one time, looked at every third of a millisecond; `resident` what the process holds.
    """
    tiny = nn.Sequential(nn.Conv2d(3, 2, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(392, CLASSES))
    three_rounds(kind, images=2, models=tiny)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before, used = resident("VmRSS"), in_use()
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    with Highest(in_use) as highest:
        needed = three_rounds(kind, IMAGES)
    peak, allocated = resident("VmHWM") - before, highest.seen - used
    return {"needed": needed, "peak": allocated, "ratio": allocated / needed, "resident": peak}


def three_rounds(kind: str, images: int, models: Models | None = None) -> int:
    """Train with so many images per client; the bytes that data and models take."""
    config, clients = setting("fedproto", "threads", images, models)
    if kind == "plain":
        one_round = plain_round(clients, "fedproto")
        for _ in range(3):
            one_round()
    else:
        with tempfile.TemporaryDirectory() as folder, closing(new_engine("threads", clients)) as runner:
            federation = Federation(config, clients.method, runner, RunFolder.create(Path(folder) / "run", config))
            for number in (1, 2, 3):
                federation.round(number)
    return clients.dataset.images.numel() + 4 * sum(clients.profile(client).parameters for client in range(CLIENTS))


class Highest:
    """Watches a number from a thread of its own and remembers the highest it has seen."""

    def __init__(self, number: Callable[[], int]) -> None:
        self.seen = 0
        self._number = number
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Highest:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._end.wait(0.0003):
            self.seen = max(self.seen, self._number())


class _Mallinfo(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]


def in_use() -> int:
    """Bytes that are allocated at this moment, without what the C library (glibc) keeps for reuse."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _Mallinfo
    found = mallinfo()
    return int(found.uordblks + found.hblkhd)


def resident(name: str) -> int:
    """Bytes of memory that this process holds (VmRSS) or held at its peak (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--memory", choices=["polyfed", "plain"], help="measure memory only, in this process")
    parser.add_argument("--workers", help="measure the threads engine with these numbers of workers, as in 1,2,4")
    options = parser.parse_args()
    if options.memory:
        print(json.dumps(memory(options.memory)))
        return
    if options.workers:
        show_scaling([int(number) for number in options.workers.split(",")], options.repeats, as_json=options.json)
        return
    rows = [row for method in ("standalone", "fedproto") for row in measure(method, options.repeats)]
    peak, plain = (in_own_process("--memory", kind) for kind in ("polyfed", "plain"))
    if options.json:
        print(json.dumps({"rounds": rows, "memory": peak, "plain_memory": plain}, indent=2))
        return
    table = Table(
        title=f"{CLIENTS} clients, five CNNs, {IMAGES} images each, batch {BATCH}",
        caption=f"{machine_name(torch.device('cpu'))}, torch {torch.__version__}",
    )
    for column in ("method", "engine", "s per round", "÷ plain loop", "training ÷ plain loop", "outside training"):
        table.add_column(column)
    for row in rows:
        training = f"{row['training_ratio']:.2f}" if "training_ratio" in row else ""
        outside = f"{100 * row['outside']:.1f} %" if "outside" in row else ""
        table.add_row(row["method"], row["engine"], f"{row['seconds']:.3f}", f"{row['ratio']:.2f}", training, outside)
    Console(width=120).print(table)
    print(
        f"in use at the peak {peak['peak'] / 1e6:.0f} MB, data plus models {peak['needed'] / 1e6:.0f} MB: "
        f"{peak['ratio']:.2f} times; held by the process {peak['resident'] / 1e6:.0f} MB; "
        f"the plain loop: {plain['peak'] / 1e6:.0f} and {plain['resident'] / 1e6:.0f} MB"
    )


def show_scaling(workers: list[int], repeats: int, *, as_json: bool) -> None:
    """Measure and print how a round's time falls with the number of workers."""
    rows = [row for method in ("standalone", "fedproto") for row in scaling(method, workers, repeats)]
    if as_json:
        print(json.dumps({"cores": available_cores(), "rounds": rows}, indent=2))
        return
    table = Table(
        title=f"{CLIENTS} clients, five CNNs, threads engine on {available_cores()} cores",
        caption=f"{machine_name(torch.device('cpu'))}, torch {torch.__version__}",
    )
    for column in ("method", "workers", "s per round", "times as fast", "÷ plain loop on all cores"):
        table.add_column(column)
    for row in rows:
        table.add_row(*(f"{value:.2f}" if isinstance(value, float) else value for value in row.values()))
    Console(width=120).print(table)


def in_own_process(*arguments: str) -> dict[str, float]:
    """What this script prints with these arguments."""
    done = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, check=True)
    result: dict[str, float] = json.loads(done.stdout)
    return result


if __name__ == "__main__":
    main()
