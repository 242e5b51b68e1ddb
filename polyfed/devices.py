"""A simulated clock: how long rounds would take if every client had a device and a connection of its own.

A client needs flops ÷ speed + bytes up ÷ upload bandwidth + bytes down ÷ download bandwidth + latency. A round lasts as
long as its slowest participant, or until a deadline. What the server computes takes no simulated time.
"""

from __future__ import annotations

import csv
import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, fields
from itertools import zip_longest
from pathlib import Path

import numpy as np

from polyfed.errors import InputError
from polyfed.seeds import numpy_generator


@dataclass(frozen=True)
class Device:
    """What a client computes and sends with."""

    flops_per_second: float
    upload_bytes_per_second: float
    download_bytes_per_second: float
    latency_seconds: float = 0.0
    """What a round takes in addition, however little is computed and sent."""

    def seconds(self, flops: float, upload_bytes: float, download_bytes: float) -> float:
        """How long a client with this device takes for a round.

        >>> Device(100.0, 10.0, 20.0, 0.5).seconds(flops=200, upload_bytes=10, download_bytes=40)
        5.5
        """
        sending = upload_bytes / self.upload_bytes_per_second + download_bytes / self.download_bytes_per_second
        return flops / self.flops_per_second + sending + self.latency_seconds


PHONE = Device(2e10, 1e6, 5e6, 0.1)
LAPTOP = Device(2e11, 2.5e6, 1.25e7, 0.05)
SERVER = Device(5e12, 1.25e8, 1.25e8, 0.005)
TIERS = (PHONE, LAPTOP, SERVER)
EDGES = (0.5, 0.8)
"""Half of the clients have phones, three of ten laptops, the rest servers."""
MIXES = ("uniform", "three-tier")
COLUMNS = ("client", *(field.name for field in fields(Device)))


def new_devices(devices: str, clients: int, seed: int) -> dict[int, Device]:
    """The device of each client: by the name of a mix, or from a CSV file."""
    if devices == "uniform":
        return dict.fromkeys(range(clients), LAPTOP)
    if devices == "three-tier":
        # Shuffled, because networks are often assigned in a fixed order: who has which would follow from each other.
        order = numpy_generator(seed, "devices").permutation(clients)
        tiers = np.searchsorted(EDGES, (order + 0.5) / clients, side="left").tolist()
        return {client: TIERS[tier] for client, tier in enumerate(tiers)}
    return read_devices(Path(devices), clients)


def read_devices(path: Path, clients: int) -> dict[int, Device]:
    """The devices in a CSV file, a row per client; whatever is wrong with it is one sentence."""
    if not path.is_file():
        raise InputError(
            f"devices is '{path}', but must be none, {', '.join(MIXES)} or the path of a CSV file, and there is no "
            "such file."
        )
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            header, *rows = [row for row in csv.reader(file, skipinitialspace=True) if row] or [[]]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"can't read the devices in '{path}': {getattr(error, 'strerror', None) or error}.") from error
    if not rows or sorted(header) != sorted(COLUMNS) or any(len(row) > len(header) for row in rows):
        raise InputError(f"'{path}' must have a row per client and exactly the columns {', '.join(COLUMNS)}.")
    found: dict[int, Device] = {}
    for line, cells in enumerate(rows, start=2):
        client, device = _parse(path, line, dict(zip_longest(header, cells, fillvalue="")), clients)
        if client in found:
            raise InputError(f"'{path}' has client {client} twice, the second time in line {line}: keep one of them.")
        found[client] = device
    missing = [client for client in range(clients) if client not in found]
    if missing:
        raise InputError(
            f"'{path}' has no device for client {missing[0]}: it needs a row for each of the {clients} clients, from 0."
        )
    return found


def _parse(path: Path, line: int, row: Mapping[str, str], clients: int) -> tuple[int, Device]:
    number = row["client"].strip()
    if not number.isdecimal() or len(number) > 9 or int(number) >= clients:
        raise InputError(
            f"'{path}' has '{number}' as a client in line {line}, but must have a number from 0 to {clients - 1}."
        )
    values = {}
    for name in COLUMNS[1:]:
        text = row[name]
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        may_be_zero = name == "latency_seconds"
        if not math.isfinite(value) or value < 0 or (value == 0 and not may_be_zero):
            raise InputError(
                f"{name} of client {number} is '{text}' in '{path}', but must be a number "
                f"{'at least' if may_be_zero else 'greater than'} 0."
            )
        values[name] = value
    return int(number), Device(**values)


def describe(devices: Mapping[int, Device]) -> str:
    """The devices in words, to check that a resumed run has those it started with."""
    rows = "\n".join(f"{client} {astuple(device)}" for client, device in sorted(devices.items()))
    return f"one with hash {hashlib.blake2b(rows.encode(), digest_size=8).hexdigest()}"


@dataclass(frozen=True)
class Clock:
    """The simulated time of a run's rounds."""

    devices: Mapping[int, Device]
    deadline: float | None = None

    def late(self, needed: Mapping[int, float]) -> list[int]:
        """Which clients, by the seconds that they need, would answer after the deadline."""
        return [client for client, seconds in needed.items() if self.deadline is not None and seconds > self.deadline]

    def round_seconds(self, needed: Iterable[float]) -> float:
        """How long a round lasts: until its slowest participant has answered, or until the deadline.

        >>> Clock({}).round_seconds([2.0, 7.0]), Clock({}, 5.0).round_seconds([2.0, 7.0])
        (7.0, 5.0)
        """
        return min(max(needed, default=0.0), math.inf if self.deadline is None else self.deadline)


def new_clock(devices: str | None, deadline: float | None, found: Mapping[int, Device] | None) -> Clock | None:
    """The clock of a run with these settings, if it has one; `found` are its clients' devices in a simulation."""
    if devices is None:
        return None
    if found is None:
        raise InputError(
            f"devices is {devices}, but only a simulation has a simulated clock, and these clients are real: "
            "leave devices and deadline out."
        )
    return Clock(found, deadline)
