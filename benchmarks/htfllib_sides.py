"""One method's rounds in HtFLlib and the same rounds here, timed and counted; `htfllib.py` runs both in turn.

What a round does is counted on each side by hooks of PyTorch, in a round that no clock sees: HtFLlib's second, and here
the second of a run on the sequential engine, with which every other engine agrees. So whether both sides do the same
work is measured, not concluded from settings.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
import warnings
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from polyfed.assemble import assemble, find_device
from polyfed.bench import noise, timed
from polyfed.compute import free_gpu_memory
from polyfed.config import Experiment, experiment
from polyfed.data import ClientData
from polyfed.engines import Engine, new_engine
from polyfed.engines.client import round as client_round
from polyfed.engines.client.flops import _Sum
from polyfed.engines.client.sgd import sgd
from polyfed.errors import RunError
from polyfed.methods.parts import compression
from polyfed.methods.parts.network import ClientNetwork
from polyfed.population import Population
from polyfed.records import RunFolder
from polyfed.server import training
from polyfed.server.federation import Federation
from polyfed.server.replay import Step

SERVERS = {
    "fedproto": "serverproto:FedProto", "fedtgp": "servertgp:FedTGP", "lg-fedavg": "serverlg:LG_FedAvg",
    "fml": "serverfml:FML", "fd": "serverfd:FD", "fedgh": "servergh:FedGH", "fedkd": "serverkd:FedKD",
    "fedmrl": "servermrl:FedMRL", "fedgen": "servergen:FedGen",
}  # fmt: skip
"""By polyfed's name: HtFLlib's module and class."""
SERVER_EPOCHS, SHARED_FEATURES, HIDDEN, NOISE = 100, 128, 512, 512
"""HtFLlib's defaults for what a server trains, for FedMRL's common network and for FedGen's generator."""
WARM_UP = 2
"""Rounds before the clock counts; the first may take longer than others, in the second HtFLlib's work is counted."""
WARM_UP_ON_GPU, LEAST_ON_GPU = 8, 10
"""Rounds of polyfed on a GPU before the clock counts, and how many count at least: it captures graphs in the first
ones, and those that follow take milliseconds."""
NOT_NEEDED = ("h5py", "torchvision")
"""Packages that HtFLlib imports and that these nine methods never use: it would write its results with the one, and
build networks of its own with the other."""


@dataclass
class Measured:
    """What one side needed and did."""

    first: float
    """Seconds of the first round."""
    seconds: list[float]
    """Of each round after the warm-up."""
    work: dict[str, int]
    """What was counted in one round."""
    stand_ins: list[str] = field(default_factory=list)
    """Packages of `NOT_NEEDED` that are not installed."""


class Work:
    """Counts what a round does, while `counting`: steps, samples, updated parameters, operations."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._stage = "server"
        self._on = False

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Inside, everything counts, from zero."""
        self.counts.clear()
        with _Sum() as operations:  # not torch's counter, which fails in the gradients of FedTGP's server
            hook = register_optimizer_step_post_hook(self._optimised)
            self._on = True
            try:
                yield
            finally:
                self._on = False
                hook.remove()
        self.counts["operations"] = round(operations.total)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Inside, it is the clients who work, or all are evaluated; outside, the server works."""
        before, self._stage = self._stage, name
        try:
            yield
        finally:
            self._stage = before

    def staged(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, all of which belongs to a stage."""

        @wraps(function)
        def inside(*given: Any, **named: Any) -> Any:
            with self.stage(name):
                return function(*given, **named)

        return inside

    def saw(self, samples: int) -> None:
        """A private extractor is called with this many samples."""
        if not self._on:
            return
        if torch.is_grad_enabled():
            self.counts.update({"client steps": 1, "samples trained": samples})
        else:
            self.counts["samples evaluated" if self._stage == "evaluation" else "samples gathered"] += samples

    def factored(self, numbers: int) -> None:
        """A tensor of this many numbers is factored."""
        if self._on:
            self.counts["numbers factored"] += numbers

    def updated(self, numbers: int) -> None:
        """A step has changed this many numbers."""
        if not self._on:
            return
        self.counts[f"parameters updated, {self._stage}"] += numbers
        if self._stage == "server":
            self.counts["server steps"] += 1

    def _optimised(self, optimiser: Optimizer, *_: object) -> None:
        parameters = (p for group in optimiser.param_groups for p in group["params"] if p.grad is not None)
        self.updated(sum(parameter.numel() for parameter in parameters))


WORK = Work()


def options_of(method: str, batch: int) -> dict[str, Any]:
    """polyfed's options that make a method do as many steps, of the same size, as HtFLlib's defaults."""
    return {
        "fedtgp": {"server_epochs": SERVER_EPOCHS, "server_batch_size": batch},
        "fedgh": {"server_epochs": SERVER_EPOCHS, "server_batch_size": batch},
        "fedmrl": {"shared_features": SHARED_FEATURES},
        "fedgen": {"server_steps": SERVER_EPOCHS, "server_batch": batch, "hidden": HIDDEN, "noise": NOISE},
    }.get(method, {})


