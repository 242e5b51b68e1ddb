"""The page that follows from records: tables by hand, what is missing, what was noted."""

import io
import math
import shlex
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from papers.campaign import FOLDER, Run, read_campaign
from papers.page import all_runs, comparisons_of, front, of_method, page, with_table
from papers.pictures import draw, gained_over, later, pictures
from papers.records import Record
from papers.run import asked
from papers.tables import accuracies, costs, margins, other_rules, sweep
from tests.papers.tiny import TINY, record, written

ROOT = FOLDER.parent


def test_tables_by_hand(papers: Path) -> None:
    """FedProto has 51, 54 and 54: 53 ± √3. It gains 1, 2 and 3 points: 2, and 4.303 / √3 = 2.48 to either side."""
    base, gains = {0: 0.50, 1: 0.52, 2: 0.51}, {0: 0.01, 1: 0.02, 2: 0.03}

    def made(run: Run) -> Record:
        pairs = {"margins": [[3.0, 1.0], [5.0, 2.0]]} if run.row == "fedproto" else {}
        return record(run, base[run.seed] + (gains[run.seed] if run.row == "fedproto" else 0), **pairs)

    written(papers, made)
    campaign = read_campaign(papers / "campaign.yaml")
    (found,) = comparisons_of(campaign, papers / "results")
    rows = [line.split(" | ") for line in accuracies(found, "n10/cifar10").splitlines()]
    assert rows[0][:4] == ["| method", "seeds", "ours", "minus Standalone"]
    assert rows[2] == ["| Standalone", "3", "51.0 ± 1.0", "", "49.0 ± 1.0", "56.0 ± 1.0", "51.0 ± 1.0",
                       "96.53", "", "96.53", " |"]  # fmt: skip
    assert rows[3][:6] == ["| FedProto", "3", "53.0 ± 1.7", "+2.0 (−0.5 to +4.5)", "51.0 ± 1.7", ""]
    assert rows[3][7:] == ["96.51", "−0.02", "96.51", "−0.02 |"]
    assert "| FedProto, by prototypes | 53.0 ± 1.7 | +2.0 (−0.5 to +4.5) |" in other_rules(found, "n10/cifar10")
    assert "| FedProto | 4.00 | 1.50 |" in margins(found)
    assert "| Standalone | 4.0 | 4.0 | 4e-06 | 2 | 3 |" in costs(found)
    shown = front(campaign, [found], papers / "words")
    assert shown.splitlines()[-2:] == ["| Standalone | 51.0 (96.53) |", "| FedProto | +2.0 ± 2.5 (−0.02) |"]
    assert shown.startswith("## ") and "means over 3 seeds" in shown and "(docs/results.md)" in shown
    (papers / "words" / "front.md").write_text("What agrees.\n")
    assert front(campaign, [found], papers / "words") == f"{shown}\n\nWhat agrees."
    own = of_method("fedproto", campaign, [found]).splitlines()[-1].split(" | ")
    assert own[0] == "| [Digits, reduced](../results.md#digits)"
    assert own[1:] == ["53.0 ± 1.7", "+2.0 (−0.5 to +4.5)", "96.51 (−0.02) |"]
    assert of_method("fedssa", campaign, [found]) == ""


