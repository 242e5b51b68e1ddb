"""Members that come late, go, come back or do not fit. Time is simulated, nobody sleeps."""

from pathlib import Path
from typing import Any

import pytest
import torch

from polyfed.errors import InputError, RunError
from polyfed.records import RunFolder
from polyfed.remote import Agreement, Packet, Site
from polyfed.remote.agreement import first_difference
from polyfed.remote.transport import Kind
from polyfed.server.federation import Interrupted
from tests.remote.support import NAMES, Answer, Run, agreement, ask, changed, new_sites, setting


def with_profile(answer: Answer, **values: Any) -> Answer:
    return changed(answer, "join", lambda said: Packet({**said.facts, "profile": {**said.facts["profile"], **values}}))


# Joining -------------------------------------------------------------------------------------------------------------


def test_a_late_member_joins_before_the_next_round_and_has_its_row(tmp_path: Path) -> None:
    run = Run(tmp_path, "amber", "birch", "cedar", minimum_members=3)
    run.federation.round(1)
    run.federation.round(2)
    run.comes("dune")
    run.federation.round(3)
    run.federation.round(4)
    run.federation._finish()
    assert run.column("participants") == run.column("replies") == [3, 3, 4, 4]
    assert run.seen.notes == ["dune joins before round 3"]
    assert run.federation.folder.clients().client.tolist() == [0, 1, 2, 3]
    assert run.asked("join", "dune") == run.asked("join", "amber") == 1


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"features": 7}, "its number of features is 7, but 6 in this federation"),
        ({"features": None}, "it does not tell its number of features, which fedproto needs"),
        ({"features": "6"}, "the 'features' of its profile is not a whole number above 0"),
        ({"head": 5}, "the 'head' of its profile is not a short text"),
    ],
)
def test_a_member_that_does_not_fit_is_left_out_once_until_it_reconnects(
    tmp_path: Path, values: dict[str, Any], words: str
) -> None:
    """Even the first one, whose profile the others are not measured by."""
    run = Run(tmp_path, minimum_members=3)
    own = run.transport.sites["amber"]
    run.transport.sites["amber"] = with_profile(own, **values)
    run.federation.round(1)
    run.federation.round(2)
    expected = f"amber can't join: {words}; it is asked again when it has reconnected"
    assert run.seen.notes == [expected]
    assert run.asked("join", "amber") == 1
    run.comes("amber", own)
    run.federation.round(3)
    assert run.column("participants") == [3, 3, 4]
    assert run.asked("join", "amber") == 2


@pytest.mark.parametrize("classes", [None, [0, 9], [1, 0], [0, 0], [0.0], "01", [-1]])
def test_announced_classes_that_make_no_sense_keep_a_member_out(tmp_path: Path, classes: Any) -> None:
    run = Run(tmp_path, method="fedssa", minimum_members=3)
    run.transport.sites["birch"] = with_profile(run.transport.sites["birch"], classes=classes)
    run.federation.round(1)
    assert run.column("replies") == [3]
    assert "birch can't join: the classes of its profile are not numbers from 0 to 3" in run.seen.notes[0]


@pytest.mark.parametrize("said", [Packet(), Packet({"profile": 5}), Packet({"failure": "no data yet"})])
def test_a_join_without_a_profile_does_not_stop_the_run(tmp_path: Path, said: Packet) -> None:
    run = Run(tmp_path, minimum_members=2)
    run.transport.sites["dune"] = lambda kind, packet: said
    run.federation.round(1)
    assert run.column("replies") == [3] and run.seen.notes[0].startswith("dune can't join: ")


def test_a_profile_tells_the_server_nothing_that_the_method_does_not_need(tmp_path: Path) -> None:
    """A false number of samples would bound what the others may claim."""
    run = Run(tmp_path)
    run.transport.sites["amber"] = with_profile(run.transport.sites["amber"], train_samples=1, parameters=3)
    run.federation.round(1)
    profile = run.federation.profiles[0]
    assert profile.train_samples is None and profile.parameters is None


def test_a_site_refuses_other_terms_and_names_the_first_difference(tmp_path: Path) -> None:
    _, people = setting("standalone")
    terms = {"rounds": 3, "training": {"lr": 0.1, "epochs": 1}, "task": {"mean": [0.5]}}
    own = {"rounds": 3, "training": {"lr": 0.05, "epochs": 2}, "task": {"mean": (0.5,)}}
    site = Site("amber", agreement(people), people.slice([0]), tmp_path, terms=own)
    refused = ask(site, "join", terms=terms).facts["failure"]
    assert refused == "it agreed to other terms: training.lr is 0.05 here and 0.1 at the server."
    same = {**own, "training": {"epochs": 2, "lr": 0.05}, "task": {"mean": [0.5]}}
    assert "profile" in ask(site, "join", terms=same).facts


def test_a_site_may_compare_terms_itself(tmp_path: Path) -> None:
    _, people = setting("standalone")
    site = Site(
        "amber", agreement(people), people.slice([0]), tmp_path, terms=lambda theirs: f"rounds are {theirs['rounds']}"
    )
    assert "other terms: rounds are 3." in ask(site, "join", terms={"rounds": 3}).facts["failure"]


