"""Where images come from: each source is one function from a folder to a `Dataset`."""

from __future__ import annotations

import gzip
import io
import os
import socket
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from http.client import HTTPException
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from polyfed.data.arrays import join_arrays
from polyfed.data.columns import Columns
from polyfed.data.dataset import Dataset
from polyfed.data.files import (
    find_idx_folder,
    one_line,
    read_class_folders,
    read_idx_folder,
    read_npz,
)
from polyfed.data.folders import read_folder
from polyfed.data.labels import in_order
from polyfed.data.natural import with_clients
from polyfed.data.own import Address, guess_address, parse_address
from polyfed.data.reading import Decoded, decoded_once, read_many
from polyfed.data.recipes import RECIPES
from polyfed.data.samples import Samples, join_samples
from polyfed.data.source import FOLDER_VARIABLE, Normalisation, Source
from polyfed.data.table_files import read_table
from polyfed.errors import InputError, unknown_name

SYSTEM_FOLDER = Path("/usr/share/datasets")
"""Where Debian's package dataset-fashion-mnist puts its files."""

DOWNLOAD_PATIENCE = 15.0
"""Seconds without an answer after which a download gives up."""

DOWNLOAD_ERRORS = (OSError, RuntimeError, ValueError, EOFError, HTTPException, tarfile.TarError, zipfile.BadZipFile)
"""What torchvision raises for a missing file, a missing connection or a broken archive."""

# From the released pFedES code, which normalises MNIST like the first channel of CIFAR-100.
IMAGENET: Normalisation = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
CIFAR100: Normalisation = ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))
MNIST: Normalisation = ((0.5071,), (0.2673,))
# From the released FedTGP code.
HALF_GREY: Normalisation = ((0.5,), (0.5,))
HALF_COLOUR: Normalisation = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


def default_folder() -> Path:
    """The folder of datasets: the environment variable POLYFED_DATA, else ./data."""
    return Path(os.environ.get(FOLDER_VARIABLE) or "data")


def load_dataset(
    name: str,
    folder: Path | str | None = None,
    download: bool = True,
    *,
    label: str | None = None,
    client: str | None = None,
    image: str | None = None,
) -> Dataset:
    """The dataset of that name, from the folder (default: POLYFED_DATA, else ./data).

    NAME.npz in the folder (with x_train, y_train, x_test, y_test) is used first: that is how to provide any
    dataset without internet access. Your own data are `npz:PATH` (an archive of arrays), `folder:PATH` (pictures by
    class) or `table:PATH` (CSV or Parquet, where `label` is the column with the classes, and `client` perhaps one that
    says whose a row is).

    >>> load_dataset("digits").input_shape
    (1, 28, 28)
    """
    address = parse_address(name)
    if address is not None:
        return OWN[address.kind](address.with_settings(label=label, client=client, image=image))
    source = SOURCES.get(name.lower())
    if source is None or not source.load:
        kind, colon, _ = name.partition(":")
        if colon and len(kind) > 1 and not Path(name).exists():  # a single letter is a drive of Windows
            raise unknown_name("kind of data", kind, OWN)
        if "/" in name or Path(name).suffix in (".npz", ".csv", ".parquet") or Path(name).exists():
            own = guess_address(name)
            raise InputError(f"'{name}' is not the name of a dataset: for your own data write {own.text}.")
        raise unknown_name("dataset", name, SOURCES)
    Columns(label, client, image).refuse(name)
    place = Path(default_folder() if folder is None else folder).expanduser()
    archive = place / f"{source.name}.npz"
    if archive.is_file():
        return _named_archive(source, archive) if source.samples else Samples(**read_npz(archive)).dataset(source.name)
    return source.load(source, place, download)


def _digits(source: Source, folder: Path, download: bool) -> Dataset:
    """scikit-learn's own digits, 8×8 with values 0 … 16, enlarged so that the papers' networks accept them."""
    pixels, labels = _digits_of_sklearn()
    small = torch.from_numpy(pixels.astype(np.float32)).reshape(-1, 1, 8, 8) * (255 / 16)
    large = torch.nn.functional.interpolate(small, size=source.input_shape[1:], mode="bilinear", align_corners=False)
    return source.dataset(large.round().to(torch.uint8), torch.from_numpy(labels.astype(np.int64)))


def _digits_of_sklearn() -> tuple[NDArray[Any], NDArray[Any]]:
    """The rows and classes that `load_digits` returns, read from the same file without importing scikit-learn.

    That import takes longer than anything else before round one, except PyTorch's.
    """
    package = find_spec("sklearn")
    for folder in (package and package.submodule_search_locations) or ():
        file = Path(folder) / "datasets" / "data" / "digits.csv.gz"
        if file.is_file():
            with gzip.open(file, "rt") as lines:
                table = np.loadtxt(lines, delimiter=",")
            return table[:, :-1], table[:, -1]
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)  # a version that keeps the file elsewhere
    return pixels, labels


