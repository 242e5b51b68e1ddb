"""Runs on digits travel from the command to the page: run, record, collect, render."""

import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from papers import campaign, sheet
from papers import collect as collecting
from papers import run as running
from papers.campaign import FOLDER, Run, read_campaign
from papers.collect import collect
from papers.page import comparisons_of, main
from papers.records import Record, append, check_settings, read_records
from polyfed.comparison import runner
from polyfed.comparison.plan import Cell
from polyfed.comparison.runner import finish
from polyfed.config import Experiment, experiment
from polyfed.errors import InputError, RunError
from polyfed.server.federation import Interrupted, Watcher
from tests.papers.tiny import TINY, record, written

ROOT = FOLDER.parent


def command(papers: Path, *more: str, names: Sequence[str] = ("tiny",)) -> int:
    places = ("--work", papers / "work", "--results", papers / "results", "--campaign", papers / "campaign.yaml")
    return running.main([*names, *map(str, places), "--out", str(papers / "new"), "--device", "cpu", *more])


def lines(folder: Path) -> list[Record]:
    return [json.loads(line) for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()]


def test_runs_become_a_page(papers: Path) -> None:
    """A second command has nothing to do, and a second collection changes nothing."""
    assert command(papers) == 0
    found = lines(papers / "new")
    assert [(each["method"], each["seed"]) for each in found] == [
        (method, seed) for method in ("standalone", "fedproto") for seed in range(3)
    ]
    proto = found[-1]
    assert list(proto["accuracy"]) == ["prototypes", "classifier", "own-prototypes"]
    assert proto["curves"]["classifier"][-1] == round(proto["accuracy"]["classifier"]["mean"]["last"], 4)
    assert proto["costs"]["upload_floats_per_round"] == 4 * 2 * 16  # clients, classes, features
    assert proto["margins"] and "margins" not in found[0]
    assert proto["settings"]["clients"] == 4 and "device" not in proto["settings"]
    assert len(json.dumps(proto)) < 4000
    assert not list((papers / "work" / "runs").iterdir())

    assert collect([papers / "new"], papers / "results", papers / "campaign.yaml") == 6
    before = (papers / "results" / "tiny.jsonl").read_text()
    assert collect([papers / "new"], papers / "results", papers / "campaign.yaml") == 0
    assert (papers / "results" / "tiny.jsonl").read_text() == before
    assert command(papers, "--out", str(papers / "again")) == 0
    assert lines(papers / "again") == []

    (papers / "docs" / "pictures").mkdir(parents=True)
    (papers / "docs" / "methods").mkdir()
    readme, own = papers / "README.md", papers / "docs" / "methods" / "standalone.md"
    for path in (readme, own):
        path.write_text("a\n<!-- results: begin -->\nold\n<!-- results: end -->\nb\n")
    (papers / "words" / "tiny.md").write_text("Words of ours.\n")
    main(papers, papers)
    text = (papers / "docs" / "results.md").read_text()
    assert "All 6 runs. **Reduced: scale smoke.**" in text and "Words of ours." in text
    assert "rounds 1 instead of 100" in text and "Runs left" not in text
    assert (papers / "docs" / "pictures" / "results-tiny.png").stat().st_size > 1000
    assert "| FedProto |" in readme.read_text() and "| 96.53 |" in own.read_text()
    assert "old" not in readme.read_text() + own.read_text()