def test_what_is_missing_is_said(papers: Path) -> None:
    """Two of three seeds: no interval, no place on the front page, and never called complete."""
    written(papers, lambda run: record(run, 0.5) if run.seed < 2 else None)
    campaign = read_campaign(papers / "campaign.yaml")
    comparisons = comparisons_of(campaign, papers / "results")
    text = page(comparisons, papers / "words")
    assert "**Not complete: 4 of 6 runs.**" in text and "| FedProto | 2 of 3 | 50.0 ± 0.0 | 0.0 |" in text
    assert "| `tiny` | Digits | 2 of 6 |" in text and "No run yet" not in text
    (papers / "words" / "front.md").write_text("What agrees.")
    assert front(campaign, comparisons, papers / "words") == ""
    assert with_table("no markers", "table") == "no markers"
    assert "| FedProto | 50.0 ± 0.0 (2 of 3) |" in sweep(comparisons[0])
    draw(comparisons[0], comparisons[0].order, papers / "curves.png")
    (papers / "campaign.yaml").write_text(TINY.replace("fedproto]\n    changes", "fedproto, fedssa]\n    changes"))
    written(papers, lambda run: record(run, 0.5) if run.row != "fedssa" else None)
    comparisons = comparisons_of(read_campaign(papers / "campaign.yaml"), papers / "results")
    assert "**Not complete: 6 of 9 runs.** No run yet: FedSSA. **Reduced" in page(comparisons, papers / "words")
    shown = front(campaign, comparisons, papers / "words")  # the front page has what is complete
    assert "| FedProto | 0.0 ± 0.0 (−0.02) |" in shown
    for methods, lines in {
        "standalone, fedproto, fedssa, fedavg": [],  # not more than half of them
        "fedproto, fedssa": [],  # nor the base
        "standalone, fedproto, fedavg": ["FedAvg | "],  # which the entry does not have
        "standalone, fedproto, fedssa": ["FedSSA | not run yet (+0.01)"],
    }.items():
        chosen = campaign.model_copy(update={"front": {"methods": methods.split(", "), "entries": ["tiny"]}})
        shown = front(chosen, comparisons, papers / "words").partition("\n\nWhat")[0]
        assert shown.splitlines()[-1:] == [f"| {line} |" for line in lines]


def test_accuracies_near_the_best_have_two_digits_everywhere(papers: Path) -> None:
    """Gains of 0.01, 0.02 and 0.03 points are 0.02, and 0.025 to either side; with one digit they would be none."""
    (papers / "campaign.yaml").write_text(TINY.replace("margins", "digits: 2\n    margins"))
    written(papers, lambda run: record(run, 0.99 + (run.row == "fedproto") * 0.0001 * (run.seed + 1)))
    campaign = read_campaign(papers / "campaign.yaml")
    (found,) = comparisons_of(campaign, papers / "results")
    gain = "99.02 ± 0.01 | +0.02 (0.00 to +0.04)"
    assert f"| FedProto | 3 | {gain} | 97.02 ± 0.01 |" in accuracies(found, "n10/cifar10")
    assert f"| FedProto, by prototypes | {gain} |" in other_rules(found, "n10/cifar10")
    assert front(campaign, [found], papers / "words").endswith("| 99.00 (96.53) |\n| FedProto | +0.02 ± 0.02 (−0.02) |")
    assert f"| {gain} |" in of_method("fedproto", campaign, [found])


def test_options_and_parts_of_methods_have_a_picture_of_their_own(papers: Path) -> None:
    (papers / "campaign.yaml").write_text(TINY.replace("changes", "lists: {fedproto: {weight: [2, 3]}}\n    changes"))
    campaign = read_campaign(papers / "campaign.yaml")
    variants = ["fedproto weight=2", "fedproto weight=3"]
    for made, expected in {
        (): {},
        ("standalone", *variants): {"": ["standalone", "fedproto"], "-variants": ["standalone", "fedproto", *variants]},
        ("standalone", "fedproto"): {"": ["standalone", "fedproto"]},
    }.items():
        written(papers, lambda run, made=made: record(run, 0.5) if run.row in made else None)  # type: ignore[misc]
        (found,) = comparisons_of(campaign, papers / "results")
        assert {each.file: each.rows for each in pictures(found)} == {
            f"results-tiny{kind}.png": rows for kind, rows in expected.items()
        }
        text = page([found], papers / "words")
        assert text.count("](pictures/results-tiny") == len(expected)
        for each in pictures(found):
            draw(found, each.rows, papers / each.file)


