"""A site's log: for its owner only; a line is a line whatever a server says, and a full disk ends nothing."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import Mock

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'polyfed[flower]'")

from polyfed.deploy.keys import make_site_keys
from polyfed.deploy.member import read_member
from polyfed.deploy.serve import open_folder
from polyfed.deploy.take_part import LONGEST_LINE, Answering, Log, take_part
from polyfed.deploy.terms import read_terms
from polyfed.errors import InputError
from polyfed.export.load import CARD
from polyfed.remote import Packet
from tests.deploy.files import terms, write_member, write_terms


class Refusing:
    """A site that repeats what it was asked in its refusal."""

    def __init__(self) -> None:
        self.notes = ["two\nlines"]

    def answer(self, kind: Any, packet: Packet) -> Packet:
        return Packet({"failure": f"asked as {packet.facts['name']}"})


def test_a_servers_words_begin_no_line_and_steer_no_terminal(tmp_path: Path) -> None:
    shown: list[str] = []
    name = "x\n2026-01-01 00:00:00  told that the run is finished\r\x1b[2J\x9b31m\u202e"
    with Log(tmp_path / "site.log", shown.append) as log:
        Answering(Refusing(), log.add)("train", Packet({"name": name, "round": "9\n" * 10**6}))  # type: ignore[arg-type]
        log.add("connected to [red]somewhere[/red]")
    lines = (tmp_path / "site.log").read_text().splitlines()
    assert len(lines) == len(shown) == 3
    assert all(line.isprintable() and len(line) < LONGEST_LINE + 50 for line in [*lines, *shown])
    assert (tmp_path / "site.log").stat().st_mode & 0o777 == 0o600


def test_a_full_disk_does_not_end_the_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the log nor the screen, which may be a file on the same disk, can be written; then there is room."""

    def full(*args: object) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    with Log(tmp_path / "site.log", full) as log:
        with monkeypatch.context() as patch:
            patch.setattr(log, "_file", type("Full", (), {"write": full, "close": full})())
            log.add("lost")
        log.add("kept")
    assert [line.split("  ")[1] for line in (tmp_path / "site.log").read_text().splitlines()] == ["kept"]


def test_a_folder_that_can_not_be_written_to_is_one_sentence(tmp_path: Path) -> None:
    """At a site and at the server, with the setting that names it."""
    (tmp_path / "taken").write_text("a file")
    line = make_site_keys(tmp_path / "keys", "amber")
    members = {**terms()["members"], "amber": line}
    file = write_terms(tmp_path, members=members, server={"folder": "taken/run"})
    site = write_member(tmp_path / "amber", "amber", key="../keys/amber.key")
    site.write_text(f"{site.read_text()}folder: ../taken/state\n")
    with pytest.raises(InputError, match=r"can't write to '.*taken/state': .*; choose another folder .folder in site"):
        take_part(read_member(site, trust=True), print)
    with pytest.raises(InputError, match=r"can't write to '.*taken/run': .*; choose another folder .server.folder."):
        open_folder(read_terms(file, trust=True), file)


def test_the_folder_of_another_federation_is_refused_with_the_remedy(tmp_path: Path) -> None:
    file = write_terms(tmp_path)
    open_folder(read_terms(file, trust=True), file)
    write_terms(tmp_path, name="trial-2")
    with pytest.raises(InputError, match=r"start a new run, with another name and folder .server.folder."):
        open_folder(read_terms(file, trust=True), file)


def test_a_site_that_has_ended_says_so_before_it_connects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyfed.flower.node.SiteConnection", Mock())
    line = make_site_keys(tmp_path / "keys", "amber")
    write_terms(tmp_path, members={**terms()["members"], "amber": line})
    member = read_member(write_member(tmp_path / "amber", "amber", key="../keys/amber.key"), trust=True)
    shown: list[str] = []
    take_part(member, shown.append)
    assert shown == []
    (member.settings.folder / "final.safetensors").touch()  # it ended, but its model could not be written
    take_part(member, shown.append)
    assert shown == []
    (member.settings.folder / "model").mkdir()
    (member.settings.folder / "model" / CARD).touch()
    take_part(member, shown.append)
    assert len(shown) == 1 and "run trial-1 has ended here, and its model is in" in shown[0]
