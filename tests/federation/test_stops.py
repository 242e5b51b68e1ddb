"""Servers and sites that are stopped in order, find their places taken, or can't write."""

from __future__ import annotations

import resource
import shutil
import signal
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'polyfed[flower]'")

from tests.federation import support

pytestmark = pytest.mark.federation


def test_stopped_in_order_everyone_says_how_to_continue(tmp_path: Path) -> None:
    """The server first: the sites keep trying, and those that are started again continue too."""
    with support.federation(tmp_path, rounds=6) as real:
        amber, birch, cedar = real.sites.values()
        real.start()
        real.server.wait_for_round(1)
        real.server.signal(signal.SIGTERM)
        assert real.server.wait() == 143
        assert f"continue with `polyfed server run {tmp_path / 'federation.yaml'}`" in real.server.said
        for site in real.sites.values():
            site.wait_to_say("no connection to .* trying again")
        amber.signal(signal.SIGINT)
        birch.signal(signal.SIGTERM)
        assert (amber.wait(), birch.wait()) == (130, 143)
        assert all("polyfed: stopped; `polyfed site run" in site.said for site in (amber, birch))
        real.server.start()
        cedar.wait_to_say("(?s)connected to.*connected to")
        real.server.wait_to_say("waiting for .*: . of at least 3 members")
        real.server.signal(signal.SIGINT)  # while it waits
        assert real.server.wait() == 130
        for party in (real.server, amber, birch):
            party.start()
        real.finish()
        support.assert_equals_simulation(real)


def test_a_place_that_is_taken_is_refused(tmp_path: Path) -> None:
    """A site that is there before its server, a second one on its folder, a second server, a port that is in use."""
    with support.federation(tmp_path / "one") as real, support.federation(tmp_path / "other") as other:
        amber = real.sites["amber"].start()
        amber.wait_to_say("no connection to .* trying again")
        second = support.Party(real.home, "second", *amber.command).start()
        assert second.wait() == 2 and "another process is working on" in second.said
        real.server.start()
        amber.wait_to_say("connected to")
        again = support.Party(real.home, "again", *real.server.command).start()
        assert again.wait() == 2 and "another process is working on" in again.said
        other.terms["server"]["listen"] = real.terms["server"]["listen"]
        other.write_terms()
        assert other.server.start().wait() == 2
        assert f"the server can't listen on 127.0.0.1:{real.port}" in other.server.said
        assert real.server.process is not None and real.server.process.poll() is None
        assert amber.process is not None and amber.process.poll() is None


def test_a_site_that_cannot_write_fails_and_the_run_continues(tmp_path: Path) -> None:
    """Cedar's disk is full in a round and has room again in a later one; birch's folder is deleted for good."""
    with support.federation(tmp_path, rounds=30, server={"minimum_members": 2}) as real:
        _, birch, cedar = real.sites.values()
        real.start()
        cedar.wait_to_say("asked to train")
        assert cedar.process is not None
        resource.prlimit(cedar.process.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        failure = r"client 2 \(cedar\): it failed; its own notes say why"
        real.server.wait_to_say(failure)
        resource.prlimit(cedar.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        rows = real.row
        real.server.wait_until(lambda: real.row >= rows + 3, "continue")
        shutil.rmtree(tmp_path / "state-birch" / "rounds")
        real.server.wait_to_say(r"client 1 \(birch\): it failed; its own notes say why")
        assert real.server.wait() == 0
        assert "birch could not keep its final model" in real.server.said
        assert cedar.wait() == 0
        assert "asked to train round 30; sent" in cedar.said and "asked to train round 30; refused" in birch.said
        assert real.folder.rounds()["round"].tolist() == list(range(1, 31))