def test_the_front_page_says_what_did_not_converge_in_a_paper(papers: Path) -> None:
    """Neither paper has a number for FedAPEN here; one has one for FML."""
    (papers / "campaign.yaml").write_text(TINY.replace("fedproto]\n    changes", "fedapen, fml]\n    changes"))
    written(papers, lambda run: record(run, 0.5))
    campaign = read_campaign(papers / "campaign.yaml")
    chosen = campaign.model_copy(update={"front": {"methods": ["standalone", "fedapen", "fml"], "entries": ["tiny"]}})
    shown = front(chosen, comparisons_of(campaign, papers / "results"), papers / "words")
    assert "| FedAPEN | 0.0 ± 0.0 (did not converge) |\n| FML | 0.0 ± 0.0 (−66.05) |" in shown


def test_the_front_page_has_each_printed_gain_once(papers: Path) -> None:
    """pFedES and FedSSA print the same numbers, DC-PFL others."""
    more = "fedssa-table2, {recipe: dc-pfl-table2, setting: cifar10}]"
    (papers / "campaign.yaml").write_text(TINY.replace("fedssa-table2]", more))
    written(papers, lambda run: record(run, 0.5))
    campaign = read_campaign(papers / "campaign.yaml")
    shown = front(campaign, comparisons_of(campaign, papers / "results"), papers / "words")
    assert shown.splitlines()[-2:] == [
        "| Standalone | 50.0 (96.53; 92.84) |",
        "| FedProto | 0.0 ± 0.0 (−0.02; +1.52) |",
    ]


def test_gains_of_fewer_seeds_say_so(papers: Path) -> None:
    """FedProto has all three seeds, Standalone only two of them: a gain of 1 and 2 points is 1.5, without interval."""
    gains = {0: 0.01, 1: 0.02, 2: 0.3}

    def made(run: Run) -> Record | None:
        return (
            record(run, 0.5 + gains[run.seed]) if run.row == "fedproto" else record(run, 0.5) if run.seed < 2 else None
        )

    written(papers, made)
    (found,) = comparisons_of(read_campaign(papers / "campaign.yaml"), papers / "results")
    rows = accuracies(found, "n10/cifar10").splitlines()[2:]
    assert rows[0].startswith("| Standalone | 2 of 3 | 50.0 ± 0.0 |  |")
    assert rows[1].startswith("| FedProto | 3 | 61.0 ± 16.5 | +1.5 [2 seeds] |")


def test_rows_of_a_method_s_own_page_say_what_is_unusual(papers: Path) -> None:
    """Options, fewer seeds, a base other than Standalone, even one without runs; no row of several settings."""
    entry = TINY[TINY.index("    title") :]
    several = entry.replace("settings: [n10/cifar10]", "settings: [n10/cifar10, n50/cifar10]")
    other = entry.replace("    changes", "    base: fedproto\n    lists: {fedproto: {weight: [2]}}\n    changes")
    (papers / "campaign.yaml").write_text(f"seeds: [0, 1, 2]\nentries:\n  tiny:\n{other}  several:\n{several}")
    campaign = read_campaign(papers / "campaign.yaml")

    def shown(name: str, made: Callable[[Run], bool]) -> list[str]:
        written(papers, lambda run: record(run, 0.5) if made(run) else None)
        table = of_method(name, campaign, comparisons_of(campaign, papers / "results"))
        return [line.replace("[Digits, reduced](../results.md#digits)", "…") for line in table.splitlines()[6:]]

    assert shown("standalone", lambda run: run.row == "standalone") == [
        "| …, gains over FedProto | 50.0 ± 0.0 | 96.53 (+0.02) |"
    ]
    assert shown("fedproto", lambda run: run.seed < 2 or run.row == "fedproto") == [
        "| … | 50.0 ± 0.0 |  | 96.51 |",
        "| …, `fedproto weight=2`, 2 of 3 seeds, gains over FedProto | 50.0 ± 0.0 | 0.0 |  |",
    ]


