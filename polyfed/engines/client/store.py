"""Where clients' personal states are kept: in memory, and on disk beyond a budget.

A client that never took part has no state yet and costs nothing. The store is safe to use from several threads.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file

from polyfed.engines.client.scratch import ScratchFolder, remove_abandoned
from polyfed.message import State, state_bytes, state_size


class ClientStore:
    """Personal states by client number, the least recently used on disk when memory is short."""

    def __init__(
        self,
        initial: Callable[[int], State],
        budget: int,
        device: str = "cpu",
        note: Callable[[str], None] = lambda note: None,
    ) -> None:
        self._initial = initial
        self._budget: float = budget
        self._note = note
        self._device = device
        self._states: OrderedDict[int, State] = OrderedDict()
        self._sizes: dict[int, int] = {}
        self._versions: Counter[int] = Counter()
        self._spilled: set[int] = set()
        self._bytes = 0
        self._folder: ScratchFolder | None = None
        self._lock = threading.RLock()
        self.changed: set[int] = set()
        """Clients whose state was put here since this set was last cleared."""
        remove_abandoned()

    def get(self, client: int) -> State:
        """The client's state, to read; the initial state if it never trained."""
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
        """Tensors like these for the client's next state, to give back with `put`: its current ones if in memory."""
        with self._lock:
            if client in self._states:
                return self._states[client]
            return {name: torch.empty_like(tensor) for name, tensor in like.items()}

    def put(self, client: int, state: State) -> None:
        """Keep the client's state; it belongs to the store from now on."""
        with self._lock:
            self._versions[client] += 1
            self.changed.add(client)
            if self._states.get(client) is state:  # its room, so it is as large as before
                self._states.move_to_end(client)
                return
            if client in self._states:
                self._remove(client)
            self._states[client] = state
            self._spilled.discard(client)
            self._sizes[client] = state_size(state)
            self._bytes += self._sizes[client]
            while self._bytes > self._budget and len(self._states) > 1:
                self._spill(next(iter(self._states)))

    def version(self, client: int) -> int:
        """How often the client's state was put here; as long as this stays the same, the state does."""
        with self._lock:
            return self._versions[client]

    def has(self, client: int) -> bool:
        """Whether the client has its own state, because it has trained or was restored."""
        with self._lock:
            return client in self._states or client in self._spilled

    def close(self) -> None:
        """Remove what was spilled to disk."""
        if self._folder is not None:
            self._folder.remove()
            self._folder = None

    def _remove(self, client: int) -> State:
        self._bytes -= self._sizes[client]
        return self._states.pop(client)

    def _spill(self, client: int) -> None:
        try:
            self._file(client).write_bytes(state_bytes(self._states[client]))
        except OSError as error:
            self._budget = float("inf")
            self._note(
                f"clients' states beyond the memory budget can't be written to disk ({error.strerror}), so all stay in "
                "memory from now on: make room there, or set TMPDIR to a folder on another disk"
            )
            return
        self._remove(client)
        self._spilled.add(client)

    def _file(self, client: int) -> Path:
        if self._folder is None:
            self._folder = ScratchFolder()
        return self._folder.path / f"client-{client:04d}.safetensors"
