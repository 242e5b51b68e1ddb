"""How fast a machine runs polyfed, against the plain eager loop measured in the same run."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch import nn

from polyfed.assemble import assemble, find_device
from polyfed.compute import free_gpu_memory
from polyfed.config import Experiment, experiment
from polyfed.data import ClientData, Dataset
from polyfed.engines import Engine, new_engine
from polyfed.errors import InputError
from polyfed.population import Population
from polyfed.records import RunFolder
from polyfed.server.federation import Federation
from polyfed.server.training import eager

CLASSES, IMAGES = 10, 640
WARM_UP = 2
LONG_ENOUGH = 20
"""Seconds of the plain loop after which no further round of it is timed."""
SHAPES_SEEN = 30
"""Rounds after which a GPU has met nearly all sizes of cohorts, where new participants are drawn in every round."""


@dataclass(frozen=True)
class Case:
    """One federation to measure; every client has 640 CIFAR-sized images, one epoch."""

    name: str
    method: str = "standalone"
    models: str = "papers"
    clients: int = 100
    participants: int | None = None
    """None: all."""
    plain: bool = True
    """Measure the plain loop beside it."""
    cuda_only: bool = False
    batch_size: int = 64


CASES = (
    Case("a: 20 × CNN-1", models="cnn1", clients=20),
    Case("b: five CNNs, 100 clients", clients=100, cuda_only=True),
    Case("c: five CNNs, 10 of 100 clients", clients=100, participants=10),
    Case("d: FedTGP, 100 clients", method="fedtgp", cuda_only=True),
    Case("d: pFedES, 100 clients", method="pfedes", cuda_only=True),
    Case("d: DC-PFL, 100 clients", method="dc-pfl", cuda_only=True),
    Case("e: 20 × ResNet-18", models="resnet18", clients=20, cuda_only=True),
    Case("g: FedTGP's eight networks, 20 clients, batch 10", models="htfe8", clients=20, cuda_only=True, batch_size=10),
    *(Case(f"f: 10 of {n} clients", clients=n, participants=10, plain=False) for n in (10, 100, 1000, 10_000)),
)


@dataclass
class Measurement:
    """What was measured for one case on one engine."""

    case: str
    method: str
    engine: str
    seconds: float
    """For a round without evaluation; the median of several."""
    steps_per_second: float
    outside: float
    """Share of the round that is not training: messages, server, records."""
    warm_up: float
    """Seconds by which the first rounds together took longer: kernels are compiled and chosen, steps captured."""
    memory: int | None
    """Peak bytes on the GPU; none on a CPU, where it can't be separated from what came before."""
    plain_seconds: float | None = None
    ratio: float | None = None
    """How many times faster than the plain loop."""
    times: list[float] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What the engine could not do as it should, such as training clients together."""


def noise(count: int) -> Dataset:
    """This many CIFAR-sized random images."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (count, 3, 32, 32), generator=generator, dtype=torch.uint8)
    return Dataset("noise", images, torch.arange(count) % CLASSES, CLASSES, (0.5,) * 3, (0.25,) * 3)


def setting(case: Case, engine: str, device: str) -> tuple[Experiment, Population]:
    """The experiment of a case and its clients."""
    config = experiment(
        method=case.method, data="python:noise", models=case.models, clients=case.clients, partition="iid",
        participation=(case.participants or case.clients) / case.clients, split="1:0:0", rounds=10_000,
        batch_size=case.batch_size, lr=0.01, engine=engine, device=device, eval_every=10_000, checkpoint_every=10_000,
    )  # fmt: skip
    # More than a hundred clients share images, to limit memory.
    clients = assemble(config, noise(min(case.clients, 100) * IMAGES))
    blocks = torch.arange(len(clients.dataset)).split(IMAGES)
    none = torch.empty(0, dtype=torch.int64)
    data = {client: ClientData(blocks[client % len(blocks)], none, none) for client in range(case.clients)}
    return config, replace(clients, data=data)


def plain_round(clients: Population) -> Callable[[Sequence[int]], None]:
    """Standalone training of some clients as a person would write it: one after another."""
    people = clients.on_device()
    networks: dict[int, nn.Module] = {}
    data = people.dataset
    scale, shift = 1 / (255 * 0.25), -0.5 / 0.25

    def one_round(participants: Sequence[int]) -> None:
        for client in participants:
            if client not in networks:
                networks[client] = people.new_network(client).model
            network, samples = networks[client], people.data[client].train.to(people.device)
            optimiser = torch.optim.SGD(network.parameters(), people.training.lr)
            network.train()
            order = torch.randperm(len(samples), device=people.device)
            for chunk in samples[order].split(people.training.batch_size):
                x, y = data.images[chunk].float() * scale + shift, data.labels[chunk]
                loss = nn.functional.cross_entropy(network(x), y)
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()

    return one_round


