"""Clients without partners: each is a federation of one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import polyfed
from papers import few
from polyfed.config import Experiment, experiment
from polyfed.errors import InputError, RunError
from polyfed.methods.base import Reply
from polyfed.server.participants import participants
from tests import support

SETTINGS: dict[str, Any] = {
    "data": "digits", "clients": 4, "rounds": 4, "models": "cnn5", "batch_size": 64, "epochs": 1, "seed": 3,
    "engine": "threads", "device": "cpu",
}  # fmt: skip


def test_standalone_s_clients_are_as_among_others(tmp_path: Path) -> None:
    """Of four clients two take part in a round; the same ones train in the same rounds, with the same draws."""
    settings = {**SETTINGS, "participation": 0.5, "rounds": 6, "eval_every": 4}
    among = polyfed.run("standalone", **settings, out=tmp_path / "run", progress=False)
    found = few.curves(experiment(method="standalone", **settings), 3)
    assert [curve[6] for curve in found.values()] == pytest.approx(among.clients["accuracy_final"].tolist()[:3])
    assert {tuple(curve) for curve in found.values()} == {(4, 6)}
    assert len({curve[6] for curve in found.values()}) > 1


@pytest.mark.parametrize("method", ["fml", "fedkd", "fedproto", "fedgh", "dc-pfl", "pfedes", "fedssa"])
def test_nothing_is_left_out_but_the_others(method: str, tmp_path: Path) -> None:
    """A federation with a single client has no partners either; its server and its client do the same."""
    settings = {**SETTINGS, "clients": 1, "classes_per_client": 10, "rounds": 3}
    among = polyfed.run(method, **settings, out=tmp_path / "run", progress=False)
    found = few.curves(experiment(method=method, **settings), 1)
    assert found[0][3] == pytest.approx(among.clients["accuracy_final"].item())


@pytest.mark.parametrize("method", ["fedproto", "protonorm"])
def test_they_are_scored_with_what_their_servers_know(method: str, tmp_path: Path) -> None:
    """Before a round's training those who sit out are as after the download that follows on their last training."""
    settings = {**SETTINGS, "method": method, "participation": 0.5, "rounds": 6}
    after_training = few.curves(experiment(**settings), 4)
    after_download = few.curves(experiment(**settings, evaluate="after-download"), 4)
    there = {number: set(participants(3, number, range(4), 0.5)) for number in range(1, 7)}
    waits = [(client, number) for number in range(2, 7) for client in there[number - 1] - there[number]]
    assert len(waits) > 4
    assert all(after_training[c][n] == after_download[c][n - 1] for c, n in waits)
    assert any(after_training[c][n - 1] != after_download[c][n - 1] for c, n in waits)
    one = {**settings, "clients": 1, "classes_per_client": 10, "rounds": 3, "evaluate": "after-download"}
    among = polyfed.run(**one, out=tmp_path / "run", progress=False)
    assert few.curves(experiment(**one), 1)[0][3] == pytest.approx(among.clients["accuracy_final"].item())


def test_a_client_without_test_samples_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    given = few.assemble

    def robbed(config: Experiment) -> Any:
        people = given(config)
        return replace(people, data={**people.data, 1: replace(people.data[1], test=people.data[1].test[:0])})

    monkeypatch.setattr(few, "assemble", robbed)
    assert list(few.curves(experiment(method="standalone", **SETTINGS), 3)) == [0, 2]


