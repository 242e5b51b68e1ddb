"""Small federations for tests: two tiny networks, little data, one call for a method or a whole run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from torch.autograd import Function

from polyfed.assemble import assemble
from polyfed.config import experiment
from polyfed.data import Dataset
from polyfed.engines import SequentialEngine
from polyfed.message import Message, State
from polyfed.methods.base import Method, Reply, Server, Trained
from polyfed.population import Population
from polyfed.records import RunFolder
from polyfed.server.federation import Federation

FEATURES = 6


class Wide(nn.Module):
    """A flat network with FEATURES features."""

    def __init__(self, input_shape: tuple[int, ...], classes: int, hidden: int = 16) -> None:
        super().__init__()
        size = int(torch.tensor(input_shape).prod())
        self.body = nn.Sequential(
            nn.Flatten(), nn.Linear(size, hidden), nn.ReLU(), nn.Linear(hidden, FEATURES), nn.ReLU()
        )
        self.out = nn.Linear(FEATURES, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(self.body(x))
        return logits


class Narrow(Wide):
    """The same with fewer hidden units: another architecture with the same features and head."""

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__(input_shape, classes, hidden=8)


class Normed(nn.Module):
    """A convolutional network with batch norm and dropout."""

    def __init__(self, in_channels: int, classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(in_channels, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Dropout(0.25), nn.Linear(4, FEATURES), nn.ReLU(),
        )  # fmt: skip
        self.out = nn.Linear(FEATURES, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(self.body(x))
        return logits


class _Cut(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None: ...

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None: ...


class Cut(nn.Module):
    """Changes nothing, and gives no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Cut.apply(x)
        return y


def tiny_dataset(classes: int = 4, per_class: int = 30, side: int = 6, channels: int = 1) -> Dataset:
    """Noisy images whose brightest corner tells the class: learnable in a few steps."""
    generator = torch.Generator().manual_seed(7)
    labels = torch.arange(classes).repeat_interleave(per_class)
    images = torch.randint(0, 120, (len(labels), channels, side, side), generator=generator, dtype=torch.uint8)
    for index, label in enumerate(labels.tolist()):
        row, column = divmod(label, 2)
        images[index, :, row * 3 % side : row * 3 % side + 3, column * 3 : column * 3 + 3] += 130
    return Dataset("tiny", images, labels, classes, (0.5,) * channels, (0.25,) * channels)


def uneven_dataset(*sizes: int) -> Dataset:
    """A tiny dataset of clients with so many samples each, of all classes in turn."""
    dataset = tiny_dataset(per_class=-(-sum(sizes) // 4))
    rows = torch.arange(len(dataset)).view(4, -1).T.flatten()[: sum(sizes)]
    return replace(dataset.only(rows), owners=torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)))


DEFAULTS: dict[str, Any] = {
    "clients": 4, "rounds": 2, "batch_size": 8, "lr": 0.1, "classes_per_client": 2, "engine": "sequential",
    "device": "cpu",
}  # fmt: skip


def population(
    method: str | dict[str, Any], *, models: Any = (Wide, Narrow), data: Dataset | None = None, **settings: Any
) -> Population:
    """The clients of a tiny federation; `.method` is the method."""
    dataset = data or tiny_dataset()
    config = experiment(**{**DEFAULTS, **settings, "method": method, "data": "python:tiny", "models": "python:tiny"})
    return assemble(config, dataset, list(models))


def new_method(method: str | dict[str, Any], **settings: Any) -> Method:
    """A method bound to the tiny task."""
    return population(method, **settings).method


def new_server(method: Method, round: int = 1) -> Server:
    """A server as it is before its first round."""
    server = Server(seed=0, round=round)
    method.start(server)
    return server


def reply(client: int, tensors: State, **metadata: Any) -> Reply:
    """A reply with these tensors; metadata are lists of integers."""
    return Reply(client, Message(tensors, {name: torch.tensor(value) for name, value in metadata.items()}))


def trained(counts: list[int], state: State | None = None, round: int = 1, **rest: Any) -> Trained:
    """A client after training, for `upload`."""
    return Trained(torch.tensor(counts), round, state=state or {}, **rest)


def federation(
    tmp_path: Any, method: str | dict[str, Any], engine: Any = SequentialEngine, **settings: Any
) -> Federation:
    """A whole tiny federation, ready to run."""
    models = settings.pop("models", (Wide, Narrow))
    dataset = settings.pop("dataset", None) or tiny_dataset()
    config = experiment(**{**DEFAULTS, **settings, "method": method, "data": "python:tiny", "models": "python:tiny"})
    clients = assemble(config, dataset, list(models))
    folder = RunFolder.create(tmp_path / "run", config)
    return Federation(config, clients.method, engine(clients), folder, devices=clients.devices)


def run(folder: Path, engine: Any, method: Any, **settings: Any) -> tuple[pd.DataFrame, list[str], Any]:
    """Rounds, notes and the federation of a finished run."""
    made = federation(folder / engine.__name__, method, engine, **settings)
    made.run()
    notes = [event["note"] for event in made.folder.events() if event["event"] == "note"]
    return made.folder.rounds().drop(columns="seconds"), notes, made


def traffic(tmp_path: Any, method: str | dict[str, Any], classes: int, models: str = "cnn5") -> tuple[float, float]:
    """Floats up and down per participant in a steady round, on CIFAR-shaped data with C classes and the papers' CNNs.

    Five clients with 2 of 10 classes, or ten with 10 of 100, so that every class has an owner; K = 500.
    """
    clients, per_client = (5, 2) if classes == 10 else (10, 10)
    labels = torch.arange(classes).repeat_interleave(5)
    images = torch.randint(
        0, 256, (len(labels), 3, 32, 32), generator=torch.Generator().manual_seed(3), dtype=torch.uint8
    )
    dataset = Dataset("noise", images, labels, classes, (0.5,) * 3, (0.25,) * 3)
    config = experiment(
        method=method, data="python:noise", models=models, clients=clients, classes_per_client=per_client, rounds=2,
        eval_every=2, split="6:2:2", device="cpu",
    )  # fmt: skip
    people = assemble(config, dataset)
    folder = RunFolder.create(tmp_path / f"traffic{classes}", config)
    run = Federation(config, people.method, SequentialEngine(people), folder)
    run.run()
    last = run.folder.rounds().iloc[-1]
    return last.upload_floats / clients, last.download_floats / clients