def _mnist_like(source: Source, folder: Path, download: bool) -> Dataset:
    """MNIST or Fashion-MNIST: idx files in the usual places, else torchvision's download."""
    from torchvision import datasets

    kind = {"mnist": datasets.MNIST, "fashion-mnist": datasets.FashionMNIST}[source.name]
    # The second is torchvision's own layout.
    places = [folder / source.name, folder / kind.__name__ / "raw", SYSTEM_FOLDER / source.name]
    found = find_idx_folder(places)
    if found is None:
        return _torchvision_pair(source, kind, folder, download)
    return source.dataset(*join_arrays(*read_idx_folder(found), source.name), kind.classes)


def _cifar(source: Source, folder: Path, download: bool) -> Dataset:
    """CIFAR-10 or CIFAR-100 through torchvision."""
    from torchvision import datasets

    kind = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}[source.name]
    return _torchvision_pair(source, kind, folder, download)


def _flowers(source: Source, folder: Path, download: bool) -> Dataset:
    """Flowers102 through torchvision: its training, validation and test pictures, resized."""
    from PIL import Image
    from torchvision import datasets

    height, width = source.input_shape[1:]

    def resized(image: Image.Image) -> NDArray[np.uint8]:
        colours = image.convert("RGB").resize((width, height), Image.Resampling.BILINEAR)
        return np.asarray(colours).transpose(2, 0, 1)

    def decode() -> Decoded:
        with _fetching(source, folder, download):
            kinds = ("train", "val", "test")
            parts = [datasets.Flowers102(folder, split=kind, transform=resized, download=download) for kind in kinds]
        places = [(part, position) for part in parts for position in range(len(part))]
        try:
            samples = read_many(lambda place: place[0][place[1]], places, source.name)
        except (OSError, SyntaxError) as error:
            raise InputError(
                f"a picture of '{source.name}' in {folder} cannot be read ({one_line(error)}): fetch the files again."
            ) from error
        images = torch.from_numpy(np.stack([image for image, _ in samples]))
        return images, torch.tensor([label for _, label in samples]), len(parts[-1])

    return source.dataset(*decoded_once(folder / "flowers-102", (height, width), decode))


def _tiny_imagenet(source: Source, folder: Path, download: bool) -> Dataset:
    """The training pictures of Tiny-ImageNet, from its unpacked archive."""
    place = folder / "tiny-imagenet-200" / "train"
    if not place.is_dir():
        raise InputError(
            f"dataset 'tiny-imagenet' is missing: there is no folder {place}, so unpack tiny-imagenet-200.zip of "
            f"http://cs231n.stanford.edu in {folder}, or name another folder with {FOLDER_VARIABLE}."
        )
    height, width = source.input_shape[1:]
    return source.dataset(
        *decoded_once(place, (height, width), lambda: (*read_class_folders(place, (height, width), source.name), 0))
    )


def _named_archive(source: Source, archive: Path) -> Dataset:
    """A named dataset from an npz archive."""
    found = read_npz(archive)
    images, labels, official_test = join_arrays(
        found["x"], found["y"], found.get("x_test"), found.get("y_test"), source.name
    )
    dataset = source.dataset(images, labels, official_test, found.get("class_names"))
    return with_clients(dataset, found.get("client"), found.get("client_test"))


def _own_archive(address: Address) -> Dataset:
    """Arrays in one archive, in a folder of npy files, or in a folder with one archive per client."""
    map, layout = address.options.get("map"), address.options.get("layout")
    if not address.file.is_dir() or any(address.file.glob("*.npy")):
        return Samples(**read_npz(address.file, map)).laid_out(layout, address.name).dataset(address.name)
    if map is not None:
        raise InputError(f"'{address.text}' has one archive per client, which are read into memory: leave map out.")
    files = {path.stem.removeprefix("client-"): path for path in address.file.glob("client-*.npz")}
    if not files:
        raise InputError(
            f"{address.file} is a folder without client-*.npz or x.npy: give an archive, or one for each client."
        )
    parts = {
        client: Samples(**read_npz(files[client], "no")).laid_out(layout, f"client {client}")
        for client in in_order(set(files))
    }
    for client, part in parts.items():
        if part.client is not None:
            raise InputError(f"{files[client]} holds a client array, but its name says whose it is: leave one out.")
    return join_samples(parts).dataset(address.name)


def _hub(address: Address) -> Dataset:
    from polyfed.data.hub import read_hub  # which reads what people hold, names of datasets among it

    return read_hub(address)


OWN: dict[str, Callable[[Address], Dataset]] = {
    "npz": _own_archive,
    "folder": read_folder,
    "table": read_table,
    "hf": _hub,
}
"""How each kind of a user's own data is read."""


