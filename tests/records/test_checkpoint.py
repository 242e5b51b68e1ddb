"""Checkpoints: whatever happens to the newest, one that is intact is left."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from polyfed.errors import InputError
from polyfed.message import State
from polyfed.records import Checkpoints, checkpoint, disk
from polyfed.records.log import Extent
from tests import support

RUN = "0123abcd"


def states(round: int) -> dict[int, State]:
    return {client: {"w": torch.full((3,), float(10 * client + round))} for client in range(3)}


def save(checkpoints: Checkpoints, round: int, changed: tuple[int, ...] = (0, 1, 2)) -> None:
    server = {"state.p": torch.tensor(float(round)), "state.known": torch.tensor([True]), "n": torch.tensor(round)}
    checkpoints.save(round, server, {"totals": {"flops": round}}, changed, states(round).__getitem__)


def restored_round(folder: Path) -> int:
    """The round of the newest whole checkpoint, after a check that all of it is of that round."""
    saved = Checkpoints(folder, RUN).restore()
    if saved is None:
        return 0
    assert saved.progress == {"totals": {"flops": saved.round}}
    assert int(saved.server["n"]) == saved.round
    assert all(torch.equal(saved.clients[c]["w"], states(saved.round)[c]["w"]) for c in range(3))
    return saved.round


def test_what_is_saved_is_restored(tmp_path: Path) -> None:
    save(Checkpoints(tmp_path / "checkpoint", RUN), 1)
    assert restored_round(tmp_path / "checkpoint") == 1
    saved = Checkpoints(tmp_path / "checkpoint", RUN).restore()
    assert saved is not None
    assert saved.server["state.known"].dtype == torch.bool
    assert saved.server["state.p"].shape == ()


def test_without_a_checkpoint_there_is_nothing(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "none", RUN)
    assert checkpoints.restore() is None
    checkpoints.remove()


def files(folder: Path, pattern: str = "clients-*") -> list[str]:
    return sorted(path.name for path in folder.glob(pattern))


@pytest.mark.parametrize("change", [{"round": -3}, {"round": 7}, {"clients": []}, {"records": {}}, {"hash": None}])
def test_a_manifest_with_a_number_changed_is_damaged(tmp_path: Path, change: dict[str, Any]) -> None:
    """It is still a manifest that can be read, but not the one that was written."""
    checkpoints = Checkpoints(tmp_path, RUN)
    save(checkpoints, 1)
    checkpoints.save(2, {}, {}, (0,), states(2).__getitem__, lambda: {"rounds.csv": Extent(1, 2, "x")})
    content = json.loads((tmp_path / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps({**content, **change}))
    assert restored_round(tmp_path) == 1


@pytest.mark.parametrize("what", ["server", "progress"])
def test_a_file_that_is_listed_but_holds_no_state_is_damaged(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path, RUN)
    save(checkpoints, 1)
    write = checkpoint.write_file
    monkeypatch.setattr(checkpoint, "write_file", lambda f, name, d: write(f, name, b"x" if what in name else d))
    save(checkpoints, 2)
    assert restored_round(tmp_path) == 1


def test_only_changed_clients_are_written(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, RUN)
    save(checkpoints, 1)
    save(checkpoints, 2, changed=(1,))
    first = f"clients-0.1.{RUN}.safetensors"
    assert files(tmp_path) == [first, f"{first}.copy", f"clients-0.2.{RUN}.safetensors"]
    with safe_open(tmp_path / f"clients-0.2.{RUN}.safetensors", "pt") as file:
        assert file.metadata()["clients"] == "1"
    saved = Checkpoints(tmp_path, RUN).restore()
    assert saved is not None
    assert [float(saved.clients[client]["w"][0]) for client in range(3)] == [1.0, 12.0, 21.0]


def test_a_file_most_of_whose_clients_have_moved_is_given_up(tmp_path: Path) -> None:
    """Clients 0 and 1 move on in rounds 2 and 3; client 2 alone would keep a file of three, so it is written again."""
    checkpoints = Checkpoints(tmp_path, RUN)
    save(checkpoints, 1)
    save(checkpoints, 2, changed=(0,))
    save(checkpoints, 3, changed=(1,))
    with safe_open(tmp_path / f"clients-0.3.{RUN}.safetensors", "pt") as file:
        assert file.metadata()["clients"] == "1 2"
    for round in (4, 5, 6):
        save(checkpoints, round)
    assert not list(tmp_path.glob("clients-0.2.*"))
    saved = Checkpoints(tmp_path, RUN).restore()
    assert saved is not None and float(saved.clients[2]["w"][0]) == 26.0


@pytest.mark.parametrize(
    "name",
    ["manifest.json", f"server.2.{RUN}.safetensors", f"progress.2.{RUN}.json", f"clients-0.2.{RUN}.safetensors"],
)
@pytest.mark.parametrize("harm", ["truncate", "empty", "remove", "flip"])
def test_a_damaged_checkpoint_falls_back_to_the_one_before(tmp_path: Path, name: str, harm: str) -> None:
    checkpoints = Checkpoints(tmp_path, RUN)
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

    resumed = Checkpoints(tmp_path, RUN)
    again = resumed.restore()
    assert again is not None
    assert any(name in note for note in again.notes) or (name, harm) == ("manifest.json", "remove")
    save(resumed, 2)
    save(resumed, 3)
    assert restored_round(tmp_path) == 3
    (tmp_path / "manifest.json").unlink()
    assert restored_round(tmp_path) == 2


def test_the_damaged_one_is_never_kept_as_the_one_before(tmp_path: Path) -> None:
    """Between the two moves of a save the fallback must still be there."""
    save(checkpoints := Checkpoints(tmp_path, RUN), 1)
    save(checkpoints, 2)
    (tmp_path / "manifest.json").write_text("{")
    resumed = Checkpoints(tmp_path, RUN)
    resumed.restore()
    save(resumed, 2)
    (tmp_path / "manifest.json").write_text("{")
    assert restored_round(tmp_path) == 1


@pytest.mark.parametrize("harmed", ["", ".copy"])
def test_a_file_that_all_checkpoints_share_has_a_second_copy(tmp_path: Path, harmed: str) -> None:
    """Clients 0 and 2 have not changed since round 1, so both checkpoints need the file of round 1."""
    save(checkpoints := Checkpoints(tmp_path, RUN), 1)
    save(checkpoints, 2, changed=(1,))
    shared = tmp_path / f"clients-0.1.{RUN}.safetensors"
    whole = shared.read_bytes()
    shared.with_name(shared.name + harmed).write_bytes(b"torn")
    saved = Checkpoints(tmp_path, RUN).restore()
    assert saved is not None and saved.round == 2
    assert [float(saved.clients[client]["w"][0]) for client in range(3)] == [1.0, 12.0, 21.0]
    assert shared.read_bytes() == whole
    assert bool(saved.notes) == (harmed == "")


def test_what_is_lost_for_good_is_asked_about(tmp_path: Path) -> None:
    save(checkpoints := Checkpoints(tmp_path, RUN), 1)
    save(checkpoints, 2, changed=(1,))
    for path in tmp_path.glob("clients-0.1.*"):
        path.write_bytes(b"")
    with pytest.raises(InputError, match=r"no checkpoint in .* is intact \(manifest.json: .*manifest.1.json.*--repair"):
        checkpoints.restore()
    saved = checkpoints.restore(repair=True)
    assert saved is not None and saved.round == 2
    assert {client: float(state["w"][0]) for client, state in saved.clients.items()} == {1: 12.0}
    assert "clients 0, 2 are lost" in saved.notes[0]
    save(checkpoints, 3, changed=(0, 2))
    saved = Checkpoints(tmp_path, RUN).restore()
    assert saved is not None
    assert [float(saved.clients[client]["w"][0]) for client in range(3)] == [3.0, 12.0, 23.0]


def test_a_damaged_file_is_noticed_when_its_copy_is_due(tmp_path: Path) -> None:
    save(checkpoints := Checkpoints(tmp_path, RUN), 1)
    (tmp_path / f"clients-0.1.{RUN}.safetensors").write_bytes(b"torn")
    save(checkpoints, 2, changed=(1,))
    assert restored_round(tmp_path) == 2  # all clients were written again


def test_another_runs_checkpoint_is_refused(tmp_path: Path) -> None:
    save(Checkpoints(tmp_path, "deadbeef"), 1)
    with pytest.raises(InputError, match="is the checkpoint of another run"):
        Checkpoints(tmp_path, RUN).restore()
    Checkpoints(tmp_path, RUN).remove()
    assert files(tmp_path, "*.deadbeef.*")


def test_a_manifest_can_not_reach_out_of_its_folder(tmp_path: Path) -> None:
    save(checkpoints := Checkpoints(tmp_path / "checkpoint", RUN), 1)
    manifest = tmp_path / "checkpoint" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"file": "clients', '"file": "../clients'))
    with pytest.raises(InputError, match=r"lists '\.\./clients.*', which is not in its folder"):
        checkpoints.restore()


def test_checkpoints_of_earlier_rounds_are_kept_to_go_back_to(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, RUN)
    for round in range(1, 26):
        save(checkpoints, round)
    assert checkpoints.rounds() == [10, 20, 24, 25]
    saved = checkpoints.restore(10)
    assert saved is not None and saved.round == 10
    checkpoints.go_back(saved)
    assert checkpoints.rounds() == [10]
    assert restored_round(tmp_path) == 10
    save(checkpoints, 11)
    assert restored_round(tmp_path) == 11


def test_only_files_of_the_run_are_deleted(tmp_path: Path) -> None:
    """Someone else keeps a model, a folder and a link to a file elsewhere in the checkpoint's folder."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("mine")
    folder = tmp_path / "checkpoint"
    checkpoints = Checkpoints(folder, RUN)
    save(checkpoints, 1)
    (folder / "resnet50.pt").write_text("mine")
    (folder / "more").mkdir()
    (folder / f"server.9.{RUN}.safetensors").symlink_to(elsewhere)
    save(checkpoints, 2)
    checkpoints.remove()
    assert files(folder, "*") == ["more", "resnet50.pt", f"server.9.{RUN}.safetensors"]
    assert elsewhere.read_text() == "mine"


