"""The vectorized engine gives the sequential engine's numbers, for every method and every uneven case."""

from __future__ import annotations

import gc
import threading
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch

from polyfed.compute import precision
from polyfed.engines import SequentialEngine, VectorizedEngine, vectorized
from polyfed.engines import stacked as stacked_package
from polyfed.engines.stacked import passes
from polyfed.engines.stacked import round as stacked_round
from polyfed.engines.stacked.captured import CapturedStep, Stream, reason
from polyfed.engines.stacked.plan import new_plan
from polyfed.engines.stacked.receiving import receive_all
from polyfed.engines.stacked.step import PhaseStep
from polyfed.errors import DivergedError, InputError
from polyfed.message import Message
from polyfed.methods import METHODS
from polyfed.methods.base import Method, Phase, Trained
from polyfed.methods.parts.tools import cross_entropy
from tests import support
from tests.methods import parity
from tests.support import run


def test_downloads_of_several_clients_arrive_together() -> None:
    """Each client gets its own, converted if it is of another type, and nothing refers to the message afterwards."""
    people = support.population("lg-fedavg")
    states = [{name: tensor.clone() for name, tensor in people.new_network(0).state_dict().items()} for _ in range(2)]
    sent = [torch.full((4,), 1.0), torch.full((4,), 2.0, dtype=torch.float64)]
    receive_all(people, [0, 1], states, {i: Message({"model.head.bias": bias}) for i, bias in enumerate(sent)}, 1)
    sent[0].zero_()
    assert [state["model.head.bias"].tolist() for state in states] == [[1.0] * 4, [2.0] * 4]
    assert states[1]["model.head.bias"].dtype == torch.float32
    assert torch.equal(states[0]["model.head.weight"], states[1]["model.head.weight"])


