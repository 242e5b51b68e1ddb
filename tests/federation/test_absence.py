"""Members that are slow, silent, late or gone: nobody waits for them longer than agreed."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'polyfed[flower]'")

from tests.federation import support

pytestmark = pytest.mark.federation


def test_a_straggler_is_left_behind_and_not_asked_until_it_has_answered(tmp_path: Path) -> None:
    """Slow in round 2 and, asked again, in the last: the run ends without it, and still tells it so.

    So many rounds, because the run goes on meanwhile: twelve were over if this process stood still for three seconds.
    """
    group = {"minimum_members": 3, "enough_replies": 2, "grace": 10}
    with support.federation(tmp_path, rounds=40, server=group) as real:
        cedar = real.sites["cedar"]
        real.start()
        real.server.wait_for_round(1)
        cedar.hold()
        late = r"continues without client 2 \(cedar\): no answer yet, 10 s \(grace\) after 2 others"
        real.server.wait_to_say(late)
        real.server.wait_for_round(6)
        cedar.release()
        real.server.wait_to_say("cedar is back after missing rounds?")
        cedar.hold()
        real.server.wait_for_round(40)
        real.server.wait_until(lambda: real.folder.finished, "finish the run")
        cedar.release()
        rounds = real.finish().rounds()
        asked = (rounds["participants"] == 3).sum()
        assert asked <= 40 - 3 and cedar.said.count("asked to train") == asked
        assert 2 <= sum("without client 2 (cedar): no answer yet" in note for note in real.notes) <= asked


def test_a_site_that_never_answers_is_given_up_after_the_timeout(tmp_path: Path) -> None:
    """Stopped in the middle of its training, as by a machine that hangs. When it moves again it is back."""
    group = {"minimum_members": 2, "reply_timeout": 12}
    with support.federation(tmp_path, rounds=300, server=group) as real:
        birch, cedar = real.sites["birch"], real.sites["cedar"]
        real.start()
        cedar.wait_to_say("asked to train")
        cedar.signal(signal.SIGSTOP)
        given_up = r"continues without client 2 \(cedar\): no answer within 12 s"
        real.server.wait_to_say(f"(?s){given_up}.*missing: cedar")  # its heartbeats are missed after 20 s
        cedar.signal(signal.SIGCONT)
        real.server.wait_to_say("cedar is back after missing rounds?")
        birch.signal(signal.SIGTERM)  # its connection is closed, so nobody waits
        assert birch.wait() == 143
        real.server.signal(signal.SIGINT)
        assert real.server.wait() == 130


def test_members_join_late_leave_and_are_waited_for(tmp_path: Path) -> None:
    """Cedar comes late and leaves for good; without birch there are too few, so the run pauses until it is back."""
    with support.federation(tmp_path, rounds=14, server={"minimum_members": 2}) as real:
        amber, birch, cedar = real.sites.values()
        real.server.start()
        amber.start()
        real.server.wait_to_say("waiting for .* of at least 2 members")
        birch.start()
        real.server.wait_to_say("continuing with amber and birch")
        real.server.wait_for_round(2)
        birch.hold()
        cedar.start().wait_to_say("connected to")
        birch.release()
        real.server.wait_to_say("cedar joins before round")
        real.server.wait_to_say(r"(?m)^round .* 3 of 3 answered")
        cedar.signal(signal.SIGTERM)
        birch.signal(signal.SIGTERM)
        assert (cedar.wait(), birch.wait()) == (143, 143)
        paused = "note: waiting for birch and cedar: 1 of at least 2 members is here"
        real.server.wait_until(lambda: real.server.said.rstrip().endswith(paused), "pause again")
        cedar.process = None
        birch.start()
        continued = "note: continuing with amber and birch"
        real.server.wait_until(lambda: real.server.said.count(continued) == 2, "continue")
        run = real.finish()
        assert "cedar does not know yet that the run has ended" in real.server.said
        assert run.rounds()["round"].tolist() == list(range(1, 15))
        clients = run.clients()
        assert clients["client"].tolist() == [0, 1, 2] and clients["accuracy_final"].notna().all()
