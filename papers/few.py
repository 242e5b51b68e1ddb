"""Clients without partners, to see how much of a method's gain needs others, and what a setting does to Standalone.

    python -m papers.few cifar100-n100:fml --seeds 2-4 --data-dir data --out papers/results/alone
    python -m papers.few cifar10-n100 --data-dir data --set training.augment=false

Each of the first clients of an entry has a server of its own, which hears of nobody else: a federation of one. Clients
train in the rounds in which they take part in the entry's runs, with the entry's settings and those that are set. As
they never meet, the others need not be trained, so ten of a hundred take a tenth of the time. Printed is their mean
accuracy over the last tenth of the rounds, as in the tables.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from datetime import date
from pathlib import Path
from statistics import mean
from typing import Any

import pandas as pd
import torch

import polyfed
from papers.campaign import Run, read_campaign
from papers.records import line_of
from papers.run import asked, commit
from polyfed.assemble import assemble
from polyfed.cli.options import parse_settings
from polyfed.comparison.plan import parse_seeds
from polyfed.compute import machine_name
from polyfed.config import Experiment, experiment, merged
from polyfed.engines import Engine, EngineSettings, new_engine
from polyfed.errors import InputError, PolyfedError, RunError
from polyfed.message import Message
from polyfed.methods.base import Method, Reply, Server
from polyfed.records import disk
from polyfed.reproduce.measures import chosen_round
from polyfed.reproduce.recipes import Compare
from polyfed.server.participants import participants

Curves = dict[int, dict[int, float]]
"""By client and evaluated round, its accuracy on test samples."""


class OwnServer:
    """The server of one client, which hears of nobody else."""

    def __init__(self, method: Method, seed: int, client: int, classes: Sequence[int] | None) -> None:
        self._method, self._client, self._server = method, client, Server(seed)
        self._classes = None if classes is None or not method.announces_classes else torch.tensor(classes)
        method.start(self._server)

    def download(self, round: int) -> Message:
        self._server.round = round
        return self._method.download(self._server, self._client, self._classes)

    def learn(self, reply: Reply) -> None:
        """Fuse what its client has sent, with nothing else."""
        if reply.failure:
            raise RunError(f"client {self._client} failed in round {self._server.round}: {reply.failure}")
        self._method.aggregate(self._server, [reply])


def curves(config: Experiment, clients: int, rule: str | None = None) -> Curves:
    """The accuracy of each of the first clients, without partners; by default by the method's own rule."""
    people = assemble(config)
    if clients > len(people.clients):
        raise InputError(f"there are {len(people.clients)} clients, not {clients}: ask for fewer (--clients).")
    chosen = list(people.clients)[:clients]
    found: Curves = {client: {} for client in chosen}
    with closing(new_engine(config.engine, people, EngineSettings(tf32=config.tf32))) as engine:
        servers = {c: OwnServer(people.method, config.seed, c, engine.profiles[c].classes) for c in chosen}
        for number in range(1, config.rounds + 1):
            there = set(participants(config.seed, number, people.clients, config.participation)) & servers.keys()
            _visit(engine, number, {client: servers[client] for client in sorted(there)})
            if number % config.eval_every == 0 or number == config.rounds:
                for client, score in engine.evaluate(chosen, number).items():
                    found[client][number] = score.accuracy(rule)
    return found


def _visit(engine: Engine, number: int, servers: Mapping[int, OwnServer]) -> None:
    """A round of these clients, each with its own server."""
    if servers:
        for reply in engine.train(number, {client: server.download(number) for client, server in servers.items()}):
            servers[reply.client].learn(reply)


def late(curve: Mapping[int, float]) -> float:
    """The mean over the last tenth of the rounds.

    >>> late({10: 0.2, 19: 0.4, 20: 0.6})
    0.5
    """
    return chosen_round(pd.DataFrame(curve.items(), columns=["round", "accuracy"]), Compare(round="last-tenth"))


def run_of(name: str, **machine: Any) -> Run:
    """The first run of an entry's row; without a row, of Standalone."""
    entry, _, row = name.partition(":")
    found = asked(read_campaign(), f"{entry}:{row or 'standalone'}", machine)
    if len({(run.setting, run.row) for run in found}) != 1:
        raise InputError(
            f"'{name}' has several settings or rows: name a row of an entry with one, such as cifar10-n100."
        )
    return found[0]


def record_of(run: Run, seed: int, found: Curves) -> dict[str, Any]:
    """What is kept: the curve of each client, and where it comes from."""
    rounds = sorted(next(iter(found.values())))
    return {
        "entry": run.entry, "setting": run.setting, "method": run.row, "seed": seed, "settings": run.told,
        "polyfed": polyfed.__version__, "commit": commit(), "torch": torch.__version__,
        "machine": machine_name(torch.device("cpu")), "date": date.today().isoformat(),
        "rounds": rounds,
        "curves": {str(client): [round(curve[number], 4) for number in rounds] for client, curve in found.items()},
    }  # fmt: skip


def _several(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m papers.few", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("row", metavar="entry[:row]", help="a comparison of campaign.yaml, and a row; or Standalone")
    parser.add_argument("--clients", type=_several, default=10, help="how many train; the first ones")
    parser.add_argument("--seeds", default="2", help="such as 2-4")
    parser.add_argument("--data-dir", type=Path, help="where the datasets are")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="another setting")
    parser.add_argument("--out", type=Path, help="a folder in which curves are recorded; not with --set")
    return parser.parse_args(arguments)


def _said(given: argparse.Namespace) -> Iterable[str]:
    """What is printed, a line for each seed; records on the way."""
    if given.set and given.out:
        raise InputError("records are of the campaign's settings: leave out --set or --out.")
    folder = {"data_folder": str(given.data_dir)} if given.data_dir else {}
    run = run_of(given.row, device="cpu", **folder)
    rule = read_campaign().entries[run.entry].variant(run.row.partition(" ")[0]).rule
    for seed in parse_seeds(given.seeds):
        config = experiment(**merged(merged(run.config.given, parse_settings(given.set)), {"seed": seed}))
        found = curves(config, given.clients, rule)
        if given.out:
            disk.make_folder(given.out)
            disk.append(given.out / f"{run.entry}.jsonl", line_of(record_of(run, seed, found)).encode(), sync=True)
        each = [late(curve) for curve in found.values()]
        told = " ".join(f"{100 * own:.1f}" for own in each)
        yield f"{given.row} seed {seed} {' '.join(given.set) or 'as it is'}: {100 * mean(each):.1f} % ({told})"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: a line for each seed, or one sentence and exit status 2 for wrong input."""
    given = _parsed(arguments)
    try:
        for line in _said(given):
            print(line, flush=True)
    except PolyfedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
