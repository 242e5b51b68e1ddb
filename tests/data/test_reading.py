"""Pictures are decoded once, someone is told how it goes on, and an interruption ends it."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image

from polyfed.data import SOURCES, files, load_dataset
from polyfed.data.reading import Decoded, decoded_once, listening, read_many


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    folder = tmp_path / "pictures"
    (folder / "one").mkdir(parents=True)
    for number in range(3):
        (folder / "one" / f"{number}.JPEG").write_bytes(bytes([number]))
    return folder


class Decoder:
    """Counts how often it is asked."""

    calls = 0

    def __call__(self) -> Decoded:
        self.calls += 1
        return torch.full((2, 3, 4, 5), self.calls, dtype=torch.uint8), torch.tensor([0, 1]), 1


def test_what_was_decoded_once_is_read_again_until_the_source_changes(pictures: Path) -> None:
    decode = Decoder()
    first, again = (decoded_once(pictures, (4, 5), decode) for _ in range(2))
    assert decode.calls == 1 and first[2] == again[2] == 1
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
    picture = pictures / "one" / "2.JPEG"
    os.utime(picture, ns=(0, 0))  # another date
    assert int(decoded_once(pictures, (4, 5), decode)[0].max()) == 2
    picture.unlink()  # another number of files
    assert int(decoded_once(pictures, (4, 5), decode)[0].max()) == 3
    decoded_once(pictures, (8, 8), decode)  # another size
    assert decode.calls == 4
    decoded_once(pictures, (4, 5), decode)
    assert decode.calls == 4


@pytest.mark.parametrize("content", [b"", b"broken", None])
def test_a_broken_cache_is_made_anew(pictures: Path, content: bytes | None) -> None:
    decode = Decoder()
    cache = pictures.with_name("pictures.decoded-4x5.npz")
    if content is None:
        np.savez(cache, other=np.zeros(3))
    else:
        cache.write_bytes(content)
    decoded_once(pictures, (4, 5), decode)
    decoded_once(pictures, (4, 5), decode)
    assert decode.calls == 1


def test_without_room_for_a_cache_everything_works_and_nothing_is_left(
    pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    decode = Decoder()
    for _ in range(2):
        decoded_once(pictures, (4, 5), decode)
    assert decode.calls == 2 and [path.name for path in pictures.parent.iterdir()] == ["pictures"]


def test_tiny_imagenet_is_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SOURCES, "tiny-imagenet", replace(SOURCES["tiny-imagenet"], samples=2, classes=2))
    for label in ("n1", "n2"):
        folder = tmp_path / "tiny-imagenet-200" / "train" / label / "images"
        folder.mkdir(parents=True)
        Image.new("RGB", (64, 64), (9, 9, 9)).save(folder / f"{label}_0.JPEG")
    first = load_dataset("tiny-imagenet", tmp_path)
    monkeypatch.setattr(files, "read_picture", lambda *given: pytest.fail("a picture was decoded again"))
    assert torch.equal(load_dataset("tiny-imagenet", tmp_path).images, first.images)


def test_flowers_are_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Flowers:
        def __init__(self, root: Path, split: str, transform: object, download: bool) -> None:
            (root / "flowers-102").mkdir(exist_ok=True)
            (root / "flowers-102" / "setid.mat").touch()
            self.transform = transform

        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> tuple[object, int]:
            return self.transform(Image.new("RGB", (90, 70), (index, 0, 0))), index  # type: ignore[operator]

    small = replace(SOURCES["flowers102"], samples=6, classes=2, test_samples=2)
    monkeypatch.setitem(SOURCES, "flowers102", small)
    monkeypatch.setattr(torchvision.datasets, "Flowers102", Flowers)
    first = load_dataset("flowers102", tmp_path)
    monkeypatch.setattr(Flowers, "__getitem__", lambda *given: pytest.fail("a picture was decoded again"))
    again = load_dataset("flowers102", tmp_path)
    assert torch.equal(again.images, first.images) and torch.equal(again.labels, first.labels)
    assert again.official_test == first.official_test == 2


def test_a_listener_hears_of_the_start_and_the_end() -> None:
    heard: list[tuple[str, int, int]] = []
    with listening(lambda *told: heard.append(told)):
        assert read_many(lambda item: item * 2, list(range(250)), "flowers") == [2 * item for item in range(250)]
    assert heard[0] == ("flowers", 0, 250) and heard[-1] == ("flowers", 250, 250) and 50 < len(heard) < 150
    read_many(str, [1, 2], "quietly")
    assert len(heard) < 150


def test_an_interruption_does_not_read_on_to_the_end() -> None:
    read, lock = [], threading.Lock()

    def one(item: int) -> int:
        with lock:
            read.append(item)
        return item

    def interrupt(what: str, done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    slow = threading.Event()
    with listening(interrupt), pytest.raises(KeyboardInterrupt):
        read_many(lambda item: (slow.wait(0.001), one(item)), list(range(20_000)), "pictures")
    assert len(read) < 20_000
