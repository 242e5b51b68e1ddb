"""A run overwrites nothing: it has a folder of its own, follows no links, and deletes only what it wrote."""

import multiprocessing
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import polyfed
from polyfed.config import experiment
from polyfed.errors import InputError
from polyfed.records import RunFolder
from polyfed.records.claim import locked, read_claim
from tests import support
from tests.stopping import StopAfterTwo


def everything(folder: Path) -> dict[str, bytes]:
    """All files below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def own() -> dict[str, Any]:
    return {"data": support.tiny_dataset(), "models": [support.Wide]}


def unfinished(path: Path) -> None:
    """A run that stopped after round 2 of 3."""
    settings = {**support.DEFAULTS, "rounds": 3, "method": "fedproto"}
    with pytest.raises(polyfed.RunError, match="stopped after round 2"):
        polyfed.run(**settings, **own(), out=path, watcher=StopAfterTwo())


@pytest.mark.parametrize(
    "name", ["checkpoint/resnet50.pt", "rounds.csv", "summary.json", "models/net.safetensors", "x"]
)
def test_a_folder_with_anything_in_it_is_not_touched(tmp_path: Path, name: str) -> None:
    file = tmp_path / "run" / name
    file.parent.mkdir(parents=True)
    file.write_text("mine")
    before = everything(tmp_path)
    with pytest.raises(InputError, match="'.*run' is not empty, and a run overwrites nothing: choose a new or empty"):
        polyfed.run("standalone", **support.DEFAULTS, **own(), out=tmp_path / "run")
    assert everything(tmp_path) == before


def test_an_empty_folder_will_do(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    polyfed.run("standalone", **support.DEFAULTS, **own(), out=tmp_path / "run")
    assert RunFolder.open(tmp_path / "run").finished


def test_a_file_in_the_place_of_the_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("mine")
    with pytest.raises(InputError, match="'.*run' is a file"):
        RunFolder.create(tmp_path / "run", experiment(method="standalone"))
    assert (tmp_path / "run").read_text() == "mine"


def test_a_run_that_was_killed_before_it_began_can_be_started_again(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", experiment(method="standalone"))
    (folder.path / "config.yaml").unlink()
    (folder.path / ".config.yaml.0123abcd.new").write_text("half")
    first = read_claim(folder.path)["id"]
    RunFolder.create(tmp_path / "run", experiment(method="standalone"))
    assert read_claim(folder.path)["id"] != first
    assert not (folder.path / ".config.yaml.0123abcd.new").exists()


def test_an_old_summary_does_not_make_a_run_finished(tmp_path: Path) -> None:
    unfinished(tmp_path / "run")
    (tmp_path / "run" / "summary.json").write_text('{"accuracy_final": 1.0}')
    result = polyfed.resume(tmp_path / "run", **own())
    assert result.rounds["round"].tolist() == [1, 2, 3]
    assert result.summary["rounds"] == 3


@pytest.mark.parametrize(
    ("settings", "trust"),
    [
        ({"models": "cnn5"}, False),
        ({"models": "cnn5,nets_of_user:Small"}, True),
        ({"models": "python:Small"}, False),  # passed again as Python objects
        ({"auxiliary": "nets_of_user:Small"}, True),
        ({"data": "npz:images.npz"}, False),
        ({"method": {"name": "pfedes", "proxy": "nets_of_user:proxy"}}, True),
    ],
)
def test_the_advice_to_resume_names_trust_where_code_is_imported(
    tmp_path: Path, settings: dict[str, Any], trust: bool
) -> None:
    path = tmp_path / "run"
    folder = RunFolder.create(path, experiment(**{"method": "standalone", **settings}))
    command = f"`polyfed resume {path}{' --trust' if trust else ''}`"
    with pytest.raises(InputError, match=re.escape(f"already holds a run; continue it with {command}, or choose")):
        RunFolder.create(path, experiment(method="standalone"))
    with pytest.raises(InputError, match=re.escape(f"is not finished; continue it with {command}.")):
        folder.summary()


def attempt(folder: Path, barrier: Any, results: Any) -> None:
    barrier.wait()
    try:
        RunFolder.create(folder, experiment(method="standalone"))
        results.put("created")
    except InputError as error:
        results.put(str(error))


def test_of_processes_that_want_one_folder_one_gets_it(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    for trial in range(5):
        barrier, results = context.Barrier(4), context.Queue()
        folder = tmp_path / str(trial)
        workers = [context.Process(target=attempt, args=(folder, barrier, results)) for _ in range(4)]
        for worker in workers:
            worker.start()
        said = [results.get(timeout=30) for _ in workers]
        for worker in workers:
            worker.join()
        assert said.count("created") == 1, said
        said.remove("created")
        assert all("already holds a run" in words or "another process is working on" in words for words in said)
        assert (folder / "rounds.csv").read_text().count("\n") == 1


def test_a_folder_that_is_worked_on_is_left_alone(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", experiment(method="standalone"))
    with locked(folder.path), pytest.raises(InputError, match="another process is working on"), folder.owned():
        pass


@pytest.mark.parametrize("name", ["checkpoint", "models", "rounds.csv", "events.jsonl", "summary.json", "clients.csv"])
def test_links_in_a_strangers_run_are_refused(tmp_path: Path, name: str) -> None:
    """What is behind a link stays as it is, and the link too."""
    unfinished(tmp_path / "run")
    victim = tmp_path / "victim"
    if name in ("checkpoint", "models"):
        victim.mkdir()
        (victim / "manifest.json").write_text("mine")
    else:
        victim.write_text("mine")
    place = tmp_path / "run" / name
    if place.is_dir():
        place.rename(tmp_path / "moved")
    else:
        place.unlink(missing_ok=True)
    place.symlink_to(victim)
    before = everything(victim) if victim.is_dir() else victim.read_text()
    with pytest.raises(InputError, match=rf"'.*{name}' is a link, and a run changes only files in its own folder"):
        polyfed.resume(tmp_path / "run", **own())
    assert (everything(victim) if victim.is_dir() else victim.read_text()) == before
    assert place.is_symlink()


@pytest.mark.parametrize("name", ["rounds.csv.new", ".rounds.csv.new", "checkpoint/manifest.json.new"])
def test_links_with_the_names_of_half_written_files_are_not_followed(tmp_path: Path, name: str) -> None:
    unfinished(tmp_path / "run")
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "run" / name).symlink_to(victim)
    polyfed.resume(tmp_path / "run", **own())
    assert victim.read_text() == "mine"


def test_half_written_files_of_a_killed_process_are_tidied_up(tmp_path: Path) -> None:
    unfinished(tmp_path / "run")
    ours = tmp_path / "run" / ".rounds.csv.0123abcd.new"
    others = [tmp_path / "run" / name for name in (".notes.txt.0123abcd.new", ".rounds.csv.mine.new")]
    for path in (ours, *others):
        path.write_text("half")
    polyfed.resume(tmp_path / "run", **own())
    assert not ours.exists() and all(path.exists() for path in others)


CODE = "from pathlib import Path\nfrom tests.support import Wide as Net\nPath({!r}).write_text('imported')\n"


def test_code_that_a_file_names_is_run_only_if_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger's run names a module; with a network of that name in the current folder it would be imported."""
    mark = tmp_path / "mark"
    monkeypatch.syspath_prepend(str(tmp_path))
    settings = {**support.DEFAULTS, "method": "standalone", "data": support.tiny_dataset(), "rounds": 3}
    (tmp_path / "helper_of_a_stranger.py").write_text(CODE.format(str(mark)))
    with pytest.raises(polyfed.RunError):
        polyfed.run(**settings, models="helper_of_a_stranger:Net", out=tmp_path / "run", watcher=StopAfterTwo())
    mark.unlink()
    monkeypatch.delitem(sys.modules, "helper_of_a_stranger")
    data = settings["data"]
    with pytest.raises(InputError, match="names code that would be run, 'helper_of_a_stranger:Net': .*--trust"):
        polyfed.resume(tmp_path / "run", data=data)
    assert not mark.exists()
    polyfed.resume(tmp_path / "run", data=data, trust=True)
    assert mark.read_text() == "imported"
    mark.unlink()
    monkeypatch.delitem(sys.modules, "helper_of_a_stranger")
    result = polyfed.resume(tmp_path / "run")  # finished: only read
    assert len(result.rounds) == 3
    assert not mark.exists()
    with pytest.raises(InputError, match="--trust"):
        result.model(0)
