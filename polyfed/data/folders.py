"""Pictures in folders by class, as torchvision's ImageFolder expects them: PATH/CLASS/FILE.

A test set of its own is in PATH/test, beside PATH/train. One level more names the clients: PATH/CLIENT/CLASS/FILE, or
PATH/CLIENT/train/CLASS/FILE and PATH/CLIENT/test/CLASS/FILE. Pictures are brought to one size.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from polyfed.data.arrays import measured_dataset
from polyfed.data.dataset import Dataset
from polyfed.data.files import one_line, read_picture
from polyfed.data.natural import with_clients
from polyfed.data.own import Address
from polyfed.data.reading import read_many
from polyfed.errors import InputError, counted

PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".ppm", ".pgm", ".pbm", ".tif", ".tiff", ".webp")
"""Endings of files that are read as pictures."""
BESIDE = (".txt", ".csv", ".json", ".xml", ".md", ".db", ".ini")
"""Endings of files that people keep beside pictures."""
TEST_FOLDERS = ("test", "val", "validation")
"""What a test set's folder is called, beside `train`."""
MODES = {"grey": "L", "colour": "RGB"}
GREY, DEEP = ("1", "L", "LA"), ("I", "F", "I;16", "I;16B", "I;16L")


@dataclass(frozen=True)
class Picture:
    """A picture file, with what its place says about it."""

    path: Path
    label: str
    test: bool = False
    client: str | None = None


def read_folder(address: Address, least: int = 2) -> Dataset:
    """The pictures in a folder as a dataset; the names of the folders are the classes' names, at least so many."""
    folder = address.file
    if not folder.is_dir():
        raise InputError(f"there is no folder {folder}: give the path of one that holds CLASS/PICTURE files.")
    pictures = sorted(_listed(folder), key=lambda picture: picture.test)
    names = sorted({picture.label for picture in pictures if not picture.test})
    if len(names) < least:
        raise InputError(
            f"{folder} holds pictures of {counted(len(names), 'class')}, but a classifier needs {least} or "
            f"more: put the pictures of each class into a folder of their own, {folder}/CLASS/PICTURE."
        )
    unknown = sorted({picture.label for picture in pictures} - set(names))
    if unknown:
        raise InputError(f"the test set in {folder} has a class '{unknown[0]}' without training pictures: add some.")
    size, mode = _common_form([picture.path for picture in pictures], address)
    images = np.stack(read_many(lambda picture: read_picture(picture.path, size, mode), pictures, address.name))
    labels = torch.tensor([names.index(picture.label) for picture in pictures])
    official_test = sum(picture.test for picture in pictures)
    dataset = measured_dataset(torch.from_numpy(images), labels, official_test, address.name, class_names=names)
    return dataset if pictures[0].client is None else _with_owners(dataset, pictures)


def _with_owners(dataset: Dataset, pictures: Sequence[Picture]) -> Dataset:
    training, test = ([picture.client for picture in pictures if picture.test == part] for part in (False, True))
    return with_clients(dataset, training, test or None)


def _listed(folder: Path) -> list[Picture]:
    """All pictures of a folder, or of the folders of clients in it."""
    parts = _folders(folder)
    special = {entry.name for entry in parts} & {"train", *TEST_FOLDERS}
    deep = [
        entry
        for entry in parts
        if not _files(entry) and any(_files(inner) or _folders(inner) for inner in _folders(entry))
    ]
    if not parts or special or len(deep) < len(parts):
        return _of_one(folder)
    return [replace(picture, client=entry.name) for entry in deep for picture in _of_one(entry)]


