"""`polyfed export` and `polyfed predict`: files of all kinds, and one sentence for everything that is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import polyfed
from polyfed.export import formats
from tests.export.runs import NAMES, finished, some
from tests.shell import Shell, is_one_sentence


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Shell:
    monkeypatch.chdir(tmp_path)
    return Shell(capsys, monkeypatch)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> polyfed.Result:
    """FedProto on grey pictures of 16x16 pixels."""
    result: polyfed.Result = finished(tmp_path_factory.mktemp("runs") / "run", "fedproto")
    return result


def path_of(result: polyfed.Result) -> str:
    return str(result.folder.path)


def test_from_run_to_prediction(shell: Shell, run: polyfed.Result) -> None:
    ended = shell("export", path_of(run), "--client", "1", "--out", "out")
    assert ended.status == 0 and ended.output.splitlines()[-1] == "out"
    assert "gives the run's predictions on 32 random samples" in ended.output
    text = Path("out/README.md").read_text()
    for words in ("trained with FedProto on pets", "nearest", "ant, bee, cat, dog", "(to fill in)", "test samples"):
        assert words in text
    images = some()
    Image.fromarray(images[0, 0].numpy()).save("one.png")
    Image.fromarray(images[1, 0].numpy()).convert("RGB").save("two.png")
    np.savez("many.npz", x=images.numpy())
    np.savetxt("flat.csv", images.reshape(5, -1).numpy(), fmt="%d", delimiter=",", header="a" + ",b" * 255, comments="")
    expected = run.predict(1, images)
    files = ["one.png", "two.png", "many.npz", "flat.csv"]
    for model in (["out"], ["out/model.safetensors"], [path_of(run), "--client", "1"]):
        ended = shell("predict", *model, *files, "--json")
        rows = json.loads(ended.output)
        order = [0, 1, *range(5), *range(5)]
        assert [row["label"] for row in rows] == expected.classes[order].tolist()
        assert [row["class"] for row in rows] == [expected.names[index] for index in order]
        found = torch.tensor([list(row["probabilities"].values()) for row in rows])
        assert torch.allclose(found, expected.probabilities[order], atol=1e-6)
        assert [row["row"] for row in rows] == [None, None, *range(5), *range(5)]
        assert list(rows[0]["probabilities"]) == list(NAMES)
    lines = shell("predict", "out", *files).output.splitlines()
    assert lines[0] == f"one.png  {expected.names[0]}  {100 * float(expected.probabilities[0].max()):.2f} %"
    assert lines[4].startswith("many.npz[2]  ")


def test_pictures_are_resized_only_if_asked(shell: Shell, run: polyfed.Result) -> None:
    Image.new("L", (20, 10), 90).save("large.png")
    ended = shell("predict", path_of(run), "--client", "0", "large.png")
    assert ended.status == 2 and is_one_sentence(ended.error)
    assert "has 20x10 pixels (width x height), but the model was trained on 16x16: add --resize" in ended.error
    assert shell("predict", path_of(run), "--client", "0", "large.png", "--resize").status == 0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("missing.png", "there is no file 'missing.png'"),
        ("text.png", "'text.png' can't be read as a picture"),
        ("colour.png", "'colour.png' is in colour, but the model was trained on grey pictures"),
        ("clear.png", "'clear.png' is partly transparent"),
        ("deep.png", "'deep.png' has more than 8 bits per value"),
        ("two.npz", "'two.npz' holds a, b: save the samples as x"),
        ("bad.npz", "is not an npz archive"),
        ("shape.npz", "'shape.npz' can't be used: images of shape (2, 9, 9)"),
        ("few.csv", "'few.csv' has 3 columns, but a sample of this model has 256 numbers"),
        ("words.csv", "'words.csv' is not a table of numbers"),
        ("float.csv", "'float.csv' has values that are not pixels"),
    ],
)
def test_files_that_can_not_be_predicted(shell: Shell, run: polyfed.Result, name: str, words: str) -> None:
    Path("text.png").write_text("hello")
    Image.new("RGB", (16, 16), (1, 2, 3)).save("colour.png")
    Image.new("RGBA", (16, 16), (1, 1, 1, 9)).save("clear.png")
    Image.fromarray(np.full((16, 16), 5000, np.uint16)).save("deep.png")
    np.savez("two.npz", a=np.zeros(1), b=np.zeros(1))
    Path("bad.npz").write_text("no archive")
    np.savez("shape.npz", x=np.zeros((2, 9, 9), np.uint8))
    Path("few.csv").write_text("1,2,3\n")
    Path("words.csv").write_text("a,b\nc,d\n")
    Path("float.csv").write_text(",".join(["0.5"] * 256) + "\n")
    ended = shell("predict", path_of(run), "--client", "0", name)
    assert ended.status == 2 and is_one_sentence(ended.error) and words in ended.error, ended.error


def test_what_can_not_be_exported(
    shell: Shell, run: polyfed.Result, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    Path("full").mkdir()
    Path("full/mine.txt").write_text("keep")
    path = path_of(run)

    class Stop(polyfed.Watcher):
        def on_round(self, round: int, row: object) -> None:
            self.stop_requested = True

    with pytest.raises(polyfed.RunError):
        finished(tmp_path / "half", "standalone", watcher=Stop())
    for arguments, words in (
        ((path, "--client", "7"), "there is no client 7; the run has 2 clients"),
        ((path, "--client", "x"), "--client is 'x', but must be a whole number"),
        ((path, "--client", "0", "--out", "full"), "'full' is not empty"),
        ((path, "--client", "0", "--format", "onyx"), "unknown format 'onyx': did you mean 'onnx'?"),
        (("half", "--client", "0"), "is not finished; continue it with `polyfed resume half`"),
        (("nothing", "--client", "0"), "'nothing' holds no run"),
    ):
        ended = shell("export", *arguments, *([] if "--out" in arguments else ["--out", "new"]))
        assert ended.status == 2 and is_one_sentence(ended.error) and words in ended.error, ended.error
    monkeypatch.setattr(formats, "ONNX_PACKAGES", ("onnx", "no_such_package"))
    ended = shell("export", path, "--client", "0", "--format", "onnx", "--out", "new")
    assert ended.status == 2 and "ONNX needs no_such_package" in ended.error and "polyfed[onnx]" in ended.error
    for missing in (("--client", "0"), ("--out", "new")):
        ended = shell("export", path, *missing)
        assert ended.status == 2 and is_one_sentence(ended.error) and "missing option" in ended.error
    assert not Path("new").exists()
    assert [entry.name for entry in Path("full").iterdir()] == ["mine.txt"]


def test_tables_of_features(shell: Shell, tmp_path: Path) -> None:
    x, y = torch.randn(60, 5), torch.arange(60) % 3
    models = [nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))]
    result = finished(tmp_path / "run", "standalone", models, polyfed.from_arrays(x, y))
    polyfed.export_client(tmp_path / "run", 0, tmp_path / "out", format="torch", models=models)
    np.savetxt("rows.csv", x[:4].numpy(), delimiter=",")
    rows = json.loads(shell("predict", "out", "rows.csv", "--json", "--trust").output)
    assert [row["label"] for row in rows] == result.predict(0, x[:4]).classes.tolist()
    Image.new("L", (5, 1)).save("one.png")
    assert "samples of 5 that are no pictures" in shell("predict", "out", "one.png", "--trust").error
    assert "is the model of client 0, not of client 1" in shell("predict", "out", "rows.csv", "--client", "1").error