def test_the_command_in_the_table_of_all_runs_repeats_a_recorded_run(
    papers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(papers, lambda run: record(run, 0.5) if run.seed == 1 else None)
    monkeypatch.chdir(papers)
    (told,) = {sheet.command(each) for each in lines(papers / "results") if each["method"] == "fedproto"}
    kept = papers / "runs" / "campaign" / "records"
    kept.mkdir(parents=True)
    (kept / "tiny-n10-cifar10-fedproto-seed1.json").write_text((papers / "results" / "tiny.jsonl").read_text())
    given = shlex.split(told)[3:]
    assert running.main([*given, "--campaign", "campaign.yaml", "--device", "cpu"]) == 0
    assert [(each["method"], each["seed"]) for each in lines(papers / "again")] == [("fedproto", 1)]


def test_every_run_is_recorded_when_it_ends(papers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut off after its first run, the command has that run's record, and hands it out again the next time."""

    def cut(cells: Sequence[Cell], folder: Path, *, tell: Callable[[str], None], **rest: Any) -> dict[str, str]:
        finish(cells[0].config, folder / "runs" / cells[0].name)
        finish(cells[1].config, folder / "runs" / cells[1].name)
        tell(f"1 of 6: {cells[0].name} finished")
        assert [each["seed"] for each in lines(papers / "new")] == [0]
        raise KeyboardInterrupt

    monkeypatch.setattr(running, "run_cells", cut)
    with pytest.raises(KeyboardInterrupt):
        command(papers)
    monkeypatch.setattr(running, "run_cells", lambda *given, **rest: (_ for _ in ()).throw(Interrupted("")))
    assert command(papers, "--out", str(papers / "later")) == 0
    assert [each["seed"] for each in lines(papers / "later")] == [0, 1]


def test_nothing_begins_after_the_deadline(papers: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(papers, "--minutes", "0") == 0
    out = capsys.readouterr().out
    assert "stopped with 0 of 6 runs done; the same command continues" in out and "0 of 6 runs recorded" in out


def test_runs_that_would_not_end_do_not_begin(
    papers: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first run tells the pace; by it, the others would take a million times as long as they may."""
    monkeypatch.setattr("papers.pace.MARGIN", 1e9)
    assert command(papers, "--whole", "--minutes", "60") == 0
    out = capsys.readouterr().out
    assert "1 of 6 runs recorded" in out and out.count("not begun: tiny-") == 5
    assert command(papers, "--minutes", "60") == 0
    assert "6 of 6 runs recorded" in capsys.readouterr().out


class Failing:
    """Stands for `finish`. Seed 0 fails after its first round, at first; seed 1 fails at once, always."""

    def __init__(self, then: Callable[[], None] = lambda: None) -> None:
        self.tried: list[int] = []
        self._then = then
        """What the second try of seed 0 begins with."""

    def __call__(self, config: Experiment, path: Path, watcher: Watcher | None = None, **more: Any) -> None:
        self.tried.append(config.seed)
        if config.seed == 1:
            raise RunError("no such network")
        if self.tried == [0]:
            with suppress(Interrupted):
                finish(config, path, Stops())
            raise RunError("the GPU is gone")
        if config.seed == 0:
            self._then()
        finish(config, path, watcher)


@pytest.mark.parametrize("whole", [False, True])
def test_a_run_that_fails_after_it_has_begun_is_tried_once_more(
    papers: Path, whole: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where seed 2 is not begun: by the pace of seed 0 it would take too long, and the rest of seed 0 does not."""
    (papers / "campaign.yaml").write_text(TINY.replace("eval_every: 1", "eval_every: 1, rounds: 3"))
    failing = Failing()
    monkeypatch.setattr(runner, "finish", failing)
    monkeypatch.setattr(running.Overseer, "can_end", lambda self, runs: not whole or "seed2" not in runs[0])
    assert command(papers, names=["tiny:standalone"]) == 1
    shown = capsys.readouterr()
    assert failing.tried == [0, 1, *([] if whole else [2]), 0]
    assert re.search(r"once more: \S*standalone-seed0\n", shown.out)
    assert f"{1 if whole else 2} of 3 runs recorded" in shown.out and "1 failed" in shown.out
    assert "seed1 failed: no such network" in shown.err and "the GPU is gone" not in shown.err


def test_what_failed_before_is_named_whatever_comes_of_the_second_try(
    papers: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is stopped by the deadline; or it fails again, as the only one and by what was asked for."""
    (papers / "campaign.yaml").write_text(TINY.replace("eval_every: 1", "eval_every: 1, rounds: 3"))

    def late() -> None:
        monkeypatch.setattr(running.Overseer, "stop_requested", True)

    def wrong() -> None:
        raise InputError("no such engine")

    monkeypatch.setattr(running.Overseer, "stop_requested", False)
    monkeypatch.setattr(runner, "finish", Failing(late))
    assert command(papers, names=["tiny:standalone"]) == 1
    shown = capsys.readouterr()
    assert "seed1 failed: no such network" in shown.err and "1 of 3 runs recorded" in shown.out
    assert re.search(r"seed0: \d of 3 rounds", shown.out)

    monkeypatch.setattr(running.Overseer, "stop_requested", False)
    monkeypatch.setattr(runner, "finish", Failing(wrong))
    assert (
        command(papers, "--work", str(papers / "other"), "--out", str(papers / "more"), names=["tiny:standalone"]) == 1
    )
    shown = capsys.readouterr()
    assert "seed1 failed: no such network" in shown.err and "seed0 failed: no such engine" in shown.err
    assert "1 of 3 runs recorded" in shown.out and "2 failed" in shown.out


def test_what_failed_and_is_not_begun_again_is_named(
    papers: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seed 0 fails so late that a second try would not end in time."""
    (papers / "campaign.yaml").write_text(TINY.replace("eval_every: 1", "eval_every: 1, rounds: 3"))
    failing = Failing()
    monkeypatch.setattr(runner, "finish", failing)
    monkeypatch.setattr(running.Overseer, "can_end", lambda self, runs: not failing.tried)
    assert command(papers, "--seeds", "0", names=["tiny:standalone"]) == 1
    shown = capsys.readouterr()
    assert failing.tried == [0] and "once more" in shown.out
    assert "seed0 failed: the GPU is gone" in shown.err and "0 of 1 runs recorded" in shown.out


def test_a_process_without_its_gpu_tries_nothing_again(papers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (papers / "campaign.yaml").write_text(TINY.replace("eval_every: 1", "eval_every: 1, rounds: 3"))
    failing = Failing()
    monkeypatch.setattr(runner, "finish", failing)
    monkeypatch.setattr(running, "gpu_has_failed", lambda device: device == "cpu")
    assert command(papers, names=["tiny:standalone"]) == 1
    assert failing.tried == [0, 1, 2]


def test_settings_of_an_entry_can_be_chosen(papers: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (papers / "campaign.yaml").write_text(TINY.replace("[n10/cifar10]", "[n10/cifar10, n50/cifar10]"))
    assert command(papers, "--minutes", "0", "--settings", "n50/cifar10", names=["tiny:standalone"]) == 0
    assert "0 of 3 runs recorded" in capsys.readouterr().out
    assert command(papers, "--settings", "n5/cifar10") == 2
    assert "unknown setting 'n5/cifar10': did you mean 'n50/cifar10'?" in capsys.readouterr().err


class Stops(Watcher):
    stop_requested = True


def test_a_run_that_failed_before_the_deadline_is_named_at_the_end(
    papers: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended: list[bool] = []
    monkeypatch.setattr(running.Overseer, "stop_requested", property(lambda self: bool(ended)))

    def fails(*given: Any) -> dict[str, BaseException]:
        ended.append(True)
        return {name: RunError("no more memory") for name in given[0]}

    monkeypatch.setattr(runner, "finish_group", fails)
    assert command(papers) == 1
    shown = capsys.readouterr()
    assert "standalone-seed0 failed: no more memory" in shown.err and "0 of 6 runs recorded" in shown.out
    assert "1 failed" in shown.out


def test_runs_that_the_deadline_stops_say_how_far_they_are(
    papers: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The deadline is over after the second of three rounds."""
    (papers / "campaign.yaml").write_text(TINY.replace("eval_every: 1", "eval_every: 1, rounds: 3"))
    monkeypatch.setattr(running.Overseer, "stop_requested", False)
    monkeypatch.setattr(
        running.Overseer,
        "on_round",
        lambda overseer, round, row: monkeypatch.setattr(type(overseer), "stop_requested", round == 2),
    )
    assert command(papers, names=["tiny:standalone"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"standalone.*seed0: 2 of 3 rounds, [\d.e-]+ s a round", said), said
    assert "0 of 3 runs recorded" in said


def test_how_far_runs_are_is_said_meanwhile(
    papers: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run waits after its first round until that has been said; what is said at the end is not meant here."""
    said = threading.Event()
    unfinished = running.Recorder.unfinished

    def overheard(recorder: running.Recorder) -> list[str]:
        found = unfinished(recorder)
        if any("fedproto-seed0: 1 of" in line for line in found):
            said.set()
        return found

    monkeypatch.setattr(running.Recorder, "unfinished", overheard)
    monkeypatch.setattr(running.Overseer, "on_round", lambda *given: given[0].folder and said.wait(20))
    assert command(papers, "--pace", "0.0001", "--seeds", "0", names=["tiny:fedproto"]) == 0
    out = capsys.readouterr().out
    assert said.is_set() and re.search(r"fedproto-seed0: 1 of \d+ rounds\n", out), out


@pytest.mark.parametrize(("number", "jobs"), [(signal.SIGINT, "1"), (signal.SIGTERM, "2")])
def test_a_signal_stops_runs_after_their_round(papers: Path, number: signal.Signals, jobs: str) -> None:
    """Nothing is killed: both runs leave a checkpoint, and the same command continues."""
    (papers / "campaign.yaml").write_text(TINY.replace("eval_every: 1", "eval_every: 1, rounds: 100000"))
    places = ["--work", papers / "work", "--results", papers / "results", "--campaign", papers / "campaign.yaml"]
    words = ["tiny:standalone", "--seeds", "0-1", "--jobs", jobs, *places, "--out", papers / "new", "--device", "cpu"]
    process = subprocess.Popen(
        [sys.executable, "-m", "papers.run", *map(str, words)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    folders, begun = papers / "work" / "runs", list[Path]()
    try:
        for _ in range(1200):
            begun = [path.parent for path in folders.glob("*/events.jsonl") if '"round"' in path.read_text()]
            if len(begun) >= int(jobs):
                break
            time.sleep(0.1)
        assert len(begun) >= int(jobs), "no run has begun in two minutes"
        process.send_signal(number)
        out, _ = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0
    assert "stopped with 0 of 2 runs done; the same command continues" in out and "of 100000 rounds" in out
    for folder in begun:
        assert any((folder / "checkpoint").iterdir())


def test_one_signal_after_the_deadline_stops_nothing_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    """Runs are writing their checkpoints then. The second may be for those who wait for them."""
    overseer = running.Overseer(0.0, [])
    assert overseer.stop_requested
    with overseer.listening():
        signal.raise_signal(signal.SIGTERM)
        assert "stopping after the rounds in progress" in capfd.readouterr().out
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("more", [(), ("--jobs", "2"), ("--together", "3")])
def test_what_a_run_notes_is_printed_once_and_recorded(
    papers: Path, more: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """A network that falls back to the loop must not be slow in silence, in whichever process it trains."""
    changed = "changes: {models: 'tests.comparison.networks:Branching', engine: vectorized, "
    (papers / "campaign.yaml").write_text(TINY.replace("changes: {", changed))
    assert command(papers, *more, names=["tiny:standalone"]) == 0
    said = capsys.readouterr().out.splitlines()
    words = "clients with tests.comparison.networks:Branching train one after another: "
    first, every = ([line for line in said if line.startswith(start)] for start in ("note of tiny-", "noted by "))
    assert len(first) == len(every) == 1 and words in first[0] and len(first[0]) < 260
    assert every[0].startswith(f"noted by 3 of 3 runs: {words}")
    assert said.index(first[0]) < next(place for place, line in enumerate(said) if line.startswith("1 of 3: "))
    assert [len(each["notes"]) for each in lines(papers / "new")] == [1, 1, 1]
    assert all(each["notes"][0].startswith(words) for each in lines(papers / "new"))


def test_notes_about_other_clients_are_not_printed_again(capsys: pytest.CaptureFixture[str]) -> None:
    overseer = running.Overseer(math.inf, ["one", "two"])
    overseer.on_note("one: clients 0, 1, 2 and 46 others: slow")
    overseer.on_note("two: client 3: slow")
    overseer.on_note("one: client 17: slow")
    overseer.on_note("one: round 12 continues without client 3: late")
    overseer.on_note("two: round 7 continues without client 30: late")
    told = ["clients …: slow", "client …: slow", "round … continues without client …: late"]
    printed = [f"note of {run}: {note}" for run, note in zip(("one", "two", "one"), told, strict=True)]
    assert capsys.readouterr().out.splitlines() == printed
    assert overseer.summary() == [f"noted by {n} of 2 runs: {note}" for n, note in zip((1, 2, 2), told, strict=True)]


def test_a_reader_that_leaves_ends_the_command_quietly() -> None:
    """As `| head` does: the pipe has no reader when the first line is written."""
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run([sys.executable, "-m", "papers.run"], cwd=ROOT, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (1, b"")


def test_only_what_is_asked_for_is_run(papers: Path) -> None:
    assert command(papers, "--seeds", "1", names=["tiny:fedproto"]) == 0
    assert [(each["method"], each["seed"]) for each in lines(papers / "new")] == [("fedproto", 1)]


@pytest.mark.parametrize(
    "names", [["tiny:fedproto,standalone"], ["tiny:standalone,fedproto"], ["tiny:fedproto", "tiny"]], ids=" ".join
)
def test_rows_run_in_the_order_in_which_they_are_named(papers: Path, names: list[str]) -> None:
    """So a deadline costs the last ones. An entry that is named again has what is left of it."""
    assert command(papers, "--seeds", "1", names=names) == 0
    first = "fedproto" if "tiny:fedproto" in names[0] else "standalone"
    assert [each["method"] for each in lines(papers / "new")] == sorted(("fedproto", "standalone"), key=first.__ne__)


def test_a_record_that_fails_costs_no_other_run(papers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run's folder stays, so that the next command records it."""
    good = running.record_of

    def record_of(run: Run, path: Path, **rest: Any) -> Record:
        return good(run, path, **rest) if run.seed else good(run, path / "nothing", **rest)

    monkeypatch.setattr(running, "record_of", record_of)
    assert command(papers, names=["tiny:standalone"]) == 1
    assert [each["seed"] for each in lines(papers / "new")] == [1, 2]
    monkeypatch.undo()
    assert command(papers, "--out", str(papers / "later"), "--minutes", "0", names=["tiny:standalone"]) == 0
    assert [each["seed"] for each in lines(papers / "later")] == [0, 1, 2]


@pytest.mark.parametrize("text", ["entries: [", "entries: 3", "- standalone"])
def test_a_file_that_is_no_campaign_is_refused(papers: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    (papers / "campaign.yaml").write_text(text)
    assert command(papers) == 2
    assert "is not a campaign" in capsys.readouterr().err


def test_a_deadline_is_a_number(papers: Path) -> None:
    with pytest.raises(SystemExit):
        command(papers, "--minutes", "nan")


def test_unknown_names_are_refused(papers: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(papers, names=["tiny:fedprot"]) == 2
    assert "row of tiny 'fedprot'" in (said := capsys.readouterr().err) and "fedproto" in said
    assert command(papers, names=["tiny:"]) == 2  # a list that a shell left empty is not all of them
    assert "row of tiny ''" in capsys.readouterr().err
    assert command(papers, names=["tin:fedproto"]) == 2
    assert "did you mean" in capsys.readouterr().err


def test_runs_train_together_as_asked(papers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1 is an answer too: without it, polyfed decides, and a GPU trains many runs together."""
    asked = []

    def cells_run(cells: Sequence[Cell], folder: Path, *, together: int | None, **rest: Any) -> dict[str, str]:
        asked.append(together)
        return {}

    monkeypatch.setattr(running, "run_cells", cells_run)
    for more in ((), ("--together", "1"), ("--together", "3")):
        assert command(papers, *more) == 0
    assert asked == [None, 1, 3]


def test_a_folder_with_another_run_costs_no_other_run(papers: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = papers / "work" / "runs" / "tiny-n10-cifar10-standalone-seed1"
    other.mkdir(parents=True)
    (other / "config.yaml").write_text("rounds: 99\n")
    assert command(papers, names=["tiny:standalone"]) == 1
    assert [each["seed"] for each in lines(papers / "new")] == [0, 2]
    assert "holds a run with rounds 99" in capsys.readouterr().err


def test_a_seed_that_is_not_planned_is_refused(papers: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(papers, "--seeds", "1-7") == 2
    assert "no run has the seed 3: the campaign has 0, 1, 2." in capsys.readouterr().err


def test_a_line_that_was_cut_off_spoils_no_other(papers: Path) -> None:
    """Killed while it wrote the second line, the command writes it again."""
    runs = read_campaign(papers / "campaign.yaml").runs()
    append(record(runs[0], 0.5), papers)
    with (papers / "tiny.jsonl").open("a") as file:
        file.write('{"entry":"tiny","sett')
    append(record(runs[1], 0.6), papers)
    assert list(read_records([papers])) == [runs[0].key, runs[1].key]


def test_together_needs_the_vectorized_engine(papers: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(papers, "--together", "3") == 2
    assert "only the vectorized engine" in capsys.readouterr().err


def test_collecting_is_refused_without_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert collecting.main([str(tmp_path / "nothing")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        collecting.main([])


def test_contradictions_are_refused(papers: Path) -> None:
    """Another accuracy of the same run, other settings, a run that is not planned: nothing is written."""
    written(papers, lambda run: record(run, 0.5))
    before = (papers / "results" / "tiny.jsonl").read_text()
    new = papers / "new"
    new.mkdir()
    for wrong, words in (
        (before.replace('"last-tenth": 0.5', '"last-tenth": 0.6'), "another record of standalone with seed 0"),
        ('{"entry": "tiny"}\n', "line 1 of .* is no record"),
    ):
        (new / "tiny.jsonl").write_text(wrong)
        with pytest.raises(InputError, match=words):
            collect([new], papers / "results", papers / "campaign.yaml")
        assert (papers / "results" / "tiny.jsonl").read_text() == before
    (papers / "campaign.yaml").write_text(TINY.replace("eval_every: 1", "rounds: 3"))
    with pytest.raises(InputError, match="standalone with seed 0 .* rounds 1, but the campaign has 3"):
        collect([], papers / "results", papers / "campaign.yaml")
    (papers / "campaign.yaml").write_text(TINY.replace("[0, 1, 2]", "[0, 1]"))
    with pytest.raises(InputError, match="seed 2 .* not in the campaign"):
        collect([], papers / "results", papers / "campaign.yaml")
    (papers / "results" / "tiny.jsonl").write_text(before[:-5])  # cut off while it was written
    assert len(read_records([papers / "results"])) == 5


def test_a_default_that_changed_after_a_run_is_noticed(papers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in the record of seed 0, which lacks it, unless the campaign no longer has the default."""
    records = {run.seed: record(run, 0.5) for run in read_campaign(papers / "campaign.yaml").runs()[:2]}
    del records[0]["settings"]["min_replies"]
    monkeypatch.setattr(campaign, "experiment", lambda **given: experiment(**{"min_replies": 2, **given}))
    first, second = read_campaign(papers / "campaign.yaml").runs()[:2]
    check_settings(first, records[0])
    with pytest.raises(InputError, match="standalone with seed 1 .* min_replies 1, but the campaign has 2"):
        check_settings(second, records[1])
    (papers / "campaign.yaml").write_text(TINY.replace("eval_every: 1", "eval_every: 1, min_replies: 3"))
    with pytest.raises(InputError, match="standalone with seed 0 .* min_replies 2, but the campaign has 3"):
        check_settings(read_campaign(papers / "campaign.yaml").runs()[0], records[0])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rounds": [1, 2], "curves": {"classifier": [0.1, 0.5]}}, "recorded up to round 2, but the campaign has 1"),
        ({"curves": {"classifier": [0.1, 0.5]}}, "line 1 of .* is no record"),
        ({"accuracy": None}, "line 1 of .* is no record"),
        ({"settings": None}, "line 1 of .* is no record"),
        ({"seed": [0]}, "line 1 of .* is no record"),
        ({"date": "\udc00"}, "line 1 of .* is no record"),
    ],
)
def test_a_record_of_a_shorter_run_or_a_part_of_one_is_refused(
    papers: Path, change: dict[str, Any], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = record(read_campaign(papers / "campaign.yaml").runs()[0], 0.5) | change
    line = json.dumps(found, ensure_ascii=False).encode("utf-8", "surrogatepass")
    (papers / "results" / "tiny.jsonl").write_bytes(line + b"\n")
    with pytest.raises(InputError, match=words):
        main(papers, papers)
    assert command(papers) == 2
    assert re.search(words, capsys.readouterr().err)


def test_a_kept_record_that_was_cut_off_is_named(papers: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = read_campaign(papers / "campaign.yaml").runs()[0].cell.name
    (papers / "work" / "records").mkdir(parents=True)
    (papers / "work" / "records" / f"{name}.json").write_text('{"entry": "ti')
    assert command(papers) == 2
    assert f"{name}.json' is no record: remove it" in capsys.readouterr().err


def test_a_missing_mean_of_best_rounds_is_left_out(papers: Path) -> None:
    """Of clients without test samples there is none."""
    written(papers, lambda run: record(run, 0.5) | ({"own_best": None} if run.seed else {}))
    (given,) = comparisons_of(read_campaign(papers / "campaign.yaml"), papers / "results")
    assert given.own_best("standalone", "n10/cifar10") == {0: pytest.approx(55)}