def _of_one(folder: Path) -> list[Picture]:
    """All pictures of PATH/CLASS/FILE, or of PATH/train/CLASS/FILE and PATH/test/CLASS/FILE."""
    parts = {entry.name: entry for entry in _folders(folder)}
    tests = [name for name in TEST_FOLDERS if name in parts]
    if "train" not in parts or not tests or any(_files(parts[name]) for name in ("train", *tests)):
        return list(_by_class(parts))
    if len(tests) > 1 or len(parts) > 2:
        others = ", ".join(sorted(parts.keys() - {"train", tests[0]}))
        raise InputError(
            f"{folder} has other folders ({others}) beside train and {tests[0]}: move their pictures into one "
            f"of these, because validation samples are chosen by the split."
        )
    train, test = (_by_class({entry.name: entry for entry in _folders(parts[name])}) for name in ("train", tests[0]))
    return [*train, *(Picture(picture.path, picture.label, test=True) for picture in test)]


def _by_class(folders: Mapping[str, Path]) -> Iterable[Picture]:
    for name, folder in folders.items():
        inner, files = _folders(folder), _files(folder)
        if inner:
            raise InputError(
                f"{folder} holds the folder '{inner[0].name}', but pictures are expected there: put them as "
                f"CLASS/PICTURE, or as CLIENT/CLASS/PICTURE for every client."
            )
        if not files:
            raise InputError(f"{folder} holds no pictures ({', '.join(PICTURES)}): add some, or remove the folder.")
        yield from (Picture(file, name) for file in files)


def _folders(folder: Path) -> list[Path]:
    return sorted(entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _files(folder: Path) -> list[Path]:
    """The pictures directly in a folder; what might be a picture that can't be read is refused, not skipped."""
    files = sorted(entry for entry in folder.iterdir() if entry.is_file() and not entry.name.startswith("."))
    files = [file for file in files if file.suffix.lower() not in BESIDE]
    for file in files:
        if file.suffix.lower() not in PICTURES:
            raise InputError(f"{file} is no picture ({', '.join(PICTURES)}): convert it, or move it away.")
    return files


def _common_form(paths: Sequence[Path], address: Address) -> tuple[tuple[int, int], str]:
    """Height and width of all pictures, and L for grey or RGB for colour: as asked for, or as most of them are."""
    heads = read_many(_head, paths, address.name)
    return _size([size for size, _ in heads], address), _mode(paths, [mode for _, mode in heads], address)


def _head(path: Path) -> tuple[tuple[int, int], str]:
    """A picture's height and width, and its mode, from the start of the file."""
    try:
        with Image.open(path) as image:
            return (image.height, image.width), image.mode
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise InputError(
            f"{path} cannot be read as a picture ({one_line(error)}): repair it, or move it away."
        ) from error


def _size(sizes: Sequence[tuple[int, int]], address: Address) -> tuple[int, int]:
    wish = address.options.get("size")
    if wish is not None:
        numbers = re.fullmatch(r"(\d{1,5})(?:x(\d{1,5}))?", wish)
        height, width = (int(side) for side in (numbers[1], numbers[2] or numbers[1])) if numbers else (0, 0)
        if min(height, width) < 1:
            raise InputError(f"size is '{wish}': give one number such as 64, or HEIGHTxWIDTH such as 48x64.")
        return height, width
    (common, count), *_ = Counter(sizes).most_common()
    if 2 * count < len(sizes):
        raise InputError(
            f"the pictures in {address.file} have {len(set(sizes))} different sizes, and none is that of half of them: "
            f"say which to use, such as folder:{address.path}?size=64."
        )
    return common


def _mode(paths: Sequence[Path], modes: Sequence[str], address: Address) -> str:
    wish = address.options.get("mode")
    if wish is not None and wish not in MODES:
        raise InputError(f"mode is '{wish}': give grey or colour.")
    deep = next((path for path, mode in zip(paths, modes, strict=True) if mode in DEEP), None)
    if deep is not None:
        raise InputError(f"{deep} has more than 8 bits per pixel: convert it to 8 bits, or give arrays in an npz file.")
    if wish is not None:
        return MODES[wish]
    grey = sum(mode in GREY for mode in modes)
    if 0 < grey < len(modes):
        raise InputError(
            f"{grey} of the {len(modes)} pictures in {address.file} are grey and the others have colours: say how to "
            f"read them, with folder:{address.path}?mode=colour or mode=grey."
        )
    return "L" if grey else "RGB"
