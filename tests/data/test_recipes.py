"""Datasets of people, from tiny files in their sources' own formats; and those that need no files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import polyfed
from polyfed.data import load_dataset
from polyfed.data.leaf import LETTERS, shakespeare
from polyfed.data.sensors import HAR_CHANNELS
from polyfed.data.texts import ag_news
from polyfed.errors import InputError


def write_leaf(folder: Path, part: str, users: dict[str, Any]) -> None:
    """A file as LEAF's preprocess.sh writes it."""
    data = {user: {"x": x, "y": y} for user, (x, y) in users.items()}
    content = {"users": list(users), "num_samples": [len(y) for _, y in users.values()], "user_data": data}
    (folder / part).mkdir(parents=True, exist_ok=True)
    (folder / part / f"all_data_niid_0_keep_0_{part}_9.json").write_text(json.dumps(content))


def picture(value: float) -> list[float]:
    return [value] * 28 + [1.0] * (784 - 28)


def test_femnist(tmp_path: Path) -> None:
    place = tmp_path / "femnist" / "data"
    write_leaf(place, "train", {"f0_1": ([picture(0.2), picture(0.0)], [10, 61]), "f0_0": ([picture(1.0)], [3])})
    write_leaf(place, "test", {"f0_1": ([picture(0.4)], [61])})
    dataset = load_dataset("femnist", tmp_path)
    assert dataset.input_shape == (1, 28, 28) and dataset.classes == 62 and dataset.client_names == ("f0_0", "f0_1")
    assert dataset.images[:, 0, 0, 0].tolist() == [51, 0, 255, 102] and dataset.images[0, 0, 1, 0] == 255
    assert [dataset.class_names[label] for label in dataset.labels.tolist()] == ["A", "z", "3", "z"]
    assert dataset.owners is not None and dataset.owners.tolist() == [1, 1, 0, 1] and dataset.official_test == 1
    write_leaf(place, "test", {"f9": ([picture(0.4)], [61])})
    with pytest.raises(InputError, match="'f9' in .*test has no training samples: .*-t sample"):
        load_dataset("femnist", tmp_path)
    (place / "train" / "broken.json").write_text("{}")
    with pytest.raises(InputError, match="broken.json is no file of LEAF's"):
        load_dataset("femnist", tmp_path)


def test_shakespeare_gives_tokens(tmp_path: Path) -> None:
    line = "to be, or not to be".ljust(80)
    write_leaf(tmp_path / "shakespeare", "train", {"PLAY_HAMLET": ([line, line[1:] + "T"], ["T", "h"])})
    write_leaf(tmp_path / "shakespeare", "test", {"PLAY_HAMLET": ([line], ["."])})
    texts = shakespeare(tmp_path)
    assert texts.tokens.shape == (3, 80) and texts.tokens.dtype == texts.labels.dtype == torch.int64
    assert "".join(LETTERS[token] for token in texts.tokens[1].tolist()) == line[1:] + "T"
    assert [LETTERS[label] for label in texts.labels.tolist()] == ["T", "h", "."]
    assert texts.official_test == 1 and texts.owners is not None and texts.owners.tolist() == [0, 0, 0]
    dataset = load_dataset("shakespeare", tmp_path)
    assert (dataset.vocabulary, dataset.padding, dataset.clients, dataset.classes) == (80, None, 1, 80)
    assert len(LETTERS) == len(set(LETTERS)) == len(texts.vocabulary) == 80
    write_leaf(tmp_path / "shakespeare", "train", {"PLAY_HAMLET": ([line.replace("t", "ü")], ["T"])})
    with pytest.raises(InputError, match="the character 'ü'"):
        shakespeare(tmp_path)


