"""What FedTGP's training on the server costs in a round.

Ten participants send ten of 100 classes each (500 features); 100 server epochs in batches of 10, so 1000 steps that
each train all 100 prototypes. Prints milliseconds per round (best of several) beside the participants' training.

On a GPU it also compares ways to make the steps, for these 1000 and for the 10 000 of 100 participants with all of 10
classes: launched one by one, one or several in a graph, by autograd and by our kernels; `--tiles` tries other tiles.

    python benchmarks/fedtgp_server.py [--repeats 3] [--device cpu] [--tiles]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import product
from typing import Any

import torch
from dc_pfl_covariance import CLASSES, CLASSES_EACH, CLIENTS, clients_of, training_time
from torch import Tensor, nn

from polyfed.message import Message
from polyfed.methods.base import Reply, Server
from polyfed.methods.fedtgp import contrastive_loss
from polyfed.methods.parts.separation import separating_steps
from polyfed.methods.parts.trainable import TrainablePrototypes
from polyfed.server import replay
from polyfed.server.training import FusedSteps, eager, sgd_step, train_on_vectors

FEATURES, BATCH, EPOCHS, LR = 500, 10, 100, 0.01
Way = tuple[Callable[[], AbstractContextManager[None]], bool]
"""What to enter before training, and whether our kernels make the steps."""


@contextmanager
def steps_in_a_graph(number: int) -> Iterator[None]:
    before = replay.MOST_STEPS
    replay.MOST_STEPS = number
    try:
        yield
    finally:
        replay.MOST_STEPS = before


WAYS: dict[str, Way] = {
    "autograd, launched one by one": (eager, False),
    "autograd, one step in a graph": (partial(steps_in_a_graph, 1), False),
    "autograd, several in a graph": (nullcontext, False),
    "our kernels, one step in a graph": (partial(steps_in_a_graph, 1), True),
    "our kernels, several in a graph": (nullcontext, True),
}


class Round:
    """A round's client prototypes, and prototypes to train on them."""

    def __init__(self, classes: int, vectors: int, device: str) -> None:
        torch.manual_seed(0)
        self.classes, self.device = classes, device
        self.vectors = torch.rand(vectors, FEATURES).to(device)
        self.labels = torch.arange(vectors, device=device) % classes
        self.margin = torch.tensor(5.0, device=device)
        self.notes: list[str] = []
        self.loss = lambda module, chosen, labels: contrastive_loss(module(), chosen, labels, self.margin)
        self.fused: FusedSteps = partial(separating_steps, margin=self.margin, notes=self.notes)

    def module(self) -> TrainablePrototypes:
        torch.manual_seed(1)
        return TrainablePrototypes(self.classes, FEATURES).to(self.device)

    def train(self, way: Way, epochs: int) -> tuple[Tensor, float]:
        """The prototypes after these epochs, and the seconds that they took."""
        entered, kernels = way
        module, generator = self.module(), torch.Generator().manual_seed(2)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        with entered():
            train_on_vectors(
                module, self.vectors, self.labels, loss=self.loss, epochs=epochs, batch_size=BATCH, lr=LR,
                generator=generator, fused=self.fused if kernels else None, notes=self.notes,
            )  # fmt: skip
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        with torch.no_grad():
            return module(), seconds

    def launched(self, kernels: bool, steps: int = 20) -> float:
        """Kernels (and copies) on the GPU for a step."""
        module: nn.Module = self.module()
        given: tuple[Any, ...] = (module, self.vectors, self.labels, LR)
        step = self.fused(*given) if kernels else sgd_step(*given, self.loss)
        assert step is not None, self.notes
        rows, losses = torch.arange(BATCH, device=self.device), self.vectors.new_empty(BATCH)
        step(rows, losses)
        with torch.profiler.profile() as profile:
            for _ in range(steps):
                step(rows, losses)
            torch.cuda.synchronize()
        events = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        if kernels:
            for name in sorted({event.name for event in events}):
                own = [event.time_range.elapsed_us() for event in events if event.name == name]
                print(f"    {name:40} {len(own) / steps:4.1f} a step, {sum(own) / len(own):6.2f} µs each")
        return len(events) / steps


def compare(classes: int, vectors: int, device: str, repeats: int, tiles: bool) -> None:
    """One line for each way to make a round's steps."""
    case = Round(classes, vectors, device)
    steps_each = -(-vectors // BATCH)
    print(f"{classes} classes, {vectors} client prototypes, {EPOCHS * steps_each} steps")
    counts = {kernels: case.launched(kernels) for kernels in (False, True)}
    reference = case.train(WAYS["autograd, launched one by one"], 1000 // steps_each)[0]
    base = 0.0
    for name, way in WAYS.items():
        apart = (case.train(way, 1000 // steps_each)[0] - reference).abs().max()
        seconds = min(case.train(way, EPOCHS)[1] for _ in range(1 if way[0] is eager else repeats))
        base = base or seconds
        print(
            f"  {name:34} {seconds:7.3f} s  {base / seconds:5.1f} ×  "
            f"{1e6 * seconds / EPOCHS / steps_each:6.1f} µs a step  {counts[way[1]]:5.1f} kernels a step  "
            f"differs by {float(apart):.1e} after 1000 steps"
        )
    print(f"  (prototypes are up to {float(reference.abs().max()):.2g})", *case.notes, sep="\n  ")
    if tiles:
        try_tiles(case, steps_each)


def try_tiles(case: Round, steps_each: int) -> None:
    """Seconds of a round with other tiles, the fastest last."""
    from polyfed.methods.parts import prototype_kernels as kernels

    way, before, found = WAYS["our kernels, several in a graph"], kernels.TILES, []
    for rows, columns, classes, warps in product((2, 4, 8), (4, 8), (2, 4, 8), (4, 8)):
        kernels.TILES = kernels.Tiles(rows, columns, classes, warps)
        case.train(way, 1)  # compiled
        found.append((case.train(way, EPOCHS // 5)[1] * 5, kernels.TILES))
    kernels.TILES = before
    for seconds, chosen in sorted(found, reverse=True)[-8:]:
        print(f"  {1e6 * seconds / EPOCHS / steps_each:6.1f} µs a step with {chosen}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tiles", action="store_true", help="try other tiles of our kernels")
    options = parser.parse_args()
    if options.device.startswith("cuda"):
        for classes, vectors in ((10, 1000), (100, 100)):
            compare(classes, vectors, options.device, options.repeats, options.tiles)
    clients = clients_of("fedtgp", options.device)
    server = Server(0, clients.device)
    clients.method.start(server)
    generator = torch.Generator().manual_seed(0)
    replies = []
    for client in range(CLIENTS):
        prototypes = torch.rand(CLASSES_EACH, FEATURES, generator=generator)
        labels = torch.arange(CLASSES_EACH) + CLASSES_EACH * client
        replies.append(Reply(client, Message({"prototypes": prototypes}, {"labels": labels})))
    times = []
    for server.round in range(1, options.repeats + 2):
        begin = time.perf_counter()
        clients.method.aggregate(server, replies)
        times.append(1000 * (time.perf_counter() - begin))
    training = training_time(options.device, options.repeats)
    print(
        f"{CLIENTS} participants, {CLASSES_EACH} of {CLASSES} classes each; {options.device}, torch {torch.__version__}"
    )
    print(f"server {min(times[1:]):.0f} ms (in the first round {times[0]:.0f} ms)")
    print(f"training of the participants, one epoch: {training:.0f} ms")
    print(*server.notes, sep="\n")


if __name__ == "__main__":
    main()
