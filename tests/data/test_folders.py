"""Pictures in folders by class: what is read, brought to one size, and what is refused in a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

import polyfed
from polyfed.data import load_dataset
from polyfed.errors import InputError

RED, GREEN = (255, 0, 0), (0, 255, 0)


def draw(path: Path, colour: object = RED, size: tuple[int, int] = (6, 4), mode: str = "RGB") -> None:
    """A picture in one colour; the size is width, height."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(path)  # type: ignore[arg-type]


def pets(folder: Path) -> None:
    draw(folder / "dog" / "b.png", GREEN)
    draw(folder / "cat" / "a.png", RED)
    draw(folder / "cat" / "c.BMP", RED)
    draw(folder / "dog" / "d.jpg", GREEN)


def test_classes_are_the_folders_names(tmp_path: Path) -> None:
    pets(tmp_path / "pets")
    (tmp_path / "pets" / "cat" / ".hidden").write_text("")
    (tmp_path / "pets" / "cat" / "notes.txt").write_text("")
    dataset = load_dataset(f"folder:{tmp_path / 'pets'}")
    assert (dataset.name, dataset.class_names, dataset.labels.tolist()) == ("pets", ("cat", "dog"), [0, 0, 1, 1])
    assert dataset.images.shape == (4, 3, 4, 6) and dataset.images.dtype == torch.uint8
    assert dataset.images[:3, :, 0, 0].tolist() == [[255, 0, 0], [255, 0, 0], [0, 255, 0]]


def test_the_most_frequent_size_is_used_unless_one_is_given(tmp_path: Path) -> None:
    pets(tmp_path)
    draw(tmp_path / "dog" / "large.png", GREEN, (60, 40))
    assert load_dataset(f"folder:{tmp_path}").input_shape == (3, 4, 6)
    assert load_dataset(f"folder:{tmp_path}?size=8").input_shape == (3, 8, 8)
    resized = load_dataset(f"folder:{tmp_path}?size=5x7")
    assert resized.input_shape == (3, 5, 7) and resized.images[4, :, 2, 2].tolist() == [0, 255, 0]


def test_sizes_without_a_majority_need_a_choice(tmp_path: Path) -> None:
    for number in range(4):
        draw(tmp_path / "ab"[number % 2] / f"{number}.png", RED, (5 + number, 5))
    with pytest.raises(InputError, match=r"4 different sizes.*\?size=64"):
        load_dataset(f"folder:{tmp_path}")
    with pytest.raises(InputError, match="size is 'big'"):
        load_dataset(f"folder:{tmp_path}?size=big")


def test_grey_pictures_have_one_channel_and_a_mixture_needs_a_choice(tmp_path: Path) -> None:
    draw(tmp_path / "a" / "1.png", 100, mode="L")
    draw(tmp_path / "b" / "1.png", 200, mode="L")
    grey = load_dataset(f"folder:{tmp_path}")
    assert grey.input_shape == (1, 4, 6) and grey.images[:, 0, 0, 0].tolist() == [100, 200]
    draw(tmp_path / "b" / "2.png", GREEN)
    with pytest.raises(InputError, match="2 of the 3 pictures .* are grey .*mode=colour"):
        load_dataset(f"folder:{tmp_path}")
    assert load_dataset(f"folder:{tmp_path}?mode=colour").images[0, :, 0, 0].tolist() == [100, 100, 100]
    assert load_dataset(f"folder:{tmp_path}?mode=grey&size=9").input_shape == (1, 9, 9)


def test_a_test_set_beside_the_training_pictures(tmp_path: Path) -> None:
    pets(tmp_path / "train")
    draw(tmp_path / "test" / "dog" / "t.png", (0, 0, 255))
    dataset = load_dataset(f"folder:{tmp_path}")
    assert dataset.official_test == 1 and dataset.labels.tolist() == [0, 0, 1, 1, 1] and not dataset.pools_test
    assert dataset.images[-1, :, 0, 0].tolist() == [0, 0, 255]
    draw(tmp_path / "test" / "owl" / "t.png")
    with pytest.raises(InputError, match="a class 'owl' without training pictures"):
        load_dataset(f"folder:{tmp_path}")
    (tmp_path / "test" / "owl" / "t.png").unlink()
    (tmp_path / "test" / "owl").rmdir()
    (tmp_path / "val").mkdir()
    with pytest.raises(InputError, match="other folders \\(val\\) beside train and test"):
        load_dataset(f"folder:{tmp_path}")


def test_what_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no folder"):
        load_dataset(f"folder:{tmp_path / 'none'}")
    draw(tmp_path / "a" / "1.png")
    with pytest.raises(InputError, match=r"1 class, but a classifier needs 2"):
        load_dataset(f"folder:{tmp_path}")
    (tmp_path / "b").mkdir()
    with pytest.raises(InputError, match="b holds no pictures"):
        load_dataset(f"folder:{tmp_path}")
    (tmp_path / "b" / "1.heic").write_bytes(b"x")
    with pytest.raises(InputError, match="1.heic is no picture"):
        load_dataset(f"folder:{tmp_path}")
    (tmp_path / "b" / "1.heic").rename(tmp_path / "b" / "1.png")
    with pytest.raises(InputError, match="1.png cannot be read as a picture"):
        load_dataset(f"folder:{tmp_path}")
    Image.new("I;16", (6, 4)).save(tmp_path / "b" / "1.png")
    with pytest.raises(InputError, match="more than 8 bits"):
        load_dataset(f"folder:{tmp_path}")


def test_a_picture_cut_off_in_the_middle_is_named(tmp_path: Path) -> None:
    pets(tmp_path)
    draw(tmp_path / "dog" / "cut.png", GREEN, (6, 4))
    content = (tmp_path / "dog" / "cut.png").read_bytes()
    (tmp_path / "dog" / "cut.png").write_bytes(content[: len(content) - 30])
    with pytest.raises(InputError, match="cut.png"):
        load_dataset(f"folder:{tmp_path}")


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("folder:x?sise=3", "unknown option of folder:PATH 'sise': did you mean 'size'"),
        ("folder:x?size=", "has no value"),
        ("folder:x?size=3&size=4", "given twice"),
        ("folder:", "names no path"),
    ],
)
def test_addresses_are_checked(address: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        load_dataset(address)


def test_a_path_without_its_kind_gets_a_hint(tmp_path: Path) -> None:
    pets(tmp_path)
    with pytest.raises(InputError, match=f"write folder:{tmp_path}"):
        load_dataset(str(tmp_path))
    with pytest.raises(InputError, match="write table:a/b.csv"):
        load_dataset("a/b.csv")


def test_label_is_for_data_with_columns(tmp_path: Path) -> None:
    for data in ("digits", f"folder:{tmp_path}"):
        with pytest.raises(InputError, match="label is 'kind', but the data .* have no columns"):
            load_dataset(data, label="kind")


def test_a_run_on_a_folder_continues_from_another_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(24):
        draw(tmp_path / "pets" / "ab"[number % 2] / f"{number}.png", (10 * number, 0, 0), (16, 16))
    monkeypatch.chdir(tmp_path)
    settings = {"clients": 2, "rounds": 1, "models": "cnn5", "batch_size": 8, "device": "cpu", "progress": False}
    polyfed.run("standalone", data="folder:pets", out="run", **settings)
    monkeypatch.chdir("/")
    again = polyfed.resume(tmp_path / "run", rounds=2, progress=False)
    assert again.summary["rounds"] == 2 and again.predict(0, again.population.dataset.images[:1]).names[0] in "ab"
