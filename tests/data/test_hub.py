"""hf:NAME, with a stand-in for the library `datasets` that behaves like it where polyfed looks."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from polyfed.data import load_dataset
from polyfed.errors import InputError
from tests.data.test_given import LABELS, PICTURES, PIXELS, Rows


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the hub holds, by name."""
    held: dict[str, Any] = {}

    def load(path: str, name: str | None = None) -> Any:
        found = held.get(path if name is None else f"{path}/{name}")
        if found is None:
            raise ConnectionError("Couldn't reach the Hub.\nReally.")
        return found

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load))
    return held


def test_parts_names_and_columns(hub: dict[str, Any]) -> None:
    parts = {
        "train": Rows(["a", "b", "c"], img=PICTURES, fine_label=LABELS, label=[0] * 6, writer=list("uuvvww")),
        "test": Rows(["a", "b", "c"], img=PICTURES[:2], fine_label=LABELS[:2], label=[0] * 2, writer=list("uw")),
        "extra": Rows(["a", "b", "c"], img=PICTURES[:3], fine_label=LABELS[:3], label=[0] * 3, writer=list("uvw")),
    }
    hub["someone/pets"] = parts
    dataset = load_dataset("hf:someone/pets?image=img&label=fine_label", client="writer")
    assert (dataset.name, dataset.class_names, dataset.official_test) == ("pets", ("a", "b", "c"), 2)
    assert np.array_equal(dataset.images[:6, 0].numpy(), PIXELS) and dataset.labels.tolist() == [*LABELS, 0, 1]
    assert dataset.owners is not None and dataset.owners.tolist() == [0, 0, 1, 1, 2, 2, 0, 2]
    other = load_dataset("hf:someone/pets?train=extra&test=train&label=fine_label")
    assert len(other) == 9 and other.official_test == 6
    with pytest.raises(InputError, match="has the parts train, test, extra, not 'valid'"):
        load_dataset("hf:someone/pets?train=valid")


def test_a_configuration_and_a_single_part(hub: dict[str, Any]) -> None:
    hub["pets/small"] = Rows(image=PICTURES, label=LABELS)
    assert len(load_dataset("hf:pets?config=small")) == 6


def test_what_cannot_be_had_is_one_sentence(hub: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="'nothing' can't be loaded .*Couldn't reach the Hub") as caught:
        load_dataset("hf:nothing")
    assert "\n" not in str(caught.value)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match=r"pip install 'polyfed\[hf\]'"):
        load_dataset("hf:mnist")
