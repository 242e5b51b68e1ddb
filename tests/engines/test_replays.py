"""Captured passes give the numbers of plain ones, whoever takes part. Without a GPU, something stands for a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from polyfed.engines import VectorizedEngine
from polyfed.engines.stacked import passes, replays
from polyfed.engines.stacked.captured import Stream
from polyfed.engines.stacked.replays import CohortReplays, Replays
from polyfed.engines.stacked.step import Stack
from polyfed.evaluation import Evaluation
from polyfed.message import Message, State
from polyfed.methods.base import Collect, Reply
from tests import support

ROUNDS = ([0, 1, 2, 3], [2, 0], [1, 3], [3, 2, 1], [0, 1, 2, 3], [3, 0])
"""Who takes part: cohorts of sizes that come again with other clients."""


class Graph:
    """What stands for a graph: a replay computes again, from the same memory and into the same memory."""

    made: list[Graph] = []

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call
        self.replays = 0
        # A capture computes nothing, so there is no result yet.
        self.outcome = tree_map(lambda tensor: torch.full_like(tensor, -7), call())
        Graph.made.append(self)

    def replay(self) -> None:
        self.replays += 1
        tree_map(lambda into, new: into.copy_(new), self.outcome, self._call())


def captured_by(stream: Stream, call: Callable[[], object]) -> tuple[Graph, object]:
    graph = Graph(call)
    return graph, graph.outcome


def refused(stream: Stream, call: Callable[[], object]) -> Any:
    raise RuntimeError("operation not permitted\nwhen stream is capturing")


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Graph]]:
    """On a CPU, passes are captured as on a GPU."""

    def given(self: VectorizedEngine, client: int, stack: Stack) -> CohortReplays | None:
        name = self._architecture(client)
        if self._stacks.get((name, len(stack.parts))) is not stack:
            return None
        return CohortReplays(self._replays, name, stack.state, self._stream(client))

    monkeypatch.setattr(VectorizedEngine, "_graphs", given)
    monkeypatch.setattr(replays, "capture", captured_by)
    Graph.made.clear()
    yield Graph.made
    Graph.made.clear()


def rounds(method: Any, **settings: Any) -> tuple[list[list[Reply]], list[dict[int, Evaluation]], VectorizedEngine]:
    """Replies and scores of rounds with changing participants, who receive what was sent in the round before."""
    people = support.population(method, partition="dirichlet", alpha=0.7, split="6:2:2", lr=0.05, **settings)
    engine, answers, scores = VectorizedEngine(people), [], []
    sent: dict[int, Message] = {}
    for number, clients in enumerate(ROUNDS, 1):
        downloads = {client: sent.get((client + 1) % 4, Message()) for client in clients}
        answers.append(engine.train(number, downloads))
        sent |= {reply.client: reply.message for reply in answers[-1]}
        scores.append(engine.evaluate(range(4), number))
        scores.append(engine.evaluate(clients, number, downloads))  # as if they had just arrived
    return answers, scores, engine


def assert_same(actual: Any, expected: Any, **tolerance: float) -> None:
    assert actual[1] == expected[1]
    for one, two in zip(actual[0], expected[0], strict=True):
        assert [reply.client for reply in one] == [reply.client for reply in two]
        for own, other in zip(one, two, strict=True):
            torch.testing.assert_close(dict(own.message.tensors), dict(other.message.tensors), **tolerance)


FEATURES = Collect()
NEGATIVES = Collect(of=lambda net, x: -net.features(x))
CASES = [
    ("fedproto", {"models": (support.Wide,)}),
    ("fedproto", {}),
    ("dc-pfl", {"models": (support.Wide,)}),
    ("fedproto", {"models": (support.Normed,), "data": support.tiny_dataset(channels=3)}),
    ("fedproto", {"data": support.tiny_dataset(classes=2)}),
]
IDS = ["one-architecture", "two", "covariances", "batch-norm", "two-classes"]


@contextmanager
def plain() -> Iterator[None]:
    """Inside, nothing is captured."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replays, "MOST_REPLAYS", 0)
        yield


