"""The client store: memory, then disk, and never two owners of one tensor."""

import errno
import multiprocessing
import os
import re
import signal
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from polyfed.engines.client.store import ClientStore
from polyfed.engines.together.joint import JointStore
from polyfed.message import State, state_size


def state(value: float) -> State:
    return {
        "w": torch.full((4,), float(value)),
        "steps": torch.tensor(int(value)),
        "known": torch.tensor([True, False]),
    }


FIRST = state(-1)
BYTES = 4 * 4 + 8 + 2


def new_store(states: float) -> ClientStore:
    """A store with room for so many states."""
    return ClientStore(lambda client: FIRST, int(BYTES * states))


def value(store: ClientStore, client: int) -> int:
    return int(store.get(client)["steps"])


def test_size_counts_bytes() -> None:
    assert state_size(FIRST) == BYTES


def test_a_client_without_a_state_starts_from_a_copy_of_the_first() -> None:
    store = new_store(9)
    assert not store.has(5)
    taken = store.take(5)
    taken["w"].zero_()
    assert FIRST["w"].tolist() == [-1.0] * 4
    assert value(store, 5) == -1  # nothing was put back
    store.put(5, taken)
    assert store.has(5)
    assert store.get(5)["w"].tolist() == [0.0] * 4


def test_the_least_recently_used_states_go_to_disk() -> None:
    store = new_store(2)
    for client in range(3):
        store.put(client, state(client))
    assert (set(store._states), store._spilled) == ({1, 2}, {0})
    store.get(1)  # used now, so client 2 is the next to go
    store.put(3, state(3))
    assert (set(store._states), store._spilled) == ({1, 3}, {0, 2})
    assert [value(store, client) for client in range(4)] == [0, 1, 2, 3]
    assert store.get(0)["known"].dtype == torch.bool


def test_a_state_that_comes_back_from_disk_is_not_lost_or_counted_twice() -> None:
    store = new_store(1)
    for client in range(3):
        store.put(client, state(client))
    back = store.take(0)
    back["steps"] += 10
    store.put(0, back)
    assert value(store, 0) == 10
    assert store._spilled == {1, 2}
    assert store._bytes == BYTES
    store.put(0, state(20))
    assert (value(store, 0), store._bytes) == (20, BYTES)


def test_one_state_larger_than_the_budget_stays_in_memory() -> None:
    store = new_store(0.5)
    store.put(0, state(0))
    assert (set(store._states), store._spilled) == ({0}, set())


def test_changed_clients_are_remembered_until_cleared() -> None:
    store = new_store(1)
    store.put(0, state(0))
    store.put(1, state(1))
    store.get(0)
    assert store.changed == {0, 1}
    store.changed.clear()
    store.put(1, store.take(1))
    assert store.changed == {1}


def test_closing_removes_the_files() -> None:
    store = new_store(1)
    store.put(0, state(0))
    store.put(1, state(1))
    assert store._folder is not None
    folder = store._folder.path
    assert len(list(folder.glob("client-*"))) == 1
    store.close()
    assert not folder.exists()
    store.close()


def test_a_full_disk_keeps_states_in_memory_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    store = ClientStore(lambda client: FIRST, 1, note=notes.append)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full_disk)
        store.put(0, state(0))
        store.put(1, state(1))
    store.put(2, state(2))
    assert all(torch.equal(store.get(client)["w"], state(client)["w"]) for client in range(3))
    assert len(notes) == 1
    assert re.search(r"can't be written to disk \(No space left on device\).*set TMPDIR", notes[0])
    store.close()


def full_disk(*arguments: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def spill(folder: str) -> None:
    """A process that spills, and is killed."""
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    store = new_store(1)
    store.put(0, state(0))
    store.put(1, state(1))
    os.kill(os.getpid(), signal.SIGKILL)


def test_files_of_a_killed_process_are_removed_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = multiprocessing.get_context("fork").Process(target=spill, args=(str(tmp_path),))
    process.start()
    process.join()
    (abandoned,) = tmp_path.glob("polyfed-clients-*")
    assert list(abandoned.glob("client-*"))
    mine = tmp_path / "polyfed-clients-of-mine"
    mine.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    running = new_store(1)
    running.put(0, state(0))
    running.put(1, state(1))
    new_store(1)
    assert not abandoned.exists()
    assert mine.exists()
    assert torch.equal(running.get(0)["w"], state(0)["w"])
    running.close()
    assert [path.name for path in tmp_path.iterdir()] == [mine.name]


def test_versions_in_a_store_of_several_runs_are_those_of_each_runs_own_client() -> None:
    stores = [new_store(9), new_store(9)]
    members: list[Any] = [SimpleNamespace(store=store) for store in stores]
    joint = JointStore({number: (members[number // 2], number % 2) for number in range(4)})
    before = [joint.version(client) for client in range(4)]
    stores[1].put(0, state(1))
    joint.put(3, state(2))
    assert [joint.version(client) - old for client, old in enumerate(before)] == [0, 0, 1, 1]
    assert (stores[1].version(0), stores[1].version(1)) == (1, 1)
