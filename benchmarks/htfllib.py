"""The same rounds in HtFLlib and here: how many times faster is polyfed?

    git clone https://github.com/TsingZ0/HtFLlib /tmp/HtFLlib
    python benchmarks/htfllib.py --checkout /tmp/HtFLlib [--methods fedproto,fedtgp] [--models papers] [--device cuda]

Nothing is fetched. Both sides train the same networks (polyfed's, put into HtFLlib as models of its own) on the same
samples of the same clients, with the same batch size and number of steps, on clients and on the server. They take
turns, each in a process of its own, and every round ends with an evaluation of all clients, as it does in HtFLlib by
default. Prints the median seconds of a round on each side, their ratio, and both commits.

HtFLlib is imported from the checkout as it is; its files go into a temporary folder. It keeps its models as pickled
modules, which PyTorch 2.6 and later only load if TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD is set: it is, for that process.
A method whose packages are not installed is named with what it lacks.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from polyfed.assemble import assemble, find_device
from polyfed.bench import noise, timed
from polyfed.compute import machine_name
from polyfed.config import Experiment, experiment
from polyfed.data import ClientData
from polyfed.engines import new_engine
from polyfed.errors import first_line
from polyfed.population import Population
from polyfed.records import RunFolder
from polyfed.server.federation import Federation

HERE = Path(__file__).resolve().parents[1]
SERVERS = {
    "fedproto": "serverproto:FedProto", "fedtgp": "servertgp:FedTGP", "lg-fedavg": "serverlg:LG_FedAvg",
    "fml": "serverfml:FML", "fd": "serverfd:FD", "fedgh": "servergh:FedGH", "fedkd": "serverkd:FedKD",
    "fedmrl": "servermrl:FedMRL", "fedgen": "servergen:FedGen",
}  # fmt: skip
"""By polyfed's name: HtFLlib's module and class."""
SERVER_EPOCHS, SHARED_FEATURES, HIDDEN, NOISE = 100, 128, 512, 512
"""HtFLlib's defaults for what a server trains, for FedMRL's common network and for FedGen's generator."""
WARM_UP = 2
"""Rounds before the clock counts, on both sides."""


def options_of(method: str, batch: int) -> dict[str, Any]:
    """polyfed's options that make a method do as many steps, of the same size, as HtFLlib's defaults."""
    return {
        "fedtgp": {"server_epochs": SERVER_EPOCHS, "server_batch_size": batch},
        "fedgh": {"server_epochs": SERVER_EPOCHS, "server_batch_size": batch},
        "fedmrl": {"shared_features": SHARED_FEATURES},
        "fedgen": {"server_steps": SERVER_EPOCHS, "server_batch": batch, "hidden": HIDDEN, "noise": NOISE},
    }.get(method, {})


def setting(given: Namespace, method: str) -> tuple[Experiment, Population]:
    """The experiment and its clients, each with its own block of images to train on and one to test on."""
    config = experiment(
        method={"name": method, **options_of(method, given.batch)}, data="python:noise", models=given.models,
        clients=given.clients, partition="iid", rounds=10_000, batch_size=given.batch, lr=0.01, engine=given.engine,
        device=given.device, eval_every=10_000 if given.no_evaluation else 1, checkpoint_every=10_000,
    )  # fmt: skip
    size = given.images + given.tests
    blocks = torch.arange(given.clients * size).split(size)
    none = torch.empty(0, dtype=torch.int64)
    data = {number: ClientData(own[: given.images], none, own[given.images :]) for number, own in enumerate(blocks)}
    return config, replace(assemble(config, noise(given.clients * size)), data=data)


def ours(given: Namespace, method: str) -> list[float]:
    """Seconds of polyfed's rounds."""
    config, clients = setting(given, method)
    runner = new_engine(given.engine, clients)
    run = Federation(config, clients.method, runner, RunFolder.create(Path("run"), config))
    try:
        rounds = range(1, WARM_UP + given.rounds + 1)
        return [timed(partial(run.round, number), clients.device) for number in rounds][WARM_UP:]
    finally:
        runner.close()


class Body(nn.Module):
    """A network of polyfed as HtFLlib expects one: it replaces `fc` by a layer that gives the number of features."""

    def __init__(self, extractor: nn.Module) -> None:
        super().__init__()
        self.extractor = extractor
        self.fc: nn.Module = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.fc(self.extractor(x))
        return features