def test_the_engine_sends_the_terms_of_the_agreement(tmp_path: Path) -> None:
    run = Run(tmp_path, minimum_members=3, terms={"rounds": 4})
    people = run.people
    other = Site("dune", run.agreed, people.slice([3]), tmp_path / "other", terms={"rounds": 5})
    run.transport.sites["dune"] = other.answer
    run.federation.round(1)
    (note,) = run.seen.notes
    assert "dune can't join: it agreed to other terms: rounds is 5 here and 4 at the server" in note


def test_a_term_that_only_one_side_has_is_a_difference() -> None:
    assert first_difference({"a": 1}, {"a": 1, "b": {"c": 2}}) == "b is missing here and {'c': 2} at the server"
    assert first_difference({"a": {"b": [1, 2]}}, {"a": {"b": (1, 2)}}) is None
    assert first_difference({"a": [1]}, {}) == "a is [1] here and missing at the server"


@pytest.mark.parametrize("kind", ["join", "train", "evaluate"])
def test_a_site_answers_to_its_own_name_only(tmp_path: Path, kind: Kind) -> None:
    _, people = setting("standalone")
    site = new_sites(people, tmp_path, agreement(people))["amber"]
    answer = site.answer(kind, Packet({"run": "run-1", "name": "birch", "round": 1}))
    assert answer.facts == {"failure": "its name is 'amber', but it was asked as 'birch': compare names and keys."}


def test_a_member_that_left_for_good_keeps_its_row_after_a_restart(tmp_path: Path) -> None:
    run = Run(tmp_path, minimum_members=3)
    run.federation.round(1)
    run.federation.round(2)
    run.goes("birch")
    run.federation.round(3)
    run.federation.checkpoint()
    again = run.restarted()
    assert sorted(again.profiles) == [0, 1, 2, 3]
    again.run()
    assert again.folder.clients().client.tolist() == [0, 1, 2, 3]
    assert again.folder.clients().accuracy_final.notna().all()
    assert run.asked("join", "amber") == 2  # whoever is there joins the new server


@pytest.mark.parametrize(("seconds", "participants"), [(20, 4), (30, 3)])
def test_after_a_restart_those_who_took_part_have_time_to_reconnect(
    tmp_path: Path, seconds: float, participants: int
) -> None:
    """Sites try again every few seconds, so with fewer members than before the first round would lose some of them."""
    run = Run(tmp_path, rounds=2, minimum_members=2)
    run.federation.round(1)
    run.federation.checkpoint()
    run.goes("dune")
    again = run.restarted()
    run.seen.notes.clear()
    begin = run.transport.now
    run.transport.at(begin + seconds, lambda: run.comes("dune"))
    again.run()
    assert again.folder.rounds()["participants"].tolist() == [4, participants]
    assert run.transport.now == begin + min(seconds, 25)
    assert run.seen.notes[0] == "waiting up to 25 s for dune to reconnect"


# Pausing -------------------------------------------------------------------------------------------------------------


def test_a_run_waits_for_enough_members_and_says_so_once(tmp_path: Path) -> None:
    run = Run(tmp_path, "amber", minimum_members=2)
    run.transport.at(30.0, lambda: run.comes("cedar"))
    run.federation.round(1)
    assert run.transport.now == 30.0
    assert run.seen.notes == [
        "waiting for birch, cedar and dune: 1 of at least 2 members is here",
        "continuing with amber and cedar",
    ]
    assert run.column("participants") == [2]
    assert run.seen.members == [("amber", "birch cedar dune"), ("amber cedar", "birch dune")]


def test_each_pause_is_told_anew(tmp_path: Path) -> None:
    run = Run(tmp_path, "amber", "birch", minimum_members=2)
    for number, time in ((1, 10.0), (2, 20.0)):
        run.goes("birch")
        run.transport.at(time, lambda: run.comes("birch"))
        run.federation.round(number)
    assert [note.split(":")[0] for note in run.seen.notes] == [
        "waiting for birch, cedar and dune", "continuing with amber and birch",
    ] * 2  # fmt: skip


def test_by_default_all_members_are_needed(tmp_path: Path) -> None:
    run = Run(tmp_path, "amber", "birch", "cedar")
    with pytest.raises(RunError, match="nobody else will come"):
        run.federation.round(1)
    assert run.seen.notes == ["waiting for dune: 3 of at least 4 members are here"]


@pytest.mark.parametrize("finished", [0, 1])
def test_a_run_that_waits_can_be_stopped_and_resumed(tmp_path: Path, finished: int) -> None:
    run = Run(tmp_path, rounds=3)
    if finished:
        run.federation.round(1)
    run.goes("dune")
    run.transport.at(50.0, lambda: setattr(run.seen, "stop_requested", True))
    with pytest.raises(Interrupted, match=f"stopped after round {finished} of 3; continue with"):
        run.federation.run()
    run.seen.stop_requested = False
    run.comes("dune")
    again = run.restarted()
    again.run()
    assert list(again.folder.rounds()["round"]) == [1, 2, 3]
    assert list(again.folder.rounds().replies) == [4, 4, 4]