def test_ag_news_gives_tokens(tmp_path: Path) -> None:
    """Words by how often they occur in the training texts: a three times, b twice, then c; d is unknown."""
    (tmp_path / "ag-news").mkdir()
    (tmp_path / "ag-news" / "train.csv").write_text('"3","A b","a, b\\c"\n"1","a","null"\n')
    (tmp_path / "ag-news" / "test.csv").write_text('"4","d","b"\n')
    texts = ag_news(tmp_path, length=4, words=5)
    assert texts.vocabulary == ("<padding>", "<unknown>", "a", "b", "c")
    assert texts.tokens.tolist() == [[2, 3, 2, 3], [2, 1, 0, 0], [1, 3, 0, 0]]
    assert texts.labels.tolist() == [2, 0, 3] and texts.official_test == 1 and texts.class_names[2] == "Business"
    dataset = load_dataset("ag-news", tmp_path)
    assert (dataset.vocabulary, dataset.padding, dataset.official_test) == (6, 0, 1) and dataset.images.shape == (3, 64)
    (tmp_path / "ag-news" / "test.csv").write_text('"5","d","b"\n')
    with pytest.raises(InputError, match="is not AG News"):
        ag_news(tmp_path)
    with pytest.raises(InputError, match="'ag-news' is missing: there is no .*train.csv"):
        ag_news(tmp_path / "nowhere")


def write_har(folder: Path) -> None:
    """Two people: subject 3 with two windows in train, subject 1 with one in test. A value tells channel and window."""
    folder.mkdir()
    (folder / "activity_labels.txt").write_text("1 WALKING\n2 SITTING\n")
    for part, labels, subjects in (("train", "2\n1\n", "3\n3\n"), ("test", "1\n", "1\n")):
        (folder / part / "Inertial Signals").mkdir(parents=True)
        (folder / part / f"y_{part}.txt").write_text(labels)
        (folder / part / f"subject_{part}.txt").write_text(subjects)
        for number, name in enumerate(HAR_CHANNELS):
            rows = [f"  {number + window / 10:e} {'-1.0e-002 ' * 127}" for window in range(len(labels.split()))]
            (folder / part / "Inertial Signals" / f"{name}_{part}.txt").write_text("\n".join(rows) + "\n")


@pytest.mark.parametrize("name", ["UCI HAR Dataset", "uci-har"])
def test_uci_har(tmp_path: Path, name: str) -> None:
    write_har(tmp_path / name)
    dataset = load_dataset("uci-har", tmp_path)
    assert dataset.input_shape == (9, 128) and dataset.class_names == ("WALKING", "SITTING")
    assert dataset.labels.tolist() == [1, 0, 0] and dataset.client_names == ("1", "3") and dataset.official_test == 0
    assert dataset.owners is not None and dataset.owners.tolist() == [1, 1, 0]
    assert dataset.images[1, :, 0].tolist() == pytest.approx([number + 0.1 for number in range(9)])
    (tmp_path / name / "train" / "y_train.txt").write_text("1\n")
    with pytest.raises(InputError, match="different numbers of rows"):
        load_dataset("uci-har", tmp_path)


def test_windows_of_uci_har_share_no_reading(tmp_path: Path) -> None:
    """Its windows begin 64 readings after each other, so every second row of a person's activity is used.

    Otherwise 24 of 25 test samples would share half of their readings with a training sample (8:1:1).
    """
    runs = [(1, 2, 5), (1, 1, 2), (2, 1, 4)]  # a person, an activity, so many windows
    rows, first = [], 0
    for person, activity, windows in runs:
        rows += [(person, activity, first + 64 * window) for window in range(windows)]
        first += 10_000
    place = tmp_path / "uci-har"
    (place / "train" / "Inertial Signals").mkdir(parents=True)
    (place / "activity_labels.txt").write_text("1 WALKING\n2 SITTING\n")
    for column, what in enumerate(("subject", "y")):
        (place / "train" / f"{what}_train.txt").write_text("\n".join(str(row[column]) for row in rows))
    signal = "\n".join(" ".join(map(str, range(start, start + 128))) for _, _, start in rows)
    for name in HAR_CHANNELS:
        (place / "train" / "Inertial Signals" / f"{name}_train.txt").write_text(signal)
    dataset = load_dataset("uci-har", tmp_path)
    assert dataset.images[:, 0, 0].tolist() == [0, 128, 256, 10_000, 20_000, 20_128]
    assert dataset.labels.tolist() == [1, 1, 1, 0, 0, 0] and dataset.owners is not None
    assert dataset.owners.tolist() == [0, 0, 0, 0, 1, 1]


