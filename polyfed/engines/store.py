"""Where clients' personal states rest: in memory, and on disk beyond a budget.

A client that never took part has no state of its own yet and costs nothing. Used from several threads.
"""

from __future__ import annotations

import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from polyfed.message import State


class ClientStore:
    """Personal states by client number, the least recently used on disk when memory is short."""

    def __init__(self, initial: Callable[[int], State], budget: int, device: str = "cpu") -> None:
        self._initial = initial
        self._budget = budget
        self._device = device
        self._states: OrderedDict[int, State] = OrderedDict()
        self._sizes: dict[int, int] = {}
        self._spilled: set[int] = set()
        self._bytes = 0
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._lock = threading.RLock()
        self.changed: set[int] = set()
        """Clients whose state was put here since this set was last cleared."""

    def get(self, client: int) -> State:
        """The client's state, to read; the first state if it never trained."""
        with self._lock:
            if client in self._states:
                self._states.move_to_end(client)
                return self._states[client]
            if client in self._spilled:
                return load_file(self._file(client), device=self._device)
            return self._initial(client)

    def take(self, client: int) -> State:
        """The client's state, to change; give it back with `put`."""
        with self._lock:
            if client in self._states:
                return self._remove(client)
            return {name: tensor.clone() for name, tensor in self.get(client).items()}

    def room(self, client: int, like: State) -> State:
        """Tensors like these for the client's next state, to give back with `put`: its present ones if in memory."""
        with self._lock:
            if client in self._states:
                return self._states[client]
            return {name: torch.empty_like(tensor) for name, tensor in like.items()}

    def put(self, client: int, state: State) -> None:
        """Keep the client's state; it belongs to the store from now on."""
        with self._lock:
            if client in self._states:
                self._remove(client)
            self._states[client] = state
            self._spilled.discard(client)
            self._sizes[client] = size(state)
            self._bytes += self._sizes[client]
            self.changed.add(client)
            while self._bytes > self._budget and len(self._states) > 1:
                self._spill(next(iter(self._states)))

    def has(self, client: int) -> bool:
        """Whether the client has a state of its own, that is, has trained or was restored."""
        with self._lock:
            return client in self._states or client in self._spilled

    def close(self) -> None:
        """Remove what was spilled to disk."""
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _remove(self, client: int) -> State:
        self._bytes -= self._sizes[client]
        return self._states.pop(client)

    def _spill(self, client: int) -> None:
        state = self._remove(client)
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, self._file(client))
        self._spilled.add(client)

    def _file(self, client: int) -> Path:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="polyfed-clients-")
        return Path(self._folder.name) / f"client-{client:04d}.safetensors"


def size(state: State) -> int:
    """Bytes that a state's tensors take."""
    return sum(tensor.numel() * tensor.element_size() for tensor in state.values())
