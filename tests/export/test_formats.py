"""Exported models give the run's probabilities, in every format and for every rule of prediction."""

from __future__ import annotations

import json
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import polyfed
from polyfed.export import formats, write
from tests import support
from tests.export.runs import finished, pictures, some

needs_onnx = pytest.mark.skipif(
    any(find_spec(package) is None for package in formats.ONNX_PACKAGES), reason="needs the extra polyfed[onnx]"
)
FORMATS = ["safetensors", "torch", pytest.param("onnx", marks=needs_onnx)]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("method", "models"),
    [
        ("fedproto", "cnn5"), ("fedapen", "cnn5"), ("fedmrl", "cnn5"), ("fedavg", "resnet4"),
        ("lg-fedavg", [support.Normed]),
    ],
)  # fmt: skip
def test_probabilities_are_those_of_the_result(tmp_path: Path, format: str, method: str, models: Any) -> None:
    """In batches of one and of many; `Normed` has batch norm and dropout."""
    result = finished(tmp_path / "run", method, models)
    own = None if isinstance(models, str) else models
    card = polyfed.export_client(tmp_path / "run", 1, tmp_path / "out", format=format, data=pictures(), models=own)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["README.md", "card.json", card.file]
    model = polyfed.load_client(tmp_path / "out", models=own, trust=True)
    for x in (some(), some((1, 1, 16, 16))):
        found, expected = model.predict(x), result.predict(1, x)
        assert torch.allclose(found.probabilities, expected.probabilities, atol=1e-5)
        assert found.names == expected.names
    own_test = result.population.data[1].test
    x, y = result.population.dataset.batch(own_test)
    assert card.checked_on == f"the {len(y)} test samples of client 1" and card.test_samples == len(y)
    assert card.accuracy_exported == pytest.approx(float((result.predict(1, x).classes == y).float().mean()))
    assert card.accuracy == pytest.approx(result.clients["accuracy_final"][1])


class Counting(nn.Module):
    """A network that asks for the number of samples as a plain number, as many do."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(1, 5))
        self.out = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.out(x + self.first.expand(len(x), -1))
        return logits


def test_a_network_that_fixes_the_number_of_samples_can_not_be_a_program(tmp_path: Path) -> None:
    data = polyfed.from_arrays(torch.randn(60, 5), torch.arange(60) % 3)
    finished(tmp_path / "run", "standalone", [Counting], data)
    with pytest.raises(polyfed.InputError, match=r"a constant of the number of samples: write x.shape\[0\] instead of"):
        polyfed.export_client(tmp_path / "run", 0, tmp_path / "out", format="torch", models=[Counting])


@pytest.mark.parametrize("format", FORMATS)
def test_floats_in_tables(tmp_path: Path, format: str) -> None:
    x, y = torch.randn(60, 5), torch.arange(60) % 3
    models = [nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))]
    result = finished(tmp_path / "run", "standalone", models, polyfed.from_arrays(x, y))
    card = polyfed.export_client(tmp_path / "run", 0, tmp_path / "out", format=format, models=models)
    assert card.checked_on == "32 random samples, because the run's data are not here"
    found = polyfed.load_client(tmp_path / "out", models=models, trust=True).predict(x[:4]).probabilities
    assert torch.allclose(found, result.predict(0, x[:4]).probabilities, atol=1e-5)


def test_a_program_takes_raw_pixels_and_is_opened_only_if_trusted(tmp_path: Path) -> None:
    result = finished(tmp_path / "run", "standalone")
    polyfed.export_client(tmp_path / "run", 0, tmp_path / "out", format="torch")
    with pytest.raises(polyfed.InputError, match="can run any code when it is opened: .*--trust"):
        polyfed.load_client(tmp_path / "out")
    model = polyfed.load_client(tmp_path / "out" / "model.pt2", trust=True)
    with pytest.raises(polyfed.InputError, match="normalises images itself: give raw pixels"):
        model.predict(result.population.dataset.batch(torch.arange(2))[0])


def test_our_programs_hold_no_pickle_and_nobodys_samples(tmp_path: Path) -> None:
    """Weights are raw bytes; the only pickle is the blank example input, whose values are all zero."""
    finished(tmp_path / "run", "fedproto")
    polyfed.export_client(tmp_path / "run", 0, tmp_path / "out", format="torch", data=pictures())
    with zipfile.ZipFile(tmp_path / "out/model.pt2") as archive:
        configs = [name for name in archive.namelist() if name.endswith("_config.json")]
        payloads = [entry for name in configs for entry in json.loads(archive.read(name))["config"].values()]
        pickled = [entry for entry in payloads if entry["use_pickle"]]
    assert payloads and not pickled
    examples, _ = torch.export.load(tmp_path / "out/model.pt2").example_inputs
    assert not any(example.any() for example in examples)


def test_original_names_of_layers(tmp_path: Path) -> None:
    """A ResNet's head is what torchvision calls fc; a network whose number of features was changed has a new head."""
    finished(tmp_path / "run", "standalone", "resnet18", rounds=1)
    card = polyfed.export_client(tmp_path / "run", 0, tmp_path / "out")
    assert card.layers["model.head.weight"] == "fc.weight" and card.layers["model.extractor.conv1.weight"] == (
        "conv1.weight"
    )
    from torchvision.models import resnet18

    saved = polyfed.load_client(tmp_path / "out").network
    assert saved is not None
    original = resnet18(num_classes=4)
    original.conv1 = nn.Conv2d(1, 64, 7, 2, 3, bias=False)
    own = saved.state_dict()
    original.load_state_dict({name: own[key] for key, name in card.layers.items()})
    x = torch.randn(2, 1, 16, 16)
    with torch.no_grad():
        assert torch.allclose(original.eval()(x), saved(x), atol=1e-5)
    finished(tmp_path / "pooled", "standalone", "resnet4", rounds=1, features=32)
    assert polyfed.export_client(tmp_path / "pooled", 0, tmp_path / "other").layers == {}