def test_pamap2(tmp_path: Path) -> None:
    """600 rows of walking make two windows, 255 of lying none, and those without an activity do not count."""
    place = tmp_path / "PAMAP2_Dataset" / "Protocol"
    place.mkdir(parents=True)
    activities = np.repeat([4, 0, 1], [600, 300, 255])
    table = np.zeros((len(activities), 54))
    table[:, 1], table[:, 4], table[:, 10 + 17] = activities, 20.0, np.arange(len(activities))
    lines = [" ".join(f"{value:g}" for value in row) for row in table]
    lines[5] = lines[5].replace(" 20 ", " NaN ", 1)
    (place / "subject101.dat").write_text("\n".join(lines))
    (place / "subject102.dat").write_text("\n".join(lines[:300]))
    dataset = load_dataset("pamap2", tmp_path)
    assert dataset.input_shape == (27, 256) and dataset.client_names == ("subject101", "subject102")
    assert [dataset.class_names[label] for label in dataset.labels.tolist()] == ["walking"] * 3
    assert torch.equal(dataset.images[:, 0], torch.full((3, 256), 2.0))
    # The chest's rotation is the thirteenth channel: after nine of the hand and three of its own acceleration.
    assert dataset.images[1, 12, :2].tolist() == [256, 257]
    (place / "subject103.dat").write_text("1 2 3\n")
    with pytest.raises(InputError, match="subject103.dat has 3 columns, not 54"):
        load_dataset("pamap2", tmp_path)


@pytest.mark.parametrize("name", ["femnist", "uci-har", "pamap2"])
def test_missing_files_are_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"'{name}' is missing: there is no {tmp_path}.*POLYFED_DATA"):
        load_dataset(name, tmp_path)


def test_an_archive_in_their_place_keeps_the_clients(tmp_path: Path) -> None:
    np.savez(tmp_path / "uci-har.npz", x=np.zeros((4, 9, 128), np.float32), y=[0, 1, 0, 1], client=[7, 7, 9, 9])
    assert load_dataset("uci-har", tmp_path).client_names == ("7", "9")


@pytest.mark.parametrize(("name", "classes"), [("wine", ("class_0", "class_1", "class_2")), ("breast-cancer", None)])
def test_tables_that_need_no_download(name: str, classes: tuple[str, ...] | None) -> None:
    dataset = load_dataset(name)
    assert dataset.class_names == (classes or ("benign", "malignant")) and dataset.table is not None
    assert float(dataset.images.mean(0).abs().max()) < 1e-5


class Cells(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(30, 8), nn.ReLU(), nn.Linear(8, 2))


class Signals(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv1d(3, 8, 9, stride=2), nn.ReLU(), nn.AdaptiveAvgPool1d(4), nn.Flatten(), nn.Linear(32, 6)
        )


def test_a_table_is_learnt_and_keeps_its_names() -> None:
    settings = {"models": [Cells], "clients": 4, "rounds": 5, "lr": 0.1, "device": "cpu", "progress": False}
    result = polyfed.run("fedproto", data="breast-cancer", **settings)
    assert result.summary["accuracy_final"] > 0.8
    own = result.population.data[0]
    table = result.population.dataset.table
    assert table is not None
    assert result.predict(0, table.frame.iloc[own.test[:1]]).names[0] in ("benign", "malignant")


def test_motion_is_learnt_by_twelve_people() -> None:
    dataset = load_dataset("motion")
    assert dataset.input_shape == (3, 64) and len(dataset) == 720 and dataset.clients == 12
    assert torch.equal(dataset.images, load_dataset("motion").images)
    own = [dataset.images[dataset.owners == person].std() for person in range(12)]
    assert max(own) > 1.3 * min(own)  # people differ
    result = polyfed.run("fedproto", data="motion", models=[Signals], rounds=8, lr=0.1, device="cpu", progress=False)
    assert result.folder.config.clients == 12 and result.summary["accuracy_final"] > 0.5
