"""How one client's samples are divided into training, validation and test samples, class by class."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polyfed.errors import InputError, unknown_name

Integers = NDArray[np.int64]

OFFICIAL_SPLIT = "released-code"
"""The split that keeps the source's own test set apart, as the released code of pFedES and FedSSA does."""

SPLITS: dict[str, str] = {
    "pfedes": "8:0:2",
    "pfedes-arxiv": "8:1:1",
    "fedssa": "8:1:1",
    "dc-pfl": "8:1:1",
    "fedtgp": "75:0:25",
    OFFICIAL_SPLIT: "4:1:1",
}
"""The papers' splits by name, as train:validation:test."""

TRAIN, VALIDATION, TEST = 0, 1, 2
"""Which part a sample is in."""


@dataclass(frozen=True)
class Ratio:
    """Parts as integers, so that no rounding of floats decides where a sample goes."""

    train: int
    validation: int
    test: int

    @property
    def total(self) -> int:
        return self.train + self.validation + self.test


def parse_split(split: str) -> Ratio:
    """A ratio train:validation:test or train:test, or the name of a paper's split.

    >>> parse_split("80:20")
    Ratio(train=4, validation=0, test=1)
    >>> parse_split("fedssa")
    Ratio(train=8, validation=1, test=1)
    """
    if re.search("[a-z]", split, re.IGNORECASE):
        if split.lower() not in SPLITS:
            raise unknown_name("split", split, ["train:validation:test such as 8:1:1", *SPLITS])
        split = SPLITS[split.lower()]
    numbers = split.split(":")
    usable = len(numbers) in (2, 3) and all(re.fullmatch(r"\s*\d{1,4}(\.\d{1,4})?\s*", number) for number in numbers)
    parts = [round(float(number) * 10_000) for number in numbers] if usable else [0]
    if parts[0] == 0:
        raise InputError(
            f"split '{split}' is not a ratio: write train:validation:test such as 8:1:1, or train:test such as 8:2, "
            f"with a training part above 0, or one of {', '.join(SPLITS)}."
        )
    if len(parts) == 2:
        parts.insert(1, 0)
    common = math.gcd(*parts)
    return Ratio(*(part // common for part in parts))


def divide(owners: Integers, labels: Integers, ratio: Ratio, generator: np.random.Generator) -> Integers:
    """The part (TRAIN, VALIDATION or TEST) of every sample; −1 where a sample has no owner.

    Each client's samples are divided class by class, at random within a class, so that a client's parts have the
    same mixture of classes and its totals are the ratio's, rounded. Each client trains on at least one sample, and
    tests on at least one if it owns two and the ratio has a test part. A class of a single sample goes to training,
    unless every class of the client is like that.
    """
    parts = np.full(len(owners), -1, dtype=np.int64)
    samples = generator.permutation(np.flatnonzero(owners >= 0))
    classes = int(labels.max()) + 1
    # A cell is one class of one client.
    cells = owners[samples] * classes + labels[samples]
    order = np.argsort(cells, kind="stable")
    samples, cells = samples[order], cells[order]
    names, starts, sizes = np.unique(cells, return_index=True, return_counts=True)
    held_out, test = _held_out(names // classes, sizes, ratio, generator)
    position = np.arange(len(samples)) - np.repeat(starts, sizes)
    parts[samples] = TRAIN
    parts[samples[position < np.repeat(held_out, sizes)]] = VALIDATION
    parts[samples[position < np.repeat(test, sizes)]] = TEST
    return parts


def _held_out(
    clients: Integers, sizes: Integers, ratio: Ratio, generator: np.random.Generator
) -> tuple[Integers, Integers]:
    """How many samples of each cell are not for training, and how many of these are for testing."""
    nothing = np.zeros_like(sizes)
    away = ratio.validation + ratio.test
    if away == 0:
        return nothing, nothing
    owned = np.bincount(clients, weights=sizes).astype(np.int64)
    least = (owned >= 2).astype(np.int64) if ratio.test else np.zeros_like(owned)
    # At most all but one: a client should have trained on every class it tests on.
    wanted = np.minimum(sizes * away, (sizes - 1) * ratio.total)
    held_out = round_by_group(wanted, ratio.total, clients, least, generator)
    if ratio.test == 0:
        return held_out, nothing
    return held_out, round_by_group(held_out * ratio.test, away, clients, least, generator)


def round_by_group(
    numerators: Integers, denominator: int, groups: Integers, least: Integers, generator: np.random.Generator
) -> Integers:
    """Fractions numerator/denominator as whole numbers whose sum per group is the rounded sum of its fractions.

    Every fraction is rounded down, then the largest remainders are rounded up; ties are drawn. A group's sum
    is at least `least[group]`. (The largest-remainder method, exact because it stays with integers.)
    """
    floors, remainders = numerators // denominator, numerators % denominator
    sums = np.zeros((2, len(least)), dtype=np.int64)
    np.add.at(sums[0], groups, numerators)
    np.add.at(sums[1], groups, floors)
    totals = np.maximum((2 * sums[0] + denominator) // (2 * denominator), least)
    order = np.lexsort((generator.random(len(groups)), -remainders, groups))
    firsts = np.searchsorted(groups[order], np.arange(len(least)))
    ranks = np.empty_like(groups)
    ranks[order] = np.arange(len(groups)) - firsts[groups[order]]
    rounded_up: Integers = (ranks < (totals - sums[1])[groups]).astype(np.int64)
    return floors + rounded_up
