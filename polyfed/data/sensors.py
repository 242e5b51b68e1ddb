"""Signals [channels, length] of people in motion, each person a client: UCI-HAR, PAMAP2, and a generated one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyfed.data.dataset import Dataset
from polyfed.data.files import one_line
from polyfed.data.samples import Samples
from polyfed.data.source import Source, missing
from polyfed.errors import InputError
from polyfed.seeds import numpy_generator

Floats = NDArray[np.float32]

HAR_FOLDERS = ("uci-har", "UCI HAR Dataset")
HAR_CHANNELS = [f"{kind}_{axis}" for kind in ("body_acc", "body_gyro", "total_acc") for axis in "xyz"]

PAMAP2_FOLDERS = ("pamap2", "PAMAP2_Dataset")
PAMAP2_COLUMNS = 54
PAMAP2_ACTIVITIES = {
    1: "lying", 2: "sitting", 3: "standing", 4: "walking", 5: "running", 6: "cycling", 7: "Nordic walking",
    12: "ascending stairs", 13: "descending stairs", 16: "vacuum cleaning", 17: "ironing", 24: "rope jumping",
}  # fmt: skip
PAMAP2_WINDOW = 256
"""2.56 seconds at 100 Hz."""
# Acceleration (±16 g), rotation and magnetic field of the sensors at hand, chest and ankle; and what brings each of
# these near 1. Orientation is not valid in these files; heart rate and temperature are slow.
PAMAP2_SIGNALS = [
    (17 * sensor + start, scale) for sensor in range(3) for start, scale in ((4, 10.0), (10, 1.0), (13, 50.0))
]

MOTIONS = ("rest", "walk", "run", "climb", "cycle", "jump")
MOTION_PEOPLE, MOTION_WINDOWS, MOTION_LENGTH = 12, 60, 64


def uci_har(source: Source, folder: Path, download: bool) -> Dataset:
    """Nine signals of a telephone at the waist. Its test set has other people, so all are pooled: a client each.

    Its windows begin 64 readings after each other and have 128. Samples of one person are split, so only windows that
    share no reading are used: otherwise nearly every test sample would be half of a training sample.
    """
    place = next((folder / name for name in HAR_FOLDERS if (folder / name).is_dir()), folder / HAR_FOLDERS[0])
    if not (place / "train").is_dir():
        raise missing("uci-har", f"{place}/train", f"unpack 'UCI HAR Dataset.zip' of UCI's repository in {folder}")
    names = [str(name) for name in _numbers(place / "activity_labels.txt", text=True)[:, 1]]
    parts = [_har_part(place / part, part) for part in ("train", "test") if (place / part).is_dir()]
    x, y, subjects = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return Samples(x, y - 1, class_names=names, client=subjects).dataset("uci-har")


def _har_part(folder: Path, part: str) -> tuple[Floats, Any, Any]:
    channels = [_numbers(folder / "Inertial Signals" / f"{name}_{part}.txt") for name in HAR_CHANNELS]
    y, subjects = (_numbers(folder / f"{what}_{part}.txt")[:, 0].astype(np.int64) for what in ("y", "subject"))
    if len({len(array) for array in (*channels, y, subjects)}) > 1:
        raise InputError(f"the files in {folder} have different numbers of rows: unpack the archive again.")
    used = _every_second(y, subjects)
    return np.stack([channel[used] for channel in channels], axis=1).astype(np.float32), y[used], subjects[used]


def _every_second(*columns: Any) -> Any:
    """Every second row of each stretch of rows in which no column changes.

    >>> _every_second(np.array([1, 1, 1, 2, 2, 2]), np.array([5, 5, 5, 5, 5, 6])).tolist()
    [0, 2, 3, 5]
    """
    changes = np.any([np.diff(column) != 0 for column in columns], axis=0)
    edges = np.flatnonzero(changes) + 1
    return np.concatenate([stretch[::2] for stretch in np.split(np.arange(len(columns[0])), edges)])


def pamap2(source: Source, folder: Path, download: bool) -> Dataset:
    """Signals of three sensors, cut into windows of a single activity; each subject is a client."""
    place = next((folder / name for name in PAMAP2_FOLDERS if (folder / name).is_dir()), folder / PAMAP2_FOLDERS[0])
    files = sorted((place / "Protocol" if (place / "Protocol").is_dir() else place).glob("subject*.dat"))
    if not files:
        raise missing("pamap2", f"{place}/Protocol/subject*.dat", f"unpack PAMAP2_Dataset.zip of UCI's in {folder}")
    numbers = {activity: number for number, activity in enumerate(PAMAP2_ACTIVITIES)}
    rows = [(window, numbers[activity], file.stem) for file in files for window, activity in _windows(file)]
    if not rows:
        raise InputError(f"the files in {place} have no {PAMAP2_WINDOW} rows of one activity: fetch them again.")
    x, y, subjects = zip(*rows, strict=True)
    names = tuple(PAMAP2_ACTIVITIES.values())
    return Samples(np.stack(x), np.array(y), class_names=names, client=list(subjects)).dataset("pamap2")


def _windows(path: Path) -> Iterator[tuple[Floats, int]]:
    """Windows without overlap of the activities that count; gaps in a signal are filled on a straight line."""
    import pandas as pd

    table = _numbers(path)
    if table.shape[1] != PAMAP2_COLUMNS:
        raise InputError(f"{path} has {table.shape[1]} columns, not {PAMAP2_COLUMNS}: fetch it again.")
    activities = table[:, 1].astype(np.int64)
    signals = np.concatenate([table[:, start : start + 3] / scale for start, scale in PAMAP2_SIGNALS], axis=1)
    signals = pd.DataFrame(signals).interpolate(limit_direction="both").to_numpy().astype(np.float32)
    edges = np.flatnonzero(np.diff(activities)) + 1
    for rows in np.split(np.arange(len(activities)), edges):
        activity = int(activities[rows[0]])
        if activity in PAMAP2_ACTIVITIES:
            for start in range(rows[0], rows[-1] + 2 - PAMAP2_WINDOW, PAMAP2_WINDOW):
                yield signals[start : start + PAMAP2_WINDOW].T, activity


def motion(source: Source, folder: Path, download: bool) -> Dataset:
    """Waves with a frequency and a direction for each activity; each person has an amplitude, a pace and a phase."""
    draw = numpy_generator(0, "motion")
    time = np.arange(MOTION_LENGTH) / 20  # seconds, at 20 Hz
    frequencies = np.array([0.3, 1.8, 2.9, 1.4, 1.2, 2.2])
    directions = draw.normal(size=(len(MOTIONS), 3, 2))
    signals, labels, people = [], [], []
    for person in range(MOTION_PEOPLE):
        amplitude, pace, phase = draw.uniform(0.6, 1.6), draw.uniform(0.85, 1.15), draw.uniform(0, 2 * np.pi)
        for window in range(MOTION_WINDOWS):
            label = window % len(MOTIONS)
            angle = 2 * np.pi * frequencies[label] * pace * time + phase + draw.uniform(0, 2 * np.pi)
            waves = np.stack([np.sin(angle), np.sin(2 * angle) / 2])
            strength = amplitude * (0.2 if MOTIONS[label] == "rest" else 1.0)
            signals.append(strength * directions[label] @ waves + draw.normal(0, 0.4, (3, MOTION_LENGTH)))
            labels.append(label)
            people.append(person)
    x = np.stack(signals).astype(np.float32)
    return Samples(x, np.array(labels), class_names=MOTIONS, client=np.array(people)).dataset("motion")


def _numbers(path: Path, *, text: bool = False) -> NDArray[Any]:
    """The columns of a file, separated by blanks."""
    import pandas as pd

    try:
        return pd.read_csv(path, sep=r"\s+", header=None, dtype=str if text else np.float64).to_numpy()
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read as columns of numbers ({one_line(error)}): fetch it again.") from error