@contextmanager
def federation(case: Case, engine: str, device: str) -> Iterator[tuple[Federation, Engine]]:
    """A federation that records into a temporary folder."""
    config, clients = setting(case, engine, device)
    runner = new_engine(engine, clients)
    with tempfile.TemporaryDirectory() as folder, closing(runner):
        run = Federation(config, clients.method, runner, RunFolder.create(Path(folder) / "run", config))
        with closing(run.server.kept):
            yield run, runner


def timed(work: Callable[[], object], device: torch.device) -> float:
    """Seconds until the work is really done."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def silent(words: str) -> None:
    """Do not say what is measured now."""


def _say_at(say: Callable[[str], None], place: str, words: str) -> None:
    say(f"{place}: {words}")


def measure(
    case: Case,
    engine: str,
    device_name: str,
    repeats: int = 5,
    warm_up: int | None = None,
    say: Callable[[str], None] = silent,
) -> Measurement:
    """Time rounds of a case, and of the plain loop with the same participants right after, on an idle device."""
    device = find_device(device_name)
    if device.type == "cuda":
        free_gpu_memory()  # what is left of the case before
        torch.cuda.reset_peak_memory_stats()
    if warm_up is None:
        warm_up = SHAPES_SEEN if case.participants and device.type == "cuda" else WARM_UP
    result, participants = _measured(case, engine, device, repeats, warm_up, say)
    if case.plain:
        if device.type == "cuda":
            free_gpu_memory()  # the plain loop has the GPU to itself
        say("the plain loop")
        result.plain_seconds = median(plain_times(case, device_name, participants))
        result.ratio = result.plain_seconds / result.seconds
    return result


def _measured(
    case: Case, engine: str, device: torch.device, repeats: int, warm_up: int, say: Callable[[str], None]
) -> tuple[Measurement, list[list[int]]]:
    """What an engine needs, and who took part in the rounds that count; all that it has built is gone afterwards."""
    numbers = range(1, warm_up + repeats + 1)
    say("making clients")
    with federation(case, engine, str(device)) as (run, runner):
        times = []
        for number in numbers:
            say(f"round {number} of {len(numbers)}")
            times.append(timed(partial(run.round, number), device))
        first, times = times[:warm_up], times[warm_up:]
        rounds = [event for event in run.folder.events() if event["event"] == "round"][warm_up:]
        notes = run.folder.notes()
        training = sum(event["training_seconds"] for event in rounds)
        participants = [run.participants(number) for number in numbers][warm_up:]
        samples = (run.profiles[client].train_samples or 0 for client in participants[0])
        steps = sum(-(-count // case.batch_size) for count in samples)
    seconds = median(times)
    result = Measurement(
        case.name, case.method, runner.name, seconds, steps / seconds, 1 - training / sum(times),
        sum(first) - warm_up * seconds, peak_memory(device), times=times, notes=notes,
    )  # fmt: skip
    return result, participants


def plain_times(case: Case, device_name: str, participants: Sequence[Sequence[int]]) -> list[float]:
    """The plain loop's seconds for the same steps: hand-written for Standalone, the sequential engine for others.

    Nothing is captured in either, on clients or on the server. No further round begins after `LONG_ENOUGH` seconds.
    """
    device = find_device(device_name)
    if case.method == "standalone":
        one_round = plain_round(setting(case, "sequential", device_name)[1])
        for everyone in {tuple(each) for each in participants}:  # before the clock runs, to build the networks
            one_round(everyone)
        return _times((partial(one_round, everyone) for everyone in participants), device)
    with federation(case, "sequential", device_name) as (run, _), eager():
        run.round(1)
        return _times((partial(run.round, number) for number in range(2, len(participants) + 2)), device)


def _times(rounds: Iterable[Callable[[], object]], device: torch.device) -> list[float]:
    """The seconds of each round, until they are enough."""
    times: list[float] = []
    for one in rounds:
        times.append(timed(one, device))
        if sum(times) >= LONG_ENOUGH:
            break
    return times


def peak_memory(device: torch.device) -> int | None:
    """Peak bytes on the GPU."""
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else None


def run_cases(
    device: str, only: str = "", engine: str = "auto", say: Callable[[str], None] = silent
) -> Iterator[Measurement]:
    """Measure every case that fits the device, one after another; `only` picks cases by the start of their names."""
    on_gpu = find_device(device).type == "cuda"
    chosen = [c for c in CASES if (c.name.startswith(tuple(only)) if only else on_gpu or not c.cuda_only)]
    if not chosen:
        raise InputError(f"no case starts with one of '{only}': the cases are a to g.")
    for number, case in enumerate(chosen, 1):
        place = f"measuring {number} of {len(chosen)}, {case.name}"
        yield measure(case, engine, device, say=partial(_say_at, say, place))
