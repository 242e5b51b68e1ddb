"""Who sees how a run goes on: terminals, notebooks, pipes; and nothing that a user wrote is interpreted."""

from __future__ import annotations

import io
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import polyfed
from polyfed.config import experiment
from polyfed.data.reading import read_many
from polyfed.report import progress
from polyfed.report.progress import BarProgress, LineProgress, NotebookProgress, watched
from tests import support

SETTINGS: dict[str, Any] = {"models": support.Wide, "clients": 2, "rounds": 2, "device": "cpu"}
ROW = {"accuracy_mean": 0.5, "loss_mean": 1.25, "seconds": 1.0}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_run_in_a_pipe_says_nothing_unless_asked(capsys: pytest.CaptureFixture[str]) -> None:
    polyfed.run("standalone", data=support.tiny_dataset(), **SETTINGS)
    assert capsys.readouterr() == ("", "")
    polyfed.run("standalone", data=support.tiny_dataset(), **SETTINGS, progress=True)
    output, error = capsys.readouterr()
    assert output == "" and "round 2/2  accuracy" in error


def test_a_run_on_a_terminal_shows_a_bar_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for wish, shown in ((None, True), (False, False)):
        terminal = Terminal()
        monkeypatch.setattr(sys, "stderr", terminal)
        polyfed.run("standalone", data=support.tiny_dataset(), **SETTINGS, progress=wish)
        assert ("2/2" in terminal.getvalue()) == shown


def test_a_watcher_is_told_instead_of_a_bar() -> None:
    mine = polyfed.Watcher()
    with watched(mine, None) as told:
        assert told is mine
    with pytest.raises(polyfed.InputError, match="watcher and progress=True: give one"), watched(mine, True):
        pass
    with (
        pytest.raises(polyfed.InputError, match="the watcher is a value of type function: give a polyfed.Watcher"),
        watched(lambda row: None, None),  # type: ignore[arg-type]
    ):
        pass


Shown = list[tuple[str, dict[str, str]]]


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Shown:
    """A notebook's kernel, and what it was given to display or to put in the place of an earlier display."""
    shown: Shown = []

    class Handle:
        def update(self, content: dict[str, str], raw: bool) -> None:
            shown.append(("updated", content))

    def display(content: dict[str, str], raw: bool, display_id: bool = False) -> Handle:
        shown.append(("new", content))
        return Handle()

    kernel = type("ZMQInteractiveShell", (), {})()
    modules = {"IPython": types.ModuleType("IPython"), "IPython.display": types.ModuleType("IPython.display")}
    modules["IPython"].get_ipython = lambda: kernel  # type: ignore[attr-defined]
    modules["IPython.display"].display = display  # type: ignore[attr-defined]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return shown


def test_a_notebook_has_one_bar_that_changes(notebook: Shown) -> None:
    with watched(None, None) as told:
        assert isinstance(told, NotebookProgress)
        told.on_start(experiment(method="standalone", rounds=2), 1)
        told.on_round(1, ROW)
        told.on_note("remarkable")
        told.on_round(2, ROW)
    assert [kind for kind, _ in notebook] == ["new", "updated", "new", "updated"]
    assert [content["text/html"][:33] for kind, content in notebook if kind == "updated"] == [
        '<progress value="1.00" max="2" st', '<progress value="2.00" max="2" st',
    ]  # fmt: skip
    assert notebook[2][1] == {"text/plain": "note: remarkable"}
    assert notebook[3][1]["text/plain"].startswith("round 2/2  accuracy 50.00 %")


def test_a_notebook_s_bar_moves_with_clients_but_not_with_every_one(
    notebook: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four clients of a round that end at once are one drawing at most; after a moment the next is drawn."""
    clock = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    with watched(None, None) as told:
        told.on_start(experiment(method="standalone", clients=8, participation=0.5, rounds=2), 2)
        for client in range(3):
            told.on_client(2, client)
        assert len(notebook) == 1
        clock[0] += 1
        told.on_client(2, 3)
    assert [content["text/html"][:22] for _, content in notebook] == [
        '<progress value="1.00"',
        '<progress value="2.00"',
    ]


def test_a_result_is_a_small_table_in_which_nothing_is_interpreted(tmp_path: Path) -> None:
    result = polyfed.run("standalone", data=support.tiny_dataset(), **SETTINGS, out=tmp_path / "<b>x&y")
    html = result._repr_html_()
    assert "&lt;b&gt;x&amp;y</caption>" in html and "<b>" not in html
    assert f"<td>{100 * result.summary['accuracy_final']:.2f} %</td>" in html
    assert html.count("<tr>") == html.count("</tr>") >= 7


@pytest.mark.parametrize("kind", [LineProgress, BarProgress])
def test_reading_shows_a_sign_of_life_and_notes_stay_as_they_are(kind: type[LineProgress | BarProgress]) -> None:
    text = io.StringIO()
    console = Console(file=text, markup=False, emoji=False, highlight=False, width=100)
    watcher = kind(console)
    with watcher.showing():
        read_many(str, list(range(10)), "flowers[red]102")
        watcher.on_start(experiment(method="standalone", rounds=2), 1)
        watcher.on_note("client [red]:b: x[/b]")
        watcher.on_round(1, ROW)
    assert "note: client [red]:b: x[/b]" in text.getvalue()
    if kind is LineProgress:
        assert "flowers" not in text.getvalue()  # it took no time, so it needs no line


def test_long_reading_is_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, text = [100.0], io.StringIO()
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    watcher = LineProgress(Console(file=text, markup=False, width=100))
    for done in range(20):
        watcher.on_reading("flowers[red]102", done, 20)
        clock[0] += 1
    assert text.getvalue().splitlines() == [
        f"reading flowers[red]102: {done} of 20 pictures" for done in (3, 14)
    ]  # fmt: skip


def test_an_accuracy_that_does_not_exist_is_a_dash() -> None:
    text = io.StringIO()
    watcher = LineProgress(Console(file=text, width=100))
    watcher.on_start(experiment(method="standalone", rounds=2), 1)
    watcher.on_round(1, {**ROW, "accuracy_mean": float("nan")})
    assert "accuracy –  loss 1.2500" in text.getvalue()


def test_consoles_print_what_they_are_given(capsys: pytest.CaptureFixture[str]) -> None:
    progress.plain_console().print("runs/[red]a :b: x[/b] 'text' 12")
    assert capsys.readouterr().out == "runs/[red]a :b: x[/b] 'text' 12\n"


@pytest.mark.parametrize("kind", [LineProgress, BarProgress])
def test_a_real_federation_shows_who_is_there_and_who_has_answered(kind: type[LineProgress | BarProgress]) -> None:
    output = io.StringIO()
    shown = kind(Console(file=output, width=100, force_terminal=kind is BarProgress))
    with shown.showing():
        shown.on_start(experiment(method="standalone", clients=2, rounds=2), 1)
        shown.on_members({0: "amber"}, {1: "birch"})
        shown.on_members({0: "amber", 1: "birch"}, {})
        shown.on_client(1, 1)
        shown.on_client(1, 0)
        if isinstance(shown, BarProgress):
            assert shown._bar.tasks[0].description == "round 1, answered: birch, amber"
        shown.on_round(1, {**ROW, "replies": 2})
    assert "here: amber; missing: birch" in output.getvalue() and "here: amber, birch\n" in output.getvalue()
    assert kind is BarProgress or "round 1/2  2 of 2 answered  accuracy 50.00 %" in output.getvalue()