def test_a_wrong_export_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A predictor that forgets the normalisation gives other probabilities."""
    finished(tmp_path / "run", "standalone")

    def forgetful(self: formats.Predictor, samples: torch.Tensor) -> torch.Tensor:
        return next(iter(self._rules(self.network, samples.to(torch.float32)).values())).softmax(1)

    monkeypatch.setattr(formats.Predictor, "forward", forgetful)
    with pytest.raises(polyfed.RunError, match="gives other probabilities than the run .* nothing was written"):
        write.export_client(tmp_path / "run", 0, tmp_path / "out", format="torch")
    assert not (tmp_path / "out").exists()


def test_other_data_are_refused(tmp_path: Path) -> None:
    finished(tmp_path / "run", "standalone")
    other = support.tiny_dataset(per_class=12, side=16, classes=3)
    with pytest.raises(polyfed.InputError, match="the data is 36 samples .* but the run in .* started with 48"):
        polyfed.export_client(tmp_path / "run", 0, tmp_path / "out", data=other)


def test_data_are_given_again_as_they_were_to_the_run(tmp_path: Path) -> None:
    images, labels = pictures().images.numpy(), pictures().labels.numpy()
    finished(tmp_path / "run", "standalone", data=(images, labels))
    card = polyfed.export_client(tmp_path / "run", 0, tmp_path / "out", data=(images, labels))
    assert card.checked_on == f"the {card.test_samples} test samples of client 0"
    with pytest.raises(polyfed.InputError, match="the run names its data itself: leave data out"):
        polyfed.export_client(tmp_path / "run", 0, tmp_path / "again", data="digits")


def test_damaged_exports_are_refused(tmp_path: Path) -> None:
    finished(tmp_path / "run", "standalone")
    polyfed.export_client(tmp_path / "run", 0, tmp_path / "out")
    card, model = tmp_path / "out/card.json", tmp_path / "out/model.safetensors"
    text = card.read_text()
    for old, new, words in (
        ('"format": 1', '"format": 2', "a format that this version of polyfed can't read"),
        ('"file": "model.safetensors"', '"file": "../model.safetensors"', "is not the model that"),
        ('"network": "cnn5"', '"network": "cnn4"', "describes no network 'cnn4'"),
        ('"source": "cnn5"', '"source": "os:abort"', "names code that would be run, 'os:abort'"),
        ('"feature_size": 500', '"feature_size": "many"', "is damaged"),
        ('"features": null', '"features": 900000000000', "does not fit into memory"),
        ('"source": "cnn5"', '"source": "cnn4"', "does not fit its network"),
    ):
        assert old in text.replace("\\n", "")
        card.write_text(text.replace(old, new))
        with pytest.raises(polyfed.InputError, match=words):
            polyfed.load_client(tmp_path / "out")
    card.write_text(text)
    model.write_bytes(model.read_bytes()[:-8])
    with pytest.raises(polyfed.InputError, match="is damaged"):
        polyfed.load_client(tmp_path / "out")
