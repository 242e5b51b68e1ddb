"""Which runs a comparison consists of, and which it refuses before any of them begins."""

from pathlib import Path
from typing import Any

import pytest

from polyfed.comparison.plan import Cell, checked_seeds, concerns, folder_name, grid, plan
from polyfed.errors import InputError


def test_every_method_runs_with_every_seed() -> None:
    cells = plan(["standalone", "fedproto"], [0, 3], {"clients": 4, "lr": 0.2})
    assert [cell.name for cell in cells] == ["standalone-seed0", "standalone-seed3", "fedproto-seed0", "fedproto-seed3"]
    assert [cell.config.seed for cell in cells] == [0, 3, 0, 3]
    assert {cell.config.clients for cell in cells} == {4}
    assert {cell.config.training.lr for cell in cells} == {0.2}


def test_a_swept_option_concerns_only_methods_that_have_it() -> None:
    """Standalone has no weight, so it runs once and belongs to the tables of both weights; clients concern all."""
    cells = plan(["standalone", "fedproto"], [0], {}, {"method.weight": [0.5, 1], "clients": [4, 5]})
    assert [cell.name for cell in cells] == [
        "standalone-clients=4-seed0",
        "standalone-clients=5-seed0",
        "fedproto-method.weight=0.5-clients=4-seed0",
        "fedproto-method.weight=0.5-clients=5-seed0",
        "fedproto-method.weight=1-clients=4-seed0",
        "fedproto-method.weight=1-clients=5-seed0",
    ]
    assert [(cell.config.clients, cell.config.method.get("weight")) for cell in cells[:3]] == [
        (4, None),
        (5, None),
        (4, 0.5),
    ]
    points = grid(cells)
    assert len(points) == 4
    at = {"clients": 5, "method.weight": 1}
    assert [c.name for c in cells if concerns(c, at)] == [
        "standalone-clients=5-seed0",
        "fedproto-method.weight=1-clients=5-seed0",
    ]


def test_shortcuts_are_swept_by_their_full_names() -> None:
    cells = plan(["standalone"], [0], {}, {"batch-size": [8, 16]})
    assert [cell.point for cell in cells] == [{"training.batch_size": 8}, {"training.batch_size": 16}]
    assert [cell.config.training.batch_size for cell in cells] == [8, 16]


def test_files_are_methods_with_options_labelled_by_their_names(tmp_path: Path) -> None:
    (tmp_path / "heavy.yaml").write_text("method: {name: fedproto, weight: 5}\nseed: 7\ntraining: {lr: 0.3}\n")
    (tmp_path / "best.yaml").write_text(
        "methods:\n  standalone: {training.lr: 0.1}\n  fedtgp: {method.margin: fixed}\n"
    )
    cells = plan([str(tmp_path / "heavy.yaml"), "fedproto", tmp_path / "best.yaml"], [0], {"clients": 3})
    assert [(cell.method, cell.config.method["name"], cell.seed) for cell in cells] == [
        ("heavy", "fedproto", 0),
        ("fedproto", "fedproto", 0),
        ("standalone", "standalone", 0),
        ("fedtgp", "fedtgp", 0),
    ]
    heavy, plain, alone, tgp = (cell.config for cell in cells)
    assert (heavy.method["weight"], heavy.training.lr, heavy.clients, heavy.seed) == (5, 0.3, 3, 0)
    assert plain.method["weight"] != 5
    assert alone.training.lr == 0.1
    assert tgp.method["margin"] == "fixed"


def test_options_of_a_method_can_be_set_for_those_that_have_them() -> None:
    alone, proto = plan(["standalone", "fedproto"], [0], {"method": {"weight": 3}})
    assert "weight" not in alone.config.method
    assert proto.config.method["weight"] == 3


