"""What can be searched: how values are written, and the methods' own grids."""

from __future__ import annotations

from typing import Any

import pytest

from polyfed import METHODS
from polyfed.errors import InputError
from polyfed.tuning import Choices, Range, parse_search, search_space
from polyfed.tuning.space import check_space


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lr", "NAME=VALUE"),
        ("lr=0.1..", "not a range"),
        ("lr=0.1..0.01", "smaller"),
        ("lr=1,1", "twice"),
    ],
)
def test_a_search_that_can_not_be_read_is_explained(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        parse_search([text], "tpe")


def test_values_with_commas_are_a_list_and_what_is_no_yaml_is_a_text() -> None:
    assert parse_search(["models=[cnn5, 'cnn1,cnn5']"], "grid") == {"models": Choices(("cnn5", "cnn1,cnn5"))}
    assert parse_search(["models=[,cnn5"], "grid") == {"models": Choices(("[", "cnn5"))}


def test_a_range_is_no_grid() -> None:
    with pytest.raises(InputError, match="list them"):
        parse_search(["lr=0.001..0.1"], "grid")


def test_grids_of_numbers_are_ranges_for_tpe() -> None:
    space = search_space("standalone", {}, "tpe")
    assert space["training.lr"] == Range(0.01, 0.1) and space["training.epochs"] == Choices((1, 10))
    assert isinstance(search_space("standalone", {}, "grid")["training.lr"], Choices)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_a_grid_has_values_that_the_method_accepts_in_order(method: str) -> None:
    for name, values in METHODS[method].grid.items():
        assert list(values) == sorted(values)  # type: ignore[type-var]
        for value in values:
            METHODS[method].Config(**{name: value})
    check_space([method], {}, {})


def test_a_method_with_options_to_tune_has_a_grid() -> None:
    without = {name for name, method in METHODS.items() if method.Config.model_fields and not method.grid}
    assert not without


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("clients", (10, 20), "whose clients have other samples can't be compared; make a search for each value"),
        ("partition", ("iid", "dirichlet"), "other samples"),
        ("classes_per_client", (2, 3), "other samples"),
        ("alpha", (0.1, 1.0), "other samples"),
        ("min_samples", (5, 10), "other samples"),
        ("test_set", ("apart", "pooled"), "other samples"),
        ("split", ("8:1:1", "6:2:2"), "other samples"),
        ("data", ("digits", "mnist"), "other data"),
        ("evaluate", ("after-training", "after-download"), "scored at other moments"),
        ("devices", ("uniform", "three-tier"), "other devices"),
    ],
)
def test_what_changes_the_task_is_not_searched(name: str, values: tuple[Any, ...], words: str) -> None:
    """The easier task would win, whatever the other settings are."""
    with pytest.raises(InputError, match=f"^{name} can't be searched: trials .*{words}"):
        check_space(["fedproto"], {name: Choices(values)}, {})


def test_what_changes_how_clients_train_is_searched() -> None:
    given = {"participation": Choices((0.5, 1.0)), "models": Choices(("cnn1", "cnn5")), "start": Choices(("client",))}
    check_space(["standalone"], given, {})
