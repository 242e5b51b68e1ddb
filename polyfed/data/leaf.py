"""LEAF's JSON files, in which each user has samples of its own: FEMNIST and Shakespeare.

LEAF's preprocessing leaves train/*.json and test/*.json, each with `users` and, by user, `user_data` of x and y.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from polyfed.data.dataset import Dataset
from polyfed.data.files import one_line
from polyfed.data.labels import in_order
from polyfed.data.samples import Samples
from polyfed.data.source import Source, missing
from polyfed.data.texts import Texts
from polyfed.errors import InputError

FEMNIST_CLASSES = tuple("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")
LETTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""The characters of LEAF's Shakespeare, in its order."""
HOW = "make them with LEAF's preprocess.sh (github.com/TalwalkarLab/leaf, data/{name}) and put its data folder there"


def femnist(source: Source, folder: Path, download: bool) -> Dataset:
    """Handwritten digits and letters by their writers, each with its own test samples."""
    train, test = _parts(folder / "femnist", "femnist")
    x, y, writers = _pixels(train)
    if not test:
        return Samples(x, y, class_names=FEMNIST_CLASSES, client=writers).dataset("femnist")
    x_test, y_test, test_writers = _pixels(test)
    return Samples(x, y, x_test, y_test, FEMNIST_CLASSES, writers, test_writers).dataset("femnist")


def shakespeare(folder: Path) -> Texts:
    """80 characters of a role's lines, as numbers, and the character that follows; each role is a client."""
    train, test = _parts(folder / "shakespeare", "shakespeare")
    names = tuple(in_order(set(train)))
    rows = [(line, follows, role) for part in (train, test) for role in names for line, follows in _lines(part, role)]
    strange = next((c for line, follows, _ in rows for c in line + follows if c not in LETTERS), None)
    if strange is not None:
        raise InputError(f"shakespeare has the character {strange!r}, which LEAF's files do not have: make them again.")
    numbers = {letter: number for number, letter in enumerate(LETTERS)}
    return Texts(
        "shakespeare",
        torch.tensor([[numbers[c] for c in line] for line, _, _ in rows]),
        torch.tensor([numbers[follows] for _, follows, _ in rows]),
        vocabulary=tuple(LETTERS),
        class_names=tuple(LETTERS),
        official_test=sum(len(own["y"]) for own in test.values()),
        owners=torch.tensor([names.index(role) for _, _, role in rows]),
        client_names=names,
    )


def _parts(folder: Path, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The data of all users, for training and for testing."""
    place = folder / "data" if (folder / "data").is_dir() else folder
    files = [sorted((place / part).glob("*.json")) for part in ("train", "test")]
    if not files[0]:
        raise missing(name, f"{folder}/train/*.json", HOW.format(name=name))
    train, test = ({user: own for file in part for user, own in _users(file)} for part in files)
    strangers = sorted(test.keys() - train.keys())
    if strangers:
        raise InputError(
            f"'{strangers[0]}' in {place}/test has no training samples: divide each user's samples, not the users "
            f"(preprocess.sh -t sample)."
        )
    return train, test


def _users(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        content = json.loads(path.read_text())
        for user in content["users"]:
            own = content["user_data"][user]
            if len(own["x"]) != len(own["y"]):
                raise ValueError(f"user {user} has {len(own['x'])} samples but {len(own['y'])} labels")
            if len(own["x"]):
                yield str(user), own
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} is no file of LEAF's ({one_line(error)}): make it again.") from error


def _pixels(users: dict[str, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], list[str]]:
    """LEAF has 784 values from 0 to 1 per picture."""
    writers = [user for user, own in users.items() for _ in own["y"]]
    x = np.array([picture for own in users.values() for picture in own["x"]], dtype=np.float32)
    if x.shape[1:] != (784,) or x.min() < 0 or x.max() > 1:
        raise InputError("femnist has pictures that are not 784 values from 0 to 1: make the files again.")
    pixels = np.round(x * 255).astype(np.uint8).reshape(-1, 28, 28)
    return pixels, np.array([label for own in users.values() for label in own["y"]], dtype=np.int64), writers


def _lines(users: dict[str, Any], role: str) -> Iterator[tuple[str, str]]:
    own = users.get(role, {"x": [], "y": []})
    return zip(own["x"], own["y"], strict=True)
