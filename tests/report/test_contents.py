"""What the tables say, and the same content for programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.table import Table

import polyfed
from polyfed.config import experiment
from polyfed.records.origin import settings_by_name
from polyfed.report import tables

ROOT = Path(polyfed.__file__).parent.parent

SUMMARY: dict[str, Any] = {
    "method": "fedproto", "rounds": 20, "accuracy_final": 0.98765, "accuracy_at_best_validation": 0.9,
    "best_validation_round": 17, "accuracy_best": 0.991, "best_round": 18, "upload_floats": 2_621_558,
    "upload_bytes": 10_486_232, "download_floats": 999, "download_bytes": 4096, "flops": 1.5e12, "seconds": 12.34,
}  # fmt: skip


def rows(table: Table) -> list[list[str]]:
    return [list(row) for row in zip(*([str(cell) for cell in column.cells] for column in table.columns), strict=True)]


def test_a_summary_has_every_number_with_its_round_or_unit() -> None:
    shown = {row[0]: row[1:] for row in rows(tables.summary_table(SUMMARY))}
    assert shown["accuracy, final"] == ["98.77 %", "round 20"]
    assert shown["accuracy at the round best on validation"] == ["90.00 %", "round 17"]
    assert shown["accuracy, best on test"] == ["99.10 %", "round 18"]
    assert shown["communication, up"] == ["2.62 M", "floats, 10.49 MB"]
    assert shown["communication, down"] == ["999 ", "floats, 4.10 kB"]
    assert shown["computation of the clients"] == ["1.50 T", "FLOPs"]
    assert shown["time for training and server"] == ["12.3", "seconds"]
    assert "simulated time of all rounds" not in shown
    shown = {row[0]: row[1:] for row in rows(tables.summary_table({**SUMMARY, "simulated_seconds": 61.25}))}
    assert shown["simulated time of all rounds"] == ["61.2", "seconds"]


def test_a_summary_without_accuracies_names_no_best_round() -> None:
    shown = {row[0]: row[1:] for row in rows(tables.summary_table({**SUMMARY, "accuracy_best": None, "best_round": 1}))}
    assert shown["accuracy, best on test"] == ["–", ""]


@pytest.mark.parametrize("missing", [None, float("nan")])
def test_a_summary_says_that_there_are_no_validation_samples(missing: float | None) -> None:
    summary = {**SUMMARY, "accuracy_at_best_validation": missing, "best_validation_round": 0}
    shown = {row[0]: row[1:] for row in rows(tables.summary_table(summary))}
    assert shown["accuracy at the round best on validation"] == ["–", "no validation samples"]


def test_every_method_network_and_dataset_has_its_row() -> None:
    assert [row[0] for row in rows(tables.methods_table())] == list(polyfed.METHODS)
    for table, values in (
        (tables.networks_table(), tables.networks()),
        (tables.datasets_table(), tables.datasets()),
    ):
        assert [row[0] for row in rows(table)] == [value["name"] for value in values]
    for method in tables.methods():
        if method["options"]:
            assert [row[0] for row in rows(tables.options_table(method))] == [o["name"] for o in method["options"]]


def test_one_method_has_its_paper_its_needs_its_page_and_options_with_ranges() -> None:
    method = tables.about_method(polyfed.METHODS["fedproto"])
    shown = dict(rows(tables.method_table(method)))
    assert shown["paper"] == "Tan et al., AAAI 2022" and shown["clients need"] == "same number of features"
    assert (ROOT / shown["explained in"]).is_file()
    options = {row[0]: row[1:] for row in rows(tables.options_table(method))}
    assert options["distance"][0] == "euclidean" and options["distance"][1].endswith("(one of euclidean, mse)")


def test_every_setting_of_an_experiment_is_listed() -> None:
    listed = {setting["name"]: setting for setting in tables.settings()}
    wanted = {name for name in settings_by_name(experiment(method="standalone")) if not name.startswith("method.")}
    assert set(listed) == wanted | {"method", "preset"}
    assert listed["training.lr"]["default"] == 0.05 and listed["training.lr"]["range"] == "a number greater than 0"


def test_values_for_programs_are_plain() -> None:
    for values in (tables.methods(), tables.networks(), tables.datasets(), tables.settings()):
        assert json.loads(json.dumps(values)) == values
    (fedproto,) = (method for method in tables.methods() if method["name"] == "fedproto")
    assert fedproto["requires"] == ["features"] and {"name", "default", "range", "description"} == set(
        fedproto["options"][0]
    )