def _torchvision_pair(source: Source, kind: Callable[..., Any], folder: Path, download: bool) -> Dataset:
    """The arrays of a torchvision dataset that has a training and a test set."""
    with _fetching(source, folder, download):
        train, test = (kind(folder, train=part, download=download) for part in (True, False))
        x, y, x_test, y_test = (torch.as_tensor(a) for a in (train.data, train.targets, test.data, test.targets))
    return source.dataset(*join_arrays(x, y, x_test, y_test, source.name), getattr(train, "classes", None))


@contextmanager
def _fetching(source: Source, folder: Path, download: bool) -> Iterator[None]:
    """Give up on a silent connection soon, keep torchvision's remarks off the output, and explain what is missing."""
    patience, before = socket.getdefaulttimeout(), set(_folders(folder))
    socket.setdefaulttimeout(DOWNLOAD_PATIENCE)
    try:
        with redirect_stdout(io.StringIO()):
            yield
    except DOWNLOAD_ERRORS as error:
        tried = f"and the download failed ({one_line(error)})" if download else "and no download was allowed"
        raise InputError(
            f"dataset '{source.name}' is missing: {folder} holds neither {source.name}.npz (with x_train, y_train, "
            f"x_test, y_test) nor {source.layout}, {tried}; run once with internet access, put one of these there, or "
            f"name another folder with {FOLDER_VARIABLE}."
        ) from error
    finally:
        socket.setdefaulttimeout(patience)
        for place in reversed(_folders(folder)):  # torchvision makes folders before it has anything to put in them
            if place not in before and not any(place.iterdir()):
                place.rmdir()


def _folders(folder: Path) -> list[Path]:
    """The folder with those above it and two levels below, as far as they exist, outer ones first."""
    below = [*folder.glob("*"), *folder.glob("*/*")]
    return [place for place in (*reversed(folder.parents), folder, *below) if place.is_dir()]


_DOWNLOADED = "downloaded by torchvision"
_IDX = "the four idx files, gzipped or not, in {name}/ or {raw}/raw/"
_ENTRIES = (
    Source("digits", "handwritten digits", 1797, 10, (1, 28, 28), "comes with scikit-learn", HALF_GREY, _digits),
    Source(
        "mnist",
        "handwritten digits",
        70_000,
        10,
        (1, 28, 28),
        _DOWNLOADED,
        MNIST,
        _mnist_like,
        10_000,
        _IDX.format(name="mnist", raw="MNIST"),
    ),
    Source(
        "fashion-mnist",
        "articles of clothing",
        70_000,
        10,
        (1, 28, 28),
        f"{_DOWNLOADED}, or Debian's package dataset-fashion-mnist",
        HALF_GREY,
        _mnist_like,
        10_000,
        _IDX.format(name="fashion-mnist", raw="FashionMNIST"),
    ),
    Source(
        "cifar10",
        "photographs of things and animals",
        60_000,
        10,
        (3, 32, 32),
        _DOWNLOADED,
        IMAGENET,
        _cifar,
        10_000,
        "cifar-10-python.tar.gz or cifar-10-batches-py/",
    ),
    Source(
        "cifar100",
        "photographs of things and animals",
        60_000,
        100,
        (3, 32, 32),
        _DOWNLOADED,
        CIFAR100,
        _cifar,
        10_000,
        "cifar-100-python.tar.gz or cifar-100-python/",
    ),
    Source(
        "flowers102",
        "photographs of flowers",
        8189,
        102,
        (3, 64, 64),
        _DOWNLOADED,
        HALF_COLOUR,
        _flowers,
        6149,
        "flowers-102/ with jpg/, imagelabels.mat and setid.mat",
    ),
    Source(
        "tiny-imagenet",
        "photographs of things and animals",
        100_000,
        200,
        (3, 64, 64),
        "unpack tiny-imagenet-200.zip in the folder of datasets",
        HALF_COLOUR,
        _tiny_imagenet,
    ),
)
_OWN_ENTRIES = (
    Source("npz:PATH", "arrays of your own", 0, 0, (), "an npz with x_train, y_train, …", ((), ())),
    Source("folder:PATH", "pictures of your own", 0, 0, (), "folders CLASS/PICTURE", ((), ())),
    Source("hf:NAME", "a dataset of the Hugging Face hub", 0, 0, (), "pip install 'polyfed[hf]'", ((), ())),
    Source("table:PATH", "a table of your own", 0, 0, (), "CSV or Parquet, --label COLUMN", ((), ())),
)

SOURCES: dict[str, Source] = {source.name: source for source in (*_ENTRIES, *RECIPES, *_OWN_ENTRIES)}
"""Every dataset by name, in the order in which `polyfed datasets` lists them."""
