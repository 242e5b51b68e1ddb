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
import yaml

import polyfed
from polyfed.deploy import keys
from polyfed.deploy.member import Member, read_member
from polyfed.records import RunFolder

NAMES = ("amber", "birch", "cedar")
CLASSES = {"amber": [0, 1, 2, 3], "birch": [3, 4, 5, 6], "cedar": [6, 7, 8, 9, 0]}
NETWORKS = {"amber": "cnn5", "birch": "own:Small", "cedar": "own:Normed"}
OWN = '''
from torch import nn

class Small(nn.Sequential):
    """A user's own network."""
    def __init__(self, classes: int = 10) -> None:
        super().__init__(nn.Flatten(), nn.Linear(784, 24), nn.ReLU(), nn.Linear(24, classes))

class Normed(nn.Sequential):
    """With batch norm."""
    def __init__(self, classes: int = 10) -> None:
        super().__init__(
            nn.Conv2d(1, 4, 5, stride=3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(256, 32), nn.ReLU(),
            nn.Linear(32, classes),
        )
'''
PATIENCE = 240.0
"""Seconds after which something that should have happened is a failure; machines that run tests may be slow."""


class Party:
    """One process of the federation, started and killed at will; its output is in a file."""

    def __init__(self, home: Path, name: str, *command: str, **environment: str) -> None:
        self.home, self.name, self.command, self.environment = home, name, command, environment
        self.output = home / f"{name}.out"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> Party:
        assert self.process is None or self.process.poll() is not None, f"{self.name} runs already"
        variables = {**os.environ, "OMP_NUM_THREADS": "1", **self.environment}
        with self.output.open("ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "polyfed", *self.command],
                cwd=self.home, env=variables, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        return self

    def kill(self) -> None:
        """At once, without a word: as if the power went out."""
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

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

    def wait_until(self, condition: Callable[[], bool], what: str, seconds: float = PATIENCE) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"{self.name} did not {what} in time; it said:\n{self.said}"
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
    def notes(self) -> list[str]:
        """What the server noted."""
        return [event["note"] for event in self.folder.events() if event["event"] == "note"]

    def members(self) -> list[Member]:
        """The members, to be simulated in this process."""
        return [read_member(self.home / f"{name}.yaml") for name in NAMES]

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


def free_port() -> int:
    """A port of loopback that nobody uses now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
