"""Passes without training, for many clients at once: one for an evaluation, and all queued before the first wait."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from polyfed.engines import SequentialEngine, VectorizedEngine
from polyfed.engines import stacked as stacked_package
from polyfed.engines.stacked import passes
from polyfed.engines.stacked.round import CohortRound
from polyfed.evaluation import Evaluation
from polyfed.message import Message
from polyfed.population import Population
from tests import support

PARTS = [(3, 5), (0, 4), (6, 0), (0, 0)]
"""How many test and validation samples each client has: some have none of either part, one none of both."""


def uneven(method: str, classes: int = 4, **settings: Any) -> Population:
    """Four clients with PARTS samples, of which those of one part have other classes than those of the other."""
    data = support.tiny_dataset(classes=classes)
    people = support.population(method, data=data, classes_per_client=classes, **settings)
    own = {}
    for (client, given), (test, validation) in zip(people.data.items(), PARTS, strict=True):
        samples = torch.cat([given.train, given.test, given.validation])
        samples = samples[people.dataset.labels[samples].argsort(stable=True)]
        evenly = samples[torch.linspace(0, len(samples) - 1, 12).long()]
        own[client] = replace(given, train=evenly, test=samples[:test], validation=samples[len(samples) - validation :])
        if classes == 2:  # both classes in each part, for the AUC
            own[client] = replace(own[client], test=evenly[::2][:test], validation=evenly[1::2][:validation])
    return replace(people, data=own)


def trained(engine: VectorizedEngine | SequentialEngine, rounds: int = 2) -> dict[int, Evaluation]:
    for round in range(1, rounds + 1):
        engine.train(round, {client: Message() for client in engine.population.clients})
    return engine.evaluate(engine.population.clients, rounds)


@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("method", ["standalone", "fedproto"])
@pytest.mark.parametrize("samples", [8192, 8])
def test_both_parts_are_scored_as_in_the_loop(
    monkeypatch: pytest.MonkeyPatch, method: str, classes: int, samples: int
) -> None:
    """With 8 samples at once a step has columns of both parts."""
    monkeypatch.setattr(passes, "EVALUATION_SAMPLES", samples)
    people = uneven(method, classes, models=(support.Wide,), lr=0.01)
    expected, actual = (trained(engine(people)) for engine in (SequentialEngine, VectorizedEngine))
    assert actual == expected
    assert [(own.test, own.validation) for own in actual.values()] == PARTS
    areas = [own.further["validation"][own.rules[0]].get("auc") for own in actual.values()]
    assert (areas[0] is not None) == (classes == 2)


@pytest.mark.parametrize("classes", [2, 4])
def test_a_cohort_without_samples_of_either_part_is_scored_as_in_the_loop(classes: int) -> None:
    people = uneven("fedproto", classes, models=(support.Wide,))
    people.data.update(
        {client: replace(own, test=own.test[:0], validation=own.validation[:0]) for client, own in people.data.items()}
    )
    expected, actual = (engine(people).evaluate(people.clients, 1) for engine in (SequentialEngine, VectorizedEngine))
    assert actual == expected
    assert ("auc" in actual[0].further["test"]["prototypes"]) == (classes == 2)


def test_an_evaluation_is_one_pass_of_each_cohort(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two architectures; the first's clients have 3 + 5 and 6 + 0 samples, the other's 0 + 4 and none: 6 + 5, 0 + 4."""
    engine = VectorizedEngine(uneven("standalone"))
    trained(engine)
    original, seen = passes.for_each, []

    def counted(function: Any, state: Any, x: torch.Tensor) -> Any:
        seen.append(tuple(x.shape[:2]))
        return original(function, state, x)

    monkeypatch.setattr(passes, "for_each", counted)
    engine.evaluate(range(4), 2)
    assert seen == [(2, 11), (2, 4)]


def test_all_cohorts_are_queued_before_the_first_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []

    def noted(owner: Any, name: str, word: str) -> None:
        original = getattr(owner, name)

        def call(*given: Any, **named: Any) -> Any:
            happened.append(word)
            return original(*given, **named)

        monkeypatch.setattr(owner, name, call)

    engine = VectorizedEngine(support.population("fedproto"))
    trained(engine)
    noted(stacked_package, "predict", "predict")
    noted(stacked_package.Predicted, "evaluations", "read scores")
    noted(passes, "collect", "collect")
    noted(stacked_package.Collected, "of_clients", "read means")
    noted(CohortRound, "losses", "read losses")
    engine.train(3, {client: Message() for client in range(4)})
    assert happened == ["collect"] * 2 + ["read means", "read losses"] * 2
    happened.clear()
    engine.evaluate(range(4), 3)
    assert happened == ["predict"] * 2 + ["read scores"] * 2


def test_cohorts_that_do_not_fit_are_evaluated_in_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The three clients of one architecture are too many at once; the one of the other is not asked twice."""
    people = support.population("standalone", models=(support.Wide, support.Wide, support.Wide, support.Narrow))
    engine = VectorizedEngine(people)
    expected = trained(engine)
    original, asked = stacked_package.predict, []

    def predict(people: Population, clients: list[int], *rest: Any) -> Any:
        asked.append(clients)
        if len(clients) > 2:
            raise torch.OutOfMemoryError("no room")
        return original(people, clients, *rest)

    monkeypatch.setattr(stacked_package, "predict", predict)
    assert engine.evaluate(range(4), 2) == expected
    assert asked == [[0, 1, 2], [3], [0, 1, 2], [0], [1, 2]]
    assert "3 clients at once did not fit into memory; from now on at most 1 train together" in engine.notes


def test_remarks_are_those_that_apply_to_each_client() -> None:
    found = {"odd": torch.tensor([False, True, False]), "large": torch.tensor([False, True, True])}
    assert passes.remarks(found, 3) == [(), ("odd", "large"), ("large",)]
    assert passes.remarks({}, 2) == [(), ()]


@pytest.mark.parametrize("uneven", [False, True])
def test_what_was_just_trained_is_evaluated_where_it_lies(monkeypatch: pytest.MonkeyPatch, uneven: bool) -> None:
    """Only the clients that were trained last, in their last states, and once: an evaluation might change them.

    Clients train in the order of their numbers of samples.
    """
    people = support.population("standalone", models=(support.Wide,), clients=4)
    if uneven:
        own = people.data[0]
        people.data[0] = replace(own, train=own.train[:-2])
    engine = VectorizedEngine(people)
    copied: list[int] = []
    copy_states = stacked_package.copy_states

    def counted(targets: Any, sources: Any) -> None:
        copied.append(len(targets))
        copy_states(targets, sources)

    monkeypatch.setattr(stacked_package, "copy_states", counted)

    def scores(clients: list[int]) -> tuple[Any, bool]:
        copied.clear()
        found = engine.evaluate(clients, 1)
        return {client: score.confusion for client, score in found.items()}, bool(copied)

    engine.train(1, {client: Message() for client in range(4)})
    first, again, some = scores([0, 1, 2, 3]), scores([0, 1, 2, 3]), scores([2, 3])
    assert [moved for _, moved in (first, again)] == [False, True]
    assert first[0] == again[0] and some[0] == {client: first[0][client] for client in (2, 3)}
    engine.train(2, {client: Message() for client in range(4)})
    other = VectorizedEngine(people).first_state(0)
    engine.set_state(1, other)
    changed, moved = scores([0, 1, 2, 3])
    assert moved
    alone = VectorizedEngine(people)
    alone.set_state(1, other)
    assert changed[1] == alone.evaluate([1], 1)[1].confusion