def test_clients_hear_of_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a client of FML receives is what it has sent itself, in the round before."""
    sent: dict[int, Any] = {}
    engine = few.new_engine

    def spying(*given: Any) -> Any:
        made = engine(*given)
        train = made.train

        def watched(round: int, downloads: Any) -> list[Reply]:
            for client, download in downloads.items():
                assert client not in sent or _same(download.tensors, sent[client])
            replies = train(round, downloads)
            sent.update({reply.client: reply.message.tensors for reply in replies})
            return replies

        made.train = watched
        return made

    monkeypatch.setattr(few, "new_engine", spying)
    few.curves(experiment(method="fml", **SETTINGS), 2)
    assert len(sent) == 2 and not _same(sent[0], sent[1])


def test_a_failed_client_ends_it() -> None:
    server = few.OwnServer(support.new_method("fedproto"), 0, 7, None)
    server.download(2)
    with pytest.raises(RunError, match="client 7 failed in round 2: diverged"):
        server.learn(Reply(7, few.Message(), failure="diverged"))


def test_more_clients_than_there_are() -> None:
    with pytest.raises(InputError, match="there are 4 clients, not 5"):
        few.curves(experiment(method="standalone", **SETTINGS), 5)


@pytest.fixture
def asked_for(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Experiment, int, str | None]]:
    """What is asked of training, instead of training: two clients with 50 and 70 % at the end."""
    found = []

    def pretended(config: Experiment, clients: int, rule: str | None = None) -> few.Curves:
        found.append((config, clients, rule))
        return {0: {450: 0.1, 460: 0.4, 500: 0.6}, 1: {450: 0.1, 460: 0.7, 500: 0.7}}

    monkeypatch.setattr(few, "curves", pretended)
    return found


Asked = list[tuple[Experiment, int, str | None]]


def test_settings_are_changed(asked_for: Asked, capsys: pytest.CaptureFixture[str]) -> None:
    changed = ["--set", "training.augment=false", "--seeds", "4", "--data-dir", "x"]
    assert few.main(["cifar10-n100", "--clients", "2", *changed]) == 0
    config, clients, rule = asked_for[0]
    assert (config.training.augment, config.training.batch_size, config.seed, clients) == (False, 64, 4, 2)
    assert (config.method["name"], str(config.data_folder), config.clients, rule) == ("standalone", "x", 100, None)
    assert capsys.readouterr().out == "cifar10-n100 seed 4 training.augment=false: 60.0 % (50.0 70.0)\n"


def test_curves_are_recorded(asked_for: Asked, tmp_path: Path) -> None:
    assert few.main(["cifar100-n100:fedproto", "--seeds", "2-3", "--out", str(tmp_path / "new")]) == 0
    assert [(config.seed, clients, rule) for config, clients, rule in asked_for] == [
        (2, 10, "classifier"),
        (3, 10, "classifier"),
    ]
    first, second = map(json.loads, (tmp_path / "new" / "cifar100-n100.jsonl").read_text().splitlines())
    assert (first["entry"], first["setting"], first["method"]) == ("cifar100-n100", "n100/cifar100", "fedproto")
    assert (first["seed"], second["seed"]) == (2, 3) and first["settings"]["training.batch_size"] == 64
    assert first["rounds"] == [450, 460, 500] and first["curves"] == {"0": [0.1, 0.4, 0.6], "1": [0.1, 0.7, 0.7]}


def test_what_is_recorded_is_not_run_again(
    asked_for: Asked, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor what is wanted beside it; a line that was cut off is made again."""
    given = ["cifar100-n100", "--out", str(tmp_path)]
    assert few.main(given) == 0
    assert few.main([*given, "--seeds", "2-3"]) == 2
    assert f"seed 2 is recorded in '{tmp_path}'" in capsys.readouterr().err and len(asked_for) == 1
    path = tmp_path / "cifar100-n100.jsonl"
    whole = path.read_text()
    path.write_text(whole[:-9])
    assert few.main(given) == 0 and path.read_text() == whole


def test_wrong_words_are_refused(asked_for: Asked, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for given, said in {
        ("cifar10-n10000",): "cifar10-n100",
        ("cifar10-n100:fedprot",): "fedproto",
        ("pfedes-classes",): "'pfedes-classes' has several settings",
        ("cifar10-n100:fml,fedkd",): "has several settings or rows",
        ("cifar10-n100", "--set", "training.lr=1", "--out", "x"): "leave out --set or --out",
    }.items():
        assert few.main(list(given)) == 2
        assert said in capsys.readouterr().err
    with pytest.raises(SystemExit):
        few.main(["cifar10-n100", "--clients", "0"])
    assert few.main(["cifar10-n100", "--seeds", "2,9", "--out", str(tmp_path)]) == 2
    assert "no run with seed 9: name some of 2, 3, 4" in capsys.readouterr().err
    assert not asked_for


def _same(one: Any, other: Any) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