def assert_agree(tmp_path: Path, method: Any, **settings: Any) -> None:
    expected, _, plain = run(tmp_path, SequentialEngine, method, **settings)
    actual, notes, stacked = run(tmp_path, VectorizedEngine, method, **settings)
    assert not [note for note in notes if "one after another" in note]  # nothing fell back to the loop
    pd.testing.assert_frame_equal(actual, expected, check_exact=False, rtol=1e-4, atol=1e-5)
    for client in range(plain.config.clients):
        for name, tensor in plain.engine.get_state(client).items():
            if name != "received.version":  # FedKD's hash of weights, which the last bit changes
                torch.testing.assert_close(stacked.engine.get_state(client)[name], tensor, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_method_agrees_with_the_plain_loop(tmp_path: Path, method: str) -> None:
    models = (support.Wide,) if method == "fedavg" else (support.Wide, support.Narrow)
    assert_agree(tmp_path, method, models=models, clients=5, lr=0.05)


@pytest.mark.parametrize("option", parity.OPTIONS)
def test_options_agree_with_the_plain_loop(tmp_path: Path, option: str) -> None:
    assert_agree(tmp_path, parity.OPTIONS[option], clients=5, participation=0.6, lr=0.05, rounds=3)


@pytest.mark.parametrize(
    "settings",
    [
        {"training": {"momentum": 0.9, "weight_decay": 1e-3, "clip": 0.5}},
        {"training": {"augment": True, "epochs": 3}},
        {"partition": "dirichlet", "alpha": 0.5, "training": {"epochs": 2}},
        {"participation": 0.5, "clients": 6, "rounds": 3},
        {"start": "client"},
        {"evaluate": "after-download"},
        {"batch_size": 1000},
    ],
    ids=lambda settings: "-".join(settings),
)
def test_uneven_cases_agree_with_the_plain_loop(tmp_path: Path, settings: dict[str, Any]) -> None:
    assert_agree(tmp_path, "fedproto", **settings)


def test_bf16_is_coarser_but_the_same_on_both_engines(tmp_path: Path) -> None:
    def losses(engine: Any, **training: Any) -> Any:
        rounds, _, _ = run(tmp_path / str(training), engine, "fedproto", models=(support.Wide,), training=training)
        return rounds.loss_mean.to_numpy()

    exact, loop, stacked = (
        losses(SequentialEngine), losses(SequentialEngine, bf16=True), losses(VectorizedEngine, bf16=True)
    )  # fmt: skip
    assert abs(loop - exact).max() > 1e-5
    with precision(torch.device("cpu"), bf16=True):
        assert cross_entropy(torch.zeros(2, 3, dtype=torch.bfloat16), torch.tensor([0, 1])).dtype == torch.float32
    assert loop == pytest.approx(exact, rel=0.05)
    assert stacked == pytest.approx(loop, rel=0.02)


def test_a_scalar_parameter_is_clipped_like_any_other(tmp_path: Path) -> None:
    assert_agree(tmp_path, "fedapen", lr=0.01, rounds=3, training={"clip": 0.1, "momentum": 0.9})


class PartlyUnused(support.Wide):
    """One of its layers is never used."""

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__(input_shape, classes)
        self.spare = torch.nn.Linear(2, 2)


def test_a_parameter_without_gradient_does_not_decay(tmp_path: Path) -> None:
    training = {"weight_decay": 0.1, "momentum": 0.5, "clip": 1.0}
    settings = {"models": (PartlyUnused,), "training": training}
    assert_agree(tmp_path, "standalone", **settings)
    _, _, federation = run(tmp_path / "again", VectorizedEngine, "standalone", **settings)
    first = federation.engine.population.new_network(0).state_dict()
    for name, tensor in federation.engine.get_state(0).items():
        assert torch.equal(tensor, first[name]) == ("spare" in name)


def test_prepare_learns_what_all_steps_have_in_common_and_changes_no_state() -> None:
    """FD's loss returns logits, four per sample; of its two clients, part of the network is out of the loss's reach."""
    clients = support.population("fd", models=(PartlyUnused,), clients=2, training={"weight_decay": 0.1})
    (phase,) = clients.method.phases()
    network = clients.new_network(0)
    state = {name: torch.stack([tensor, tensor]) for name, tensor in network.state_dict().items()}
    before = {name: tensor.clone() for name, tensor in state.items()}
    step = PhaseStep(clients, network, phase, state)
    network.eval()  # others use the network too
    step.prepare(new_plan(clients, [0, 1], 4, 2, phase, 1).at(0))
    assert network.model.training
    assert step.sums is not None and step.sums.shape == (2, 4, 4) and not step.sums.any()
    assert {name for name in step.frozen if "spare" in name} == {name for name in state if "spare" in name} != set()
    assert step.trained and not [name for name in step.trained if "spare" in name]
    assert all(torch.equal(tensor, before[name]) for name, tensor in state.items())


@pytest.mark.parametrize("normed", [True, False])
def test_padding_comes_last(normed: bool) -> None:
    """So the first place of a batch tells whether a client has one; the third client is padding alone."""
    clients = support.population("standalone", models=(support.Wide,), clients=2)
    (phase,) = clients.method.phases()
    real = new_plan(clients, [0, 1], 7, 3, phase, 1, normed=normed).inputs["rows"] >= 0
    assert (real[..., 1:] <= real[..., :-1]).all()
    assert torch.equal(real[..., 0], real.any(2)) and real[..., 0].any() and not real[:, 2].any()
    assert not real[:, :2].all()


def test_clients_without_test_samples_are_no_error(tmp_path: Path) -> None:
    rounds, _, _ = run(tmp_path, VectorizedEngine, "fedproto", split="1:0:0")
    assert rounds.accuracy_mean.isna().all()


def test_running_out_of_memory_at_the_end_trains_nobody_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _, _ = run(tmp_path, SequentialEngine, "fedproto", models=(support.Wide,))
    method = type(support.new_method("fedproto"))
    original, calls = method.upload, []

    def upload(self: Any, client: Any) -> Any:
        calls.append(client)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("no room")
        return original(self, client)

    monkeypatch.setattr(method, "upload", upload)
    actual, _, _ = run(tmp_path, VectorizedEngine, "fedproto", models=(support.Wide,))
    pd.testing.assert_frame_equal(actual, expected, check_exact=False, rtol=1e-4, atol=1e-5)


def test_running_out_of_memory_when_states_are_kept_loses_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients 0 and 1 have trained before, 2 and 3 need new memory for their states, and there is none at first."""
    clients = support.population("standalone", models=(support.Wide,), clients=4)
    nothing = {client: support.Message() for client in range(4)}
    engines = [VectorizedEngine(clients), VectorizedEngine(clients)]
    for engine in engines:
        engine.train(1, {client: nothing[client] for client in (0, 1)})
    engines[0].train(2, nothing)
    original, calls = torch.empty_like, []

    def empty_like(*arguments: Any, **options: Any) -> torch.Tensor:
        calls.append(arguments)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("no room")
        return original(*arguments, **options)

    monkeypatch.setattr("polyfed.engines.client.store.torch.empty_like", empty_like)
    engines[1].train(2, nothing)
    assert len(calls) > 1
    for client in range(4):
        for name, tensor in engines[0].get_state(client).items():
            torch.testing.assert_close(engines[1].get_state(client)[name], tensor, rtol=1e-5, atol=1e-6)


def test_architectures_that_do_not_fit_side_by_side_train_one_after_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _, _ = run(tmp_path, SequentialEngine, "pfedes")
    begin, queued = VectorizedEngine._begin, weakref.WeakSet[Any]()

    def no_second(self: VectorizedEngine, *arguments: Any) -> Any:
        gc.collect()
        if queued:
            raise torch.OutOfMemoryError("no room")
        work = yield from begin(self, *arguments)
        queued.add(work)
        return work

    monkeypatch.setattr(VectorizedEngine, "_begin", no_second)
    monkeypatch.setattr(vectorized, "STEPS_IN_A_TURN", 10_000)
    actual, notes, _ = run(tmp_path, VectorizedEngine, "pfedes")
    pd.testing.assert_frame_equal(actual, expected, check_exact=False, rtol=1e-4, atol=1e-5)
    assert [note for note in notes if "side by side" in note] == [
        "not all architectures fit into memory side by side; from now on they train one after another"
    ]


def test_cohorts_queue_their_steps_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten steps of one architecture and six of the other, four at a time."""
    clients = support.population("standalone", models=(support.Wide, support.Narrow), clients=2, batch_size=2)
    samples = {0: 20, 1: 12}
    clients = replace(clients, data={c: replace(own, train=own.train[: samples[c]]) for c, own in clients.data.items()})
    original, order = PhaseStep.__call__, []

    def noted(self: PhaseStep, inputs: Any) -> None:
        order.append({16: "W", 8: "N"}[next(iter(self.trained.values())).shape[1]])
        original(self, inputs)

    engine = VectorizedEngine(clients)
    engine.train(1, {client: support.Message() for client in samples})  # with trials of the architectures
    monkeypatch.setattr(PhaseStep, "__call__", noted)
    monkeypatch.setattr(vectorized, "STEPS_IN_A_TURN", 4)
    engine.train(2, {client: support.Message() for client in samples})
    assert "".join(order) == "WWWW NNNN WWWW NN WW".replace(" ", "")


def test_a_cohort_that_does_not_fit_is_halved_and_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _, _ = run(tmp_path, SequentialEngine, "pfedes", models=(support.Wide,))
    original = VectorizedEngine._train_phase

    def too_large(self: VectorizedEngine, clients: list[int], *rest: Any) -> Any:
        if len(clients) > 2:
            raise torch.OutOfMemoryError("no room")
        return original(self, clients, *rest)

    monkeypatch.setattr(VectorizedEngine, "_train_phase", too_large)
    actual, notes, _ = run(tmp_path, VectorizedEngine, "pfedes", models=(support.Wide,))
    pd.testing.assert_frame_equal(actual, expected, check_exact=False, rtol=1e-4, atol=1e-5)
    assert [note for note in notes if "did not fit" in note] == [
        "4 clients at once did not fit into memory; from now on at most 2 train together"
    ]


def test_a_cohort_that_runs_out_of_memory_between_turns_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others have queued steps in between, and its own steps so far are forgotten."""
    settings: dict[str, Any] = {"batch_size": 2, "rounds": 2, "training": {"momentum": 0.5}}
    expected, _, _ = run(tmp_path, SequentialEngine, "fedproto", **settings)
    original, refused = CapturedStep.queued, []

    def short_of_memory(self: CapturedStep, *given: Any) -> Any:
        for number, _ in enumerate(original(self, *given)):
            if number == 3 and not refused:
                refused.append(self)
                raise torch.OutOfMemoryError("no room")
            yield

    monkeypatch.setattr(CapturedStep, "queued", short_of_memory)
    monkeypatch.setattr(vectorized, "STEPS_IN_A_TURN", 2)
    actual, notes, _ = run(tmp_path, VectorizedEngine, "fedproto", **settings)
    pd.testing.assert_frame_equal(actual, expected, check_exact=False, rtol=1e-4, atol=1e-5)
    assert refused and any("side by side" in note for note in notes)


def test_a_finished_client_does_not_move(tmp_path: Path) -> None:
    """One client has a single batch, another has many: the first stays bitwise where its last batch left it."""
    clients = support.population("standalone", models=(support.Wide,), partition="dirichlet", alpha=0.3)
    engine = VectorizedEngine(clients)
    lengths = [len(data.train) for data in clients.data.values()]
    shortest = min(range(len(lengths)), key=lengths.__getitem__)
    assert lengths[shortest] < max(lengths)
    together = VectorizedEngine(clients)
    nothing = {client: support.Message() for client in range(len(lengths))}
    together.train(1, nothing)
    engine.train(1, {shortest: support.Message()})
    for name, tensor in engine.get_state(shortest).items():
        torch.testing.assert_close(together.get_state(shortest)[name], tensor, rtol=1e-5, atol=1e-6)


def test_finished_clients_take_no_part_in_further_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    clients = support.population("fd", models=(support.Wide,), clients=5, batch_size=2, epochs=2)
    kept = (3, 12, 1, 4, 2)
    shorter = {
        client: replace(own, train=own.train[:count])
        for (client, own), count in zip(clients.data.items(), kept, strict=True)
    }
    clients = replace(clients, data=shorter)
    original, sizes = PhaseStep.__call__, []

    def counted(self: PhaseStep, inputs: Any) -> None:
        sizes.append(len(inputs["rows"]))
        original(self, inputs)

    monkeypatch.setattr(PhaseStep, "__call__", counted)
    nothing = {client: support.Message() for client in range(5)}
    expected, actual = (engine(clients).train(1, nothing) for engine in (SequentialEngine, VectorizedEngine))
    # Two copies of one client try whether it can be stacked; then steps of 2, 6, 1, 2, 1 batches, twice.
    assert sizes == [2, 5, 5, 3, 3, *[1] * 8]
    for one, two in zip(actual, expected, strict=True):
        assert (one.client, one.loss) == (two.client, pytest.approx(two.loss, rel=1e-4))
        for name, tensor in two.message.tensors.items():  # FD averages what it saw in every step
            torch.testing.assert_close(one.message.tensors[name], tensor, rtol=1e-4, atol=1e-5)


def test_plan_pads_with_rows_that_are_no_samples() -> None:
    clients = support.population("standalone", models=(support.Wide,))
    phase: Phase = clients.method.phases()[0]
    plan = new_plan(clients, [0, 1], width=8, size=3, phase=phase, round=1)
    rows = plan.inputs["rows"]
    for column, client in enumerate((0, 1)):
        visited = rows[:, column].flatten()
        assert sorted(visited[visited >= 0].tolist()) == sorted(clients.data[client].train.tolist())
    assert (rows[:, 2] == -1).all()


def test_samples_that_do_not_fit_at_once_are_evaluated_in_smaller_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of a single client, which can't be halved."""
    expected, *_ = run(tmp_path, VectorizedEngine, "fedproto", clients=2, models=(support.Wide, support.Narrow))
    original, largest = passes.for_each, [0]

    def small(function: Any, state: Any, x: Any, *rest: Any) -> Any:
        if isinstance(x, torch.Tensor):
            if x.shape[1] > 5:
                raise torch.OutOfMemoryError("no room")
            largest[0] = max(largest[0], x.shape[1])
        return original(function, state, x, *rest)

    monkeypatch.setattr(passes, "for_each", small)
    monkeypatch.setattr(stacked_package, "inspect", lambda *given: {})
    again, *_ = run(tmp_path / "small", VectorizedEngine, "fedproto", clients=2, models=(support.Wide, support.Narrow))
    pd.testing.assert_frame_equal(again, expected, check_exact=False, rtol=1e-5)
    assert 2 < largest[0] <= 5


def test_why_a_step_can_not_be_captured() -> None:
    def failed(first: Exception) -> RuntimeError:
        try:
            try:
                raise first
            finally:
                raise RuntimeError("capture was invalidated")  # as leaving a failed capture does
        except RuntimeError as error:
            return error

    assert isinstance(reason(failed(torch.OutOfMemoryError("full"))), torch.OutOfMemoryError)
    said = reason(failed(RuntimeError("no copy\nwhile capturing")))
    assert isinstance(said, InputError)
    assert "(no copy while capturing): use --engine sequential" in str(said)


@pytest.mark.parametrize("engine", [SequentialEngine, VectorizedEngine])
def test_training_that_diverges_is_named_before_an_answer_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: Any
) -> None:
    monkeypatch.setattr(Method, "upload", lambda *given: pytest.fail("an answer from numbers that are not finite"))
    with pytest.raises(DivergedError, match="lr"):
        run(tmp_path, engine, "standalone", models=(support.Wide,), lr=1e30)


