"""Models for token ids and signals leave their run like those for images."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import polyfed
from polyfed.errors import InputError
from polyfed.export.files import read_samples
from tests.export.runs import finished
from tests.kinds import signals, texts


@pytest.mark.parametrize("format", ["safetensors", "torch"])
@pytest.mark.parametrize("models", ["text_cnn,text_transformer", "text_gru,text_lstm"])
def test_token_ids(tmp_path: Path, models: str, format: str) -> None:
    data = texts()
    result = finished(tmp_path / "run", "fedproto", models, data)
    for client in range(2):
        out = tmp_path / f"out{client}"
        polyfed.export_client(tmp_path / "run", client, out, format=format)  # checked on random ids of the vocabulary
        model = polyfed.load_client(out, trust=True)
        found = model.predict(data.images[:5].numpy()).probabilities
        assert torch.allclose(found, result.predict(client, data.images[:5]).probabilities, atol=1e-5)
        assert len(model.predict(data.images[0])) == 1
    inputs = json.loads((out / "card.json").read_text())["inputs"]
    assert (inputs["vocabulary"], inputs["padding"], inputs["pixels"]) == (20, 0, False)
    assert "int64 token ids of shape 9, from 0 to 19; 0 fills short samples" in (out / "README.md").read_text()


def test_samples_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    result = finished(tmp_path / "run", "standalone", "text_cnn", texts())
    for x, words in (
        (np.zeros((2, 9)), "trained on token ids"),
        (np.full((2, 9), 20), "the run's vocabulary has the ids 0 to 19"),
        (np.zeros((2, 8), np.int64), r"the run's have the shape \(9,\)"),
    ):
        with pytest.raises(InputError, match=words):
            result.predict(0, x)


def test_files_of_token_ids(tmp_path: Path) -> None:
    finished(tmp_path / "run", "standalone", "text_cnn", texts())
    inputs = polyfed.load_client(tmp_path / "run", 0).inputs
    np.savez(tmp_path / "some.npz", x=texts().images[:3].numpy())
    (tmp_path / "some.csv").write_text("\n".join(",".join(map(str, row)) for row in texts().images[:3].tolist()))
    for name in ("some.npz", "some.csv"):
        assert torch.equal(read_samples(tmp_path / name, inputs).batch, texts().images[:3])
    (tmp_path / "halves.csv").write_text("0.5,1,2,3,4,5,6,7,8")
    with pytest.raises(InputError, match="not whole numbers: this model needs token ids"):
        read_samples(tmp_path / "halves.csv", inputs)


def test_signals(tmp_path: Path) -> None:
    data = signals()
    result = finished(tmp_path / "run", "fml", "signal4", data)
    polyfed.export_client(tmp_path / "run", 1, tmp_path / "out", format="torch")
    model = polyfed.load_client(tmp_path / "out", trust=True)
    expected = result.predict(1, data.images[:5]).probabilities
    assert torch.allclose(model.predict(data.images[:5]).probabilities, expected, atol=1e-5)


@pytest.fixture
def patients(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pd.DataFrame:
    """A table with numbers far from 0, categories and missing values, from which a run has learned."""
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    ill = np.arange(60) % 2
    frame = pd.DataFrame(
        {
            "age": random.normal(500 + 200 * ill, 30),
            "ward": np.array(["7", "8b"])[random.integers(0, 2, 60)],
            "ill": np.array(["no", "yes"])[ill],
        }
    )
    frame.loc[3, "age"] = frame.loc[4, "ward"] = None
    frame.to_csv("patients.csv", index=False)
    finished(tmp_path / "run", "fedproto", "tabular4", "table:patients.csv", label="ill", rounds=4)
    return frame


@pytest.mark.parametrize("format", ["safetensors", "torch"])
def test_rows_of_a_table_are_prepared_as_in_training(patients: pd.DataFrame, format: str) -> None:
    result = polyfed.resume("run")
    polyfed.export_client("run", 1, "out", format=format)
    loaded, exported = polyfed.load_client("run", 1), polyfed.load_client("out", trust=True)
    expected = loaded.predict_batch(result.population.dataset.images)
    assert sum(name == true for name, true in zip(expected.names, patients["ill"], strict=True)) > 50
    columns = patients[["ill", "ward", "age"]]  # by name, in any order, and the label is not looked at
    for found in (result.predict(1, columns), loaded.predict(columns), exported.predict(columns)):
        assert torch.allclose(found.probabilities, expected.probabilities, atol=1e-5)
    columns.to_csv("rows.csv", index=False, sep=";")
    read = read_samples(Path("rows.csv"), exported.inputs)
    assert torch.equal(read.batch, result.population.dataset.images)
    Path("one.csv").write_text("age,ward\n,7\n")  # a missing number, and a text that looks like a number
    row = read_samples(Path("one.csv"), exported.inputs).batch
    assert abs(float(row[0, 0])) < 1 and row[0, 1:].tolist() == [1, 0]
    assert "rows with the columns age, ward" in Path("out/README.md").read_text()


def test_arrays_are_no_rows_of_a_table(patients: pd.DataFrame) -> None:
    """They would be taken for rows that are prepared already, and those look no different."""
    result, model = polyfed.resume("run"), polyfed.load_client("run", 1)
    raw = patients[["age", "age", "age"]].to_numpy()  # as many numbers as a prepared row has
    for x in (raw, torch.tensor(raw), list(raw), patients.iloc[0], result.population.dataset.images):
        for predict in (model.predict, partial(result.predict, 1)):
            with pytest.raises(InputError, match="trained on a table, .* in a frame with the columns age, ward"):
                predict(x)
    np.savez("rows.npz", x=raw)
    with pytest.raises(InputError, match="'rows.npz' can't be used: the model was trained on a table"):
        read_samples(Path("rows.npz"), model.inputs)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("age\n50\n", "'rows.csv' lacks the column 'ward', which the model needs: add it"),
        ("50,7\n51,8\n", "'rows.csv' lacks the column 'age'"),
        ("age,ward\nold,7\n", "column 'age' of 'rows.csv' has texts, but the model needs numbers there"),
        ("age,ward\ninf,7\n", "column 'age' of 'rows.csv' has infinite values"),
        ("age,ward\n", "'rows.csv' has no rows"),
    ],
)
def test_rows_that_do_not_fit_are_refused(patients: pd.DataFrame, content: str, words: str) -> None:
    Path("rows.csv").write_text(content)
    with pytest.raises(InputError, match=words):
        read_samples(Path("rows.csv"), polyfed.load_client("run", 0).inputs)
