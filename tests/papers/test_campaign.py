"""The campaign: every run is an experiment, every table of a paper finds its rows, and options are the papers'."""

import math
from collections import Counter

import pytest

from papers.campaign import Campaign, read_campaign
from polyfed.errors import InputError
from polyfed.reproduce.published import applicable

CAMPAIGN = read_campaign()


def test_all_runs_are_experiments_with_names_of_their_own() -> None:
    runs = CAMPAIGN.runs()
    assert len({run.key for run in runs}) == len({run.cell.name for run in runs}) == len(runs)
    assert {run.seed for run in runs if run.entry == "cifar100-n100"} == {2, 3, 4}


@pytest.mark.parametrize("name", CAMPAIGN.entries)
def test_every_published_row_has_a_run(name: str) -> None:
    """Otherwise a misspelt setting or a forgotten method would leave a hole in a table."""
    entry = CAMPAIGN.entries[name]
    for beside in entry.beside if entry.methods != ["standalone"] else ():  # that alone is the base of options to try
        for setting in entry.points:
            theirs = beside.setting or setting
            assert theirs in beside.of.settings, (name, theirs)
            named = {beside.named(row) for row in CAMPAIGN.rows[name]}
            wanted = {row for row in beside.of.entry.methods if applicable(beside.of, row, theirs)}
            assert wanted <= named, (name, beside.label, wanted - named)
            assert any(not math.isnan(beside.number(row, setting).value) for row in CAMPAIGN.rows[name])


def test_options_are_those_of_the_papers() -> None:
    """FD has FedTGP's variant only in FedTGP's tables; a row of another paper has that paper's options."""
    found = {(run.entry, run.row): run.config for run in CAMPAIGN.runs()}
    assert found["cifar100-n100", "fedssa"].options["stable_round"] == 20
    assert found["mnist-n100", "fedssa"].options["stable_round"] == 20
    assert found["cifar100-n100", "pfedes"].options["weight"] == 0.5
    assert found["cifar100-n100", "fd"].options["mean"] == "leave-one-out"
    assert found["fedtgp-practical-cifar100", "fd"].options["mean"] == "all"
    assert found["cnn1-cifar100-n10", "dc-pfl-600"].options["virtual_features"] == 600
    assert found["cnn1-cifar100-n10", "dc-pfl-without-gc"].options["calibrate"] is False
    listed = found["tuning-cifar100-n100", "pfedes weight=0.1 proxy_epochs=10 activation=none"].options
    assert (listed["weight"], listed["proxy_epochs"]) == (0.1, 10)
    both = [run.config for run in CAMPAIGN.runs(["fedtgp-sensitivity"]) if run.setting == "s10"]
    assert {config.options["server_epochs"] for config in both} == {10}


def test_methods_that_are_tuned_have_as_many_trials_each() -> None:
    entry = "tuning-cifar100-n100"
    trials = Counter(CAMPAIGN.method(entry, row) for row, options in CAMPAIGN.rows[entry].items() if options)
    assert trials == dict.fromkeys(["fedproto", "fedtgp", "fedssa", "pfedes", "dc-pfl"], 8)


def test_settings_are_those_of_the_recipe_with_the_entrys_changes() -> None:
    config = CAMPAIGN.runs(["cifar100-n100"])[0].config
    assert (config.clients, config.participation, config.rounds, config.eval_every) == (100, 0.1, 500, 10)
    assert (config.training.batch_size, config.training.epochs, config.models) == (64, 10, "papers")
    assert CAMPAIGN.runs(["fedtgp-practical-cifar10"])[0].config.rounds == 200


def test_long_runs_begin_first_and_seeds_stay_together() -> None:
    runs = CAMPAIGN.runs(["cifar100-n100"])
    assert [(run.row, run.seed) for run in runs[:4]] == [("fedkd", 2), ("fedkd", 3), ("fedkd", 4), ("pfedes", 2)]
    assert {run.row for run in runs[-15:]} == set(CAMPAIGN.groups["newer"])


def test_unknown_names_are_refused() -> None:
    with pytest.raises(InputError, match="cifar100-n11"):
        CAMPAIGN.runs(["cifar100-n11"])
    entry = {"title": "t", "recipe": "fedssa-table2", "settings": ["n10/cifar10"], "methods": ["fedsa"]}
    with pytest.raises(InputError, match="fedsa"):
        Campaign(seeds=[0], entries={"e": entry}).runs()  # type: ignore[dict-item]
