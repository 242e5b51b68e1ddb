"""Where the time of a federation's round goes: a server and three sites as processes of this machine, over TLS.

    python benchmarks/federation_overhead.py [--method fedproto] [--rounds 12]

Prints for each round the seconds of the slowest site's training (with its scores and what it keeps), of the transport
(questions and answers on their way, and sites that ask whether there is work), of the server's own work and of its
checkpoint. In the first round the server also waits for the sites. The same members are then simulated one after
another in this process, for comparison. The median round, without the first two, must have at most 5 s beside the
training. The exit status is 1 if it has more.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import yaml

import polyfed
from polyfed.deploy import keys
from polyfed.deploy.member import read_member, simulated
from polyfed.deploy.serve import serve
from polyfed.deploy.take_part import take_part
from polyfed.engines import SequentialEngine
from polyfed.records import RunFolder
from polyfed.remote import Packet, RemoteEngine, Site
from polyfed.server.federation import Federation

BAR = 5.0
PORT = 29443
NETWORKS = {"amber": "cnn1", "birch": "cnn2", "cedar": "cnn5"}
TASK = {"classes": 10, "input_shape": [1, 28, 28], "features": 64, "auxiliary": "cnn5"}
COLUMNS = ("training", "transport", "server", "checkpoint")


def prepare(home: Path, method: str, rounds: int) -> None:
    """Everybody's keys, terms, files and data: each has a third of the digits."""
    keys.make_server_keys(home / "keys", ["127.0.0.1"])
    terms = {
        "name": "overhead",
        "method": method,
        "rounds": rounds,
        "task": {**TASK, "mean": [0.5], "std": [0.5]},
        "members": {name: keys.make_site_keys(home / "keys", name) for name in NETWORKS},
        "server": {"listen": f"127.0.0.1:{PORT}", "minimum_members": 3},
    }
    (home / "federation.yaml").write_text(yaml.safe_dump(terms, sort_keys=False))
    digits = polyfed.load_dataset("digits")
    for place, (name, network) in enumerate(NETWORKS.items()):
        np.savez(home / f"{name}.npz", x=digits.images[place::3].numpy(), y=digits.labels[place::3].numpy())
        site = {"name": name, "server": f"127.0.0.1:{PORT}", "data": f"npz:{name}.npz", "network": network}
        files = {"certificate": "keys/ca.crt", "key": f"keys/{name}.key", "folder": name, "device": "cpu"}
        (home / f"{name}.yaml").write_text(yaml.safe_dump({**site, **files}))


def timed(owner: Any, name: str, spent: Callable[[tuple[Any, ...], float], None]) -> None:
    """Let `spent` know the arguments and the seconds of every call of a function."""
    original = getattr(owner, name)

    @wraps(original)
    def measured(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        try:
            return original(*args, **kwargs)
        finally:
            spent(args, time.perf_counter() - begin)

    setattr(owner, name, measured)


def take_part_timed(path: Path) -> None:
    """One site; every answer's seconds are a line of its output."""

    def spent(args: tuple[Any, ...], seconds: float) -> None:
        packet: Packet = args[2]
        print(json.dumps([args[1], packet.facts.get("round"), seconds]), flush=True)

    timed(Site, "answer", spent)
    take_part(read_member(path), lambda line: None)


def lead(home: Path) -> dict[int, dict[str, float]]:
    """Run the federation; the seconds of each round by where they went."""
    rounds: dict[int, dict[str, float]] = {}
    asking: dict[int, float] = {}
    timed(Federation, "round", lambda args, seconds: rounds.setdefault(args[1], {"all": seconds}))
    timed(Federation, "checkpoint", lambda args, seconds: rounds[args[0].server.round].update(checkpoint=seconds))
    timed(RemoteEngine, "train", lambda args, seconds: asking.update({args[1]: seconds}))
    command = [sys.executable, __file__, "--site"]
    sites = [
        subprocess.Popen([*command, str(home / f"{name}.yaml")], stdout=subprocess.PIPE, text=True) for name in NETWORKS
    ]
    try:
        serve(home / "federation.yaml", polyfed.Watcher())
        said = [site.communicate(timeout=60)[0] for site in sites]
    finally:
        for site in sites:
            site.kill()
    answers = [json.loads(line) for lines in said for line in lines.splitlines()]
    for number, spent in rounds.items():
        spent["training"] = max(seconds for kind, round, seconds in answers if (kind, round) == ("train", number))
        spent["transport"] = asking[number] - spent["training"]
        spent["server"] = spent.pop("all") - asking[number]
        spent.setdefault("checkpoint", 0.0)  # the last round has none
    return rounds


def simulate(home: Path) -> list[float]:
    """Seconds of the simulation's rounds."""
    members = [read_member(home / f"{name}.yaml") for name in NETWORKS]
    people, config = simulated(members), members[0].terms.experiment()
    found: list[float] = []
    timed(Federation, "round", lambda args, seconds: found.append(seconds))
    Federation(config, people.method, SequentialEngine(people), RunFolder.create(home / "simulation", config)).run()
    return found


def show(rounds: Mapping[int, Mapping[str, float]], simulation: float) -> bool:
    """Print the table; whether the bar is met."""
    print("round  " + "".join(f"{name:>12}" for name in (*COLUMNS, "together")))
    for number, spent in rounds.items():
        print(f"{number:5}  " + "".join(f"{spent[name]:10.3f} s" for name in COLUMNS) + f"{total(spent):10.3f} s")
    late = [spent for number, spent in rounds.items() if number > 2] or list(rounds.values())
    middle = {name: statistics.median(spent[name] for spent in late) for name in COLUMNS}
    whole = statistics.median(map(total, late))
    print("median " + "".join(f"{middle[name]:10.3f} s" for name in COLUMNS) + f"{whole:10.3f} s")
    beside = statistics.median(total(spent) - spent["training"] for spent in late)
    print(f"beside the training: {beside:.3f} s a round, at most {BAR:g} s")
    print(f"simulated one after another: {simulation:.3f} s a round, in the federation {whole:.3f} s")
    return beside <= BAR


def total(spent: Mapping[str, float]) -> float:
    return sum(spent[name] for name in COLUMNS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="fedproto")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--site", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.site:
        take_part_timed(options.site)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        prepare(home, options.method, options.rounds)
        rounds = lead(home)
        simulated_seconds = simulate(home)
    return 0 if show(rounds, statistics.median(simulated_seconds[2:] or simulated_seconds)) else 1


if __name__ == "__main__":
    sys.exit(main())