@pytest.mark.parametrize("samples", [8192, 64])
@pytest.mark.parametrize(("method", "settings"), CASES, ids=IDS)
def test_captured_passes_follow_states_and_clients(
    monkeypatch: pytest.MonkeyPatch, graphs: list[Graph], method: str, settings: Any, samples: int
) -> None:
    """64 samples at once are 8 in a captured pass: of two for each of four clients, in several replays."""
    monkeypatch.setattr(passes, "EVALUATION_SAMPLES", samples)
    monkeypatch.setattr(replays, "MOST_REPLAYS", 100)
    with plain():
        expected = rounds(method, **settings)
    assert not graphs
    actual = rounds(method, **settings)
    assert sum(graph.replays for graph in graphs) > len(graphs) > 0
    assert_same(actual, expected, rtol=1e-4, atol=1e-5)
    assert not actual[2].notes


def cohort(size: int = 3) -> tuple[CohortReplays, State]:
    state = {"weight": torch.arange(1.0, size + 1)}
    return CohortReplays(Replays(lambda note: None), "net", state, Stream(torch.device("cpu"))), state


def times_weight(state: State, rows: Tensor) -> dict[str, Tensor]:
    return {"product": state["weight"][:, None] * rows}


def test_results_stay_when_a_graph_is_replayed(graphs: list[Graph]) -> None:
    """Weights 1, 2, 3 times sample numbers, first of all clients and then of two, two samples at a time."""
    own, state = cohort()
    rows = torch.tensor([[1, 2, 3, 4, 5], [1, 1, 1, 1, 1], [2, 2, 2, 2, 2]])
    first = own.over("product", times_weight, rows, {}, 6)
    assert first is not None
    state["weight"].mul_(10)
    second = own.over("product", times_weight, rows[:2], {}, 6)
    assert second is not None
    tables = [torch.cat([found["product"] for _, found in each], 1).tolist() for each in (first, second)]  # type: ignore[index]
    assert tables[0] == [[1, 2, 3, 4, 5], [2] * 5, [6] * 5]
    assert tables[1] == [[10, 20, 30, 40, 50], [20] * 5]
    assert [graph.replays for graph in graphs] == [5]  # six pieces, the first without a graph


def test_a_thread_captures_only_what_it_has_computed_before(graphs: list[Graph]) -> None:
    """Of runs that train together; a library's handles, and the plans that cuDNN has found, are those of a thread."""
    own, _ = cohort()
    rows = torch.ones(3, 1, dtype=torch.int64)

    def captured() -> int:
        assert own.over("product", times_weight, rows, {}, 6) is not None
        return len(graphs)

    assert captured() == 0
    with ThreadPoolExecutor(1) as second, ThreadPoolExecutor(1) as third:
        assert [other.submit(captured).result() for other in (second, second, third)] == [0, 1, 1]
    assert graphs[0].replays == 2


def test_numbers_of_the_clients_are_those_of_this_call(graphs: list[Graph]) -> None:
    def work(state: State, rows: Tensor) -> Tensor:
        return state["number.method.weight"][:, None] * rows

    own, _ = cohort(2)
    rows = torch.ones(2, 2, dtype=torch.int64)
    for values in ([1.0, 2.0], [3.0, 4.0], [5.0, 6.0]):
        found = own.over("weights", work, rows, {"number.method.weight": torch.tensor(values)}, 100)
        assert found is not None
        ((_, result),) = found
        assert isinstance(result, Tensor)
        assert result[:, 0].tolist() == values


def test_a_pass_over_too_many_samples_or_none_is_not_captured(graphs: list[Graph]) -> None:
    own, _ = cohort()
    most = replays.MOST_REPLAYS * 2
    for columns, found in ((0, False), (most, True), (most + 1, False)):
        rows = torch.zeros(3, columns, dtype=torch.int64)
        assert (own.over("product", times_weight, rows, {}, 6) is not None) == found


