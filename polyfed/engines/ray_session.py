"""A connection to Ray: to an existing cluster, or to one that is started on this machine and ends with the run."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from polyfed.config import RaySettings
from polyfed.errors import InputError, first_line

MOST_PER_MACHINE = 8
"""The default limit of hosts on one machine: each is a process that loads PyTorch."""
_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Set to 0 before Ray is imported, it makes Ray listen only on loopback on every system; some do by default."""


class RaySession:
    """Ray, ready to be used."""

    def __init__(self, settings: RaySettings) -> None:
        self.notes: list[str] = []
        self.ray = _import(settings)
        self._ours = not self.ray.is_initialized()
        if self._ours:
            with _own_signals():
                _connect(self.ray, settings)
        started = self._ours and settings.address is None
        if started and not str(self.nodes[0]["NodeManagerAddress"]).startswith("127."):
            self.notes.append(
                "Ray was imported before polyfed started it, so it listens on this machine's address and not "
                "only on loopback: import polyfed first, or set RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0"
            )

    @property
    def nodes(self) -> list[dict[str, Any]]:
        """The machines that are alive now."""
        return [node for node in self.ray.nodes() if node["Alive"]]

    def is_there(self, node: str) -> bool:
        """Whether this machine is still part of the cluster."""
        return any(one["NodeID"] == node for one in self.nodes)

    def plan(self, settings: RaySettings, clients: int, *, gpu: bool) -> tuple[int, int]:
        """How many hosts, and with how many CPUs each; raises if the cluster is too small for them."""
        of = [(int(node["Resources"].get("CPU", 0)), int(node["Resources"].get("GPU", 0))) for node in self.nodes]
        return planned(settings, clients, of, gpu=gpu)

    def close(self) -> None:
        """Leave a cluster that was joined; end one that was started here."""
        if self._ours and self.ray.is_initialized():
            self._ours = False
            with _own_signals():
                self.ray.shutdown()


def planned(settings: RaySettings, clients: int, machines: Sequence[tuple[int, int]], *, gpu: bool) -> tuple[int, int]:
    """How many hosts, and with how many CPUs each, on machines with so many CPUs and GPUs.

    A host is on one machine. So if the machines differ, it is not enough that all their CPUs together are enough.
    """

    def room(each: int, most: int = sys.maxsize) -> int:
        return sum(min(gpus if gpu else most, cpus // each) for cpus, gpus in machines)

    hosts = min(clients, settings.hosts or max(1, room(settings.cpus or 1, MOST_PER_MACHINE)))
    cpus, gpus = (sum(column) for column in zip(*machines, strict=True))
    each = settings.cpus or next((n for n in range(cpus // hosts, 0, -1) if room(n) >= hosts), 1)
    if room(each) >= hosts:
        return hosts, each
    needed = f"{hosts} GPUs and {hosts * each} CPUs" if gpu else f"{hosts * each} CPUs"
    has = f"{gpus} GPUs and {cpus} CPUs" if gpu else f"{cpus} CPUs"
    if hosts * each <= cpus and (hosts <= gpus or not gpu):
        has += f", of which too few are on one machine ({room(each)} hosts would fit)"
    raise InputError(
        f"{hosts} hosts need {needed}, but the Ray cluster has {has}: ask for fewer hosts (--set ray.hosts=1) or fewer "
        "CPUs for each (--set ray.cpus=1)."
    )


def _import(settings: RaySettings) -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if settings.address is None and "ray" not in sys.modules:
        os.environ.setdefault(_LOOPBACK, "0")
    try:
        import ray
    except ImportError as error:
        raise InputError(
            "the ray engine needs the package ray, which is not installed: `pip install 'polyfed[ray]'`, or use "
            "another engine (--engine threads)."
        ) from error
    return ray


def _connect(ray: Any, settings: RaySettings) -> None:
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    if settings.address is None:
        asked = (settings.hosts or 1) * (settings.cpus or 1)
        # On one machine CPUs are only counted: more hosts than cores are slow, but work.
        cpus = max(asked, os.cpu_count() or 1)
        ray.init(address="local", include_dashboard=False, num_cpus=cpus, **quiet)
        return
    if settings.address.startswith("ray://"):
        raise InputError(
            f"ray.address is '{settings.address}', but must be the HOST:PORT of the cluster's head: start polyfed on "
            "one of the cluster's machines."
        )
    try:
        _knock(settings.address)
        ray.init(address=settings.address, **quiet)
    except (OSError, RuntimeError, ValueError, AssertionError) as error:
        raise InputError(
            f"can't join the Ray cluster at '{settings.address}' ({first_line(error).rstrip('.')}): start one with "
            "`ray start --head`, join it on this machine too, and give its HOST:PORT as ray.address."
        ) from error


def _knock(address: str) -> None:
    """Check at once whether anything answers there; Ray would try for minutes."""
    host, separator, port = address.rpartition(":")
    if separator and port.isdigit():
        socket.create_connection((host, int(port)), timeout=10).close()


@contextmanager
def _own_signals() -> Iterator[None]:
    """Inside, Ray may set a handler for SIGTERM; afterwards ours is restored, which ends a run with a checkpoint."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)
