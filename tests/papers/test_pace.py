"""What a group of runs is expected to take, worked out by hand, and what may begin by that."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from papers import run as running
from papers.campaign import Run, read_campaign
from papers.pace import Pace, progress

CAMPAIGN = """
seeds: [0, 1, 2]
effort: {pfedes: 4}
entries:
  short: &one
    title: Rounds by the hundred
    recipe: fedssa-table2
    settings: [n10/cifar10]
    methods: [standalone, fedproto, pfedes]
  long:
    <<: *one
    settings: [n50/cifar10]
  cnn1:
    <<: *one
    recipe: fedssa-table1
  other-data:
    <<: *one
    settings: [n10/cifar100]
  more-epochs:
    <<: *one
    changes: {epochs: 30}
"""


class Place:
    """Runs that are read by their names, and folders in which they have made rounds."""

    def __init__(self, folder: Path) -> None:
        (folder / "campaign.yaml").write_text(CAMPAIGN)
        campaign = read_campaign(folder / "campaign.yaml")
        self.runs: dict[str, Run] = {run.cell.name: run for run in campaign.runs()}
        self.folder = folder / "runs"
        self.pace = Pace(campaign, self.runs, self.folder)

    def group(self, entry: str, row: str, seeds: int = 1) -> list[str]:
        return [name for name, run in self.runs.items() if (run.entry, run.row) == (entry, row)][:seeds]

    def makes(self, name: str, *seconds: float) -> None:
        """So many seconds for each of the first rounds."""
        (self.folder / name).mkdir(parents=True, exist_ok=True)
        (self.folder / name / "config.yaml").touch()
        (self.folder / name / "run.json").write_text('{"id": "0123abcd"}')
        rounds = [{"event": "round", "round": number, "seconds": each} for number, each in enumerate(seconds, 1)]
        events = [{"event": "start"}, *rounds, {"event": "note", "note": "a"}]
        (self.folder / name / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setattr("papers.pace.MARGIN", 1.0)
    return Place(tmp_path)


def test_a_run_s_pace_is_that_of_the_second_half_of_its_rounds(place: Place) -> None:
    """The first compiles kernels, and alone tells nothing. 9, 9 | 2, 4, 6."""
    place.makes("one", 9, 9, 2, 4, 6)
    assert progress(place.folder / "one") == (5, 4)
    place.makes("one", 9, 2)
    assert progress(place.folder / "one") == (2, 2)
    place.makes("one", 9)
    assert progress(place.folder / "one") == (1, None)
    place.makes("one")
    assert progress(place.folder / "one") == (0, None)
    assert progress(place.folder / "other") is None


def test_other_methods_rounds_and_participants_take_as_long_as_their_work(place: Place) -> None:
    """Standalone takes 2 s a round with all of 10 clients, in 100 rounds of ten epochs.

    pFedES's effort is 4: 800 s. With 10 of 50 clients a round has a fifth of the samples, but there are 500: 200 s.
    With thirty epochs it is 600 s.
    """
    first = place.group("short", "standalone")
    assert place.pace.expected(first) is None
    place.pace.begins(first)
    assert place.pace.expected(first) is None
    place.makes(first[0], 2, 2)
    assert place.pace.expected(place.group("short", "fedproto")) == pytest.approx(200)
    assert place.pace.expected(place.group("short", "pfedes")) == pytest.approx(800)
    assert place.pace.expected(place.group("long", "standalone")) == pytest.approx(200)
    assert place.pace.expected(place.group("more-epochs", "standalone")) == pytest.approx(600)


def test_rounds_that_are_made_need_no_time(place: Place) -> None:
    """Of a group the run that has made fewest counts."""
    group = place.group("short", "fedproto", 2)
    place.pace.begins(group[:1])
    for name, rounds in zip(group, (80, 60), strict=True):
        place.makes(name, *[3.0] * rounds)
    assert place.pace.expected(group[:1]) == pytest.approx(3 * 20)
    assert place.pace.expected(group) == pytest.approx(3 * 40 * 2**0.6)


def test_rounds_of_an_earlier_command_tell_no_pace(place: Place) -> None:
    """They took 40 s each; those that this command has made, after its first, take 10."""
    (run,) = group = place.group("short", "fedproto")
    place.makes(run, *[40.0] * 50)
    place.pace.begins(group)
    assert place.pace.expected(place.group("short", "standalone")) is None
    place.makes(run, *[40.0] * 50, 99, 10)
    assert place.pace.expected(group) == pytest.approx(10 * 48)
    place.pace.begins(group)  # once more, in this command: what it has made counts
    assert place.pace.expected(group) == pytest.approx(10 * 48)


def test_a_continued_run_that_has_ended_tells_of_its_new_rounds(place: Place) -> None:
    """Fifty took 40 s each, and fifty 10 now: 25 on average, which tells nothing about what comes next."""
    (run,) = group = place.group("short", "fedproto")
    place.makes(run, *[40.0] * 50)
    place.pace.begins(group)
    place.makes(run, *[40.0] * 50, *[10.0] * 50)
    place.pace.ended(run, 25.0)
    assert place.pace.expected(place.group("short", "standalone")) == pytest.approx(1000)


def test_a_run_that_begins_once_more_alone_tells_nothing_of_its_group(place: Place) -> None:
    """Three took 3 s a round, and one of them takes 1 alone: 1.55 and 1 for each, of which the middle is 1.28."""
    group = place.group("short", "fedproto", 3)
    place.pace.begins(group)
    place.makes(group[0], 9, 3)
    assert place.pace.expected(group[:1]) == pytest.approx(98 * 3 / 3**0.6)
    place.pace.begins(group[:1])
    place.makes(group[0], 9, 3, 9, 1)
    middle = (3 / 3**0.6 + 1) / 2
    assert place.pace.expected(place.group("short", "standalone")) == pytest.approx(100 * middle)
    place.pace.ended(group[0], 1.0)
    assert place.pace.expected(place.group("short", "standalone")) == pytest.approx(100 * middle)


def test_runs_of_the_same_kind_tell_more_than_others_and_the_middle_one_counts(place: Place) -> None:
    """CNN-1 for all takes 1 s a round; with five networks one group takes 2, one 3 and one 7."""
    place.pace.begins(place.group("cnn1", "standalone"))
    place.makes(place.group("cnn1", "standalone")[0], 9, 1)
    assert place.pace.expected(place.group("short", "standalone")) == pytest.approx(100)
    for row, seconds in (("standalone", 2), ("fedproto", 3), ("pfedes", 28)):
        place.pace.begins(place.group("short", row))
        place.makes(place.group("short", row)[0], 99, seconds)
    assert place.pace.expected(place.group("short", "standalone", 3)[1:2]) == pytest.approx(300)
    place.pace.begins(place.group("other-data", "standalone"))
    place.makes(place.group("other-data", "standalone")[0], 9, 5)
    assert place.pace.expected(place.group("short", "standalone", 3)[1:2]) == pytest.approx(300)
    assert place.pace.expected(place.group("other-data", "fedproto")) == pytest.approx(500)
    assert place.pace.expected(place.group("cnn1", "fedproto")) == pytest.approx(100)


def test_a_run_that_has_ended_still_tells(place: Place) -> None:
    """Its folder is gone, and nobody may have asked before; or what is there is of another that begins again.

    It tells nothing of a group that it is not in.
    """
    group = place.group("short", "standalone", 3)
    place.pace.begins(group)
    place.pace.begins(place.group("cnn1", "standalone"))
    place.pace.ended(group[1], 5.0)
    assert place.pace.expected(place.group("cnn1", "fedproto")) == pytest.approx(500 / 3**0.6)
    assert place.pace.expected(place.group("short", "fedproto", 3)) == pytest.approx(500)
    place.makes(group[0])
    assert place.pace.expected(place.group("short", "fedproto", 3)) == pytest.approx(500)


def test_only_what_can_end_begins(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten minutes in all. At 2 s a round Standalone's seeds take 200 s each, pFedES 800."""
    clock = [1000.0]
    monkeypatch.setattr(running.time, "monotonic", lambda: clock[0])
    overseer = running.Overseer(10, place.runs, place.pace)
    first = place.group("short", "standalone")
    assert overseer.may_begin(first)
    place.makes(first[0], 9, 2)
    late = place.group("short", "pfedes", 2)
    assert not overseer.may_begin(late)
    clock[0] += 390
    assert overseer.may_begin(place.group("short", "fedproto"))
    clock[0] += 20
    assert not overseer.may_begin(place.group("long", "standalone"))
    assert overseer.summary() == [
        f"not begun: {late[0]} and 1 more, expected to take 20 minutes",
        f"not begun: {place.group('long', 'standalone')[0]}, expected to take 3 minutes",
    ]
    place.makes(first[0], 9, 0.1)
    assert overseer.may_begin(place.group("long", "standalone")) and len(overseer.summary()) == 1
    assert running.Overseer(0, place.runs).may_begin(first)
