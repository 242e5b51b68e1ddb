"""What DC-PFL's covariances cost in a round, against the training of the same participants.

Ten clients with the five CNNs (500 features), ten of 100 classes each, 400 CIFAR-sized images each, batch 64, one
epoch. Prints the time of every step that deals with covariances (best of several), and its share of the training time;
and what the same factors would take by Cholesky or eigendecomposition of the full matrices.

    python benchmarks/dc_pfl_covariance.py [--repeats 5] [--device cpu]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from polyfed.assemble import assemble
from polyfed.config import experiment
from polyfed.data import Dataset
from polyfed.engines import SequentialEngine, ThreadsEngine
from polyfed.engines.client.round import collect
from polyfed.message import Message
from polyfed.methods.base import Server
from polyfed.methods.parts.gaussians import Gaussians, Noise, Wanted, draw, factors, in_proportion, pack
from polyfed.methods.parts.statistics import class_covariances, class_means
from polyfed.population import Population

CLIENTS, IMAGES, CLASSES, CLASSES_EACH = 10, 400, 100, 10


def clients_of(method: str, device: str) -> Population:
    """The participants of a round."""
    generator = torch.Generator().manual_seed(0)
    count = CLIENTS * IMAGES
    images = torch.randint(0, 256, (count, 3, 32, 32), generator=generator, dtype=torch.uint8)
    data = Dataset("noise", images, torch.arange(count) % CLASSES, CLASSES, (0.5,) * 3, (0.25,) * 3)
    config = experiment(
        method=method, data="python:noise", models="papers", clients=CLIENTS, classes_per_client=CLASSES_EACH,
        split="1:0:0", batch_size=64, device=device,
    )  # fmt: skip
    return assemble(config, data)


def best(work: Callable[[], object], repeats: int) -> float:
    """Milliseconds of the quickest of several runs, after one that does not count."""
    times = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - begin))
    return min(times[1:])


def training_time(device: str, repeats: int) -> float:
    """A round of local training and nothing else, by the quicker engine of those that need no GPU tricks."""
    clients = clients_of("standalone", device)
    engines = [SequentialEngine(clients)] + ([ThreadsEngine(clients)] if device == "cpu" else [])
    downloads = dict.fromkeys(range(CLIENTS), Message())
    return min(best(lambda: engine.train(1, downloads), repeats) for engine in engines)  # noqa: B023


def features_of(clients: Population) -> list[tuple[Tensor, Tensor]]:
    """Features and labels of every client's samples, on its device."""
    found = []
    for number, data in enumerate(clients.data):
        net = clients.new_network(number).eval()
        x, y = clients.dataset.batch(data.train, clients.device)
        with torch.no_grad():
            found.append((net.features(x), y))
    return found


def steps(device: str, repeats: int) -> dict[str, float]:
    """Milliseconds of each step of a round that deals with covariances, over all participants."""
    clients = clients_of("dc-pfl", device)
    given = features_of(clients)
    known = [class_covariances(*pair, CLASSES) for pair in given]
    full = [statistics.covariances for statistics in known if statistics.covariances is not None]
    triangles = [pack(matrices).cpu() for matrices in full]
    sent = Gaussians(
        torch.cat([statistics.labels for statistics in known]).cpu(),
        torch.cat([statistics.counts for statistics in known]).cpu(),
        torch.cat([statistics.means for statistics in known]).cpu(),
        torch.cat(triangles).to(clients.device),
    )
    messages = [
        Message({"means": s.means.cpu(), "covariances": t}, {"labels": s.labels.cpu(), "counts": s.counts.cpu()})
        for s, t in zip(known, triangles, strict=True)
    ]
    amounts = in_proportion(torch.bincount(sent.labels, sent.counts, CLASSES).long(), 1000)
    server = Server(0, clients.device)
    rank = int(sent.counts.max()) - 1

    def put_together() -> Tensor:
        return torch.cat([triangle.to(clients.device) for triangle in triangles])

    def each(work: Callable[[Tensor, Tensor, int], object]) -> Callable[[], object]:
        return lambda: [work(*pair, CLASSES) for pair in given]

    def noise() -> Noise:
        generator = server.generator("virtual features")
        wanted = Wanted.of(sent.labels, sent.counts, amounts, 500)
        return Noise(wanted, generator, aside=server.device.type == "cuda")

    means = best(each(class_means), repeats)
    factoring = best(lambda: factors(sent.triangles, 500, rank), repeats)
    drawing = best(lambda: draw(sent, noise()), repeats)
    return {
        "clients: covariances beside means": best(each(class_covariances), repeats) - means,
        "clients: packing into triangles": best(lambda: [pack(m).cpu() for m in full], repeats),
        "server: checking messages": best(lambda: clients.method.certain(messages), repeats),
        "server: putting messages together": best(
            lambda: torch.cat([t.to(clients.device) for t in triangles]), repeats
        ),
        f"server: factors of {len(sent.labels)} covariances": factoring,
        "server: pooling and drawing 1000 features": drawing - factoring,
    }


def alternatives(device: str) -> dict[str, float]:
    """The same factors from full matrices in float64; Cholesky needs something added to singular ones."""
    clients = clients_of("dc-pfl", device)
    with torch.no_grad():
        given = collect(clients, clients.data[0], clients.new_network(0).eval())
    assert given is not None and given.covariances is not None
    matrices = given.covariances.double().repeat(CLIENTS, 1, 1)
    added = 1e-4 * matrices.diagonal(dim1=1, dim2=2).mean(1)[:, None, None] * torch.eye(500, device=clients.device)
    return {
        "instead: Cholesky, added to": best(lambda: torch.linalg.cholesky(matrices + added), 1),
        "instead: eigendecomposition": best(lambda: torch.linalg.eigh(matrices), 1),
    }


def show(training: float, rows: dict[str, float], others: dict[str, float], title: str) -> None:
    table = Table(title=title)
    for column in ("step", "ms", "share of training"):
        table.add_column(column, justify="left" if column == "step" else "right")
    total = sum(rows.values())
    lines: Sequence[tuple[str, float]] = [
        ("training of all participants", training), *rows.items(), ("all steps with covariances", total),
        *others.items(),
    ]  # fmt: skip
    for step, ms in lines:
        table.add_row(step, f"{ms:.1f}", f"{100 * ms / training:.1f} %")
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    training = training_time(options.device, options.repeats)
    title = (
        f"{CLIENTS} participants, {IMAGES} images and {CLASSES_EACH} of {CLASSES} classes each, 500 features; "
        f"{options.device}, torch {torch.__version__}"
    )
    show(training, steps(options.device, options.repeats), alternatives(options.device), title)


if __name__ == "__main__":
    main()