class Killed(BaseException):
    """Stands for kill -9."""


@pytest.mark.parametrize("stage", ["before", "half", "after"])
def test_a_kill_at_any_write_leaves_a_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    """Five writes make a checkpoint; the third save dies at each of them, before, in the middle of or after it."""
    write = disk.write
    monkeypatch.setattr(Checkpoints, "_clean", lambda self: None)  # a killed process cleans nothing up
    for last in range(5):
        folder = tmp_path / str(last)
        save(checkpoints := Checkpoints(folder, RUN), 1)
        save(checkpoints, 2)
        count = iter(range(100))

        def dying(path: Path, content: bytes | str, last: int = last, count: Any = count, **options: Any) -> None:
            if next(count) < last:
                return write(path, content, **options)
            if stage == "half":
                path.with_name(path.name + ".new").write_bytes(b"half")
            elif stage == "after":
                write(path, content, **options)
            raise Killed

        monkeypatch.setattr(disk, "write", dying)
        with pytest.raises(Killed):
            save(checkpoints, 3)
        monkeypatch.setattr(disk, "write", write)
        assert restored_round(folder) == (3 if (last, stage) == (4, "after") else 2)


def full_disk(*arguments: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_leaves_the_checkpoint_before_and_no_rubbish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(checkpoints := Checkpoints(tmp_path, RUN), 1)
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
    disk.write(tmp_path / "file", "old")
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError):
        disk.write(tmp_path / "file", "new")
    assert (tmp_path / "file").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_file_is_moved_into_place_not_overwritten(tmp_path: Path) -> None:
    """Whoever has the old file open reads the whole of it."""
    disk.write(tmp_path / "file", "old")
    with (tmp_path / "file").open() as reader:
        disk.write(tmp_path / "file", b"new")
        assert reader.read() == "old"
    assert (tmp_path / "file").read_text() == "new"


def test_a_run_goes_on_when_a_checkpoint_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full during the checkpoint of round 2 of 4; that of round 3 holds all clients that changed since."""
    usual = support.federation(tmp_path / "usual", "fedproto", rounds=4)
    usual.run()
    run = support.federation(tmp_path / "full", "fedproto", rounds=4, checkpoint_every=1)
    write = disk.write
    seen: list[int] = []

    def failing(path: Path, content: bytes | str, **options: Any) -> None:
        if ".2." in path.name:
            full_disk()
        if path.name == "manifest.json":
            saved = Checkpoints(path.parent, run.folder.checkpoints.run).restore()
            seen.append(saved.round if saved else 0)
        write(path, content, **options)

    monkeypatch.setattr(disk, "write", failing)
    run.run()
    assert seen == [0, 1]  # what could have been resumed just before the checkpoints of rounds 1 and 3
    notes = [event["note"] for event in run.folder.events() if event["event"] == "note"]
    assert notes == ["the checkpoint of round 2 could not be written (No space left on device)"]
    assert run.folder.rounds().drop(columns="seconds").equals(usual.folder.rounds().drop(columns="seconds"))
    assert not (run.folder.path / "checkpoint").exists()  # removed at the end