@pytest.mark.parametrize(
    ("methods", "seeds", "settings", "sweeps", "words"),
    [
        (["fedprot"], [0], {}, {}, "unknown method 'fedprot': did you mean 'fedproto'"),
        (["standalone", "standalone"], [0], {}, {}, "method standalone is given twice: .*YAML file"),
        ([], [0], {}, {}, "no method to compare"),
        (["standalone"], [0, 1, 0], {}, {}, "seed 0 is given twice: give it once"),
        (["standalone"], [], {}, {}, "there is no seed"),
        (["standalone"], 3, {}, {}, r"seeds is 3, but must be a list such as \[0, 1, 2\], or text such as '0-2'"),
        (["standalone"], [-1], {}, {}, "seed -1 must be a whole number at least 0"),
        (["standalone"], [0], {"seed": 3}, {}, "seed can't be set .* use --seeds"),
        (["standalone"], [0], {"method": {"weight": 1}}, {}, "none of standalone has an option 'weight'"),
        (["standalone"], [0], {}, {"method.weight": [1]}, "none of standalone has an option 'weight'"),
        (["standalone"], [0], {}, {"clinets": [1]}, "unknown setting 'clinets': did you mean 'clients'"),
        (["standalone"], [0], {}, {"a.b": [1]}, "'a.b' can't be swept: name a setting"),
        (["standalone"], [0], {}, {"seed": [1]}, "'seed' can't be swept: use --seeds"),
        (["standalone"], [0], {}, {"method": ["fedavg"]}, "'method' can't be swept: list methods as arguments"),
        (["standalone"], [0], {}, {"clients": []}, "the sweep of clients needs values"),
        (["standalone"], [0], {}, {"clients": [2, 2]}, "value of clients 2 is given twice"),
        (["standalone"], [0], {"clients": 2}, {"clients": [2, 3]}, "clients is both set and swept"),
        (["standalone"], [0], {"lr": 2}, {"training.lr": [2, 3]}, "training.lr is both set and swept"),
        (["standalone"], [0], {}, {"lr": [1], "training.lr": [2]}, "training.lr is swept twice"),
        (["standalone"], [0], {}, {"clients": [0]}, "clients is 0, but must be a whole number at least 1"),
        (
            ["standalone"],
            [0],
            {"training": {"lr": 0.1, "momentum": 0.1, "batch_size": 3, "epochs": 1, "weight_decay": 0, "clip": None,
                          "augment": False}},
            {"preset": ["paper", "released-code"]},
            "the sweep changes nothing for standalone: preset=released-code",
        ),
    ],
)  # fmt: skip
def test_what_can_t_be_compared_is_refused_in_a_sentence(
    methods: list[str], seeds: list[int], settings: dict[str, Any], sweeps: dict[str, Any], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        plan(methods, seeds, settings, sweeps)


def test_runs_on_other_federations_do_not_belong_together(tmp_path: Path) -> None:
    file = tmp_path / "other.yaml"
    file.write_text("method: fedproto\nclients: 5\n")
    with pytest.raises(InputError, match="clients is 10 for standalone and 5 for other, so they can't be compared"):
        plan(["standalone", file], [0])
    assert [cell.config.clients for cell in plan(["standalone", file], [0], {"clients": 5})] == [5, 5]


def test_code_that_a_file_names_needs_trust(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("method: standalone\nmodels: tests.support:Narrow\n")
    with pytest.raises(InputError, match="names code that would be run"):
        plan([file], [0])
    assert plan([file], [0], trust=True) and plan([file], [0], {"models": "cnn5"})


def test_folder_names_are_safe_and_never_the_same() -> None:
    names = [folder_name(label, 0, {}) for label in ("a/b", "a_b", "a:b", "../../x", "..")]
    assert len(set(names)) == 5
    assert not any(set(name) & set("/:\\") or name.startswith(".") for name in names)
    assert folder_name("a_b", 0, {}) == "a_b-seed0"
    long = [folder_name("fedproto", 1, {"models": "cnn1," * 60 + last}) for last in "ab"]
    assert len(set(long)) == 2 and all(len(name) < 200 for name in long)


def test_a_cell_knows_its_folder() -> None:
    (cell,) = plan(["fedproto"], [2], {}, {"clients": [3]})
    assert isinstance(cell, Cell)
    assert cell.name == "fedproto-clients=3-seed2"


def test_seeds_may_be_any_list_or_a_text() -> None:
    for seeds in ("0-2,7", [0, 1, 2, 7], (seed for seed in (0, 1, 2, 7))):
        assert checked_seeds(seeds) == [0, 1, 2, 7]
    for wrong, words in ((3, "must be a list"), ([], "no seed"), (["0"], "whole number"), ([0, 0], "twice")):
        with pytest.raises(InputError, match=words):
            checked_seeds(wrong)  # type: ignore[arg-type]