def test_what_the_methods_without_runs_would_bring_is_left_out(papers: Path) -> None:
    """Without the base there are no gains. A table that has none of the methods with runs is not spoken of."""
    tables = "{recipe: fedtgp-table1, setting: practical/cifar10}, {recipe: dc-pfl-table3, setting: n10}"
    other = f"beside: [fedssa-table2, {tables}]"
    (papers / "campaign.yaml").write_text(TINY.replace("beside: [pfedes-table2, fedssa-table2]", other))
    written(papers, lambda run: record(run, 0.5) if run.row == "fedproto" else None)
    text = page(comparisons_of(read_campaign(papers / "campaign.yaml"), papers / "results"), papers / "words")
    assert "No run yet: Standalone. Without Standalone there are no gains." in text
    assert "minus Standalone" not in text and "Unlike FedTGP, Table 1: " in text
    assert "Unlike DC-PFL" not in text


def test_the_base_alone_is_no_table(papers: Path) -> None:
    """Its runs count as made, and are shown when there is something to compare them with."""
    written(papers, lambda run: record(run, 0.5) if run.row == "standalone" else None)
    campaign = read_campaign(papers / "campaign.yaml")
    comparisons = comparisons_of(campaign, papers / "results")
    text = page(comparisons, papers / "words")
    assert "## Digits" not in text and "| `tiny` | Digits | 3 of 6 |" in text
    assert of_method("standalone", campaign, comparisons) == ""


@pytest.mark.parametrize(("seeds", "seconds"), [(2, "|  |"), (3, "| 3 |")])
def test_times_are_of_one_machine(papers: Path, seeds: int, seconds: str) -> None:
    """Two runs of a row were made on a CPU: where there are others it has their seconds, and else none."""

    def made(run: Run) -> Record | None:
        if run.row == "standalone":
            return record(run, 0.5)
        slow = {"machine": "2 cores", "seconds": 900.0} if run.seed < 2 else {}
        return record(run, 0.5, **slow) if run.seed < seeds else None

    written(papers, made)
    (found,) = comparisons_of(read_campaign(papers / "campaign.yaml"), papers / "results")
    by_row = {line.split(" | ")[0]: line for line in costs(found).splitlines()}
    assert by_row["| Standalone"].endswith("| 3 |") and by_row["| FedProto"].endswith(seconds)


def test_published_costs_are_not_shown_as_accuracies(papers: Path) -> None:
    """The first table beside ours has floats. On the front page the base's own numbers would be among them."""
    both = "base: fedproto\n    beside: [{recipe: fedtgp-table5, setting: cifar100}, fedssa-table2]"
    (papers / "campaign.yaml").write_text(TINY.replace("beside: [pfedes-table2, fedssa-table2]", both))
    written(papers, lambda run: record(run, 0.5))
    campaign = read_campaign(papers / "campaign.yaml")
    comparisons = comparisons_of(campaign, papers / "results")
    assert comparisons[0].entry.beside[0].number("fedproto", "n10/cifar10").value > 0
    assert of_method("fedproto", campaign, comparisons).endswith("| 50.0 ± 0.0 | 96.51 |")
    assert front(campaign, comparisons, papers / "words").endswith("| FedProto | 50.0 (96.51) |")


def test_the_page_has_what_runs_noted(papers: Path) -> None:
    """A record without the field was made before notes were kept: it tells nothing about the others."""
    notes = {0: {"notes": ["slow `x`"]}, 1: {"notes": []}, 2: {}}
    written(papers, lambda run: record(run, 0.5, **notes[run.seed]))
    text = page(comparisons_of(read_campaign(papers / "campaign.yaml"), papers / "results"), papers / "words")
    assert "- Noted by 2 of 4 runs: `slow 'x'`\n" in text


