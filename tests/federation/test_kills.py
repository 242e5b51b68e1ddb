"""Servers and sites that are killed: the numbers stay those of an uninterrupted simulation."""

from __future__ import annotations

import random
import re
import signal
import time
from collections.abc import Collection, Mapping
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'polyfed[flower]'")

from polyfed.deploy.member import simulated
from polyfed.engines import SequentialEngine
from polyfed.engines.base import Listener
from polyfed.records import RunFolder
from polyfed.server import federation as server
from tests.federation import support

pytestmark = pytest.mark.federation
KILLED = -signal.SIGKILL


def assert_each_round_once(real: support.Federation) -> None:
    """In rounds.csv and among the events."""
    rounds = list(range(1, real.terms["rounds"] + 1))
    assert real.folder.rounds()["round"].tolist() == rounds
    assert [event["round"] for event in real.folder.events() if event["event"] == "round"] == rounds


def shown(real: support.Federation) -> int:
    """How many rounds the server has shown, repeated ones too."""
    return len(re.findall(r"(?m)^round \d+/", real.server.said))


def test_a_server_that_is_killed_ten_times(tmp_path: Path) -> None:
    """At random moments, at those where a kill does most harm, and when the run is over but nobody knows it yet."""
    chosen = random.Random(5)
    moments = {"aggregated": 1, "recorded": 1, "before checkpoint": 1, "half a state": 1, "half a manifest": 0}
    kills: list[tuple[str, int] | None] = [*moments.items(), None, None, None]
    chosen.shuffle(kills)
    with support.federation(tmp_path, rounds=40) as real:
        for site in real.sites.values():
            site.start()
        for kill in kills:
            if kill is None:
                before = shown(real)
                real.server.start()
                real.server.wait_until(lambda before=before: shown(real) > before, "finish a round")
                time.sleep(chosen.uniform(0, 1.5))
                real.server.kill()
            else:
                assert real.server.start(kill[0], str(kill[1])).wait() == KILLED, real.server.said
            assert not real.folder.finished
        assert real.server.start("before the end", "0").wait() == KILLED, real.server.said
        assert not real.folder.finished
        assert real.server.start("before the farewell", "0").wait() == KILLED, real.server.said
        assert real.folder.finished and all(site.process.poll() is None for site in real.sites.values())
        real.server.start()
        real.finish()
        assert_each_round_once(real)
        support.assert_equals_simulation(real)


@pytest.mark.parametrize("evaluate", ["after-training", "after-download"])
def test_a_site_that_is_killed_and_quickly_back_is_asked_again(tmp_path: Path, evaluate: str) -> None:
    """In the middle of its training, while it keeps what it trained, and before its answer has left."""
    with support.federation(tmp_path, rounds=6, evaluate=evaluate) as real:
        real.server.start()
        doomed = {"amber": "training", "birch": "half a diary", "cedar": "answering"}
        for survived, (name, moment) in enumerate(doomed.items(), start=1):
            real.sites[name].start(moment, str(survived))
            real.sites[name].prepare()
        for name in doomed:
            assert real.sites[name].wait() == KILLED
            real.sites[name].start()
        real.finish()
        assert not [note for note in real.notes if "without" in note]
        support.assert_equals_simulation(real)


def test_a_server_and_a_site_that_are_killed_at_once(tmp_path: Path) -> None:
    with support.federation(tmp_path, rounds=4) as real:
        real.server.start("aggregated", "2")
        real.sites["amber"].start()
        real.sites["birch"].start("answering", "2")
        real.sites["cedar"].start()
        real.sites["birch"].prepare()
        assert real.sites["birch"].wait() == KILLED
        real.sites["birch"].start()
        assert real.server.wait() == KILLED
        real.sites["birch"].kill()
        real.server.start()
        real.sites["birch"].start()
        real.finish()
        assert_each_round_once(real)
        support.assert_equals_simulation(real)


class Absent(SequentialEngine):
    """A simulation in which some clients miss some rounds."""

    missed: Mapping[int, Collection[int]] = {}
    now = 0

    def gather(self, round: int, needed: int, listener: Listener, failed: int = 0) -> None:
        self.now = round

    def available(self) -> Collection[int]:
        return [client for client in super().available() if self.now not in self.missed.get(client, ())]


def missed(site: support.Party, rounds: int) -> set[int]:
    """The rounds in which it did not train, by what it printed."""
    return {*range(1, rounds + 1)} - {int(each) for each in re.findall(r"asked to train round (\d+); sent", site.said)}


def test_a_site_that_stays_away_comes_back_with_its_own_state(tmp_path: Path) -> None:
    """The numbers are those of a simulation in which it misses the same rounds, and one that joined late the first."""
    with support.federation(tmp_path, rounds=12, server={"minimum_members": 2}) as real:
        birch, cedar = real.sites["birch"], real.sites["cedar"]
        real.server.start()
        birch.start().wait_to_say("connected to")
        birch.hold()
        cedar.start("training", "1")
        cedar.wait_to_say("asked to train round 1")
        real.sites["amber"].start().wait_to_say("connected")
        birch.release()
        assert cedar.wait() == KILLED
        real.server.wait_to_say(r"continues without client 2 \(cedar\): the connection to it was lost")
        real.server.wait_for_round(4)
        birch.hold()
        cedar.start()
        cedar.wait_to_say("(?s)connected to.*connected to")
        birch.release()
        real.server.wait_to_say("cedar is back after missing rounds?")
        run = real.finish()
        people = simulated(real.members())
        engine = Absent(people)
        alone = server.Federation(run.config, people.method, engine, RunFolder.create(tmp_path / "alone", run.config))
        engine.missed = {client: missed(real.sites[name], 12) for client, name in enumerate(support.NAMES)}
        assert engine.missed[0] == {1} and not engine.missed[1] and {2, 3, 4} <= engine.missed[2] < {*range(2, 13)}
        alone.run()
        for name, tensor in alone.folder.server_state().items():
            assert torch.equal(run.server_state()[name], tensor), name
        state = engine.get_state(2)
        assert all(torch.equal(state[name], tensor) for name, tensor in real.state("cedar", 12).items())
