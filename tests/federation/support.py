"""A federation of real processes on loopback: a folder with keys, terms and sites, and the commands that people use."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from safetensors.torch import load_file

import polyfed
from polyfed.deploy import keys
from polyfed.deploy.member import Member, read_member, simulated
from polyfed.engines import SequentialEngine
from polyfed.records import RunFolder
from polyfed.server import federation as server

NAMES = ("amber", "birch", "cedar")
CLASSES = {"amber": [0, 1, 2, 3], "birch": [3, 4, 5, 6], "cedar": [6, 7, 8, 9, 0]}
NETWORKS = {"amber": "cnn5", "birch": "own:Small", "cedar": "own:Normed"}
OWN = '''
import os
import time
from pathlib import Path
from torch import Tensor, nn

HOLD = Path(__file__).with_name(f"hold-{os.environ.get('PARTY')}")

class Wait(nn.Module):
    """In training, waits as long as there is a file; a process is made slow with it."""
    def forward(self, x: Tensor) -> Tensor:
        while self.training and HOLD.exists():
            time.sleep(0.02)
        return x

class Small(nn.Sequential):
    """A user's own network."""
    def __init__(self, classes: int = 10) -> None:
        super().__init__(Wait(), nn.Flatten(), nn.Linear(784, 24), nn.ReLU(), nn.Linear(24, classes))

