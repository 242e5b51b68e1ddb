"""The file formats: npz archives, idx files, folders of pictures."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from polyfed.data import from_arrays, load_dataset, save_npz
from polyfed.data.files import one_line, read_class_folders, read_idx
from polyfed.errors import InputError
from tests.data.idx import idx_bytes

PIXELS = np.random.default_rng(0).integers(0, 256, (6, 5, 4), dtype=np.uint8)


def test_npz_round_trip(tmp_path: Path) -> None:
    dataset = from_arrays(PIXELS, np.arange(6) % 3, PIXELS[:3], np.arange(3))
    save_npz(dataset, tmp_path / "mine.npz")
    again = load_dataset(f"npz:{tmp_path}/mine.npz")
    assert torch.equal(again.images, dataset.images) and torch.equal(again.labels, dataset.labels)
    assert (again.name, again.classes, again.official_test) == ("mine", 3, 3)
    assert (again.mean, again.std) == (dataset.mean, dataset.std)


def test_npz_with_x_and_y_only(tmp_path: Path) -> None:
    np.savez(tmp_path / "table.npz", x=np.ones((4, 2)), y=np.array([0, 1, 0, 1]))
    dataset = load_dataset(f"npz:{tmp_path / 'table.npz'}")
    assert dataset.input_shape == (2,) and dataset.classes == 2 and dataset.official_test == 0


def test_class_names_in_an_archive_are_counted(tmp_path: Path) -> None:
    np.savez(tmp_path / "part.npz", x=PIXELS, y=np.full(6, 4), class_names=np.array(list("abcdefg")))
    dataset = load_dataset(f"npz:{tmp_path / 'part.npz'}")
    assert (dataset.classes, dataset.class_names) == (7, tuple("abcdefg"))
    save_npz(dataset, tmp_path / "again.npz")
    assert load_dataset(f"npz:{tmp_path / 'again.npz'}").class_names == tuple("abcdefg")


@pytest.mark.parametrize(("key", "length"), [("client_names", 3), ("x_val", 2), ("weights", 6)])
def test_arrays_about_samples_that_would_be_ignored_are_refused(tmp_path: Path, key: str, length: int) -> None:
    own = {"x": PIXELS, "y": np.arange(6) % 3}
    np.savez(tmp_path / "more.npz", **own, **{key: np.zeros(length)})
    with pytest.raises(InputError, match=f"also holds an array '{key}', which polyfed does not use"):
        load_dataset(f"npz:{tmp_path / 'more.npz'}")
    np.savez(tmp_path / "more.npz", **own, about="three kinds of noise", licence=np.array(["a", "b"]))
    assert len(load_dataset(f"npz:{tmp_path / 'more.npz'}")) == 6


def test_unreadable_archives_are_refused_in_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "bad.npz"
    with pytest.raises(InputError, match="there is no file"):
        load_dataset(f"npz:{path}")
    for content in (b"not an archive", b""):
        path.write_bytes(content)
        with pytest.raises(InputError, match="bad.npz is not an npz archive, in spite of its name: save it with"):
            load_dataset(f"npz:{path}")
    np.savez(path, x_train=PIXELS)
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(InputError, match="cannot be read as an npz archive"):
        load_dataset(f"npz:{path}")
    with (tmp_path / "one.npy").open("wb") as file:
        np.save(file, PIXELS)
    with pytest.raises(InputError, match="holds a single array: save it with numpy.savez"):
        load_dataset(f"npz:{tmp_path / 'one.npy'}")
    np.savez(path, x_train=PIXELS)
    with pytest.raises(InputError, match="lacks y_train"):
        load_dataset(f"npz:{path}")
    np.savez(path, images=PIXELS)
    with pytest.raises(InputError, match="lacks x and y"):
        load_dataset(f"npz:{path}")


def test_an_archive_with_objects_runs_no_code(tmp_path: Path) -> None:
    np.savez(tmp_path / "objects.npz", x=np.array([object()]), y=np.array([0]))
    with pytest.raises(InputError, match="plain arrays") as caught:
        load_dataset(f"npz:{tmp_path / 'objects.npz'}")
    assert "unsafe" not in str(caught.value)


def test_idx_files_packed_or_not(tmp_path: Path) -> None:
    plain, packed = tmp_path / "plain", tmp_path / "packed.gz"
    plain.write_bytes(idx_bytes(PIXELS))
    packed.write_bytes(gzip.compress(idx_bytes(PIXELS)))
    assert torch.equal(read_idx(plain), torch.from_numpy(PIXELS))
    assert torch.equal(read_idx(packed), torch.from_numpy(PIXELS))


@pytest.mark.parametrize("content", [b"", b"\x00\x00\x08", b"\x00\x00\x0d\x01\x00\x00\x00\x00", idx_bytes(PIXELS)[:-1]])
def test_broken_idx_files_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "broken").write_bytes(content)
    with pytest.raises(InputError, match="not a complete idx file"):
        read_idx(tmp_path / "broken")
    (tmp_path / "broken.gz").write_bytes(b"\x1f\x8bno")
    with pytest.raises(InputError, match="fetch the file again"):
        read_idx(tmp_path / "broken.gz")


def test_class_folders_are_read_in_sorted_order_and_resized(tmp_path: Path) -> None:
    for label, shade in (("n02", 200), ("n01", 100)):
        folder = tmp_path / label / "images"
        folder.mkdir(parents=True)
        Image.new("RGB", (8, 6), (shade, shade, shade)).save(folder / f"{label}_0.JPEG")
        Image.new("L", (4, 3), shade).save(folder / f"{label}_1.JPEG")
    images, labels = read_class_folders(tmp_path, (3, 4), "small")
    assert images.shape == (4, 3, 3, 4) and labels.tolist() == [0, 0, 1, 1]
    assert abs(int(images[0, 0, 0, 0]) - 100) <= 2 and abs(int(images[3, 2, 2, 3]) - 200) <= 2


def test_a_broken_picture_is_named(tmp_path: Path) -> None:
    (tmp_path / "n01" / "images").mkdir(parents=True)
    with pytest.raises(InputError, match="no pictures"):
        read_class_folders(tmp_path, (3, 4), "small")
    (tmp_path / "n01" / "images" / "x.JPEG").write_bytes(b"nothing")
    with pytest.raises(InputError, match="x.JPEG cannot be read as a picture"):
        read_class_folders(tmp_path, (3, 4), "small")


def test_an_error_in_one_line() -> None:
    assert one_line(ValueError("first\n  line. Second sentence.")) == "first line"
    assert one_line(EOFError()) == "EOFError"
    assert len(one_line(ValueError("word " * 100))) <= 160