def theirs(given: Namespace, method: str) -> list[float]:
    """Seconds of HtFLlib's rounds, by its own clock. Runs in a folder of its own, into which HtFLlib writes."""
    sys.path.insert(0, str(given.checkout.resolve() / "system"))
    _, clients = setting(given, method)
    write_data(clients, Path("dataset/noise"))
    Path("system").mkdir()
    os.chdir("system")  # HtFLlib looks for ../dataset
    networks = [Body(clients.task.new_model(clients.architectures[number]).extractor) for number in clients.clients]
    common = Body(clients.task.new_model(clients.task.auxiliary).extractor)
    import_module("flcore.trainmodel.models").networks = [*networks, common]  # type: ignore[attr-defined]
    module, name = SERVERS[method].split(":")
    server = getattr(import_module(f"flcore.servers.{module}"), name)(arguments(given, method, clients), 0)
    server.save_results = lambda: None  # nobody reads them
    server.train()
    return [float(seconds) for seconds in server.Budget[WARM_UP:]]


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


def in_own_process(side: str, method: str) -> list[float] | str:
    """The seconds that a side measures, or why it can't."""
    environment = {**os.environ, "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"} if side == "theirs" else dict(os.environ)
    environment["PYTHONPATH"] = str(HERE)
    with tempfile.TemporaryDirectory(prefix="polyfed-htfllib-") as folder:
        command = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:], "--side", side, "--methods", method]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        found = Path(folder) / "seconds.json"
        if done.returncode == 0 and found.is_file():
            seconds: list[float] = json.loads(found.read_text())
            return seconds
    last = (done.stderr.strip().splitlines() or ["no output"])[-1]
    if last.startswith("ModuleNotFoundError: No module named "):
        return f"needs the package {last.rsplit(maxsplit=1)[-1]}, which is not installed"
    return f"fails: {first_line(RuntimeError(last))}"


def compare(given: Namespace, method: str) -> str:
    """One row: both sides in turn, as often as asked."""
    seconds: dict[str, list[float]] = {"theirs": [], "ours": []}
    for _ in range(given.repeats):
        for side, all_seconds in seconds.items():
            found = in_own_process(side, method)
            if isinstance(found, str):
                return f"{method:10} {'HtFLlib' if side == 'theirs' else 'polyfed'} {found}"
            all_seconds += found
    slow, fast = median(seconds["theirs"]), median(seconds["ours"])
    return f"{method:10} {slow:10.4f} {fast:10.4f} {slow / fast:8.1f}"


def commit(folder: Path) -> str:
    """The commit of a checkout, and whether files differ from it."""
    git = partial(subprocess.run, cwd=folder, capture_output=True, text=True, check=False)
    found, changed = git(["git", "rev-parse", "HEAD"]), git(["git", "status", "--porcelain", "-uno"])
    if found.returncode != 0:
        return "of an unknown commit"
    return found.stdout.strip() + (" with changes" if changed.stdout.strip() else "")


def parsed() -> tuple[Namespace, argparse.ArgumentParser]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, required=True, help="a checkout of HtFLlib")
    parser.add_argument("--methods", default=",".join(SERVERS))
    parser.add_argument("--models", default="papers", help="networks of polyfed; default: the five CNNs")
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--images", type=int, default=640, help="to train on, per client; a multiple of the batch size")
    parser.add_argument("--tests", type=int, default=160, help="to test on, per client")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count, per turn")
    parser.add_argument("--repeats", type=int, default=2, help="turns of each side")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--engine", default="auto", help="polyfed's engine")
    parser.add_argument("--no-evaluation", action="store_true", help="train only")
    parser.add_argument("--side", choices=["ours", "theirs"], help=argparse.SUPPRESS)
    return parser.parse_args(), parser


def main() -> None:
    given, parser = parsed()
    if given.images % given.batch:
        parser.error(f"--images {given.images} is no multiple of --batch {given.batch}: HtFLlib drops the last batch.")
    if not (given.checkout / "system" / "flcore").is_dir():
        parser.error(f"'{given.checkout}' is no checkout of HtFLlib: it has no folder system/flcore.")
    methods = given.methods.split(",")
    unknown = [method for method in methods if method not in SERVERS]
    if unknown:
        parser.error(f"'{unknown[0]}' is not among the methods that both have: {', '.join(SERVERS)}.")
    if given.side:
        seconds = Path("seconds.json").resolve()
        seconds.write_text(json.dumps((ours if given.side == "ours" else theirs)(given, methods[0])))
        return
    sys.argv[1:] = [*sys.argv[1:], "--checkout", str(given.checkout.resolve())]  # the last one counts
    print(f"HtFLlib {commit(given.checkout)}, polyfed {commit(HERE)}")
    print(f"{machine_name(find_device(given.device))}, torch {torch.__version__}, {time.strftime('%d %B %Y')}")
    print(f"{given.clients} clients ({given.models}), {given.images} images each, batch {given.batch}, one epoch")
    print(f"{'method':10} {'HtFLlib, s':>10} {'polyfed, s':>10} {'ratio':>8}")
    for method in methods:
        print(compare(given, method), flush=True)


if __name__ == "__main__":
    main()