def setting(given: Namespace, method: str, engine: str) -> tuple[Experiment, Population]:
    """The experiment and its clients, each with its own block of images to train on and one to test on."""
    config = experiment(
        method={"name": method, **options_of(method, given.batch)}, data="python:noise", models=given.models,
        clients=given.clients, partition="iid", rounds=10_000, batch_size=given.batch, lr=0.01, engine=engine,
        device=given.device, eval_every=10_000 if given.no_evaluation else 1, checkpoint_every=10_000,
    )  # fmt: skip
    size = given.images + given.tests
    blocks = torch.arange(given.clients * size).split(size)
    none = torch.empty(0, dtype=torch.int64)
    data = {number: ClientData(own[: given.images], none, own[given.images :]) for number, own in enumerate(blocks)}
    return config, replace(assemble(config, noise(given.clients * size)), data=data)


def own_rounds(given: Namespace) -> tuple[int, int]:
    """How many rounds polyfed warms up for, and how many count."""
    if find_device(given.device).type == "cpu":
        return WARM_UP, given.rounds
    return WARM_UP_ON_GPU, max(LEAST_ON_GPU, given.rounds)


def ours(given: Namespace, method: str) -> Measured:
    """Rounds of polyfed, timed on the engine that is asked for."""
    warm_up, counted = own_rounds(given)
    with federation(given, method, given.engine, "run") as (run, clients, _):
        rounds = range(1, warm_up + counted + 1)
        clock = on_cpu if given.cpu_time else timed
        seconds = [clock(partial(run.round, number), clients.device) for number in rounds]
        spent = flops_recorded(run)
    work, expected = counted_here(given, method)
    if spent != expected:
        raise RunError(f"the engine that is timed recorded {spent} operations of clients, the sequential {expected}.")
    return Measured(seconds[0], seconds[warm_up:], work)


def on_cpu(work: Callable[[], object], device: torch.device) -> float:
    """Seconds that all threads of this process work; on a busy machine they say more than a clock on the wall."""
    begin = time.process_time()
    work()
    return time.process_time() - begin


@contextmanager
def federation(
    given: Namespace, method: str, engine: str, folder: str
) -> Iterator[tuple[Federation, Population, Engine]]:
    """A federation of polyfed that records into a folder."""
    config, clients = setting(given, method, engine)
    runner = new_engine(engine, clients)
    try:
        yield Federation(config, clients.method, runner, RunFolder.create(Path(folder), config)), clients, runner
    finally:
        runner.close()
        if clients.device.type == "cuda":
            free_gpu_memory()


def flops_recorded(run: Federation) -> int:
    """The operations of the clients in the last round, by polyfed's own records."""
    return int([event for event in run.folder.events() if event["event"] == "round"][-1]["flops"])


def counted_here(given: Namespace, method: str) -> tuple[dict[str, int], int]:
    """What clients and server do in the second round of polyfed, and the operations that it records."""
    with counted_parts(), federation(given, method, "sequential", "counted") as (run, _, engine), training.eager():
        run.round(1)
        staged = WORK.staged("evaluation", engine.evaluate)
        with patch.object(engine, "evaluate", staged), WORK.counting():
            run.round(2)
        return dict(WORK.counts), flops_recorded(run)


@contextmanager
def counted_parts() -> Iterator[None]:
    """Inside, the parts of polyfed that PyTorch's hooks do not see tell `WORK` about it."""
    new_network, factorise, sgd_step = Population.new_network, compression.factorise, training.sgd_step

    def network(self: Population, client: int) -> ClientNetwork:
        made = new_network(self, client)
        made.model.extractor.register_forward_pre_hook(lambda _, given: WORK.saw(len(given[0])))
        return made

    @contextmanager
    def optimiser(groups: Sequence[Sequence[nn.Parameter]], *given: Any, **_: Any) -> Iterator[Callable[[], None]]:
        # Not early, parameter by parameter: PyTorch's hook counts the steps of its optimisers only.
        with WORK.stage("clients"), sgd(groups, *given, early=False) as step:
            yield step

    def factors(tensor: Tensor, energy: float) -> tuple[Tensor, Tensor] | None:
        WORK.factored(tensor.numel() if tensor.dim() >= 2 else 0)
        return factorise(tensor, energy)

    def server_step(module: nn.Module, *given: Any) -> Step:
        step = sgd_step(module, *given)
        size = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)

        def counted(rows: Tensor, losses: Tensor) -> None:
            step(rows, losses)
            WORK.updated(size)

        return counted

    with ExitStack() as patches:
        patches.enter_context(patch.object(training, "sgd_step", server_step))
        patches.enter_context(patch.object(Population, "new_network", network))
        patches.enter_context(patch.object(client_round, "sgd", optimiser))
        patches.enter_context(patch.object(compression, "factorise", factors))
        yield


