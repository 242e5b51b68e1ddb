"""What is kept of a cohort's samples between rounds: each row is its client's, in the order that was asked for."""

from typing import Any, cast

import pytest
import torch

from polyfed.engines.client.batches import visits
from polyfed.engines.client.workbench import state_of
from polyfed.engines.stacked import passes
from polyfed.engines.stacked.round import CohortRound
from polyfed.engines.stacked.tables import SOME, Table, Tables
from tests import support

PEOPLE = support.population("fedproto", models=(support.Wide,), clients=5, classes_per_client=2)


@pytest.mark.parametrize("clients", [(0, 1, 2), (3, 0), (4,)])
def test_every_row_is_of_its_client(clients: tuple[int, ...]) -> None:
    table = Table(PEOPLE, clients)
    classes, labels = PEOPLE.task.classes, PEOPLE.dataset.labels
    (phase,) = PEOPLE.method.phases()
    first, _ = table.widths
    groups = table.groups.view_as(table.trained)
    for row, client in enumerate(clients):
        own = PEOPLE.data[client]
        assert [sample for sample in table.trained[row].tolist() if sample >= 0] == own.train.tolist()
        test, validation = table.tested[row, :first], table.tested[row, first:]
        assert [sample for sample in test.tolist() if sample >= 0] == own.test.tolist()
        assert [sample for sample in validation.tolist() if sample >= 0] == own.validation.tolist()
        assert table.true[row, : len(own.test)].tolist() == labels[own.test].tolist()
        assert set(table.true[row, len(own.test) : first].tolist()) <= {-1}
        assert groups[row, : len(own.train)].tolist() == (row * classes + labels[own.train]).tolist()
        assert set(groups[row, len(own.train) :].tolist()) <= {len(clients) * classes}
        assert table.visits(phase)[row].tolist() == visits(PEOPLE, client, phase).tolist()
        assert table.counts[row].tolist() == PEOPLE.counts[client].tolist()
        repeated = own.train.tolist() * SOME
        assert table.some[row].tolist() == repeated[:SOME]
    held, counts = table.holdings
    assert torch.equal(table.counts.flatten()[held], counts)
    assert sum(table.seen) == len(held)


def test_tables_are_kept_by_clients_and_order() -> None:
    tables = Tables(PEOPLE)
    assert tables.of([0, 1]) is tables.of([0, 1])
    assert tables.of([0, 1]) is not tables.of([1, 0])
    assert tables.of([1, 0]).trained[0].tolist() == tables.of([0, 1]).trained[1].tolist()


def test_no_more_than_some_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    size = Table(PEOPLE, [0]).samples
    monkeypatch.setattr("polyfed.engines.stacked.tables.MOST_KEPT", 2 * size + size // 2)
    tables = Tables(PEOPLE)
    first = tables.of([0])
    tables.of([1])
    assert tables.of([0]) is first
    tables.of([2])
    assert tables.of([0]) is not first


def test_samples_that_a_round_leaves_out_are_visited_in_the_next() -> None:
    table, (phase,), nothing = Table(PEOPLE, [0, 1]), PEOPLE.method.phases(), cast(Any, None)
    missed = [PEOPLE.data[0].train[:1], PEOPLE.data[1].train[:0]]
    (all_of_them,) = CohortRound([0, 1], nothing, [phase], [], [[own[:0] for own in missed]], nothing, table).visited(
        PEOPLE
    )
    for _ in range(2):
        (found,) = CohortRound([0, 1], nothing, [phase], [], [missed], nothing, table).visited(PEOPLE)
        assert (all_of_them - found).sum(1).tolist() == [1, 0]


def test_what_a_method_does_to_its_statistics_does_not_reach_the_next_round() -> None:
    """A method may change the counts that it is given, such as to send fewer digits."""
    table, network = Table(PEOPLE, [0, 1]), PEOPLE.new_network(0).eval()
    state = {name: torch.stack([tensor, tensor]) for name, tensor in state_of(network).items()}
    with torch.no_grad():
        for _ in range(2):
            found = passes.collect(PEOPLE, [0, 1], network, state, table=table)
            assert found is not None
            for client, own in enumerate(found.of_clients()):
                assert own.counts.tolist() == PEOPLE.counts[client][own.labels].tolist()
                own.counts.clamp_(max=1)
                own.labels.zero_()
