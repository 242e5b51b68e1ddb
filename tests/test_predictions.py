"""Predictions from a result: raw or normalised images, one or many, by name and with probabilities."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import polyfed
from polyfed.predictions import as_input, prediction
from tests import support

NAMES = ("dark", "grey", "bright")


@pytest.fixture(scope="module", params=["standalone", "fedproto"])
def result(request: pytest.FixtureRequest) -> polyfed.Result:
    labels = np.arange(60) % 3
    images = (np.random.default_rng(0).integers(0, 40, (60, 8, 9)) + 90 * labels[:, None, None]).astype(np.uint8)
    data = polyfed.from_arrays(images, labels, name="brightness", class_names=NAMES)
    return polyfed.run(request.param, data=data, models=support.Wide, clients=2, rounds=2, device="cpu")


def test_all_layouts_of_the_same_images_give_the_same(result: polyfed.Result) -> None:
    dataset = result.population.dataset
    raw = dataset.images[:4].numpy()  # [4, 1, 8, 9]
    expected = result.predict(0, dataset.batch(torch.arange(4))[0])
    assert expected.probabilities.shape == (4, 3) and len(expected) == 4
    assert torch.allclose(expected.probabilities.sum(1), torch.ones(4))
    assert torch.equal(expected.probabilities.argmax(1), expected.classes)
    assert expected.names == [NAMES[label] for label in expected.classes.tolist()]
    pictures = [Image.fromarray(image[0]) for image in raw]
    for x in (raw, torch.from_numpy(raw), raw[:, 0], raw.transpose(0, 2, 3, 1), pictures, list(raw)):
        assert torch.equal(result.predict(0, x).probabilities, expected.probabilities)
    for one in (raw[2], raw[2, 0], raw[2].transpose(1, 2, 0), pictures[2], dataset.batch(torch.tensor([2]))[0][0]):
        single = result.predict(0, one)
        assert single.names == [expected.names[2]]
        assert torch.allclose(single.probabilities[0], expected.probabilities[2], atol=1e-6)
    assert repr(single).startswith(f"Prediction({single.names[0]} (")


def test_a_class_of_which_the_rule_knows_nothing_has_no_probability() -> None:
    tiny = support.tiny_dataset()
    known = prediction(torch.tensor([[-1.0, -torch.inf, -1.0, -torch.inf]]), tiny)
    assert known.probabilities.tolist() == [[0.5, 0.0, 0.5, 0.0]] and known.names == ["0"]


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (np.zeros((8, 8), np.uint8), r"shape \(8, 8\) can't be predicted: the run's have the shape \(1, 6, 6\)"),
        (np.zeros((2, 6, 6), np.float32), r"many as \(images, 1, 6, 6\)"),
        (np.full((1, 6, 6), 200.0), "must be normalised like 'tiny', from -2 to 2, .* 200 to 200: give raw pixels"),
        (np.zeros((1, 6, 6), np.int64), "give uint8 pixels or floats"),
        ("picture.png", "a value of type str can't be predicted"),
        ([np.zeros((6, 6), np.uint8), np.zeros((6, 7), np.uint8)], "different shapes"),
    ],
)
def test_what_is_no_image_of_the_run_is_refused(x: Any, words: str) -> None:
    with pytest.raises(polyfed.InputError, match=words):
        as_input(x, support.tiny_dataset())


def test_float_data_want_floats() -> None:
    table = polyfed.from_arrays(np.zeros((3, 5), np.float32), np.arange(3))
    assert as_input(np.full(5, 1e6), table).shape == (1, 5)
    with pytest.raises(polyfed.InputError, match="not uint8"):
        as_input(np.zeros(5, np.uint8), table)


def test_objects_are_shown_in_a_line(result: polyfed.Result) -> None:
    people = result.population
    assert repr(people.dataset) == "Dataset('brightness': 60 samples of 1×8×9, 3 classes)"
    assert repr(people) == f"Population(2 clients with Wide, {result.summary['method']} on 'brightness', cpu)"
    assert repr(people.data[0]).startswith("ClientData(")
    assert "%" in repr(result) and "after 2 rounds" in repr(result) and len(repr(result)) < 150


def test_prototypes_are_the_servers_last_word(tmp_path: Path) -> None:
    """No client has received the prototypes that were made of the last round's replies; predictions use them."""
    own: dict[str, Any] = {"data": support.tiny_dataset(), "models": [support.Wide, support.Narrow]}
    result = polyfed.run("fedproto", **support.DEFAULTS, **own, out=tmp_path / "run")
    last = result.server.state["prototypes.vectors"]
    assert torch.equal(result.network(0).prototypes.vectors, last)
    assert not torch.equal(result.folder.model_state(0)["prototypes.vectors"], last)
    again = polyfed.resume(tmp_path / "run", **own)
    assert torch.equal(again.server.state["prototypes.vectors"], last)


def test_a_networks_own_weights_stay_its_own(tmp_path: Path) -> None:
    """FedAvg's server has a mean, but a client predicts with what it has trained itself."""
    own: dict[str, Any] = {"data": support.tiny_dataset(), "models": [support.Wide]}
    result = polyfed.run("fedavg", **support.DEFAULTS, **own, out=tmp_path / "run")
    name = "model.head.weight"
    assert torch.equal(dict(result.network(0).named_parameters())[name], result.folder.model_state(0)[name])
    assert result.server.state.keys() >= {name}
