"""A site next to its data: it repeats answers, survives a restart, and keeps to itself what is its own."""

from pathlib import Path
from typing import Any

import pytest
import torch

from polyfed.errors import InputError
from polyfed.remote import Packet, Site
from tests import support
from tests.remote.support import agreement, ask, new_sites, setting


def test_a_site_asked_again_repeats_its_answer_without_training(tmp_path: Path) -> None:
    _, people = setting("fedavg")
    site = new_sites(people, tmp_path, agreement(people))["amber"]
    first = people.method
    server = support.new_server(first)
    packet = Packet({"run": "run-1", "name": "amber", "round": 1, "score": True}, first.download(server, 0, None))
    one = site.answer("train", packet)
    site._engine.train = None  # type: ignore[assignment, method-assign]  # it must not be called
    again = site.answer("train", packet)
    assert again.facts == one.facts and "evaluation" in one.facts
    assert one.message is not None and again.message is not None
    assert one.message.to_bytes() == again.message.to_bytes()


def test_a_lost_site_comes_back_with_its_state(tmp_path: Path) -> None:
    """One site is started anew before every question; it answers as one that runs on."""
    answers: dict[str, list[Any]] = {"steady": [], "lost": []}
    for name, said in answers.items():
        _, people = setting("standalone", rounds=4)
        terms = agreement(people)
        site = Site("amber", terms, people.slice([0]), tmp_path / name)
        for round in (1, 2, 4):
            if name == "lost":
                site.close()
                site = Site("amber", terms, people.slice([0]), tmp_path / name)
            said.append(ask(site, "train", round=round).facts)
            said.append(ask(site, "evaluate", round=round).facts)
    assert answers["steady"] == answers["lost"]


def test_a_server_that_went_back_gets_what_it_would_have_got(tmp_path: Path) -> None:
    """After rounds 1, 2, 3: asked for 3 or 2 again the site repeats its answer, for 1 it refuses in a sentence."""
    _, people = setting("standalone", rounds=4)
    site = new_sites(people, tmp_path, agreement(people))["amber"]
    said = {round: ask(site, "train", round=round).facts for round in (1, 2, 3)}
    assert ask(site, "train", round=3).facts == said[3]
    assert ask(site, "train", round=2).facts == said[2]
    refused = ask(site, "train", round=1).facts["failure"]
    assert refused.startswith("it keeps what it had after rounds 2 and 3 and can't go back to round 1")
    assert ask(site, "train", round=4).facts.keys() == {"round", "loss"}


def test_a_round_in_between_is_trained_from_the_state_before_it(tmp_path: Path) -> None:
    """The server went back after round 3 and now chooses the site in round 2, in which it did not take part before."""
    _, people = setting("standalone")
    terms = agreement(people)
    one, other = (Site("amber", terms, people.slice([0]), tmp_path / name) for name in ("one", "other"))
    ask(one, "train", round=1)
    ask(one, "train", round=3)
    ask(other, "train", round=1)
    assert ask(one, "train", round=2).facts == ask(other, "train", round=2).facts
    assert ask(one, "train", round=3).facts == ask(other, "train", round=3).facts


def test_an_error_in_a_sites_own_code_stays_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, people = setting("standalone")
    site = new_sites(people, tmp_path, agreement(people))["amber"]

    def broken(*arguments: Any, **options: Any) -> None:
        raise ValueError("secret of /home/amber")

    monkeypatch.setattr(site._engine, "train", broken)
    answer = ask(site, "train", round=1)
    assert answer.facts == {"failure": "it failed; its own notes say why"}
    assert site.notes == ["secret of /home/amber"]


def test_a_site_says_to_its_owner_that_it_starts_from_its_initial_weights(tmp_path: Path) -> None:
    """In the first round that is as it should be; later it joined late, or its folder was deleted."""
    _, people = setting("standalone")
    amber, birch = (new_sites(people, tmp_path, agreement(people))[name] for name in ("amber", "birch"))
    for round in (1, 2):
        assert not ask(amber, "train", round=round).failed
    assert amber.notes == []
    assert not ask(birch, "train", round=3).failed
    assert birch.notes == ["there is no earlier state here, so round 3 starts from the initial weights"]


def test_another_run_is_refused(tmp_path: Path) -> None:
    _, people = setting("standalone")
    site = new_sites(people, tmp_path, agreement(people))["amber"]
    answer = site.answer("train", Packet({"run": "run-2", "round": 1}))
    assert "takes part in run run-1, not in another" in answer.facts["failure"]
    ask(site, "train", round=1)
    with pytest.raises(InputError, match="holds the state of another run"):
        Site("amber", agreement(people, "run-2"), people.slice([0]), tmp_path / "amber")


def test_a_site_has_only_its_own_data(tmp_path: Path) -> None:
    _, people = setting("standalone")
    own = people.slice([2])
    assert len(own.dataset) == len(people.data[2])
    x, y = own.dataset.batch(own.data[2].train)
    expected = people.dataset.batch(people.data[2].train)
    assert torch.equal(x, expected[0]) and torch.equal(y, expected[1])
    with pytest.raises(InputError, match="'amber' is client 0, but has the data of clients"):
        Site("amber", agreement(people), own, tmp_path / "site")
