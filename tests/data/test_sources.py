"""Sources by name: what comes with the library, what a folder provides, what is said when something is missing."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image

from polyfed.data import SOURCES, default_folder, load_dataset, sources
from polyfed.errors import InputError
from tests.data.idx import write_idx_folder


@pytest.fixture(autouse=True)
def no_system_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "SYSTEM_FOLDER", tmp_path / "system")


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        assert socket.getdefaulttimeout() is not None, "a download must not wait for ever"
        raise URLError("no network\nin this test. Really.")

    monkeypatch.setattr("urllib.request.urlopen", refuse)


def expect(patch: pytest.MonkeyPatch, name: str, samples: int, test: int, classes: int) -> None:
    """Let a source be as small as a test wants it."""
    known = replace(SOURCES[name], samples=samples, test_samples=test, classes=classes)
    patch.setitem(SOURCES, name, known)


def test_digits_come_without_a_network() -> None:
    dataset = load_dataset("digits")
    assert dataset.images.shape == (1797, 1, 28, 28) and dataset.images.dtype == torch.uint8
    assert int(dataset.images.min()) == 0 and 240 <= int(dataset.images.max()) <= 255
    assert dataset.classes == 10 and torch.bincount(dataset.labels).min() > 170 and dataset.official_test == 0
    images = dataset.batch(torch.arange(1797))[0]
    assert float(images.min()) >= -1 and float(images.max()) <= 1


def test_digits_keep_their_shape_when_drawn_larger() -> None:
    from sklearn.datasets import load_digits

    small = torch.from_numpy(load_digits().images[:20])
    large = load_dataset("digits").images[:20, 0].double()
    averaged = torch.nn.functional.adaptive_avg_pool2d(large, 8)
    assert float(torch.corrcoef(torch.stack([small.flatten(), averaged.flatten()]))[0, 1]) > 0.97


def test_every_source_describes_itself() -> None:
    for name, source in SOURCES.items():
        assert source.name == name and source.title and source.obtained
        if source.input_shape and source.normalisation[0]:
            mean, std = source.normalisation
            assert len(mean) == len(std) == source.input_shape[0] and source.classes > 1


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar10", "cifar100", "flowers102", "tiny-imagenet"])
@pytest.mark.parametrize("download", [True, False])
def test_a_missing_source_says_in_one_sentence_where_and_how(
    name: str, download: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InputError) as caught:
        load_dataset(name, tmp_path / "my" / "data", download=download)
    message = str(caught.value)
    assert name in message and str(tmp_path) in message and "POLYFED_DATA" in message and "\n" not in message
    assert not list(tmp_path.iterdir())  # a folder is not made for nothing
    layouts = {"mnist": "MNIST/raw/", "fashion-mnist": "gzipped or not, in fashion-mnist/", "flowers102": "jpg/"}
    assert layouts.get(name, "") in message
    if name != "tiny-imagenet":
        assert f"{name}.npz" in message and ("no network" in message) == download
    assert capsys.readouterr().out == "" and socket.getdefaulttimeout() is None


def test_folders_that_were_there_before_stay(tmp_path: Path) -> None:
    (tmp_path / "MNIST").mkdir()
    with pytest.raises(InputError):
        load_dataset("mnist", tmp_path)
    assert [path.name for path in tmp_path.rglob("*")] == ["MNIST"]


def test_an_unknown_source_gets_a_hint() -> None:
    with pytest.raises(InputError, match="unknown kind of data 'tabel': did you mean 'table'"):
        load_dataset("tabel:my/cases.csv")
    with pytest.raises(InputError, match="did you mean 'cifar10'"):
        load_dataset("cifar-10")


def test_an_archive_in_the_folder_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = np.zeros((20, 32, 32, 3), np.uint8)
    np.savez(
        tmp_path / "cifar10.npz", x_train=pixels, y_train=np.arange(20) % 9, x_test=pixels[:5], y_test=np.zeros(5, int)
    )
    with pytest.raises(InputError, match="has 60000 samples of 10 classes, .* but 25 of 9 classes .* as npz:PATH"):
        load_dataset("cifar10", tmp_path)
    expect(monkeypatch, "cifar10", 25, 5, 9)
    dataset = load_dataset("CIFAR10", tmp_path)
    assert (dataset.name, dataset.classes, dataset.official_test, len(dataset)) == ("cifar10", 9, 5, 25)
    assert dataset.mean == (0.485, 0.456, 0.406) and dataset.std == (0.229, 0.224, 0.225)


def test_an_archive_of_another_shape_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "cifar10.npz", x=np.zeros((2, 28, 28), np.uint8), y=np.array([0, 1]))
    with pytest.raises(InputError, match="use other data as npz:PATH"):
        load_dataset("cifar10", tmp_path)


def test_the_folder_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POLYFED_DATA", raising=False)
    assert default_folder() == Path("data")
    monkeypatch.setenv("POLYFED_DATA", str(tmp_path))
    np.savez(tmp_path / "mnist.npz", x=np.zeros((10, 28, 28), np.uint8), y=np.arange(10))
    expect(monkeypatch, "mnist", 10, 0, 10)
    dataset = load_dataset("mnist")
    assert len(dataset) == 10 and dataset.mean == (0.5071,) and dataset.std == (0.2673,)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("place", ["fashion-mnist", "FashionMNIST/raw", "system/fashion-mnist"])
def test_fashion_mnist_from_idx_files_wherever_people_keep_them(
    tmp_path: Path, place: str, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_idx_folder(tmp_path / place, packed)
    expect(monkeypatch, "fashion-mnist", 15, 5, 10)
    dataset = load_dataset("fashion-mnist", tmp_path)
    assert dataset.images.shape == (15, 1, 28, 28) and dataset.official_test == 5
    assert torch.equal(dataset.images[:, 0, 3, 7].long(), dataset.labels)
    assert dataset.mean == (0.5,) and dataset.std == (0.5,)


def test_torchvision_arrays_are_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Cifar:
        def __init__(self, root: Path, train: bool, download: bool) -> None:
            count = 20 if train else 10
            self.data = np.full((count, 32, 32, 3), 1 if train else 2, np.uint8)
            self.targets = [position % 10 for position in range(count)]
            self.classes = list("abcdefghij")

    monkeypatch.setattr(torchvision.datasets, "CIFAR10", Cifar)
    expect(monkeypatch, "cifar10", 30, 10, 10)
    dataset = load_dataset("cifar10", tmp_path)
    assert dataset.images.shape == (30, 3, 32, 32) and dataset.official_test == 10
    assert dataset.images[:, 0, 0, 0].tolist() == [1] * 20 + [2] * 10
    assert dataset.class_names == tuple("abcdefghij")


def test_flowers_are_resized_and_end_with_their_test_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Flowers:
        def __init__(self, root: Path, split: str, transform: object, download: bool) -> None:
            self.count, self.transform = {"train": 2, "val": 3, "test": 4}[split], transform

        def __len__(self) -> int:
            return self.count

        def __getitem__(self, index: int) -> tuple[object, int]:
            return self.transform(Image.new("RGB", (90, 70), (self.count, 0, 0))), 3 - index  # type: ignore[operator]

    monkeypatch.setattr(torchvision.datasets, "Flowers102", Flowers)
    expect(monkeypatch, "flowers102", 9, 4, 4)
    dataset = load_dataset("flowers102", tmp_path)
    assert dataset.images.shape == (9, 3, 64, 64) and dataset.official_test == 4
    assert dataset.images[:, 0, 0, 0].tolist() == [2, 2, 3, 3, 3, 4, 4, 4, 4]
    assert dataset.labels.tolist() == [3, 2, 3, 2, 1, 3, 2, 1, 0]


def test_tiny_imagenet_from_its_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expect(monkeypatch, "tiny-imagenet", 6, 0, 3)
    for label in ("n1", "n2", "n3"):
        folder = tmp_path / "tiny-imagenet-200" / "train" / label / "images"
        folder.mkdir(parents=True)
        for number in range(2):
            Image.new("RGB", (64, 64)).save(folder / f"{label}_{number}.JPEG")
    dataset = load_dataset("tiny-imagenet", tmp_path)
    assert dataset.images.shape == (6, 3, 64, 64) and dataset.classes == 3 and dataset.official_test == 0
