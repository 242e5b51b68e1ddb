"""Sites apart from the server: a simulation's numbers bit by bit, and nothing on the wire that is not agreed on."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import polyfed
from polyfed.engines import SequentialEngine, ThreadsEngine, VectorizedEngine
from polyfed.errors import BadMessage, InputError
from polyfed.message import Message
from polyfed.profile import Profile
from polyfed.records import CLIENT_COLUMNS, RunFolder
from polyfed.remote import Agreement, InMemoryTransport, Packet, Site
from polyfed.remote.transport import Kind
from polyfed.server.federation import Federation
from tests import support
from tests.methods import parity
from tests.remote.support import NAMES, NOT_TOLD, agreement, remote, same_rows, setting
from tests.shell import Shell


@pytest.mark.parametrize("method", [*polyfed.METHODS, *parity.OPTIONS])
def test_sites_give_the_numbers_of_a_simulation(tmp_path: Path, method: Any) -> None:
    """Every row and every client's final state are the sequential engine's, bit by bit."""
    method = parity.OPTIONS.get(method, method)
    config, people = setting(method)
    simulated = Federation(config, people.method, SequentialEngine(people), RunFolder.create(tmp_path / "one", config))
    simulated.run()
    config, people = setting(method)  # a method may keep things
    apart, transport = remote(tmp_path, config, people)
    apart.run()
    same_rows(tmp_path / "one", tmp_path / "run")
    assert apart.folder.rounds()[NOT_TOLD].fillna(0).eq(0).all(axis=None)
    for number, name in enumerate(NAMES):
        site: Any = transport.sites[name]
        site.__self__.export(tmp_path / f"{name}.safetensors")
        own, expected = load_file(tmp_path / f"{name}.safetensors"), simulated.engine.states.get_state(number)  # type: ignore[union-attr]
        assert own.keys() == expected.keys()
        assert all(torch.equal(own[key], expected[key]) for key in own), name
    assert not list((tmp_path / "run" / "models").glob("client*"))  # private models stay with the sites
    with pytest.raises(polyfed.InputError, match="no confusion counts"):  # and so do the labels
        apart.folder.confusion()


@pytest.mark.parametrize("method", polyfed.METHODS)
def test_only_what_is_agreed_on_goes_over_the_wire(tmp_path: Path, method: str) -> None:
    """Entries of the schema, the profile that the method needs, and a few numbers; no names, paths or class counts."""
    config, people = setting(method)
    apart, transport = remote(tmp_path, config, people, record=True)
    apart.run()
    assert transport.record
    schema = people.method.agreed_schema
    needed = people.method.requires
    profile_keys = {"name", *needed, *(["frozen"] if "head" in needed else [])}
    profile_keys |= {"classes"} if people.method.announces_classes else set()
    for place, (kind, name, facts, message) in enumerate(transport.record):
        known, is_answer = json.loads(facts), place % 2 == 1
        if not is_answer:
            assert known.keys() <= {"run", "name", "round", "score", *(["terms"] if kind == "join" else [])}
        elif kind == "join":
            assert known.keys() == {"profile", "share"}
            assert known["profile"].keys() <= profile_keys
        elif kind == "train":
            assert known.keys() <= {"round", "loss", "evaluation"}
        else:
            assert known.keys() == {"evaluation"}
        if "evaluation" in known:  # which share is predicted correctly, not how many, nor of which class
            shares = dict(known["evaluation"])
            further = shares.pop("further")
            assert shares.keys() == further.keys() == {"test", "validation"}
            values = [x for part in shares.values() for x in part.values()]
            measured = [own for part in further.values() for own in part.values()]
            assert all(own.keys() == {"balanced_accuracy", "macro_f1"} for own in measured)  # of four classes
            values += [x for own in measured for x in own.values()]
            assert all(0 <= x <= 1 and isinstance(x, float) for x in values)
        if is_answer and message:
            sent = Message.from_bytes(message)
            assert sent.tensors.keys() <= schema.tensors.keys() and sent.metadata.keys() <= schema.metadata.keys()
        for secret in (b"Wide", b"Narrow", str(tmp_path).encode(), b"tiny"):
            allowed = secret in (b"Wide", b"Narrow") and "network" in needed and kind == "join"
            assert allowed or secret not in facts + message, (kind, name, secret)


class Unreachable:
    """A site that fails in one round, by not answering or by raising."""

    def __init__(self, site: Site, transport: InMemoryTransport, round: int) -> None:
        self.site, self.transport, self.round = site, transport, round

    def __call__(self, kind: Kind, packet: Packet) -> Packet:
        if kind == "train" and packet.facts["round"] == self.round:
            return Packet({"failure": "its power went out"})
        return self.site.answer(kind, packet)


def test_records_name_the_members(tmp_path: Path, shell: Shell) -> None:
    """So do a frame of them, `polyfed show` and a report."""
    config, people = setting("fedproto")
    apart, _ = remote(tmp_path, config, people)
    apart.run()
    frame = apart.folder.clients()
    assert list(frame.columns) == [*CLIENT_COLUMNS, "name"]
    assert dict(zip(frame["client"], frame["name"], strict=True)) == dict(enumerate(NAMES))
    shown = shell("show", str(apart.folder.path)).output
    assert re.search(r"worst clients +member +architecture", shown) and "birch" in shown
    assert shell("report", str(apart.folder.path), "-o", str(tmp_path / "page.html")).status == 0
    assert re.search(r">member</button></th>", (tmp_path / "page.html").read_text())


def test_a_run_goes_on_without_a_site_that_fails(tmp_path: Path) -> None:
    config, people = setting("fedproto", participation=1.0)
    apart, transport = remote(tmp_path, config, people)
    site: Any = transport.sites["birch"]
    transport.sites["birch"] = Unreachable(site.__self__, transport, 2)
    apart.run()
    assert apart.folder.rounds().replies.tolist() == [4, 3, 4]
    notes = [event["note"] for event in apart.folder.events() if event["event"] == "note"]
    assert notes == ["round 2 continues without client 1 (birch): its power went out"]


def test_a_site_that_fails_is_named_once(tmp_path: Path) -> None:
    config, people = setting("fedproto", participation=1.0, rounds=1)
    apart, transport = remote(tmp_path, config, people)
    site: Any = transport.sites["cedar"]
    site.__self__._engine.train = lambda *_: 1 / 0
    apart.run()
    (note,) = [event["note"] for event in apart.folder.events() if event["event"] == "note"]
    assert note == "round 1 continues without client 2 (cedar): it failed; its own notes say why"


def test_fedkd_sends_the_network_to_a_site_that_missed_a_round(tmp_path: Path) -> None:
    """Birch fails in round 2, and the server does not know whether it received that version."""
    config, people = setting("fedkd", participation=1.0, rounds=4)
    apart, transport = remote(tmp_path, config, people)
    site: Any = transport.sites["birch"]
    transport.sites["birch"] = Unreachable(site.__self__, transport, 2)
    changes = []
    for number in range(1, 5):
        changes.append(["base" in apart.download(client).metadata for client in (0, 1)])
        apart.round(number)
    assert changes == [[False, False], [True, True], [True, False], [True, True]]
    assert apart.folder.rounds().replies.tolist() == [4, 3, 4, 4]


def test_fedkd_recovers_a_site_that_lost_its_state(tmp_path: Path) -> None:
    """Birch comes back with an empty folder: it refuses changes to what it does not hold, then gets the network."""
    config, people = setting("fedkd", participation=1.0, rounds=3)
    apart, transport = remote(tmp_path, config, people)
    apart.round(1)
    transport.sites["birch"] = Site("birch", agreement(people), people.slice([1]), tmp_path / "new").answer
    apart.round(2)
    apart.round(3)
    assert apart.folder.rounds().replies.tolist() == [4, 3, 4]
    notes = [event["note"] for event in apart.folder.events() if event["event"] == "note"]
    assert len(notes) == 1 and "its next download brings the network itself" in notes[0]


def test_fedkd_recovers_when_all_sites_lose_their_states(tmp_path: Path) -> None:
    """Nobody's reply is fused in round 2, so the server's versions stay; it sends networks instead of changes next."""
    config, people = setting("fedkd", participation=1.0, rounds=3)
    apart, transport = remote(tmp_path, config, people)
    apart.round(1)
    for number, name in enumerate(list(transport.sites)):
        new = Site(name, agreement(people), people.slice([number]), tmp_path / "new" / name)
        transport.sites[name] = new.answer
    apart.round(2)
    apart.round(3)
    assert apart.folder.rounds().replies.tolist() == [4, 0, 4]


def test_a_site_that_is_away_is_not_asked_and_keeps_its_score(tmp_path: Path) -> None:
    config, people = setting("fedproto", participation=1.0)
    apart, transport = remote(tmp_path, config, people, minimum_members=1)
    apart.round(1)
    before = apart.progress.latest[2]
    away = transport.sites.pop("cedar")
    apart.round(2)
    assert apart.progress.latest[2] == before
    transport.sites["cedar"] = away
    apart.round(3)
    apart._finish()
    rounds = apart.folder.rounds()
    assert rounds.participants.tolist() == [4, 3, 4]
    assert len(apart.folder.clients()) == 4


def test_participants_are_drawn_among_those_who_are_there(tmp_path: Path) -> None:
    config, people = setting("standalone", participation=0.5)
    apart, transport = remote(tmp_path, config, people, minimum_members=1)
    apart.round(1)
    full = apart.participants(1)
    assert len(full) == 2
    transport.sites.pop(NAMES[full[0]])
    assert len(apart.participants(1)) == 1
    assert full[0] not in [client for round in range(1, 20) for client in apart.participants(round)]


def test_divergence_is_a_failed_reply_and_the_state_before_it_is_kept(tmp_path: Path) -> None:
    config, people = setting("standalone", lr=1e25, participation=1.0)
    apart, transport = remote(tmp_path, config, people)
    apart.round(1)
    notes = [event["note"] for event in apart.folder.events() if event["event"] == "note"]
    assert len(notes) == 5
    assert all("no longer finite in round 1" in note or "has grown" in note for note in notes[:4])
    assert notes[4].startswith("round 1 has 0 valid replies and needs 1 (min_replies): the server learns nothing")
    site: Any = transport.sites["amber"]
    assert site.__self__._diary.newest is None


@pytest.mark.parametrize("evaluate", ["after-training", "after-download"])
def test_a_site_may_share_no_scores(tmp_path: Path, evaluate: str) -> None:
    """Birch tells neither accuracy nor loss, and nobody asks; the mean is over the other three."""
    config, people = setting("fedproto", participation=1.0, evaluate=evaluate)
    apart, transport = remote(tmp_path, config, people, record=True)
    birch = Site("birch", agreement(people), people.slice([1]), tmp_path / "birch", share="nothing")
    transport.sites["birch"] = birch.answer
    apart.run()
    assert transport.record
    answers = [(kind, json.loads(f)) for kind, name, f, _ in transport.record[1::2] if name == "birch"]
    assert [kind for kind, _ in answers] == ["join", "train", "train", "train"]
    assert all(facts.keys() == {"round"} for _, facts in answers[1:])
    assert sorted(apart.progress.latest) == [0, 2, 3]
    expected = np.mean([apart.progress.latest[client].accuracy() for client in (0, 2, 3)])
    assert apart.folder.rounds().accuracy_mean.iloc[-1] == pytest.approx(expected)
    assert apart.folder.clients().accuracy_final.isna().tolist() == [False, True, False, False]
    with pytest.raises(InputError, match="share is 'all', but must be 'scores' or 'nothing'"):
        Site("birch", agreement(people), people.slice([1]), tmp_path / "birch", share="all")  # type: ignore[arg-type]


def test_a_run_in_which_nobody_shares_scores_ends(tmp_path: Path) -> None:
    config, people = setting("fedproto")
    apart, transport = remote(tmp_path, config, people)
    for number, name in enumerate(NAMES):
        site = Site(name, agreement(people), people.slice([number]), tmp_path / name, share="nothing")
        transport.sites[name] = site.answer
    assert math.isnan(apart.run()["accuracy_final"])
    assert apart.folder.rounds().loss_mean.isna().all()


def test_packets_pass_through_bytes_unchanged() -> None:
    packet = Packet({"loss": 0.1 + 0.2, "round": 3}, Message({"w": torch.rand(3)}))
    again = Packet.from_bytes(*packet.to_bytes())
    assert again.facts == packet.facts
    assert again.message is not None and torch.equal(again.message.tensors["w"], packet.message.tensors["w"])  # type: ignore[union-attr]
    for wrong in (b"[]", b"\xff", b"3"):
        with pytest.raises(BadMessage):
            Packet.from_bytes(wrong, b"")


def test_an_agreement_survives_json_and_numbers_its_members() -> None:
    _, people = setting("standalone")
    terms = agreement(people)
    assert Agreement.from_dict(json.loads(json.dumps(terms.to_dict()))) == terms
    with pytest.raises(InputError, match="'eve' is not a member"):
        terms.number("eve")
    with pytest.raises(InputError, match="must be numbered from 0 to 1, each once"):
        Agreement("r", {}, 2, (1,), {"a": 0, "b": 2})


def test_a_profile_tells_only_what_the_method_needs() -> None:
    _, people = setting("fedproto")
    whole = people.profile(0)
    told = whole.told_for(people.method)
    assert told == Profile(features=support.FEATURES)
    assert Profile.from_dict(json.loads(json.dumps(whole.to_dict()))) == whole


def test_upload_steps_stand_at_the_one_door(tmp_path: Path) -> None:
    """A step sees every upload of every engine, after the method made it and before it leaves."""
    for engine in (SequentialEngine, ThreadsEngine, VectorizedEngine):
        _, people = setting("lg-fedavg")
        seen: list[tuple[int, int]] = []

        def halve(message: Message, round: int, client: int, seen: list[tuple[int, int]] = seen) -> Message:
            seen.append((round, client))
            return Message({name: tensor / 2 for name, tensor in message.tensors.items()}, message.metadata)

        plain, halved = (engine(replace(people, steps=steps)) for steps in ((), (halve,)))
        downloads = {
            client: people.method.download(support.new_server(people.method), client, None) for client in (0, 1)
        }
        for one, two in zip(plain.train(1, downloads), halved.train(1, downloads), strict=True):
            for name, tensor in one.message.tensors.items():
                assert torch.equal(tensor / 2, two.message.tensors[name])
        assert sorted(seen) == [(1, 0), (1, 1)]
        plain.close(), halved.close()
