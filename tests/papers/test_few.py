"""A few of Standalone's clients, trained without the others."""

from __future__ import annotations

from typing import Any

import pytest

import polyfed
from papers import few
from polyfed.config import experiment

SETTINGS: dict[str, Any] = {
    "data": "digits", "clients": 4, "rounds": 3, "models": "cnn5", "batch_size": 64, "seed": 3, "engine": "threads",
    "device": "cpu",
}  # fmt: skip


def test_clients_have_the_accuracy_that_they_have_among_others(tmp_path: Any) -> None:
    """Everybody takes part, so the rounds of a run are the same clients' visits."""
    among = polyfed.run("standalone", **SETTINGS, out=tmp_path / "run", progress=False)
    expected = among.clients["accuracy_final"].tolist()
    assert few.accuracies(experiment(method="standalone", **SETTINGS), 3) == pytest.approx(expected[:3])
    assert len(set(expected)) > 1


@pytest.mark.parametrize(("rounds", "participation", "visits"), [(4, 0.5, [2]), (40, 0.5, [19, 20]), (3, 0.6, [2])])
def test_clients_train_as_often_as_they_would_take_part(
    rounds: int, participation: float, visits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the last tenth of it is evaluated."""
    trained, scored = [], []

    class Engine:
        def __init__(self, people: Any) -> None:
            pass

        def train(self, visit: int, downloads: Any) -> None:
            trained.append((visit, list(downloads)))

        def evaluate(self, clients: list[int], visit: int) -> dict[int, Any]:
            scored.append(visit)
            return {client: type("Score", (), {"accuracy": lambda self: visit / 100})() for client in clients}

        def close(self) -> None:
            pass

    monkeypatch.setattr(few, "ThreadsEngine", Engine)
    config = experiment(method="standalone", **{**SETTINGS, "rounds": rounds, "participation": participation})
    assert few.accuracies(config, 2) == pytest.approx([sum(visits) / len(visits) / 100] * 2)
    assert trained == [(visit, [0, 1]) for visit in range(1, visits[-1] + 1)] and scored == visits


def test_settings_are_changed_or_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    given = []
    monkeypatch.setattr(few, "accuracies", lambda config, clients: given.append((config, clients)) or [0.5, 0.7])
    assert (
        few.main(
            ["cifar10-n100", "--clients", "2", "--set", "training.augment=false", "--seed", "4", "--data-dir", "x"]
        )
        == 0
    )
    config, clients = given[0]
    assert (config.training.augment, config.training.batch_size, config.seed, clients) == (False, 64, 4, 2)
    assert (config.method["name"], str(config.data_folder), config.clients) == ("standalone", "x", 100)
    assert capsys.readouterr().out == "cifar10-n100 training.augment=false: 60.0 % (50.0 70.0)\n"
    assert few.main(["cifar10-n10000"]) == 2
    assert "cifar10-n100" in capsys.readouterr().err
    for entry in ("pfedes-sensitivity", "pfedes-classes"):  # no Standalone, and several settings of it
        assert few.main([entry]) == 2
        assert f"'{entry}' has not one setting of Standalone" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        few.main(["cifar10-n100", "--clients", "0"])