class Normed(nn.Sequential):
    """With batch norm."""
    def __init__(self, classes: int = 10) -> None:
        super().__init__(
            Wait(), nn.Conv2d(1, 4, 5, stride=3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(256, 32),
            nn.ReLU(), nn.Linear(32, classes),
        )
'''
PATIENCE = 180.0
"""Seconds after which something that should have happened is a failure; machines that run tests may be slow."""


class Party:
    """One process of the federation, started and killed at will; its output is in a file."""

    def __init__(self, home: Path, name: str, *command: str, **environment: str) -> None:
        self.home, self.name, self.command, self.environment = home, name, command, environment
        self.output = home / f"{name}.out"
        self.process: subprocess.Popen[bytes] | None = None
        self._prepared: subprocess.Popen[bytes] | None = None

    def start(self, *doom: str) -> Party:
        """Start it; with a moment and a number, in a process that dies then."""
        assert self.process is None or self.process.poll() is not None, f"{self.name} runs already"
        if self._prepared is not None and not doom:
            assert self._prepared.stdin is not None
            self._prepared.stdin.close()
            self.process, self._prepared = self._prepared, None
        else:
            self.process = self._launch(*doom)
        return self

    def prepare(self) -> None:
        """Import everything in a process that `start` then uses, so that it is quickly back on slow machines too."""
        self._prepared = self._launch("standby", "0", stdin=subprocess.PIPE)

    def _launch(self, *doom: str, stdin: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "PARTY": self.name, **self.environment}
        program = [str(Path(__file__).with_name("doomed.py")), *doom] if doom else ["-m", "polyfed"]
        with self.output.open("ab") as file:
            return subprocess.Popen(
                [sys.executable, *program, *self.command],
                cwd=self.home, env=variables, stdin=stdin, stdout=file, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip

    def kill(self) -> None:
        """At once, without a word: as if the power went out."""
        for process in (self.process, self._prepared):
            if process is not None and process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def hold(self) -> None:
        """Let it wait in the middle of its training, until `release`; for those with a network of their own."""
        self._holding.touch()

    def release(self) -> None:
        self._holding.unlink()

    @property
    def _holding(self) -> Path:
        return self.home / f"hold-{self.name}"

    def signal(self, number: signal.Signals) -> None:
        """SIGTERM, SIGINT, SIGSTOP…"""
        assert self.process is not None
        os.killpg(self.process.pid, number)

    def wait(self, seconds: float = PATIENCE) -> int:
        """Its exit status."""
        assert self.process is not None
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} did not end in time; it said:\n{self.said}") from None

    @property
    def said(self) -> str:
        """All that it has printed."""
        return self.output.read_text() if self.output.exists() else ""

    def wait_to_say(self, pattern: str, seconds: float = PATIENCE) -> None:
        """Until what it has printed matches."""
        self.wait_until(lambda: re.search(pattern, self.said) is not None, f"say '{pattern}'", seconds)

    def wait_for_round(self, number: int) -> None:
        """Until the server has shown that round, since it was started first."""
        self.wait_to_say(rf"(?m)^round {number}/")

    def wait_until(self, condition: Callable[[], bool], what: str, seconds: float = PATIENCE) -> None:
        end = time.monotonic() + seconds
        while not condition():
            ended = self.process is not None and self.process.poll() is not None and not condition()
            assert not ended and time.monotonic() < end, f"{self.name} did not {what} in time; it said:\n{self.said}"
            time.sleep(0.05)


class Federation:
    """Three members with different classes and different networks (one with batch norm, one a user's own)."""

    def __init__(self, home: Path, method: str | Mapping[str, Any] = "fedproto", **changes: Any) -> None:
        """`changes` replace terms; those of the groups `server`, `task`, `training` one by one."""
        self.home = home
        home.mkdir(parents=True, exist_ok=True)
        (home / "own.py").write_text(OWN)
        keys.make_server_keys(home / "keys", ["127.0.0.1", "localhost"])
        self.port = free_port()
        self.terms = self._terms(method, changes)
        self.write_terms()
        digits = polyfed.load_dataset("digits")
        images, labels = digits.images.numpy(), digits.labels.numpy()
        for place, (name, classes) in enumerate(CLASSES.items()):
            own = np.flatnonzero(np.isin(labels, classes))[place::6]
            np.savez(home / f"{name}.npz", x=images[own], y=labels[own])
            self.write_site(name)
        self.server = Party(home, "server", "server", "run", "federation.yaml")
        self.sites = {name: Party(home, name, "site", "run", f"{name}.yaml") for name in NAMES}

    def _terms(self, method: str | Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
        terms: dict[str, Any] = {
            "name": "test-1",
            "method": method,
            "rounds": 3,
            "seed": 3,
            "training": {"epochs": 1, "batch_size": 8, "lr": 0.05},
            "task": {
                "classes": 10, "input_shape": [1, 28, 28], "mean": [0.5], "std": [0.5], "features": 20,
                "auxiliary": "cnn5",
            },
            "members": {name: keys.make_site_keys(self.home / "keys", name) for name in NAMES},
            "server": {"listen": f"127.0.0.1:{self.port}", "minimum_members": 3, "grace": 1, "reply_timeout": 120},
        }  # fmt: skip
        for name, value in changes.items():
            terms[name] = {**terms[name], **value} if name in ("server", "task", "training") else value
        return terms

    def write_terms(self, **changes: Any) -> None:
        """Write federation.yaml, with some terms replaced."""
        (self.home / "federation.yaml").write_text(yaml.safe_dump({**self.terms, **changes}, sort_keys=False))

    def write_site(self, name: str, **changes: Any) -> None:
        """Write a member's file, with some settings replaced."""
        settings = {
            "name": name, "federation": "federation.yaml", "server": f"127.0.0.1:{self.port}",
            "certificate": "keys/ca.crt", "key": f"keys/{name}.key", "data": f"npz:{name}.npz",
            "network": NETWORKS[name], "folder": f"state-{name}", "split": "6:2:2", "device": "cpu",
        }  # fmt: skip
        (self.home / f"{name}.yaml").write_text(yaml.safe_dump({**settings, **changes}, sort_keys=False))

    def start(self) -> None:
        """Everybody."""
        self.server.start()
        for site in self.sites.values():
            site.start()

    def finish(self) -> RunFolder:
        """Wait until the server and the sites that run have ended well."""
        assert self.server.wait() == 0, self.server.said
        for site in self.sites.values():
            if site.process is not None:
                assert site.wait() == 0, site.said
        return self.folder

    @property
    def folder(self) -> RunFolder:
        return RunFolder.open(self.home / "run")

    @property
    def row(self) -> int:
        """How many rounds are recorded."""
        file = self.home / "run" / "rounds.csv"
        return max(0, file.read_text().count("\n") - 1) if file.exists() else 0

    @property
    def notes(self) -> list[str]:
        """What the server noted."""
        return [event["note"] for event in self.folder.events() if event["event"] == "note"]

    def members(self) -> list[Member]:
        """The members, to be simulated in this process."""
        return [read_member(self.home / f"{name}.yaml") for name in NAMES]

    def state(self, name: str, round: int) -> dict[str, torch.Tensor]:
        """What a member keeps of itself after a round."""
        (file,) = (self.home / f"state-{name}" / "rounds").glob(f"state.{round}.*.safetensors")
        return load_file(file)

    def close(self) -> None:
        for party in (self.server, *self.sites.values()):
            party.kill()


@contextmanager
def federation(home: Path, method: str | Mapping[str, Any] = "fedproto", **changes: Any) -> Iterator[Federation]:
    """All its processes are killed at the end."""
    found = Federation(home, method, **changes)
    try:
        yield found
    finally:
        found.close()
        sys.modules.pop("own", None)  # of this federation; the next has its own
        sys.path[:] = [folder for folder in sys.path if folder != str(home.resolve())]


TOLD = ["round", "loss_mean", "accuracy_mean", "accuracy_std", "participants", "replies", "upload_floats"]
"""What a federation and its simulation both know of a round."""


def simulate(real: Federation) -> server.Federation:
    """The same members, terms and seed in this process, one client after another."""
    people = simulated(real.members())
    config = real.members()[0].terms.experiment()
    folder = RunFolder.create(real.home / "simulation", config)
    alone = server.Federation(config, people.method, SequentialEngine(people), folder)
    alone.run()
    return alone


def assert_equals_simulation(real: Federation) -> None:
    """The same rounds, the same server and the same clients as in a simulation, bit by bit."""
    alone, run = simulate(real), real.folder
    assert run.rounds()[TOLD].equals(alone.folder.rounds()[TOLD])
    expected = alone.folder.server_state()
    assert run.server_state().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in run.server_state().items())
    for number, name in enumerate(NAMES):
        own, state = real.state(name, run.config.rounds), alone.engine.states.get_state(number)  # type: ignore[union-attr]
        assert own.keys() == state.keys()
        assert all(torch.equal(own[key], state[key]) for key in own), name


def free_port() -> int:
    """A port of loopback that nobody uses now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
