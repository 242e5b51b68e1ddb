"""What checkpoints and the end of a run cost with many clients, all of which take part.

    python benchmarks/many_clients.py [--clients 10000] [--folder DIR]

Prints seconds of a round, of a checkpoint after it (all clients changed), of the end of the run (models, tables), of
reading one client's model, and the share of a round that a checkpoint takes. The folder should be on the disk that
runs are kept on.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from polyfed.assemble import assemble
from polyfed.config import experiment
from polyfed.data import Dataset
from polyfed.engines import new_engine
from polyfed.records import RunFolder
from polyfed.server.federation import Federation


class Small(nn.Module):
    """About ten thousand parameters."""

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(input_shape[-1] ** 2, 32), nn.ReLU(), nn.Linear(32, 16))
        self.out = nn.Linear(16, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(self.body(x))
        return logits


def samples(clients: int, per_client: int) -> Dataset:
    """Noise; only time counts here."""
    count = clients * per_client
    images = torch.randint(0, 256, (count, 1, 18, 18), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    return Dataset("noise", images, torch.arange(count) % 10, 10, (0.5,), (0.25,))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=10_000)
    parser.add_argument("--per-client", type=int, default=20, help="samples of each client")
    parser.add_argument("--folder", type=Path, default=Path())
    options = parser.parse_args()
    config = experiment(
        method="fedproto", clients=options.clients, rounds=3, partition="iid", models="python:Small", batch_size=10,
        data="python:noise", eval_every=3, checkpoint_every=1000,
    )  # fmt: skip
    people = assemble(config, samples(options.clients, options.per_client), [Small])
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        run = RunFolder.create(Path(folder) / "run", config)
        federation = Federation(config, people.method, new_engine("auto", people), run)
        times: dict[str, list[float]] = {"round": [], "checkpoint": []}
        for number in (1, 2):
            for name, work in (("round", lambda n=number: federation.round(n)), ("checkpoint", federation.checkpoint)):
                begin = time.perf_counter()
                work()
                times[name].append(time.perf_counter() - begin)
        federation.round(3)
        begin = time.perf_counter()
        federation._finish()
        end = time.perf_counter() - begin
        begin = time.perf_counter()
        federation.folder.model_state(options.clients // 2)
        one = time.perf_counter() - begin
        federation.engine.close()
    round_time, checkpoint_time = min(times["round"]), min(times["checkpoint"])
    parameters = people.profile(0).parameters
    print(f"{options.clients} clients with {parameters} parameters each, all taking part:")
    print(f"  a round {round_time:.2f} s, a checkpoint {checkpoint_time:.2f} s ({checkpoint_time / round_time:.0%})")
    print(f"  the end of the run {end:.2f} s, reading one client's model {1000 * one:.1f} ms")


if __name__ == "__main__":
    main()
