"""A client's model from the run's folder alone predicts exactly what the run's result says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import polyfed
from polyfed.addresses import trusting
from tests import support
from tests.export.runs import NAMES, finished, pictures, some

RULES = {
    "fedproto": "prototypes", "fedtgp": "prototypes", "protonorm": "prototypes", "fedapen": "ensemble",
    "fedmrl": "fused", "pfedafm": "mixed",
}  # fmt: skip


def same(model: polyfed.ClientModel, result: polyfed.Result, client: int, x: torch.Tensor) -> None:
    found, expected = model.predict(x), result.predict(client, x)
    assert torch.equal(found.probabilities, expected.probabilities)
    assert torch.equal(found.classes, expected.classes) and found.names == expected.names


@pytest.mark.parametrize("method", list(polyfed.METHODS))
def test_every_methods_client_predicts_what_the_result_says(tmp_path: Path, method: str) -> None:
    """With half of the clients in a round, one client has not received the server's last knowledge."""
    result = finished(tmp_path / "run", method, participation=0.5)
    for client in range(2):
        model = polyfed.load_client(tmp_path / "run", client)
        same(model, result, client, some())
        assert model.rule == RULES.get(method, "classifier") and model.client == client
        assert set(model.predict(some()).names) <= set(NAMES)


def test_prototypes_are_those_of_the_end(tmp_path: Path) -> None:
    """In one round no client receives the prototypes that the server makes of it, yet predictions use them."""
    finished(tmp_path / "run", "fedproto", rounds=1)
    model = polyfed.load_client(tmp_path / "run", 0)
    assert model.network is not None and bool(model.network.prototypes.known.all())


def test_batch_norm_and_different_networks(tmp_path: Path) -> None:
    result = finished(tmp_path / "run", "fml", "resnet4,cnn5")
    for client in range(2):
        same(polyfed.load_client(tmp_path / "run", client), result, client, some())


def test_floats_in_tables(tmp_path: Path) -> None:
    x, y = torch.randn(60, 5), torch.arange(60) % 3
    models = [nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))]
    result = finished(tmp_path / "run", "standalone", models, polyfed.from_arrays(x, y))
    same(polyfed.load_client(tmp_path / "run", 1, models=models), result, 1, x[:4])


def test_networks_from_python_are_passed_again(tmp_path: Path) -> None:
    """Only by those who need them: client 1 has one of polyfed's own."""
    models = [support.Normed, "cnn5"]
    result = finished(tmp_path / "run", "standalone", models)
    with pytest.raises(polyfed.InputError, match="network 'Normed' was passed in Python; pass it again: .*models=…"):
        polyfed.load_client(tmp_path / "run", 0)
    same(polyfed.load_client(tmp_path / "run", 0, models=models), result, 0, some())
    same(polyfed.load_client(tmp_path / "run", 1), result, 1, some())
    with pytest.raises(polyfed.InputError, match="'Normed' is not among the models given"):
        polyfed.load_client(tmp_path / "run", 0, models=support.Wide)
    with pytest.raises(polyfed.InputError, match="does not fit its network: .* has another shape or type"):
        polyfed.load_client(tmp_path / "run", 0, models=larger())


def larger() -> type[nn.Module]:
    """A network of the same name with other shapes."""

    class Normed(support.Normed):
        def __init__(self, in_channels: int, classes: int) -> None:
            super().__init__(in_channels, classes)
            self.body[0] = nn.Conv2d(in_channels, 4, 5)

    return Normed


def test_code_is_imported_only_if_trusted(tmp_path: Path) -> None:
    with trusting(True):
        result = finished(tmp_path / "run", "lg-fedavg", "tests.support:Wide,tests.support:Narrow")
    with pytest.raises(polyfed.InputError, match="names code that would be run, 'tests.support:Wide,.*--trust"):
        polyfed.load_client(tmp_path / "run", 0)
    same(polyfed.load_client(tmp_path / "run", 1, trust=True), result, 1, some())


def test_a_continued_run_has_a_new_card(tmp_path: Path) -> None:
    finished(tmp_path / "run", "fedproto")
    longer = polyfed.resume(tmp_path / "run", data=pictures(), rounds=3, progress=False)
    assert json.loads((tmp_path / "run/models/card.json").read_text())["rounds"] == 3
    same(polyfed.load_client(tmp_path / "run", 1), longer, 1, some())


def test_cards_are_checked(tmp_path: Path) -> None:
    finished(tmp_path / "run", "standalone")
    card = tmp_path / "run/models/card.json"
    card.write_text(card.read_text().replace("ant", "ape"))
    with pytest.raises(polyfed.InputError, match=r"card in '.*models' can't be read: 'card.json' is damaged"):
        polyfed.load_client(tmp_path / "run", 0)
    notes: list[str] = []
    watcher = polyfed.Watcher()
    watcher.on_note = notes.append  # type: ignore[method-assign]
    polyfed.resume(tmp_path / "run", watcher=watcher)
    assert notes == ["card.json has changed since the run ended"]


def test_runs_without_a_card_are_read_as_before(tmp_path: Path) -> None:
    result = finished(tmp_path / "run", "fedproto")
    expected = result.predict(0, some())
    run = tmp_path / "run/run.json"
    content = json.loads(run.read_text())
    del content["finished"]["card"]
    run.write_text(json.dumps(content))
    with pytest.raises(polyfed.InputError, match=r"has no models/card.json, because an older polyfed wrote it or"):
        polyfed.load_client(tmp_path / "run", 0)
    old = polyfed.resume(tmp_path / "run", data=pictures(), progress=False)
    assert torch.equal(old.predict(0, some()).probabilities, expected.probabilities)
    card = polyfed.export_client(tmp_path / "run", 0, tmp_path / "out", data=pictures())
    assert card.rule == "prototypes"
    assert torch.equal(polyfed.load_client(tmp_path / "out").predict(some()).probabilities, expected.probabilities)


def test_what_can_not_be_loaded(tmp_path: Path) -> None:
    finished(tmp_path / "run", "standalone")
    for path, client, words in (
        (tmp_path / "run", 7, "there is no client 7; the run has 2 clients"),
        (tmp_path / "run", None, "say which one"),
        (tmp_path / "run", "0", "must be a whole number"),
        (tmp_path / "none", 0, "holds neither a run nor an exported model"),
    ):
        with pytest.raises(polyfed.InputError, match=words):
            polyfed.load_client(path, client)  # type: ignore[arg-type]