def test_gains_are_paired_by_seed_and_round() -> None:
    """Seeds 0 and 1 gain 2 and 4 points in round 2; nobody gains in a round or with a seed that the base lacks."""

    def curve(method: str, seed: int, accuracies: dict[int, float]) -> pd.DataFrame:
        rounds, values = list(accuracies), list(accuracies.values())
        return pd.DataFrame({"method": method, "seed": seed, "round": rounds, "accuracy": values})

    parts = [curve("base", 0, {2: 0.5, 4: 0.6}), curve("base", 1, {2: 0.3})]
    parts += [curve("a", 0, {2: 0.52, 4: 0.55}), curve("a", 1, {2: 0.34, 4: 0.9}), curve("a", 2, {2: 0.9})]
    found = gained_over(pd.concat(parts), "base")
    assert found[found["method"] == "base"]["accuracy"].tolist() == [0, 0, 0]
    gained = found[found["method"] == "a"].set_index(["seed", "round"])["accuracy"]
    assert dict(gained) == pytest.approx({(0, 2): 0.02, (0, 4): -0.05, (1, 2): 0.04})


def test_the_axis_of_gains_is_that_of_the_second_half() -> None:
    """From −1 to 4 points with a deviation of 1 there: −2 to 5, and a tenth of that more to each side."""
    means, stds = [-0.4, -0.01, 0.04], [0.2, 0.01, 0.01]
    low, high = later(pd.DataFrame({"round": [10, 50, 100], "accuracy": means, "std": stds}))
    assert (low, high) == pytest.approx((-2.7, 5.7))
    low, high = later(pd.DataFrame({"round": [1], "accuracy": [0.01], "std": [math.nan]}))
    assert (low, high) == pytest.approx((0.5, 1.5))  # one seed, one method: not an empty axis


def test_all_runs_are_in_one_table(papers: Path) -> None:
    """A row for each rule, whose last round is two points below; the command makes that run and no other."""
    own = "fedproto]\n    lists: {fedproto: {weight: [2]}}\n    changes"
    (papers / "campaign.yaml").write_text(TINY.replace("fedproto]\n    changes", own))
    written(papers, lambda run: record(run, 0.5 + run.seed / 10) if run.seed else None)
    campaign = read_campaign(papers / "campaign.yaml")
    comparisons = comparisons_of(campaign, papers / "results")
    rows = pd.read_csv(io.StringIO(all_runs(comparisons)))
    assert list(zip(rows["method"], rows["seed"], rows["rule"], strict=True)) == [
        *(("fedproto", seed, rule) for seed in (1, 2) for rule in ("prototypes", "classifier")),
        *(("fedproto weight=2", seed, rule) for seed in (1, 2) for rule in ("prototypes", "classifier")),
        *(("standalone", seed, "classifier") for seed in (1, 2)),
    ]
    first = rows.iloc[0]
    assert (first["last_tenth"], first["last_round"], first["own_best"]) == pytest.approx((0.6, 0.58, 0.65))
    assert (first["upload_bytes_per_round"], first["machine"], first["date"]) == (4000, "a GPU", "2026-11-16")
    assert math.isnan(first["validation_last_tenth"]) and math.isnan(rows.iloc[1]["own_best"])
    for line in rows["command"]:
        name, _, setting, _, seed, *folders = shlex.split(line)[3:]
        (run,) = [run for run in asked(campaign, name, {}) if str(run.seed) == seed]
        assert line in set(rows["command"][(rows["method"] == run.row) & (rows["seed"] == run.seed)])
        assert setting == run.setting and folders[::2] == ["--results", "--out", "--work"]


def test_the_page_is_what_the_records_give() -> None:
    """After a change of records, words or the campaign: make results."""
    campaign = read_campaign()
    comparisons = comparisons_of(campaign, FOLDER / "results")
    assert (ROOT / "docs" / "results.md").read_text() == page(comparisons, FOLDER / "words")
    assert (FOLDER / "results" / "runs.csv").read_text() == all_runs(comparisons)
    readme = (ROOT / "README.md").read_text()
    assert readme == with_table(readme, front(campaign, comparisons, FOLDER / "words"))
    for path in (ROOT / "docs" / "methods").glob("*.md"):
        assert path.read_text() == with_table(path.read_text(), of_method(path.stem, campaign, comparisons))
    for each in comparisons:
        for picture in pictures(each):
            assert (ROOT / "docs" / "pictures" / picture.file).exists()
