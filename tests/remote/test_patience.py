"""How long a round waits for sites, and what becomes of one that is late. Time is simulated, nobody sleeps."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from polyfed.errors import InputError
from polyfed.records import RunFolder
from polyfed.remote import Agreement, InMemoryTransport, Packet, Patience, RemoteEngine, Site
from polyfed.remote.transport import Kind
from polyfed.server.federation import Federation
from tests.remote.support import NAMES, agreement, ask, new_sites, same_rows, setting

Seconds = Callable[[str, Kind, Packet], float]


def slow_in(round: int, node: str = "birch", late: float = 100.0) -> Seconds:
    """Everyone needs 1 s to train; one of them far more in one round."""

    def seconds(name: str, kind: Kind, packet: Packet) -> float:
        if kind != "train":
            return 0.0
        return late if name == node and packet.facts["round"] == round else 1.0

    return seconds


def started(
    folder: Path, seconds: Seconds, method: str = "fedproto", rounds: int = 5, **terms: Any
) -> tuple[Federation, InMemoryTransport, dict[str, Site]]:
    config, people = setting(method, participation=1.0, rounds=rounds)
    agreed = agreement(people, **terms)
    sites = new_sites(people, folder / "sites", agreed)
    transport = InMemoryTransport({name: site.answer for name, site in sites.items()}, record=True, seconds=seconds)
    run = RunFolder.create(folder / "run", config)
    return Federation(config, people.method, RemoteEngine(agreed, transport, people.method), run), transport, sites


def failing_to_train(answer: Callable[[Kind, Packet], Packet]) -> Callable[[Kind, Packet], Packet]:
    return lambda kind, packet: Packet({"failure": "its power went out"}) if kind == "train" else answer(kind, packet)


def asked(transport: InMemoryTransport, node: str) -> list[int]:
    """The rounds for which a site was asked to train."""
    found = [json.loads(facts) for kind, name, facts, _ in transport.record or () if (kind, name) == ("train", node)]
    return [facts["round"] for facts in found if "run" in facts]


def test_a_round_continues_when_there_are_enough_replies_and_the_grace_is_over(tmp_path: Path) -> None:
    """Three answer after 1 s; the fourth would after 100 s, and is waited for until 1 + 5 s."""
    run, transport, _ = started(tmp_path, slow_in(2), enough_replies=3, grace=5.0)
    run.round(1)
    assert transport.now == 1.0  # all have answered: no grace
    run.round(2)
    assert transport.now == 1.0 + 1.0 + 5.0
    assert run.folder.rounds().replies.tolist() == [4, 3]
    (note,) = [event["note"] for event in run.folder.events() if event["event"] == "note"]
    assert "client 1 (birch): no answer yet, 5 s (grace) after 3 others (enough_replies)" in note


def test_who_comes_within_the_grace_counts(tmp_path: Path) -> None:
    run, transport, _ = started(tmp_path, slow_in(1, late=5.5), enough_replies=3, grace=5.0)
    run.round(1)
    assert transport.now == 5.5
    assert run.folder.rounds().replies.tolist() == [4]


def test_without_enough_replies_a_round_waits_for_the_timeout(tmp_path: Path) -> None:
    run, transport, _ = started(tmp_path, slow_in(1), reply_timeout=60.0)
    run.round(1)
    assert transport.now == 60.0
    (note,) = [event["note"] for event in run.folder.events() if event["event"] == "note"]
    assert "client 1 (birch): no answer within 60 s" in note


def test_failed_answers_are_not_enough(tmp_path: Path) -> None:
    """Two fail at once, so the third and the fourth, who takes 30 s, are waited for."""
    run, transport, _ = started(tmp_path, slow_in(1, late=30.0), enough_replies=2, grace=0.0)
    for name in ("amber", "cedar"):
        transport.sites[name] = failing_to_train(transport.sites[name])
    run.round(1)
    assert transport.now == 30.0


def test_a_straggler_is_not_asked_while_it_owes_and_then_goes_on_from_its_own_state(tmp_path: Path) -> None:
    """It is asked for round 2 when 1 s has passed and answers at 4.5 s; rounds 2, 3 and 4 end at 3, 4 and 5 s.

    Its late answer is in no round. In round 5 it starts from its state after round 2, as a site does that was asked for
    rounds 1, 2 and 5 alone and got the same downloads.
    """
    run, transport, sites = started(tmp_path, slow_in(2, late=3.5), enough_replies=3, grace=1.0)
    run.run()
    assert asked(transport, "birch") == [1, 2, 5]
    assert asked(transport, "amber") == [1, 2, 3, 4, 5]
    rounds = run.folder.rounds()
    assert rounds.participants.tolist() == [4, 4, 3, 3, 4]
    assert rounds.replies.tolist() == [4, 3, 3, 3, 4]

    _, people = setting("fedproto", participation=1.0, rounds=5)
    alone = Site("birch", agreement(people), people.slice([1]), tmp_path / "alone")
    for kind, name, facts, message in transport.record or ():
        known = json.loads(facts)
        if (kind, name) == ("train", "birch") and "run" in known:
            alone.answer("train", Packet.from_bytes(facts, message))
    for site, path in ((alone, tmp_path / "alone.safetensors"), (sites["birch"], tmp_path / "birch.safetensors")):
        site.export(path)
    own, expected = load_file(tmp_path / "birch.safetensors"), load_file(tmp_path / "alone.safetensors")
    assert all(torch.equal(own[name], expected[name]) for name in expected)
    entries = json.loads((tmp_path / "sites" / "birch" / "site.json").read_text())["rounds"]
    assert [entry["round"] for entry in entries] == [2, 5]


def test_a_late_reply_changes_no_bit_of_the_others_rounds(tmp_path: Path) -> None:
    """Round 2 is the same whether the fourth site is late or fails: what it sends afterwards is nowhere."""
    late, _, _ = started(tmp_path / "late", slow_in(2, late=1e6), rounds=4, enough_replies=3, grace=1.0)
    late.run()
    gone, transport, sites = started(tmp_path / "gone", slow_in(9), rounds=4, minimum_members=3)
    gone.round(1)
    transport.sites.pop("birch")
    for number in (2, 3, 4):
        gone.round(number)
    gone._finish()
    same = ["round", "loss_mean", "replies", "upload_floats"]
    assert late.folder.rounds()[same].equals(gone.folder.rounds()[same])


def test_who_lost_the_question_is_asked_again_after_the_timeout(tmp_path: Path) -> None:
    """It would never answer; the timeout of 4 s is over after two rounds of 1 + 1 s and one of 1 s."""
    run, transport, _ = started(tmp_path, slow_in(1, late=1e9), enough_replies=3, grace=1.0, reply_timeout=4.0)
    run.run()
    assert asked(transport, "birch") == [1, 4, 5]


@pytest.mark.parametrize("method", ["fedproto", "fedtgp", "fedavg"])
def test_patience_changes_nothing_if_all_are_in_time(tmp_path: Path, method: str) -> None:
    """Whoever answers first: replies are fused in the order of client numbers."""
    hurried = {name: 4.0 - number for number, name in enumerate(NAMES)}
    plain, _, _ = started(tmp_path / "plain", lambda *question: 0.0, method)
    other, _, _ = started(tmp_path / "other", lambda name, *rest: hurried[name], method, enough_replies=1, grace=9.0)
    plain.run(), other.run()
    same_rows(tmp_path / "plain" / "run", tmp_path / "other" / "run")


def test_the_deadline_is_the_grace_after_enough_but_never_after_the_timeout() -> None:
    """Asked at 100: enough (2) at 110, 5 s more is 115; with answers at 103 and 158 the timeout comes first."""
    patience = Patience(60.0, 2, 5.0)
    assert patience.deadline(100.0, [103.0, 110.0, 112.0]) == 115.0
    assert patience.deadline(100.0, [103.0]) == 160.0
    assert patience.deadline(100.0, [103.0, 158.0]) == 160.0


@pytest.mark.parametrize(
    ("terms", "words"),
    [
        ({"enough_replies": 0}, "enough_replies is 0, but must be a whole number from 1 to 4, the number of members"),
        ({"enough_replies": 5}, "enough_replies is 5, but must be a whole number from 1 to 4"),
        ({"enough_replies": 2.0}, "enough_replies is 2.0, but must be"),
        ({"enough_replies": True}, "enough_replies is True, but must be"),
        ({"grace": -1.0}, "grace is -1.0, but must be a number of seconds at least 0"),
        ({"grace": float("nan")}, "grace is nan, but must be"),
        ({"grace": "5"}, "grace is '5', but must be"),
        ({"reply_timeout": 0}, "reply_timeout is 0, but must be a number of seconds above 0"),
    ],
)
def test_terms_that_make_no_sense_are_refused(terms: dict[str, Any], words: str) -> None:
    _, people = setting("standalone")
    with pytest.raises(InputError, match=words):
        agreement(people, **terms)


def test_an_agreement_with_patience_survives_json_and_unknown_terms_are_refused() -> None:
    _, people = setting("standalone")
    terms = agreement(people, enough_replies=3, grace=2.5)
    values = json.loads(json.dumps(terms.to_dict()))
    assert Agreement.from_dict(values) == terms
    with pytest.raises(InputError, match="unknown term of an agreement 'grase': did you mean 'grace'"):
        Agreement.from_dict({**values, "grase": 1})


def test_a_site_says_for_which_round_it_answers(tmp_path: Path) -> None:
    _, people = setting("standalone")
    site = new_sites(people, tmp_path, agreement(people))["amber"]
    assert [ask(site, "train", round=round).facts["round"] for round in (1, 3, 1)] == [1, 3, 1]


def test_a_site_that_is_slow_to_join_is_waited_for(tmp_path: Path) -> None:
    """Enough replies are for rounds: to join, whoever is there is waited for."""
    run, transport, _ = started(
        tmp_path, lambda name, kind, packet: 40.0 * (kind == "join" and name == "birch"), enough_replies=1, grace=1.0
    )
    run.round(1)
    assert sorted(run.profiles) == [0, 1, 2, 3] and transport.now == 40.0
    assert run.folder.rounds().participants.tolist() == [4]
