"""Members and strangers that do wrong in a run of real processes: each is refused with a reason, the rest goes well."""

from __future__ import annotations

import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'polyfed[flower]'")

from polyfed.deploy import certificates, keys
from polyfed.deploy.member import simulated
from polyfed.engines import SequentialEngine
from polyfed.records import RunFolder
from polyfed.server.federation import Federation
from tests.federation import support

pytestmark = pytest.mark.federation

HOSTILE = '''
"""Joins like an honest member, then answers each round with something else."""
import math
import sys
import torch
from pathlib import Path
from polyfed.deploy.keys import read_private_key
from polyfed.flower.node import SiteConnection
from polyfed.message import Message
from polyfed.remote.transport import Packet

WRONG = {
    1: lambda good: Packet({"round": 1}, Message({"prototypes": torch.zeros(2, 7)}, {"labels": torch.tensor([0, 1])})),
    2: lambda good: Packet({"round": 2}, Message({"prototypes": good * math.nan}, {"labels": torch.tensor([0])})),
    3: lambda good: Packet({"round": 2}, Message({"prototypes": good}, {"labels": torch.tensor([0])})),
    4: lambda good: Packet({"round": 4}, Message({"prototypes": torch.zeros(400, 20)}, {"labels": torch.arange(400)})),
    5: lambda good: Packet({"round": 5}, Message({"prototypes": good + 1e6}, {"labels": torch.tensor([0])})),
    6: lambda good: Packet({"failure": "\\x1b[2J\\x07all is\\nwell: round 7 finished"}),
    7: lambda good: Packet({"round": 7, "loss": [1], "x": "y" * 2_000_000}, Message()),
}

def answer(kind, packet):
    if kind == "join":
        return Packet({"profile": {"name": "cedar", "features": 20}, "share": "scores"})
    if kind == "train":
        return WRONG[packet.facts["round"]](torch.ones(1, 20))
    if kind == "finish":
        connection.stop.set()
    return Packet()

port, home = sys.argv[1], Path(sys.argv[2])
connection = SiteConnection(
    f"127.0.0.1:{port}", home / "keys/ca.crt", read_private_key(home / "keys/cedar.key"), answer, print
)
connection.run()
'''
REASONS = {
    1: "'prototypes' has shape (2, 7), not (2, 20).",
    2: "'prototypes' holds values that are not finite.",
    3: "it answered for round 2, not for round 3.",
    4: "its message of",
    5: "times as large as usual, more than reply_bound allows",
    6: "[2J all is well: round 7 finished",
    7: "its facts of 2000",
}


def test_a_hostile_member_harms_nobody(tmp_path: Path) -> None:
    """Seven rounds, seven wrong answers: the other two have the numbers of a federation of their own."""
    with support.federation(tmp_path / "real", "fedproto", rounds=7, server={"minimum_members": 3}) as real:
        (real.home / "hostile.py").write_text(HOSTILE)
        real.sites["cedar"] = Script(real.home, "cedar", "hostile.py", str(real.port), str(real.home))
        real.start()
        run = real.finish()
        told = {event["round"]: event["note"] for event in run.events() if event.get("client") == 2}
        assert told.keys() == REASONS.keys()
        for round, reason in REASONS.items():
            assert reason in told[round]
        records = (run.path / "events.jsonl").read_text()
        assert "\x1b" not in real.server.said + records and "\\u001b" not in records and "\\u0007" not in records
        honest = alone(real, tmp_path / "one")
        columns = ["round", "loss_mean", "accuracy_mean", "replies"]
        assert run.rounds()[columns].equals(honest.rounds()[columns])


class Script(support.Party):
    """A program of a member's own."""

    def start(self, *doom: str) -> support.Party:
        with self.output.open("ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, *self.command],
                cwd=self.home, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        return self


def alone(real: support.Federation, folder: Path) -> RunFolder:
    """The two honest members in a simulation; the third one never comes."""
    sys.modules.pop("own", None)  # another test's module of that name
    members = real.members()
    people = simulated(members)
    config = members[0].terms.experiment()
    run = Federation(config, people.method, Two(people), RunFolder.create(folder, config))
    run.run()
    sys.modules.pop("own", None)
    return run.folder


class Two(SequentialEngine):
    """Only the first two clients are there."""

    def available(self) -> Any:
        return [0, 1]


def test_who_does_not_belong_is_told_why(tmp_path: Path) -> None:
    """Another member's key, an unregistered key, a foreign authority: a sentence each, nothing stays behind."""
    with support.federation(tmp_path / "real", "fedproto") as real:
        real.server.start()
        real.server.wait_until(lambda: reachable(real.port), "listen", 90)
        keys.make_site_keys(real.home / "keys", "stranger")
        keys.make_server_keys(real.home / "others", ["127.0.0.1"])
        (real.home / "terms.yaml").write_text((real.home / "federation.yaml").read_text())
        tries = {
            # its file says birch, but the key is amber's
            "birch": ({"key": "keys/amber.key"}, 2, "is not the one that .* has for 'birch'"),
            "amber": ({"certificate": "others/ca.crt"}, 1, "certificate of the server at .* can't be accepted"),
        }
        for name, (changes, status, reason) in tries.items():
            real.write_site(name, **changes)
            site = real.sites[name].start()
            assert site.wait(90) == status, site.said
            site.wait_to_say(reason.replace(" ", r"\s+"), 1)
            assert len(site.said) < 1000 and "Traceback" not in site.said
        # The stranger's own terms have its key in amber's place; the server's have not.
        own = {
            **real.terms["members"],
            "amber": keys.public_line(keys.read_private_key(real.home / "keys/stranger.key")),
        }
        real.write_terms(members=own)
        real.write_site("amber", key="keys/stranger.key")
        site = real.sites["amber"].start()
        assert site.wait(90) == 1, site.said
        site.wait_to_say(r"does\s+not\s+accept\s+this\s+site's\s+key", 1)
        assert real.server.process is not None and real.server.process.poll() is None
        assert "joins" not in real.server.said
        assert not (real.home / "state-birch").exists()


def test_an_expired_server_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its own owner when it starts, and by the sites of whoever starts it all the same."""
    with support.federation(tmp_path / "real", "fedproto") as real:
        folder, now = real.home / "keys", certificates._now()
        authority, key = (folder / "ca.crt").read_bytes(), keys.read_private_key(folder / "ca.key")
        own = keys.read_private_key(folder / "server.key").public_key()
        monkeypatch.setattr(certificates, "_now", lambda: now - timedelta(days=400))
        old = certificates.new_server_certificate(authority, key, own, ["127.0.0.1"], 30)
        (folder / "server.crt").write_bytes(old)
        assert real.server.start().wait(90) == 2
        assert "expired" in real.server.said and "Traceback" not in real.server.said


def reachable(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True
