"""How well runs share a device: seconds of a round alone, and beside others in processes of their own.

    python benchmarks/side_by_side.py --method dc-pfl --device cuda
    python benchmarks/side_by_side.py --method dc-pfl --device cuda --processes 4 --mps

Each process trains the same federation on random images. After the rounds that are measured it continues until all
have measured theirs. Beside the seconds it prints CPU seconds (many times the round's own seconds: threads that wait
for each other), and on a GPU how often a round waits for it, with the lines that do: processes take turns on a GPU, and
every wait may last for all turns of the others.

These options may help processes to share a GPU: `--threads`, CPU threads of each; `--connections`, which sets
CUDA_DEVICE_MAX_CONNECTIONS; `--mps`, under which processes need no turns; `--timeslice`, how long a turn is (by
nvidia-smi, as root; set back to the default afterwards).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from polyfed.assemble import assemble, find_device
from polyfed.bench import noise, timed
from polyfed.config import experiment
from polyfed.engines import new_engine
from polyfed.records import RunFolder
from polyfed.server.federation import Federation

SLICES = ("default", "short", "medium", "long")


@contextmanager
def federation(given: argparse.Namespace) -> Iterator[Federation]:
    config = experiment(
        method=given.method, data="python:noise", models=given.models, clients=given.clients, partition="iid",
        participation=given.participants / given.clients, split="8:1:1" if given.evaluate else "1:0:0", rounds=10_000,
        batch_size=given.batch, epochs=given.epochs, lr=0.01, device=given.device, checkpoint_every=10_000,
        eval_every=1 if given.evaluate else 10_000,
    )  # fmt: skip
    people = assemble(config, noise(given.clients * given.images))
    with tempfile.TemporaryDirectory() as folder, closing(new_engine("auto", people)) as engine:
        yield Federation(config, people.method, engine, RunFolder.create(Path(folder) / "run", config))


def waits(run: Federation, number: int) -> Counter[str]:
    """The lines that wait for the GPU in a round, and how often."""
    if run.engine.device.type != "cuda":
        return Counter()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run.round(number)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    places = [(Path(each.filename), each.lineno) for each in found if "synchroniz" in str(each.message)]
    return Counter(f"{'/'.join(path.parts[-3:])}:{line}" for path, line in places)


def work(given: argparse.Namespace) -> None:
    """One process: warm up, say so, wait for a line, measure, and continue until the input ends."""
    stop = threading.Event()
    device = find_device(given.device)
    with federation(given) as run:
        for number in range(1, given.warm_up + 1):
            run.round(number)
        print(json.dumps({"ready": True}), flush=True)
        sys.stdin.readline()
        threading.Thread(target=lambda: (sys.stdin.read(), stop.set()), daemon=True).start()
        times, begin = [], time.process_time()
        for _ in range(given.rounds):
            number += 1
            times.append(timed(partial(run.round, number), device))
        busy = (time.process_time() - begin) / given.rounds
        found = waits(run, number + 1) if given.processes == 1 else Counter()
        print(json.dumps({"seconds": median(times), "longest": max(times), "cpu": busy, "waits": found}), flush=True)
        number += 1
        while not stop.is_set():
            number += 1
            run.round(number)


def measure(given: argparse.Namespace, processes: int, environment: dict[str, str]) -> list[dict[str, Any]]:
    """What each of so many processes at once reports."""
    options = [f"--{name.replace('_', '-')}={getattr(given, name)}" for name in PASSED]
    command = [sys.executable, __file__, "--worker", f"--processes={processes}", *options]
    command += ["--evaluate"] if given.evaluate else []
    workers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(processes)
    ]
    try:
        for worker in workers:
            said(worker)
        for worker in workers:
            assert worker.stdin
            worker.stdin.write("go\n")
            worker.stdin.flush()
        return [said(worker) for worker in workers]
    finally:
        for worker in workers:
            assert worker.stdin
            worker.stdin.close()
        for worker in workers:
            worker.wait()


def said(worker: subprocess.Popen[str]) -> dict[str, Any]:
    """The next line of a worker."""
    assert worker.stdout
    line = worker.stdout.readline()
    if not line:
        raise SystemExit("a process has ended before it was measured; its error is above.")
    found: dict[str, Any] = json.loads(line)
    return found


@contextmanager
def shared(given: argparse.Namespace) -> Iterator[dict[str, str]]:
    """The environment of the processes, with what was asked for set up."""
    environment = dict(os.environ)
    if given.threads:
        environment["OMP_NUM_THREADS"] = str(given.threads)
    if given.connections:
        environment["CUDA_DEVICE_MAX_CONNECTIONS"] = str(given.connections)
    if given.timeslice:
        subprocess.run(slicing(given.timeslice), check=True)
    with tempfile.TemporaryDirectory() as folder:
        if given.mps:
            environment |= {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
            subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True, env=environment)
        try:
            yield environment
        finally:
            if given.mps:
                subprocess.run(["nvidia-cuda-mps-control"], input="quit\n", text=True, env=environment)
            if given.timeslice:
                subprocess.run(slicing("default"), check=True)


def slicing(name: str) -> list[str]:
    return ["nvidia-smi", "compute-policy", f"--set-timeslice={SLICES.index(name)}"]


def show(processes: int, found: list[dict[str, Any]], alone: float) -> None:
    seconds = max(each["seconds"] for each in found)
    longest, cpu = max(each["longest"] for each in found), max(each["cpu"] for each in found)
    print(
        f"{processes} at once: {seconds:.4f} s per round (longest {longest:.4f}), {cpu:.4f} CPU s per round and "
        f"process, {seconds / alone:.2f} times as long as alone, {processes * alone / seconds:.2f} times as many rounds"
    )


PASSED = (
    "method", "models", "clients", "participants", "images", "batch", "epochs", "rounds", "warm_up", "device",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="dc-pfl")
    parser.add_argument("--models", default="papers")
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--participants", type=int, default=10)
    parser.add_argument("--images", type=int, default=640, help="of each client")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=10, help="that are measured")
    parser.add_argument("--warm-up", type=int, default=30, help="rounds before these")
    parser.add_argument("--evaluate", action="store_true", help="evaluate after every round")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--threads", type=int, default=0, help="CPU threads of each process; 0: PyTorch's own choice")
    parser.add_argument("--connections", type=int, default=0, help="CUDA_DEVICE_MAX_CONNECTIONS; 0: not set")
    parser.add_argument("--mps", action="store_true", help="share by NVIDIA's Multi-Process Service")
    parser.add_argument("--timeslice", choices=SLICES[1:])
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        work(given)
        return
    with shared(given) as environment:
        first = measure(given, 1, environment)
        alone = first[0]["seconds"]
        show(1, first, alone)
        show(given.processes, measure(given, given.processes, environment), alone)
    places = Counter(first[0]["waits"])
    print(f"a round waits {places.total()} times for the GPU" + (":" if places else " (counted on a GPU only)"))
    for place, count in places.most_common(20):
        print(f"{count:6}  {place}")


if __name__ == "__main__":
    main()
