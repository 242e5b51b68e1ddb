"""What `data=` accepts: everything that people hold becomes the same dataset."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torch.utils.data import TensorDataset

from polyfed.data import Dataset, as_data, from_arrays, load_dataset, save_npz
from polyfed.errors import InputError

PIXELS = np.random.default_rng(0).integers(0, 256, (6, 8, 9), dtype=np.uint8)
LABELS = np.array([0, 1, 2, 0, 1, 2])
WORDS = np.array(["a", "b", "c"])[LABELS]


def made(data: Any, **columns: Any) -> Dataset:
    dataset = as_data(data, columns)
    assert isinstance(dataset, Dataset)
    return dataset


class Rows:
    """A dataset of mappings, as Hugging Face's are: named columns, features, a length, rows by number."""

    def __init__(self, names: list[str] | None = None, frame: pd.DataFrame | None = None, **columns: Any) -> None:
        self.columns, self.names, self.frame = columns, names, frame
        self.column_names = list(columns)

    @property
    def features(self) -> dict[str, Any]:
        kind = type("ClassLabel", (), {"names": self.names})
        return {name: kind() for name in self.column_names}

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {name: values[row] for name, values in self.columns.items()}

    def to_pandas(self) -> pd.DataFrame:
        return pd.DataFrame(self.columns)


class Endless:
    """Iterable, with a length and without positions."""

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[Any]:
        return iter(zip(PIXELS, LABELS, strict=True))


PICTURES = [Image.fromarray(pixels) for pixels in PIXELS]


@pytest.mark.parametrize(
    "data",
    [
        from_arrays(PIXELS, LABELS),
        (PIXELS, LABELS),
        (torch.from_numpy(PIXELS), list(LABELS)),
        (PIXELS, pd.Series(LABELS)),
        (PIXELS, WORDS),
        (PIXELS, pd.Series(WORDS)),
        (PIXELS, pd.Series(WORDS).astype("category")),
        (PIXELS, WORDS.astype("S")),
        (PIXELS, np.eye(3)[LABELS]),
        TensorDataset(torch.from_numpy(PIXELS), torch.from_numpy(LABELS)),
        list(zip(PICTURES, LABELS, strict=True)),
        [(picture, np.eye(3)[label]) for picture, label in zip(PIXELS, LABELS, strict=True)],
        [{"image": picture, "label": label} for picture, label in zip(PICTURES, WORDS, strict=True)],
        Endless(),
        Rows(img=PICTURES, label=LABELS),
        {"train": Rows(["a", "b", "c"], img=PICTURES, label=LABELS)},
    ],
)
def test_samples_and_classes_are_the_same_however_they_are_given(data: Any) -> None:
    dataset = made(data)
    assert torch.equal(dataset.images[:, 0], torch.from_numpy(PIXELS)) and dataset.labels.tolist() == LABELS.tolist()
    assert dataset.classes == 3 and dataset.class_names in ((), ("a", "b", "c"), ("0", "1", "2"))


def test_names_come_from_words_columns_of_one_hot_frames_and_features() -> None:
    assert made((PIXELS, WORDS)).class_names == ("a", "b", "c")
    assert made((PIXELS, WORDS), **{}).labels.tolist() == LABELS.tolist()
    frame = pd.get_dummies(pd.Series(WORDS))
    assert from_arrays(PIXELS, frame).class_names == ("a", "b", "c")  # type: ignore[arg-type]
    assert made(Rows(["x", "y", "z", "unused"], img=PICTURES, label=LABELS)).class_names == ("x", "y", "z", "unused")
    named = from_arrays(PIXELS, WORDS, class_names=["c", "b", "a"])
    assert named.labels.tolist() == [2, 1, 0, 2, 1, 0]
    with pytest.raises(InputError, match="the label 'c', but its class names are a, b"):
        from_arrays(PIXELS, WORDS, class_names=["a", "b"])


def test_columns_are_named_where_they_have_other_names() -> None:
    rows = Rows(photo=PICTURES, other=PICTURES, coarse=[0] * 6, fine=LABELS, writer=list("uuvvww"))
    dataset = made(rows, image="photo", label="fine", client="writer")
    assert torch.equal(dataset.images[:, 0], torch.from_numpy(PIXELS)) and dataset.client_names == ("u", "v", "w")
    with pytest.raises(InputError, match="label is 'nothing', but samples of .* have the columns 'photo', 'other'"):
        made(rows, label="nothing")


