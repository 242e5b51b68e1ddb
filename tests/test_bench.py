"""The benchmark measures what it says; how fast anything is, is no test."""

from __future__ import annotations

from dataclasses import asdict
from statistics import median

import pytest

from polyfed import bench
from polyfed.addresses import trusting
from polyfed.report.tables import measurement_line, measurements_table


@pytest.mark.parametrize("method", ["standalone", "fedproto"])
def test_a_case_is_measured_against_the_plain_loop(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "IMAGES", 70)  # two steps per client
    original, asked = bench.plain_times, []
    monkeypatch.setattr(bench, "plain_times", lambda *given: (asked.extend(given[2]), original(*given))[1])
    case = bench.Case("tiny", method=method, models="cnn5", clients=3, participants=2)
    result = bench.measure(case, "auto", "cpu", repeats=2, warm_up=1)
    assert (result.engine, len(result.times), result.seconds) == ("threads", 2, median(result.times))
    assert result.steps_per_second == pytest.approx(2 * 2 / result.seconds)
    assert result.plain_seconds is not None
    assert result.ratio == pytest.approx(result.plain_seconds / result.seconds)
    assert 0 <= result.outside < 1
    with bench.federation(case, "threads", "cpu") as (run, _):
        assert asked == [run.participants(number) for number in (2, 3)]  # the same that the engine trained


@pytest.mark.parametrize(("models", "slow"), [("tests.comparison.networks:Branching", True), ("cnn5", False)])
def test_an_engine_that_falls_back_to_the_loop_says_so(
    models: str, slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it comes, in the table, and for programs."""
    monkeypatch.setattr(bench, "IMAGES", 70)
    case = bench.Case("tiny", models=models, clients=3, plain=False)
    with trusting(True):
        result = bench.measure(case, "vectorized", "cpu", repeats=1, warm_up=1)
    words = f"note on tiny: clients with {models} train one after another"
    for shown in (measurement_line(result), str(measurements_table("a machine", [result]).caption)):
        assert (words in shown) == slow and ("note" in shown) == slow
    assert len(asdict(result)["notes"]) == slow


def test_more_than_a_hundred_clients_share_images() -> None:
    _, clients = bench.setting(bench.Case("many", models="cnn5", clients=150, participants=10), "threads", "cpu")
    assert len(clients.dataset) == 100 * bench.IMAGES
    assert clients.data[120].train.tolist() == clients.data[20].train.tolist()
    assert {len(data.train) for data in clients.data.values()} == {bench.IMAGES}


def test_cases_are_chosen_by_letter_and_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(bench, "measure", lambda case, *rest, say: asked.append(case.name))
    list(bench.run_cases("cpu"))
    assert {name[0] for name in asked} == {"a", "c", "f"}  # the others want a GPU
    asked.clear()
    list(bench.run_cases("cpu", only="be"))
    assert [name[0] for name in asked] == ["b", "e"]


def test_warm_up_is_what_the_first_rounds_took_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "IMAGES", 70)
    took = iter([9.0, 5.0, 2.0, 2.0, 2.0, 2.0, 2.0])
    monkeypatch.setattr(bench, "timed", lambda work, device: (work(), next(took))[1])
    case = bench.Case("tiny", models="cnn5", clients=3, plain=False)
    assert bench.measure(case, "auto", "cpu").warm_up == pytest.approx(9 + 5 - 2 * 2)
