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
import json
import math
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
from papers.records import Key, Record, append, key_of
from papers.run import asked, commit
from polyfed.assemble import assemble
from polyfed.cli.options import parse_settings
from polyfed.comparison.plan import parse_seeds
from polyfed.compute import machine_name
from polyfed.config import Experiment, experiment, merged
from polyfed.engines import Engine, EngineSettings, new_engine
from polyfed.errors import InputError, PolyfedError, RunError
from polyfed.evaluation import Score
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
    """The accuracy of each of the first clients, without partners; by default by the method's own rule.

    They are scored when and with what they are scored among others. One without test samples is left out.
    """
    people = assemble(config)
    if clients > len(people.clients):
        raise InputError(f"there are {len(people.clients)} clients, not {clients}: ask for fewer (--clients).")
    chosen, received = list(people.clients)[:clients], config.evaluate == "after-download"
    found: Curves = {client: {} for client in chosen}
    with closing(new_engine(config.engine, people, EngineSettings(tf32=config.tf32))) as engine:
        servers = {c: OwnServer(people.method, config.seed, c, engine.profiles[c].classes) for c in chosen}
        for number in range(1, config.rounds + 1):
            there = set(participants(config.seed, number, people.clients, config.participation)) & servers.keys()
            scored = number % config.eval_every == 0 or number == config.rounds
            scores: dict[int, Score] = {}
            if scored and people.method.kept_fresh and not received:  # those who sit out hold older knowledge
                fresh = {client: servers[client].download(number) for client in chosen if client not in there}
                scores |= engine.evaluate(fresh, number, fresh) if fresh else {}
            _visit(engine, number, {client: servers[client] for client in sorted(there)})
            if scored:
                rest = [client for client in chosen if client not in scores]
                downloads = {client: servers[client].download(number) for client in rest} if received else None
                scores |= engine.evaluate(rest, number + received, downloads) if rest else {}
            for client, score in scores.items():
                found[client][number] = score.accuracy(rule)
    return {client: curve for client, curve in found.items() if not any(map(math.isnan, curve.values()))}


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


def runs_of(name: str, **machine: Any) -> dict[int, Run]:
    """By seed, the runs of an entry's row; without a row, of Standalone."""
    entry, _, row = name.partition(":")
    found = asked(read_campaign(), f"{entry}:{row or 'standalone'}", machine)
    if len({(run.setting, run.row) for run in found}) != 1:
        raise InputError(
            f"'{name}' has several settings or rows: name a row of an entry with one, such as cifar10-n100."
        )
    return {run.seed: run for run in found}


def record_of(run: Run, found: Curves, *, commit: str | None) -> Record:
    """What is kept: the curve of each client, and where it comes from."""
    rounds = sorted(next(iter(found.values())))
    return {
        "entry": run.entry, "setting": run.setting, "method": run.row, "seed": run.seed, "settings": run.told,
        "polyfed": polyfed.__version__, "commit": commit, "torch": torch.__version__,
        "machine": machine_name(torch.device("cpu")), "date": date.today().isoformat(),
        "rounds": rounds,
        "curves": {str(client): [round(curve[number], 4) for number in rounds] for client, curve in found.items()},
    }  # fmt: skip


def read_alone(folder: Path) -> dict[Key, Record]:
    """All records in a folder; raises for lines that are none, and for two of the same run.

    A last line without a line break was cut off while it was written, and is left out.
    """
    found: dict[Key, Record] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
            if not line.endswith(b"\n"):
                continue
            try:
                record = json.loads(line)
                key, _ = key_of(record), (record["rounds"], record["curves"], record["settings"])
            except (ValueError, KeyError, TypeError) as error:
                raise InputError(f"line {number} of '{path}' is no record of papers.few: remove it.") from error
            if key in found:
                raise InputError(f"line {number} of '{path}' is of a run that was read before: remove one of them.")
            found[key] = record
    return found


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
    runs = runs_of(given.row, device="cpu", **({"data_folder": str(given.data_dir)} if given.data_dir else {}))
    first, seeds, now = next(iter(runs.values())), parse_seeds(given.seeds), commit()
    if given.out:
        _check(runs, seeds, given.out)
    rule = read_campaign().entries[first.entry].variant(first.row.partition(" ")[0]).rule
    for seed in seeds:
        config = experiment(**merged(merged(first.config.given, parse_settings(given.set)), {"seed": seed}))
        found = curves(config, given.clients, rule)
        if given.out:
            disk.make_folder(given.out)
            append(record_of(runs[seed], found, commit=now), given.out)
        each = [late(curve) for curve in found.values()]
        told = " ".join(f"{100 * own:.1f}" for own in each)
        yield f"{given.row} seed {seed} {' '.join(given.set) or 'as it is'}: {100 * mean(each):.1f} % ({told})"


def _check(runs: Mapping[int, Run], seeds: Iterable[int], out: Path) -> None:
    """Raise before hours of training if what they give can't be recorded."""
    recorded = read_alone(out)
    for seed in seeds:
        if seed not in runs:
            known = ", ".join(map(str, runs))
            raise InputError(f"the campaign has no run with seed {seed}: name some of {known}, or leave out --out.")
        if runs[seed].key in recorded:
            raise InputError(f"seed {seed} is recorded in '{out}': leave it out, or remove its line.")


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
