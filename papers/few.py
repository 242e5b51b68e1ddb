"""What a setting does to Standalone's accuracy, found with a few clients: clients that never meet need no others.

    python -m papers.few cifar10-n100 --data-dir data --set training.augment=false

The first clients of an entry train alone, as often as a client of the entry takes part on average, with the entry's
settings and those that are set. Printed is their mean accuracy over the last tenth of that, as in the tables.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from statistics import mean
from typing import Any

from papers.campaign import read_campaign
from polyfed.assemble import assemble
from polyfed.cli.options import parse_settings
from polyfed.config import Experiment, experiment, merged
from polyfed.engines import ThreadsEngine
from polyfed.errors import InputError, PolyfedError
from polyfed.message import Message


def accuracies(config: Experiment, clients: int) -> list[float]:
    """Of each of the first clients, after its training; the mean over the last tenth of it."""
    people = assemble(config)
    visits = max(1, round(config.rounds * config.participation))
    chosen, first = list(people.clients)[:clients], visits - max(1, visits // 10) + 1
    found: dict[int, list[float]] = {client: [] for client in chosen}
    with closing(ThreadsEngine(people)) as engine:
        for visit in range(1, visits + 1):
            engine.train(visit, {client: Message() for client in chosen})
            if visit >= first:
                for client, score in engine.evaluate(chosen, visit).items():
                    found[client].append(score.accuracy())
    return [mean(own) for own in found.values()]


def standalone(entry: str, **machine: Any) -> Experiment:
    """The settings of an entry's Standalone."""
    found = [run for run in read_campaign().runs([entry], **machine) if run.row == "standalone"]
    if len({run.setting for run in found}) != 1:
        raise InputError(f"'{entry}' has not one setting of Standalone: name an entry that has, such as cifar10-n100.")
    return found[0].config


def _several(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: one line, or one sentence and exit status 2 for wrong input."""
    parser = argparse.ArgumentParser(prog="python -m papers.few", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("entry", help="a comparison of campaign.yaml")
    parser.add_argument("--clients", type=_several, default=10, help="how many train; the first ones")
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--data-dir", type=Path, help="where the datasets are")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="another setting")
    given = parser.parse_args(arguments)
    folder = {"data_folder": str(given.data_dir)} if given.data_dir else {}
    try:
        config = standalone(given.entry, device="cpu", engine="threads", **folder)
        found = accuracies(
            experiment(**merged(merged(config.given, parse_settings(given.set)), {"seed": given.seed})), given.clients
        )
    except PolyfedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    each = " ".join(f"{100 * own:.1f}" for own in found)
    print(f"{given.entry} {' '.join(given.set) or 'as it is'}: {100 * mean(found):.1f} % ({each})", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