def test_the_least_recently_used_graph_is_dropped(monkeypatch: pytest.MonkeyPatch, graphs: list[Graph]) -> None:
    monkeypatch.setattr(replays, "KEPT_PASSES", 2)
    own, _ = cohort()

    def ask(columns: int) -> int:
        own.over("product", times_weight, torch.zeros(3, columns, dtype=torch.int64), {}, 1000)
        return len(graphs)

    # The first use of a shape is plain, the second captures. Width 3 drops width 2, which is then plain again.
    assert [ask(columns) for columns in (1, 1, 2, 2, 1, 3, 1, 2, 2)] == [0, 1, 1, 2, 2, 2, 2, 2, 3]


def test_a_pass_over_other_tensors_is_captured_anew(graphs: list[Graph]) -> None:
    own, _ = cohort()
    rows = torch.ones(3, 1, dtype=torch.int64)
    for _ in range(3):
        own.over("product", times_weight, rows, {}, 100)
    other = CohortReplays(own.replays, "net", {"weight": torch.full((3,), 9.0)}, own.stream)
    for _ in range(3):
        found = other.over("product", times_weight, rows, {}, 100)
        assert found is not None
        assert found[0][1]["product"].flatten().tolist() == [9.0] * 3  # type: ignore[index]
    assert len(graphs) == 2


def test_what_can_not_be_captured_is_plain_with_one_note(monkeypatch: pytest.MonkeyPatch, graphs: list[Graph]) -> None:
    with plain():
        expected = rounds("fedproto")
    monkeypatch.setattr(replays, "capture", refused)
    actual = rounds("fedproto")
    assert_same(actual, expected, rtol=1e-4, atol=1e-5)
    assert actual[2].notes == [
        "passes without training can't be captured on the GPU and take longer "
        "(operation not permitted when stream is capturing)"
    ]


def test_a_pass_that_does_not_fit_is_left_to_smaller_steps(graphs: list[Graph]) -> None:
    """Whether memory runs out in the plain pass, or later in the capture."""
    for uses in (0, 1):
        said: list[str] = []
        own = CohortReplays(Replays(said.append), "net", cohort()[1], Stream(torch.device("cpu")))
        rows = torch.ones(3, 4, dtype=torch.int64)
        left = [uses]

        def work(state: State, rows: Tensor, left: list[int] = left) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise torch.OutOfMemoryError("no room")
            return times_weight(state, rows)

        found = [own.over("product", work, rows, {}, 100) is not None for _ in range(3)]
        assert found == [True, False, False][1 - uses :] + [False] * (1 - uses)
        assert left == [-1]  # it is not tried again
        assert said == ["passes without training can't be captured on the GPU and take longer (no room)"]
        assert not own.replays._kept


def test_statistics_of_something_else_are_captured_anew(graphs: list[Graph]) -> None:
    """A method that collects features in its first rounds, and then their negatives."""
    people = support.population("fedproto", models=(support.Wide,))
    engine, found = VectorizedEngine(people), []
    for number in range(1, 7):
        people.method.collect = FEATURES if number < 4 else NEGATIVES
        replies = engine.train(number, {client: Message() for client in range(4)})
        found.append([bool((reply.message.tensors["prototypes"] <= 0).all()) for reply in replies])
    assert found == [[False] * 4] * 3 + [[True] * 4] * 3
    assert len(graphs) == 2


def test_graphs_are_freed_with_the_other_memory(graphs: list[Graph]) -> None:
    *_, engine = rounds("fedproto")
    assert engine._replays._kept
    engine._let_go()
    assert not engine._replays._kept


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, where passes are captured")
@pytest.mark.parametrize(("method", "settings"), CASES, ids=IDS)
def test_captured_passes_are_those_without_a_graph(monkeypatch: pytest.MonkeyPatch, method: str, settings: Any) -> None:
    """Scores and statistics on a GPU, over rounds with changing participants."""
    settings = {**settings, "device": "cuda", "tf32": False}
    with plain():
        expected = rounds(method, **settings)
    original, made = replays.capture, []

    def counted(stream: Stream, call: Callable[[], object]) -> tuple[Any, object]:
        made.append(original(stream, call))
        return made[-1]

    monkeypatch.setattr(replays, "capture", counted)
    actual = rounds(method, **settings)
    assert made and not actual[2].notes
    assert_same(actual, expected, rtol=1e-3, atol=1e-4)
    for engine in (expected[2], actual[2]):
        engine.close()