@pytest.mark.parametrize("models", [(support.Wide,), (support.Wide, support.Narrow)], ids=["one cohort", "two"])
def test_slow_uploads_are_made_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, models: Any) -> None:
    """Two clients, of one cohort or of two, wait for each other; they send what they send one after another."""
    fedkd, meeting, entered = METHODS["fedkd"], threading.Barrier(2, timeout=30), list[threading.Thread]()
    upload, threads, settings = fedkd.upload, torch.get_num_threads(), {"clients": 2, "models": models}
    in_stream = Stream.entered

    def recorded(stream: Stream) -> Any:
        entered.append(threading.current_thread())
        return in_stream(stream)

    def slow(method: Method, client: Trained) -> Message:
        meeting.wait()
        assert not torch.is_grad_enabled() and torch.get_num_threads() == 1
        assert threading.current_thread() in entered
        return upload(method, client)

    monkeypatch.setattr(stacked_round, "available_cores", lambda: 2)
    monkeypatch.setattr(Stream, "entered", recorded)
    monkeypatch.setattr(fedkd, "upload", slow)
    at_once, _, first = run(tmp_path / "at once", VectorizedEngine, "fedkd", **settings)
    monkeypatch.setattr(fedkd, "upload", upload)
    monkeypatch.setattr(fedkd, "uploads_in_threads", False)
    in_turn, _, second = run(tmp_path / "in turn", VectorizedEngine, "fedkd", **settings)
    pd.testing.assert_frame_equal(at_once, in_turn, check_exact=True)
    for client in (0, 1):
        torch.testing.assert_close(first.engine.get_state(client), second.engine.get_state(client), rtol=0, atol=0)
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize(("device", "sizes"), [("cuda", [1, 4, 5, 7, 10, 10, 14, 18]), ("cpu", None)])
def test_cohorts_are_padded_on_a_gpu_to_few_sizes(device: str, sizes: list[int] | None) -> None:
    """Eighteen clients have the architecture: all of them are not padded, because they come in every round."""
    like: Any = SimpleNamespace(
        population=SimpleNamespace(device=torch.device(device)),
        _owners={"Wide": 18},
        _architecture=lambda client: "Wide",
    )
    counts = [1, 4, 5, 7, 9, 10, 13, 18]
    assert [VectorizedEngine._size(like, list(range(count))) for count in counts] == (sizes or counts)