class Body(nn.Module):
    """A network of polyfed as HtFLlib expects one: it replaces `fc` by a layer that gives the number of features."""

    def __init__(self, extractor: nn.Module, *, private: bool) -> None:
        super().__init__()
        self.extractor = extractor
        self.private = private
        self.fc: nn.Module = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        if self.private:
            WORK.saw(len(x))
        features: Tensor = self.fc(self.extractor(x))
        return features


def theirs(given: Namespace, method: str) -> Measured:
    """Rounds of HtFLlib, timed by its own clock; it writes into folders `dataset` and `system` here."""
    _, clients = setting(given, method, "sequential")
    lacking = stand_in()
    sys.path[:0] = [path for path in [str(given.checkout / "system")] if path not in sys.path]
    write_data(clients, Path("dataset/noise"))
    Path("system").mkdir()
    os.chdir("system")  # HtFLlib looks for ../dataset
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # as HtFLlib's own command does
            seconds = rounds_there(given, method, clients)
    finally:
        os.chdir("..")
        shutil.rmtree("system")
    if clients.device.type == "cuda":
        free_gpu_memory()
    return Measured(seconds[0], seconds[WARM_UP:], dict(WORK.counts), lacking)


def rounds_there(given: Namespace, method: str, clients: Population) -> list[float]:
    """The seconds of all rounds; `WORK` has counted the second."""
    new_body = partial(Body, private=True)
    networks = [new_body(clients.task.new_model(clients.architectures[client]).extractor) for client in clients.clients]
    common = Body(clients.task.new_model(clients.task.auxiliary).extractor, private=False)
    import_module("flcore.trainmodel.models").networks = [*networks, common]  # type: ignore[attr-defined]
    module, name = SERVERS[method].split(":")
    server = getattr(import_module(f"flcore.servers.{module}"), name)(arguments(given, method, clients), 0)
    server.save_results = lambda: None  # nobody reads them
    server.evaluate = WORK.staged("evaluation", server.evaluate)
    for client in server.clients:
        client.train = WORK.staged("clients", client.train)
    starts: list[float] = []
    with ExitStack() as second:
        server.select_clients = at_each_start(server.select_clients, starts, second)
        server.train()
    spent = [end - begin for begin, end in pairwise([*starts, time.process_time()])]
    return spent if given.cpu_time else [float(seconds) for seconds in server.Budget]


def at_each_start(select: Callable[[], Any], starts: list[float], second: ExitStack) -> Callable[[], Any]:
    """HtFLlib's choice of clients, which begins a round: it notes the CPU time, and begins and ends the count."""
    svd = np.linalg.svd

    def factors(matrix: Any, *given: Any, **named: Any) -> Any:
        WORK.factored(np.size(matrix))
        return svd(matrix, *given, **named)

    def selected() -> Any:
        starts.append(time.process_time())
        if len(starts) == 2:
            second.enter_context(patch.object(np.linalg, "svd", factors))
            second.enter_context(WORK.counting())
        else:
            second.close()
        return select()

    return selected


def stand_in() -> list[str]:
    """Empty modules for packages that are imported but not needed and not installed; returns their names."""
    missing = [name for name in NOT_NEEDED if name not in sys.modules and find_spec(name) is None]
    for name in missing:
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__spec__ = ModuleSpec(name, None)
    return missing


def write_data(clients: Population, folder: Path) -> None:
    """The clients' samples in the format of HtFLlib, which reads them anew in every round."""
    for part in ("train", "test"):
        (folder / part).mkdir(parents=True)
        for number, own in clients.data.items():
            x, y = clients.dataset.batch(getattr(own, part))
            np.savez_compressed(folder / part / f"{number}.npz", data={"x": x.numpy(), "y": y.numpy()})  # type: ignore[arg-type]


def arguments(given: Namespace, method: str, clients: Population) -> Namespace:
    """What HtFLlib's command line would give, with its defaults for all that is not compared."""
    return Namespace(
        algorithm=method, dataset="noise", goal="test", device=clients.device.type, num_classes=clients.task.classes,
        models=[f"networks[{number}]" for number in range(given.clients)], global_model="networks[-1]",
        num_clients=given.clients, join_ratio=1.0, random_join_ratio=False, batch_size=given.batch, local_epochs=1,
        local_learning_rate=0.01, learning_rate_decay=False, global_rounds=WARM_UP + given.rounds - 1, top_cnt=100,
        eval_gap=10_000 if given.no_evaluation else 1, auto_break=False, save_folder_name="temp",
        models_folder_name="", few_shot=0, client_drop_rate=0.0, train_slow_rate=0.0, send_slow_rate=0.0,
        time_select=False, time_threthold=10_000, feature_dim=clients.task.feature_size, lamda=1.0, alpha=1.0,
        beta=1.0, mentee_learning_rate=0.01, T_start=0.95, T_end=0.98, server_learning_rate=0.01,
        server_epochs=SERVER_EPOCHS, margin_threthold=100.0, noise_dim=NOISE, hidden_dim=HIDDEN,
        generator_learning_rate=0.005, sub_feature_dim=SHARED_FEATURES,
    )  # fmt: skip