def test_rows_of_plain_values_are_a_table() -> None:
    dataset = made(Rows(age=[1.0, 3.0], sex=["f", "m"], label=["no", "yes"]), label="label")
    assert dataset.images.tolist() == [[-1, 1, 0], [1, 0, 1]] and dataset.class_names == ("no", "yes")


def test_a_mapping_of_two_parts_has_a_test_set() -> None:
    both = {"train": Rows(img=PICTURES, label=LABELS), "test": Rows(img=PICTURES[:3], label=LABELS[:3])}
    dataset = made(both)
    assert dataset.official_test == 3 and len(dataset) == 9
    with pytest.raises(InputError, match="parts validation beside train and test"):
        made({**both, "validation": both["test"]})


def test_arrays_with_a_client_or_a_test_set() -> None:
    assert made((PIXELS, LABELS, list("uuvvww"))).client_names == ("u", "v", "w")
    assert made((PIXELS, LABELS, PIXELS[:2], LABELS[:2])).official_test == 2


def test_frames_have_a_label_and_perhaps_a_client() -> None:
    frame = pd.DataFrame({"v": [1.0, 3.0, 5.0, 7.0], "site": list("abab"), "y": ["no", "yes", "yes", "no"]})
    dataset = made(frame, label="y", client="site")
    assert dataset.input_shape == (1,) and dataset.clients == 2 and dataset.class_names == ("no", "yes")


@pytest.mark.parametrize(
    "parts",
    [
        [(PIXELS[:4], LABELS[:4]), (PIXELS[4:], LABELS[4:])],
        [(PIXELS[:4], WORDS[:4]), (PIXELS[4:], WORDS[4:])],
        [from_arrays(PIXELS[:4], LABELS[:4], classes=3), from_arrays(PIXELS[4:], LABELS[4:], classes=3)],
        [TensorDataset(torch.from_numpy(PIXELS[s]), torch.from_numpy(LABELS[s])) for s in (slice(4), slice(4, 6))],
        [Rows(["a", "b", "c"], img=PICTURES[s], label=LABELS[s]) for s in (slice(4), slice(4, 6))],
    ],
)
def test_a_list_has_one_client_each_though_none_has_all_classes(parts: Any) -> None:
    dataset = made(parts)
    assert torch.equal(dataset.images[:, 0], torch.from_numpy(PIXELS)) and dataset.labels.tolist() == LABELS.tolist()
    assert dataset.owners is not None and dataset.owners.tolist() == [0, 0, 0, 0, 1, 1]
    assert dataset.classes == 3


def test_clients_may_have_test_sets_and_classes_of_their_own() -> None:
    first = from_arrays(PIXELS[:2], WORDS[:2], PIXELS[:1], WORDS[:1])
    dataset = made([first, (PIXELS[2:], WORDS[2:])])
    assert dataset.class_names == ("a", "b", "c") and dataset.official_test == 1
    assert dataset.labels.tolist() == [*LABELS.tolist(), 0]
    assert dataset.owners is not None and dataset.owners.tolist() == [0, 0, 1, 1, 1, 1, 0]


def test_token_ids_stay_token_ids(tmp_path: Path) -> None:
    first, second = (from_arrays([[1, 2], [n]], ["a", "b"], vocabulary=9, padding=0) for n in (5, 6))  # type: ignore
    dataset = made([first, second])
    assert (dataset.vocabulary, dataset.padding, dataset.clients) == (9, 0, 2)
    assert dataset.images.tolist() == [[1, 2], [5, 0], [1, 2], [6, 0]]
    save_npz(dataset, tmp_path / "t.npz")
    again = load_dataset(f"npz:{tmp_path / 't.npz'}")
    assert (again.vocabulary, again.padding, again.clients) == (9, 0, 2) and torch.equal(again.images, dataset.images)


def test_frames_of_clients_share_their_constants() -> None:
    """Values 1, 3 and 5, 7: mean 4; the second client's level is unknown to the first."""
    first, second = (pd.DataFrame({"v": v, "c": c, "y": [0, 1]}) for v, c in (([1.0, 3.0], "a"), ([5.0, 7.0], "b")))
    dataset = made([first, second], label="y")
    assert dataset.input_shape == (3,) and float(dataset.images[:, 0].sum()) == pytest.approx(0, abs=1e-6)
    assert dataset.images[:, 1:].tolist() == [[1, 0], [1, 0], [0, 1], [0, 1]] and dataset.clients == 2


