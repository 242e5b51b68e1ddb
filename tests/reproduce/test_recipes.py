"""Recipes: every cell is a valid experiment, and what a paper gives wins over what is ours."""

import math

import pytest

from polyfed.errors import InputError
from polyfed.methods import METHODS
from polyfed.reproduce.published import _all, applicable, published
from polyfed.reproduce.recipes import SCALES, Recipe, Sources, find_recipe, recipes

RECIPES = [recipe for recipe in recipes() if not recipe.entry.not_yet]
ASKED_FOR = [
    *(f"pfedes-table{number}" for number in (1, 2)), *(f"pfedes-arxiv-table{number}" for number in (2, 3)),
    "pfedes-figure2", "pfedes-figure3", *(f"pfedes-arxiv-figure{number}" for number in (3, 4, 5, 8, 9, 10)),
    *(f"fedssa-table{number}" for number in (1, 2)), *(f"fedssa-figure{number}" for number in (3, 4, 6, 7)),
    *(f"fedtgp-table{number}" for number in range(1, 8)), "fedtgp-figure1",
    *(f"dc-pfl-table{number}" for number in (1, 2, 3)), *(f"dc-pfl-figure{number}" for number in (2, 3)),
]  # fmt: skip


def test_every_table_and_figure_with_data_has_a_recipe() -> None:
    assert set(ASKED_FOR) <= {recipe.name for recipe in recipes()}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_every_cell_is_an_experiment_at_every_scale(recipe: Recipe) -> None:
    for scale in SCALES:
        for setting in recipe.settings:
            for method in recipe.entry.methods:
                assert recipe.experiment(method, setting, scale).rounds >= 1


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_settings_of_a_recipe_differ(recipe: Recipe) -> None:
    """Except in a sweep over options, where the default is a value of both."""
    method = recipe.entry.methods[-1]
    found = [recipe.experiment(method, setting, "paper") for setting in recipe.settings]
    swept = any("method" in recipe.sources(setting).given for setting in recipe.settings)
    assert swept or all(config not in found[:number] for number, config in enumerate(found))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_names_in_a_recipe_exist(recipe: Recipe) -> None:
    entry = recipe.entry
    assert entry.reference is None or entry.reference in entry.methods
    assert set(entry.targets) <= set(recipe.settings)
    assert {recipe.variant(name).method or name for name in entry.methods} <= METHODS.keys()
    assert entry.published is None or find_recipe(entry.published)


def test_every_published_number_belongs_to_a_cell() -> None:
    """A misspelt method or setting in the table of numbers would silently have no counterpart."""
    assert len(_all()) == 644
    for name, method, setting in _all():
        recipe = find_recipe(name)
        assert method in recipe.entry.methods, (name, method)
        assert setting in recipe.settings, (name, setting)


@pytest.mark.parametrize("name", sorted({name for name, _, _ in _all()}))
def test_every_cell_of_a_table_has_its_published_number_or_a_reason(name: str) -> None:
    recipe = find_recipe(name)
    for method in recipe.entry.methods:
        for setting in recipe.settings:
            theirs = published(recipe, method, setting)
            assert theirs.note or not math.isnan(theirs.value), (method, setting)


@pytest.mark.parametrize(
    ("name", "method", "setting", "value"),
    [
        ("pfedes-table1", "pfedes", "n50/cifar100", 63.55),
        ("pfedes-arxiv-table3", "fml", "n100/cifar100", 15.21),
        ("fedssa-table2", "standalone", "n100/cifar100", 53.04),
        ("fedtgp-table1", "fd", "practical/tiny-imagenet", 24.87),
        ("fedtgp-table2", "fedproto", "m100", 28.95),
        ("fedtgp-table5", "fml", "cifar100", 36.99),
        ("fedtgp-table6", "fedtgp-without-f", "flowers102", 49.39),
        ("fedtgp-table7", "fedtgp", "s1", 43.41),
        ("dc-pfl-table1", "standalone", "n10/cifar100", 59.62),
        ("dc-pfl-table1", "dc-pfl-without-gc", "n100/cifar10", 92.32),
        ("dc-pfl-table3", "dc-pfl-2000", "n50", 67.67),
    ],
)
def test_published_numbers_are_in_the_right_cells(name: str, method: str, setting: str, value: float) -> None:
    assert published(find_recipe(name), method, setting).value == value


def test_a_figure_can_use_the_numbers_of_a_table() -> None:
    assert published(find_recipe("fedssa-figure4"), "fedssa", "n100/cifar100").value == 57.29
    assert math.isnan(published(find_recipe("fedssa-figure6"), "fedssa", "n100/cifar10-2").value)


def test_a_method_that_needs_equal_heads_does_not_run_where_they_differ() -> None:
    recipe = find_recipe("fedtgp-table2")
    assert not applicable(recipe, "lg-fedavg", "res34-htc4")
    assert applicable(recipe, "lg-fedavg", "htfe9")
    assert applicable(recipe, "fedtgp", "res34-htc4")


def test_what_is_given_and_what_is_ours_make_the_experiment() -> None:
    """The preset is ours and has batch 512; batch 64 is ours too and more specific; the rest is the paper's."""
    config = find_recipe("fedssa-table2").experiment("fedssa", "n100/cifar100", "paper")
    assert (config.clients, config.participation, config.classes_per_client) == (100, 0.1, 10)
    assert (config.models, config.auxiliary, config.split, config.data) == ("papers", "cnn5", "fedssa", "cifar100")
    assert (config.training.batch_size, config.training.epochs, config.training.lr) == (64, 10, 0.01)
    assert (config.training.momentum, config.training.augment, config.rounds) == (0.9, True, 500)
    assert config.method["history"] == 0.5


def test_a_preset_that_is_ours_does_not_replace_what_is_given() -> None:
    settings = Sources(given={"lr": 0.5}, ours={"preset": "released-code"}).settings
    assert settings["training"]["lr"] == 0.5
    assert settings["training"]["momentum"] == 0.9


def test_a_setting_has_one_source() -> None:
    with pytest.raises(ValueError, match="lr can't be both given and ours"):
        Sources(given={"lr": 0.5}, ours={"lr": 0.1})


def test_points_change_options_of_a_method() -> None:
    recipe = find_recipe("fedtgp-table7")
    assert recipe.experiment("fedtgp", "tau10", "paper").method["threshold"] == 10
    assert recipe.experiment("fedtgp", "tau10", "paper").method["server_epochs"] == 100
    assert recipe.experiment("fedtgp", "s10", "paper").method["server_epochs"] == 10


def test_small_gives_every_client_the_same_number_of_visits() -> None:
    """Ten visits are 10 rounds if all take part and 100 rounds if a tenth does."""
    recipe = find_recipe("fedssa-table2")
    rounds = [recipe.experiment("fedssa", f"{n}/cifar10", "small").rounds for n in ("n10", "n50", "n100")]
    assert rounds == [10, 50, 100]


def test_a_limit_lowers_a_setting_and_adds_none() -> None:
    assert find_recipe("fedssa-figure6").experiment("fedssa", "n100/cifar100-90", "smoke").classes_per_client == 10
    assert find_recipe("fedssa-figure6").experiment("fedssa", "n100/cifar10-2", "smoke").classes_per_client == 2
    assert find_recipe("fedtgp-table6").experiment("fedtgp", "cifar100", "smoke").classes_per_client == 2


def test_an_unknown_recipe_names_the_nearest() -> None:
    with pytest.raises(InputError, match="unknown recipe 'fedsa-table2': did you mean 'fedssa-table2'"):
        find_recipe("fedsa-table2")
