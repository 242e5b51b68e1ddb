"""`polyfed server init`, `polyfed site init` and `polyfed site check`, as a user types them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from polyfed.cli import main
from polyfed.deploy.announce import Announcement
from tests.deploy.files import public_key, write_member, write_terms


def typed(monkeypatch: pytest.MonkeyPatch, capsys: Any, *words: str) -> tuple[int, str, str]:
    """The exit status, what was printed, and what was complained about."""
    monkeypatch.setattr("sys.argv", ["polyfed", *words])
    with pytest.raises(SystemExit) as end:
        main()
    out, problems = capsys.readouterr()
    return int(end.value.code or 0), out, problems


def test_init_writes_files_and_overwrites_nothing(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert typed(monkeypatch, capsys, "server", "init", "--members", "amber, birch", "--method", "fml")[0] == 0
    assert "  birch: PUBLIC-KEY" in (tmp_path / "federation.yaml").read_text()
    assert typed(monkeypatch, capsys, "site", "init", "--name", "birch", "--data", "folder:x")[0] == 0
    before = (tmp_path / "site.yaml").read_text()
    assert "\nname: birch\n" in before and "\ndata: folder:x\n" in before
    for side in ("server", "site"):
        status, _, problems = typed(monkeypatch, capsys, side, "init")
        assert status == 2 and "exists, and init overwrites nothing" in problems
    assert (tmp_path / "site.yaml").read_text() == before


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--method", "fedprot"], "unknown method 'fedprot': did you mean 'fedproto'"),
        (["--shape", "3,32"], "--shape is '3,32', but must be sizes with an x between them"),
        (["--members", "a/b,c"], "the name of a member is 'a/b', but must be"),
    ],
)
def test_init_refuses(tmp_path: Path, monkeypatch: Any, capsys: Any, words: list[str], problem: str) -> None:
    monkeypatch.chdir(tmp_path)
    status, _, problems = typed(monkeypatch, capsys, "server", "init", *words)
    assert status == 2 and problem in problems and not list(tmp_path.iterdir())


def checked_site(folder: Path, **changes: Any) -> Path:
    write_terms(folder, task={"auxiliary": None})
    return write_member(folder / "amber", "amber", **changes)


def test_check_shows_classes_and_what_would_be_sent(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """20 samples of two classes split 6:2:2, 10 each: 6, 2, 2."""
    path = checked_site(tmp_path)
    status, out, problems = typed(monkeypatch, capsys, "site", "check", str(path))
    assert status == 0
    rows = [line.split() for line in out.splitlines()]
    assert ["a", "6", "2", "2"] in rows and ["all", "12", "4", "4"] in rows
    assert ["prototypes", "floats", "seen×6", "2×6", "12", "48"] in rows
    assert ["profile.features", "6"] in rows
    assert "Nothing else is ever sent." in out
    assert all(f"can't read '{path.parent / name}': No such file" in problems for name in ("amber.key", "ca.crt"))
    assert not (path.parent / "state").exists()


def test_check_for_programs(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    path = checked_site(tmp_path)
    status, out, _ = typed(monkeypatch, capsys, "site", "check", str(path), "--json")
    found = json.loads(out)
    assert status == 0
    assert found["samples"] == [
        {"class": "a", "train": 6, "validation": 2, "test": 2},
        {"class": "b", "train": 6, "validation": 2, "test": 2},
    ]
    assert Announcement.from_dict(found["announcement"]).join["profile"] == {"name": "amber", "features": 6}
    assert len(found["warnings"]) == 2 and found["terms"]["name"] == "trial-1"


def test_check_warns_of_keys_that_would_be_refused(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """Another member's key, one that others can read, a certificate that is none; nothing if all is well."""
    pytest.importorskip("cryptography")
    from polyfed.deploy.keys import make_server_keys, make_site_keys

    path = checked_site(tmp_path)
    line = make_site_keys(path.parent, "amber")
    (path.parent / "ca.crt").write_text("x")

    def problems() -> str:
        return typed(monkeypatch, capsys, "site", "check", str(path))[2]

    said = problems()
    assert "amber.key' does not belong to the public key of 'amber' in the terms" in said and "ca.crt" in said
    (path.parent / "ca.crt").unlink()
    make_server_keys(path.parent, ["localhost"])
    write_terms(tmp_path, task={"auxiliary": None}, members={"amber": line, "birch": public_key(1)})
    assert problems() == ""
    (path.parent / "amber.key").chmod(0o640)
    assert "has permissions 640, so others can use it" in problems()


def test_check_needs_trust_for_code_that_the_terms_name(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    path = checked_site(tmp_path)
    write_terms(tmp_path)
    status, _, problems = typed(monkeypatch, capsys, "site", "check", str(path))
    assert status == 2 and "--trust" in problems
    assert typed(monkeypatch, capsys, "site", "check", str(path), "--trust")[0] == 0


def test_check_fails_in_a_sentence(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    path = checked_site(tmp_path, data="npz:gone.npz")
    status, _, problems = typed(monkeypatch, capsys, "site", "check", str(path))
    assert status == 2 and "there is no file" in problems and len(problems.splitlines()) == 1