def test_anything_with_partitions_by_number() -> None:
    class Partitioner:
        num_partitions = 2

        def load_partition(self, number: int) -> Any:
            return Rows(img=PICTURES[3 * number : 3 * number + 3], label=LABELS[:3])

    class Federated(Partitioner):
        num_partitions = None  # type: ignore[assignment]
        partitioners = {"train": Partitioner()}

    for source in (Partitioner(), Federated()):
        dataset = made(source)
        assert dataset.owners is not None and dataset.owners.tolist() == [0, 0, 0, 1, 1, 1]
    Federated.partitioners = {}
    with pytest.raises(InputError, match="num_partitions is not known"):
        made(Federated())


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([(PIXELS, LABELS), (PIXELS[:, :5], LABELS)], r"client 1 has torch.uint8 samples of shape \(1, 5, 9\), but"),
        ([(PIXELS, LABELS), (PIXELS, WORDS)], "only some clients' classes have names"),
        ([(PIXELS, LABELS), (PIXELS, LABELS[:2])], "'client 1' has 6 samples but 2 labels"),
        ([(PIXELS, LABELS), (PIXELS / 255, LABELS)], "client 1 has torch.float32 samples"),
    ],
)
def test_clients_that_do_not_fit_together_are_named(parts: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        made(parts)


def test_many_different_labels_are_values_to_predict() -> None:
    with pytest.raises(InputError, match="202 different values in 202 samples, but polyfed classifies"):
        made((np.zeros((202, 3), np.float32), np.arange(202)))
    assert made((np.zeros((404, 3), np.float32), np.arange(404) % 202)).classes == 202


def test_columns_are_refused_where_there_are_none() -> None:
    for data in ((PIXELS, LABELS), from_arrays(PIXELS, LABELS), list(zip(PIXELS, LABELS, strict=True))):
        with pytest.raises(InputError, match="label is 'y', but the data .* have no columns"):
            made(data, label="y")
    with pytest.raises(InputError, match="client is 'y', but the data 'one dataset per client'"):
        made([Rows(img=PICTURES, label=LABELS, y=LABELS)], client="y")


def test_paths_become_addresses(tmp_path: Path) -> None:
    assert as_data(Path("a/b.npz"), {}) == "npz:a/b.npz" and as_data(Path("b.csv.gz"), {}) == "table:b.csv.gz"
    assert as_data(tmp_path, {}) == f"folder:{tmp_path}"
    np.savez(tmp_path / "client-1.npz", x=PIXELS, y=LABELS)
    assert as_data(tmp_path, {}) == f"npz:{tmp_path}"


FEATURES = pd.DataFrame({"age": [10.0, 20, 30, 40, 50, 60], "sex": list("ffmmfm")}, index=range(5, 11))


@pytest.mark.parametrize(
    "labels", [WORDS, list(WORDS), pd.Series(WORDS), pd.Series(WORDS).astype("category"), pd.Categorical(WORDS)]
)
def test_a_frame_with_labels_beside_it_is_a_table(labels: Any) -> None:
    expected = made(FEATURES.assign(kind=WORDS), label="kind")
    dataset = made((FEATURES, labels))
    assert dataset.table is not None and torch.equal(dataset.images, expected.images)
    assert dataset.labels.tolist() == LABELS.tolist() and dataset.class_names == ("a", "b", "c")
    assert made((FEATURES, labels, list("xxxyyy"))).client_names == ("x", "y")
    parts = made([(FEATURES[:3], WORDS[:3]), (FEATURES[3:], WORDS[3:])])
    assert parts.client_names == ("0", "1") and torch.equal(parts.images, expected.images)
    assert made((PIXELS, labels)).labels.tolist() == LABELS.tolist()


def test_a_frame_and_labels_that_do_not_fit_are_refused() -> None:
    for data, columns, words in (
        (
            (FEATURES, WORDS[:5]),
            {},
            r"the frame has 6 rows, but what is given beside it as its label has the shape \(5,",
        ),
        ((FEATURES, WORDS, FEATURES, WORDS), {}, "polyfed.data.from_frame"),
        ((FEATURES, WORDS), {"label": "age"}, "label is 'age', but"),
    ):
        with pytest.raises(InputError, match=words):
            made(data, **columns)


@pytest.mark.parametrize("labels", [["a", None, "b"] * 2, [0, None, 1] * 2, pd.Series(["a", np.nan, "b"] * 2)])
def test_missing_labels_are_named(labels: Any) -> None:
    with pytest.raises(InputError, match="lacks 2 of its 6 labels, the first at index 1: fill them in, or leave"):
        made((PIXELS, labels))
