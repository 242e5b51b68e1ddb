"""Checkpoints: whatever happens to the newest, one that is whole is left."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from polyfed.message import State
from polyfed.records import Checkpoints, atomic
from tests import support


def states(round: int) -> dict[int, State]:
    return {client: {"w": torch.full((3,), float(10 * client + round))} for client in range(3)}


def save(checkpoints: Checkpoints, round: int, changed: tuple[int, ...] = (0, 1, 2)) -> None:
    server = {"state.p": torch.tensor(float(round)), "state.known": torch.tensor([True]), "n": torch.tensor(round)}
    checkpoints.save(round, server, {"totals": {"flops": round}}, changed, states(round).__getitem__)


def restored_round(folder: Path) -> int:
    """The round of the newest whole checkpoint, after a check that all of it is of that round."""
    saved = Checkpoints(folder).restore()
    if saved is None:
        return 0
    assert saved.progress == {"totals": {"flops": saved.round}}
    assert int(saved.server["n"]) == saved.round
    assert all(torch.equal(saved.clients[c]["w"], states(saved.round)[c]["w"]) for c in range(3))
    return saved.round


def test_what_is_saved_is_restored(tmp_path: Path) -> None:
    save(Checkpoints(tmp_path / "checkpoint"), 1)
    assert restored_round(tmp_path / "checkpoint") == 1
    saved = Checkpoints(tmp_path / "checkpoint").restore()
    assert saved is not None
    assert saved.server["state.known"].dtype == torch.bool
    assert saved.server["state.p"].shape == ()


def test_without_a_checkpoint_there_is_nothing(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "none")
    assert checkpoints.restore() is None
    assert checkpoints.damaged == ""
    checkpoints.remove()


def test_only_changed_clients_are_written(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1)
    save(checkpoints, 2, changed=(1,))
    names = sorted(path.name for path in tmp_path.glob("client*"))
    assert names == [f"client-{name}.safetensors" for name in ("0000.1", "0001.1", "0001.2", "0002.1")]
    save(checkpoints, 3, changed=())
    names = sorted(path.name for path in tmp_path.glob("client*"))
    assert names == [f"client-{name}.safetensors" for name in ("0000.1", "0001.2", "0002.1")]
    saved = Checkpoints(tmp_path).restore()
    assert saved is not None
    assert [float(saved.clients[client]["w"][0]) for client in range(3)] == [1.0, 12.0, 21.0]


@pytest.mark.parametrize(
    "name", ["manifest.json", "server.2.safetensors", "progress.2.json", "client-0001.2.safetensors"]
)
@pytest.mark.parametrize("harm", ["truncate", "empty", "remove", "flip"])
def test_a_damaged_checkpoint_falls_back_to_the_one_before(tmp_path: Path, name: str, harm: str) -> None:
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1)
    save(checkpoints, 2)
    path = tmp_path / name
    whole = path.read_bytes()
    if harm == "remove":
        path.unlink()
    elif harm == "flip":
        path.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    else:
        path.write_bytes(whole[:-1] if harm == "truncate" else b"")
    assert restored_round(tmp_path) == 1

    resumed = Checkpoints(tmp_path)
    resumed.restore()
    assert name in resumed.damaged or harm == "remove"
    save(resumed, 2)
    save(resumed, 3)
    assert restored_round(tmp_path) == 3
    (tmp_path / "manifest.json").unlink()
    assert restored_round(tmp_path) == 2


def test_the_damaged_one_is_never_kept_as_the_one_before(tmp_path: Path) -> None:
    """Between the two moves of a save the fallback must still be there."""
    save(checkpoints := Checkpoints(tmp_path), 1)
    save(checkpoints, 2)
    (tmp_path / "manifest.json").write_text("{")
    resumed = Checkpoints(tmp_path)
    resumed.restore()
    save(resumed, 2)
    (tmp_path / "manifest.json").write_text("{")
    assert restored_round(tmp_path) == 1


def test_two_damaged_checkpoints_are_told(tmp_path: Path) -> None:
    save(checkpoints := Checkpoints(tmp_path), 1)
    save(checkpoints, 2, changed=())
    (tmp_path / "client-0000.1.safetensors").write_bytes(b"")
    assert checkpoints.restore() is None
    assert "manifest.json" in checkpoints.damaged
    assert "manifest.previous.json" in checkpoints.damaged


class Killed(BaseException):
    """Stands for kill -9."""


@pytest.mark.parametrize("stage", ["before", "half", "after"])
def test_a_kill_at_any_write_leaves_a_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    """Seven writes make a checkpoint; the third save dies at each of them, before, in the middle of or after it."""
    write = atomic.write
    monkeypatch.setattr(Checkpoints, "_clean", lambda self: None)  # a killed process cleans nothing up
    for last in range(7):
        folder = tmp_path / str(last)
        save(checkpoints := Checkpoints(folder), 1)
        save(checkpoints, 2)
        count = iter(range(100))

        def dying(path: Path, content: bytes | str, last: int = last, count: Any = count) -> None:
            if next(count) < last:
                return write(path, content)
            if stage == "half":
                path.with_name(path.name + ".new").write_bytes(b"half")
            elif stage == "after":
                write(path, content)
            raise Killed

        monkeypatch.setattr(atomic, "write", dying)
        with pytest.raises(Killed):
            save(checkpoints, 3)
        monkeypatch.setattr(atomic, "write", write)
        assert restored_round(folder) == (3 if (last, stage) == (6, "after") else 2)


def full_disk(*arguments: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_leaves_the_checkpoint_before_and_no_rubbish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(checkpoints := Checkpoints(tmp_path), 1)
    before = sorted(path.name for path in tmp_path.iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_disk)
        with pytest.raises(OSError):
            save(checkpoints, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert restored_round(tmp_path) == 1
    save(checkpoints, 3)
    assert restored_round(tmp_path) == 3


def test_a_failing_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    atomic.write(tmp_path / "file", "old")
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError):
        atomic.write(tmp_path / "file", "new")
    assert (tmp_path / "file").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_file_is_moved_into_place_not_overwritten(tmp_path: Path) -> None:
    """Whoever has the old file open reads the whole of it."""
    atomic.write(tmp_path / "file", "old")
    with (tmp_path / "file").open() as reader:
        atomic.write(tmp_path / "file", b"new")
        assert reader.read() == "old"
    assert (tmp_path / "file").read_text() == "new"


def test_a_run_goes_on_when_a_checkpoint_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full during the checkpoint of round 2 of 4; that of round 3 holds all clients that changed since."""
    usual = support.federation(tmp_path / "usual", "fedproto", rounds=4)
    usual.run()
    run = support.federation(tmp_path / "full", "fedproto", rounds=4, checkpoint_every=1)
    write = atomic.write
    seen: list[int] = []

    def failing(path: Path, content: bytes | str) -> None:
        if ".2." in path.name:
            full_disk()
        if path.name == "manifest.json":
            saved = Checkpoints(path.parent).restore()
            seen.append(saved.round if saved else 0)
        write(path, content)

    monkeypatch.setattr(atomic, "write", failing)
    run.run()
    assert seen == [0, 1]  # what could have been resumed just before the checkpoints of rounds 1 and 3
    notes = [event["note"] for event in run.folder.events() if event["event"] == "note"]
    assert notes == ["the checkpoint of round 2 could not be written (No space left on device)"]
    assert run.folder.rounds().drop(columns="seconds").equals(usual.folder.rounds().drop(columns="seconds"))
    assert not (run.folder.path / "checkpoint").exists()  # removed at the end
