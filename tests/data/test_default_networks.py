"""Networks that follow from the kind of samples where the user names none."""

from pathlib import Path

import pytest
import torch

import polyfed
from polyfed.data import from_arrays


@pytest.mark.parametrize(("data", "group"), [("wine", "tabular4"), ("motion", "signal4"), ("digits", "papers")])
def test_networks_follow_from_the_samples(data: str, group: str, tmp_path: Path) -> None:
    """Recorded by name, so that a resumed run has the same."""
    result = polyfed.run("fedproto", data=data, rounds=1, epochs=1, out=tmp_path / "run")
    assert result.folder.config.models == group
    resumed = polyfed.resume(tmp_path / "run", rounds=2)
    assert len(resumed.rounds) == 2


def test_texts_get_networks_for_texts_and_a_users_choice_is_kept() -> None:
    words = torch.randint(1, 20, (60, 8)).numpy()
    data = from_arrays(words, [0, 1] * 30, vocabulary=20)
    assert polyfed.run("standalone", data=data, rounds=1, clients=2).folder.config.models == "text4"
    chosen = polyfed.run("standalone", data=data, rounds=1, clients=2, models="text_gru")
    assert chosen.folder.config.models == "text_gru"
