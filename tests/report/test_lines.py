"""What progress says: a line for each evaluated round, a bar that moves with every client, or nothing."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from polyfed.config import experiment
from polyfed.report.progress import BarProgress, LineProgress, QuietProgress

CONFIG = experiment(method="standalone", clients=4, rounds=10, participation=0.5)
ROW = {"accuracy_mean": 0.9756, "loss_mean": 0.1234, "seconds": 1.26}


def console() -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, width=80, markup=False, emoji=False, highlight=False), text


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that a clock shows, to be set by a test."""
    shown = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: shown[0])
    return shown


def test_a_line_tells_the_round_its_numbers_and_the_time_left(clock: list[float]) -> None:
    screen, text = console()
    progress = LineProgress(screen)
    progress.on_start(CONFIG, 1)
    clock[0] += 4
    progress.on_round(2, ROW)  # two rounds took 4 s, and eight are left
    assert text.getvalue() == "round 2/10  accuracy 97.56 %  loss 0.1234  1.3 s  16 s left\n"


def test_the_time_left_of_a_resumed_run_counts_its_own_rounds_only(clock: list[float]) -> None:
    screen, text = console()
    progress = LineProgress(screen)
    progress.on_start(CONFIG, 7)
    clock[0] += 6
    progress.on_round(8, ROW)
    assert text.getvalue().endswith("  6 s left\n")


def test_a_round_without_evaluation_has_no_line() -> None:
    screen, text = console()
    progress = LineProgress(screen)
    progress.on_start(CONFIG, 1)
    progress.on_client(1, 0)
    progress.on_round(1, None)
    assert text.getvalue() == ""


@pytest.mark.parametrize("kind", [LineProgress, BarProgress])
def test_a_long_note_is_whole_and_a_path_in_it_can_be_copied(kind: type[LineProgress | BarProgress]) -> None:
    screen, text = console()
    progress = kind(screen)
    progress.on_start(CONFIG, 1)
    progress.on_note("client 3 [shared]: " + "many words " * 9 + "runs/today")
    shown = text.getvalue()
    assert " ".join(shown.split()).startswith("note: client 3 [shared]: many words many")
    assert "runs/today" in shown


def test_quiet_says_nothing_at_all() -> None:
    screen, text = console()
    progress = QuietProgress(screen)
    with progress.watching():
        progress.on_start(CONFIG, 1)
        progress.on_client(1, 0)
        progress.on_note("something remarkable")
        progress.on_round(1, ROW)
    assert text.getvalue() == ""
    assert not progress.stop_requested


def shown_bar(progress: BarProgress) -> tuple[float, float | None, dict[str, Any]]:
    task = progress._bar.tasks[0]
    return task.completed, task.total, task.fields


def test_a_bar_moves_with_every_client_and_begins_where_the_run_goes_on() -> None:
    """Two of four clients take part, so each is half a round."""
    progress = BarProgress(console()[0])
    progress.on_start(CONFIG, 4)
    assert shown_bar(progress)[:2] == (3, 10)
    progress.on_client(4, 1)
    assert shown_bar(progress)[0] == 3.5
    progress.on_client(4, 2)
    progress.on_round(4, None)
    assert shown_bar(progress)[0] == 4 and "97.56" not in shown_bar(progress)[2]["accuracy"]
    progress.on_round(5, ROW)
    assert shown_bar(progress)[0] == 5 and shown_bar(progress)[2]["accuracy"] == "accuracy 97.56 %  loss 0.1234"


def test_a_bar_fits_80_columns() -> None:
    text = io.StringIO()
    progress = BarProgress(Console(file=text, width=80, force_terminal=True, color_system=None))
    with progress.watching():
        progress.on_start(CONFIG, 1)
        progress.on_round(10, ROW)
    last = text.getvalue().replace("\x1b[?25h", "").split("\x1b[2K")[-1]
    assert len(last.rstrip()) <= 80
    assert "10/10" in last and "accuracy 97.56 %  loss 0.1234" in last and last.rstrip().endswith("left")