def test_a_round_with_too_few_replies_does_not_end_the_run(tmp_path: Path) -> None:
    """All four fail in round 2; the server's prototypes stay, a checkpoint is there, and round 3 is as usual."""
    run = Run(tmp_path)
    own = dict(run.transport.sites)
    run.federation.round(1)
    before = {name: tensor.clone() for name, tensor in run.federation.server.named_state().items()}
    for name in NAMES:
        run.transport.sites[name] = changed(own[name], "train", lambda said: Packet({"failure": "no power"}))
    run.federation.round(2)
    after = run.federation.server.named_state()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    saved, _ = RunFolder(tmp_path / "run").restore()
    assert saved is not None and saved.round == 2
    assert "round 2 has 0 valid replies and needs 1 (min_replies): the server learns nothing" in run.seen.notes[-1]
    run.transport.sites.update(own)
    now = run.transport.now
    run.federation.round(3)
    assert run.column("replies") == [4, 0, 4]
    assert run.transport.now == now + 5.0  # so that a fault does not use up all rounds at once


def test_the_pause_after_failed_rounds_grows(tmp_path: Path) -> None:
    """5 s, 10 s, 20 s, 40 s, then 60 s: 135 s before round 6."""
    run = Run(tmp_path, rounds=6, method="standalone")
    for name, answer in list(run.transport.sites.items()):
        run.transport.sites[name] = changed(answer, "train", lambda said: Packet({"failure": "no power"}))
    run.federation.run()
    assert run.transport.now == 5 + 10 + 20 + 40 + 60
    assert run.column("replies") == [0] * 6


def test_busy_members_count_as_present_but_someone_must_be_free(tmp_path: Path) -> None:
    """All four take 100 s for round 1 and are given up after 10 s: the run waits for the first that is free again."""
    run = Run(tmp_path, reply_timeout=10.0)
    run.transport._seconds = lambda name, kind, packet: 100.0 if packet.facts.get("round") == 1 else 0.0
    run.federation.round(1)
    run.federation.round(2)
    assert run.column("replies") == [0, 4]


def test_who_is_back_after_missing_rounds_is_noted(tmp_path: Path) -> None:
    run = Run(tmp_path, minimum_members=1, rounds=6)
    run.federation.round(1)
    run.goes("birch", "cedar")
    run.federation.round(2)
    run.comes("cedar")
    for number in (3, 4):
        run.federation.round(number)
    run.comes("birch")
    run.federation.round(5)
    assert run.seen.notes == ["cedar is back after missing round 2", "birch is back after missing rounds 2 to 4"]
    assert run.column("participants") == [4, 2, 3, 3, 4]


def test_minimum_members_must_make_sense() -> None:
    _, people = setting("standalone")
    with pytest.raises(InputError, match="minimum_members is 5, but must be a whole number from 1 to 4"):
        agreement(people, minimum_members=5)
    assert agreement(people).quorum == 4 and agreement(people, minimum_members=2).quorum == 2
    terms = agreement(people, minimum_members=2, terms={"training": {"lr": 0.1}})
    assert Agreement.from_dict(terms.to_dict()) == terms


@pytest.mark.parametrize("evaluate", ["after-training", "after-download"])
def test_one_that_reconnects_while_it_trains_is_scored_in_the_same_round(tmp_path: Path, evaluate: str) -> None:
    """It crashed, was quickly back and repeated its answer: the round is that of a run in which nothing happened."""
    columns = ["round", "accuracy_mean", "loss_mean", "replies"]
    calm, shaken = (Run(tmp_path / name, evaluate=evaluate) for name in ("calm", "shaken"))
    usual = shaken.sites["birch"].answer

    def crashing(kind: Kind, packet: Packet) -> Packet:
        if kind == "train" and packet.facts["round"] == 2:
            shaken.transport.connections["birch"] += 1
        return usual(kind, packet)

    shaken.transport.sites["birch"] = crashing
    calm.federation.run()
    shaken.federation.run()
    assert shaken.federation.folder.rounds()[columns].equals(calm.federation.folder.rounds()[columns])
    assert shaken.asked("join", "birch") == 2


def test_one_that_comes_while_others_train_joins_before_the_next_round(tmp_path: Path) -> None:
    run = Run(tmp_path, "amber", "birch", "cedar", minimum_members=3)
    usual = run.sites["amber"].answer

    def slow(kind: Kind, packet: Packet) -> Packet:
        if kind == "train" and packet.facts["round"] == 2:
            run.comes(NAMES[3])
        return usual(kind, packet)

    run.transport.sites["amber"] = slow
    run.federation.run()
    assert run.column("participants") == [3, 3, 4, 4]
    assert f"{NAMES[3]} joins before round 3" in run.seen.notes
