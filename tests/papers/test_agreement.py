"""Which printed gains we have: intervals by hand, and what is not counted."""

from pathlib import Path

import pytest

from papers.agreement import Verdict, agreement, is_opposite, verdict
from papers.campaign import Run, read_campaign
from papers.page import comparisons_of, page
from papers.records import Record
from polyfed.comparison.statistics import Interval
from tests.papers.tiny import TINY, record, written

FULL = TINY.replace("    scale: smoke\n", "")
LINK = "[tiny](#digits)"


@pytest.mark.parametrize(
    ("low", "high", "theirs", "kind", "opposite"),
    [
        (0.5, 1.5, 1.4, Verdict.AS_PRINTED, False),
        (0.5, 1.5, 1.5, Verdict.AS_PRINTED, False),
        (0.5, 1.5, 0.4, Verdict.MORE, False),
        (0.5, 1.5, -0.4, Verdict.MORE, True),
        (0.5, 1.5, 1.6, Verdict.LESS, False),
        (-1.5, -0.5, -1.0, Verdict.AS_PRINTED, False),
        (-1.5, -0.5, 0.1, Verdict.LESS, True),
        (-1.0, 2.0, 1.9, Verdict.EITHER, False),
        (-1.0, 2.0, -0.9, Verdict.EITHER, False),
        (-1.0, 2.0, 2.1, Verdict.LESS, False),
        (-1.0, 2.0, -1.1, Verdict.MORE, False),
    ],
)
def test_where_a_printed_gain_lies(low: float, high: float, theirs: float, kind: Verdict, opposite: bool) -> None:
    ours = Interval((low + high) / 2, low, high)
    assert (verdict(ours, theirs), is_opposite(ours, theirs)) == (kind, opposite)


def table(papers: Path, campaign: str, gains: dict[str, list[float]]) -> list[str]:
    """With runs whose gains over Standalone's 50 % are these points, by row and seed; others are not made."""

    def made(run: Run) -> Record | None:
        own = gains.get(run.row, [0.0] * 9 if run.row == "standalone" else [])
        return record(run, 0.5 + own[run.seed] / 100) if run.seed < len(own) else None

    (papers / "campaign.yaml").write_text(campaign)
    written(papers, made)
    return agreement(comparisons_of(read_campaign(papers / "campaign.yaml"), papers / "results")).splitlines()


def test_the_table_by_hand(papers: Path) -> None:
    """FedProto gains 1, 2 and 3 points, 2 ± 2.5, and both papers print −0.02, which counts once. FedSSA's 0.01 is
    printed by one; it gains 1, 1 and 1.03, that is 1.01 ± 0.04. FedKD's −16.33 would be the other sign. FML is said to
    lose in one paper and not to converge in the other. FedGH has two seeds of three, and FedAvg is in neither table.
    """
    names = "fedproto, fedssa, fedkd, fml, fedgh, fedavg"
    same = dict.fromkeys(("fedkd", "fml", "fedavg"), [1.0, 1.0, 1.1])
    gains = {"fedproto": [1, 2, 3], "fedssa": [1.0, 1.0, 1.03], "fedgh": [1.0, 1.0], **same}
    lines = table(papers, FULL.replace("[standalone, fedproto]\n", f"[standalone, {names}]\n"), gains)
    assert lines[0] == "| method | as printed | as printed or zero | more | less | did not converge there |"
    assert len(lines) == 7
    assert lines[2] == f"| FedProto |  | {LINK} (−0.02) |  |  |  |"
    assert lines[3] == f"| FedSSA |  |  | {LINK} (+0.01) |  |  |"
    assert lines[4].startswith(f"| FedKD |  |  | **{LINK} (−16.33)** |")
    assert lines[5] == f"| FML |  |  | **{LINK} (−66.05)** |  | {LINK} |"
    assert lines[6] == "| all | 0 | 1 | 3 | 0 | 1 |"


def test_nothing_counts_that_is_not_complete_or_smaller_than_the_paper(papers: Path) -> None:
    gains = {"fedproto": [1.0, 1.0, 1.1]}
    assert len(table(papers, FULL, gains)) == 4
    assert table(papers, TINY, gains) == []
    assert table(papers, FULL.replace("    changes", "    reduced: {rounds: 7}\n    changes"), gains) == []
    other = FULL.replace("[n10/cifar10]", "[n10/cifar10, n50/cifar10]")
    assert table(papers, other, gains) == []
    assert table(papers, FULL, {"fedproto": [1.0, 1.0]}) == []
    four = FULL.replace("seeds: [0", "seeds: [3, 0")
    assert table(papers, four, gains) == []
    gains = {"fedproto": [1.0, 1.0, 1.1, 1.0]}
    assert len(table(papers, four, gains)) == 4
    assert table(papers, four, {**gains, "standalone": [0.0, 0.0, 0.0]}) == []
    assert table(papers, FULL.replace("seeds: [0, 1, 2]", "seeds: [0, 1]"), gains) == []  # no interval


def test_the_page_has_the_table_below_its_words(papers: Path) -> None:
    (papers / "words" / "agreement.md").write_text("## Which\n")
    gains = {"fedproto": [1.0, 1.0, 1.1]}
    lines = table(papers, FULL, gains)
    campaign = read_campaign(papers / "campaign.yaml")
    assert page(comparisons_of(campaign, papers / "results"), papers / "words").startswith(
        "\n".join(["## Which", "", *lines, "", "## Digits"])
    )
    table(papers, TINY, gains)  # nothing to say: no words either
    campaign = read_campaign(papers / "campaign.yaml")
    assert page(comparisons_of(campaign, papers / "results"), papers / "words").startswith("## Digits")
