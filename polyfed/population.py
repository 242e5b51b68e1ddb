"""The clients of a run, as an engine needs them: who has which network and which data, and how they train."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from polyfed.data import ClientData, Dataset
from polyfed.devices import Device
from polyfed.errors import InputError
from polyfed.methods.base import Knowledge, MessageStep, Method, Phase, Task, Training
from polyfed.methods.parts.network import ClientNetwork
from polyfed.models import Architecture
from polyfed.models.catalogue import FromCatalogue
from polyfed.profile import Profile
from polyfed.seeds import derive, seeded, torch_generator


@dataclass(frozen=True)
class Population:
    """Everything that is known about the clients before the first round."""

    dataset: Dataset
    data: Mapping[int, ClientData]
    """By client number; this process may have only some of a federation's clients."""
    architectures: Mapping[int, Architecture]
    method: Method
    seed: int
    device: torch.device
    networks: Mapping[str, Profile] = field(default_factory=dict)
    """By architecture, the profile of its network."""
    looks: Mapping[str, str] = field(default_factory=dict)
    """By architecture, a hash of its state's names, shapes and types."""
    heads: Mapping[str, str] = field(default_factory=dict)
    """By architecture, what its head is called in the network that was split; empty if the head is new."""
    own_start: bool = False
    """Every client starts from its own weights; otherwise clients of one architecture start from the same ones."""
    test_set: str = "none"
    """How the dataset's own test set is used: apart, pooled, or none if it has none."""
    notes: Sequence[str] = ()
    """Remarks on the data, for the run's record."""
    draws: frozenset[str] = frozenset()
    """Architectures whose networks draw from global generators in their forward."""
    devices: Mapping[int, Device] | None = None
    """What each client computes and sends with, where time is simulated."""
    steps: tuple[MessageStep, ...] = ()
    """What an upload passes through before it leaves its client, in this order."""

    def __repr__(self) -> str:
        networks = ", ".join(dict.fromkeys(architecture.name for architecture in self.architectures.values()))
        return (
            f"Population({len(self.data)} clients with {networks}, {self.method.name} on '{self.dataset.name}', "
            f"{self.device})"
        )

    @property
    def task(self) -> Task:
        return self.method.task

    @property
    def training(self) -> Training:
        return self.method.training

    @property
    def clients(self) -> list[int]:
        """The clients' numbers, in ascending order."""
        return sorted(self.data)

    @cached_property
    def counts(self) -> dict[int, Tensor]:
        """Training samples per class of every client."""
        size = self.task.classes
        return {client: torch.bincount(self.labels[own.train], minlength=size) for client, own in self.data.items()}

    @cached_property
    def labels(self) -> Tensor:
        """All samples' classes, on the CPU."""
        return self.dataset.labels.cpu()

    def home(self, client: int) -> tuple[Population, int]:
        """The client's own run and its number there: this one, unless clients of several runs train together."""
        return self, client

    def reader(self, client: int) -> Method:
        """A method whose settings are the client's; where clients of several runs train together, the same for many."""
        return self.method

    def numbers(self, clients: Sequence[int]) -> dict[str, Tensor]:
        """What differs between these clients' settings, a value for each; within one run, nothing does."""
        return {}

    def phase(self, client: int, phase: Phase) -> Phase:
        """The client's own phase of that name: its draws may depend on its run's settings."""
        return phase

    def knowledge(self, client: int, round: int) -> Knowledge:
        """What the client knows about its data in that round."""
        return Knowledge(self.counts[client], round)

    def on_device(self) -> Population:
        """The same clients with all images on the compute device, so that a batch is one lookup there."""
        if self.device.type == "cuda":
            _check_fits(self.dataset, torch.cuda.mem_get_info(self.device)[0])
        moved = replace(
            self.dataset, images=self.dataset.images.to(self.device), labels=self.dataset.labels.to(self.device)
        )
        return replace(self, dataset=moved)

    def new_network(self, client: int) -> ClientNetwork:
        """The client's network with its initial weights."""
        model = self.task.new_model(self.architectures[client], variant=client if self.own_start else "shared")
        with seeded(self.seed, "initial", "method"):
            network = ClientNetwork(model, self.method.client_modules(model))
        return network.to(self.device)

    def profile(self, client: int) -> Profile:
        """A client's profile."""
        own = self.data[client]
        return replace(
            self.networks[self.architectures[client].name],
            classes=tuple(self.counts[client].nonzero().flatten().tolist()),
            train_samples=len(own.train),
            validation_samples=len(own.validation),
            test_samples=len(own.test),
        )

    def slice(self, clients: Iterable[int]) -> Population:
        """Only these clients, with only their samples: what a host of these clients needs."""
        chosen = sorted(clients)
        parts = [part for client in chosen for part in self.data[client].parts]
        rows = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)
        edges = iter(torch.arange(len(rows)).split([len(part) for part in parts]))
        return replace(
            self,
            dataset=self.dataset.only(rows),
            data={client: ClientData(next(edges), next(edges), next(edges)) for client in chosen},
            architectures={client: self.architectures[client] for client in chosen},
        )

    def is_ours(self, client: int) -> bool:
        """Whether the method and the client's network are polyfed's own, and so their code is known."""
        return self.has_our_method and isinstance(self.architectures[client].maker, FromCatalogue)

    @property
    def has_our_method(self) -> bool:
        """Whether the method is polyfed's own."""
        return type(self.method).__module__.startswith("polyfed.methods.")

    def generator(self, purpose: str, round: int, client: int) -> torch.Generator:
        """Random draws of one client in one round, on the CPU."""
        return torch_generator(self.seed, purpose, round, client)

    def device_generator(self, purpose: str, round: int, client: int) -> torch.Generator:
        """The same, for draws that happen on the compute device (dropout)."""
        return torch.Generator(self.device).manual_seed(derive(self.seed, purpose, round, client))

    def global_draws(self, purpose: str, round: int, client: int) -> AbstractContextManager[None]:
        """Inside, what the client's network draws from global generators is seeded too, one client at a time."""
        if self.architectures[client].name not in self.draws:
            return nullcontext()
        return seeded(self.seed, f"network/{purpose}", round, client, device=self.device)


def _check_fits(dataset: Dataset, free: int) -> None:
    """Raise if the samples are larger than what a GPU has left: engines keep all of them there."""
    needed = dataset.images.nbytes
    if needed > free and dataset.images.device.type == "cpu":
        raise InputError(
            f"the samples of '{dataset.name}' need {needed / 1e9:.1f} GB, but the GPU has {free / 1e9:.1f} GB left: "
            f"use device cpu, where samples stay in memory or on disk until they are needed."
        )
