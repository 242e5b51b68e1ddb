"""Engines: they agree with each other, whatever the number of workers and wherever states rest."""

import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyfed.engines import LocalEngine, SequentialEngine, ThreadsEngine, VectorizedEngine, base, new_engine
from polyfed.engines.client.workbench import Workbench, state_of
from polyfed.errors import DivergedError
from polyfed.message import Message, State
from polyfed.population import Population
from polyfed.server.federation import Federation
from tests import support

SEVERAL = {"clients": 6, "participation": 0.5, "rounds": 3, "split": "6:2:2"}


def finished(tmp_path: Path, engine: Any, method: str = "fedproto", **settings: Any) -> Federation:
    federation = support.federation(tmp_path, method, engine=engine, **{**SEVERAL, **settings})
    federation.run()
    return federation


def states(federation: Federation) -> dict[int, State]:
    return {client: federation.engine.get_state(client) for client in range(federation.config.clients)}


def largest_difference(a: dict[int, State], b: dict[int, State]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[c][n].double() - b[c][n].double()).abs().max()) for c in a for n in a[c])


def same(a: State, b: State) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("models", [(support.Wide, support.Narrow), (support.Normed,)], ids=["plain", "normed"])
@pytest.mark.parametrize("method", ["standalone", "lg-fedavg", "fedproto"])
def test_threads_agree_with_the_reference(tmp_path: Path, method: str, models: Any) -> None:
    runs = [
        finished(tmp_path / engine.name, engine, method, models=models) for engine in (SequentialEngine, ThreadsEngine)
    ]
    assert largest_difference(*(states(run) for run in runs)) < 1e-5
    one, other = (run.folder.rounds().drop(columns="seconds") for run in runs)
    assert one.drop(columns="loss_mean").equals(other.drop(columns="loss_mean"))
    assert one.loss_mean.tolist() == pytest.approx(other.loss_mean.tolist(), abs=1e-5)


def test_the_number_of_workers_changes_no_bit(tmp_path: Path) -> None:
    models = (support.Wide, support.Normed)
    runs = [
        finished(tmp_path / str(workers), partial(ThreadsEngine, workers=workers), models=models)
        for workers in (1, 2, 3)
    ]
    for run in runs[1:]:
        assert all(same(states(runs[0])[client], states(run)[client]) for client in range(6))
        assert run.folder.rounds().drop(columns="seconds").equals(runs[0].folder.rounds().drop(columns="seconds"))


def test_states_on_disk_change_no_bit(tmp_path: Path) -> None:
    """Room for no state at all: all but the last one put rest on disk."""
    models = (support.Wide, support.Normed)
    usual = finished(tmp_path / "usual", ThreadsEngine, models=models)
    tiny = finished(tmp_path / "tiny", partial(ThreadsEngine, workers=2, memory_budget=1), models=models)
    assert isinstance(tiny.engine, LocalEngine)
    assert len(tiny.engine.store._states) == 1
    assert all(same(states(usual)[client], states(tiny)[client]) for client in range(6))
    spilled = tiny.engine.store._folder.path if tiny.engine.store._folder else Path()
    assert any(spilled.iterdir())
    tiny.engine.close()
    assert not spilled.exists()


def trained(population: Population, rounds: int = 1) -> SequentialEngine:
    engine = SequentialEngine(population)
    for round in range(1, rounds + 1):
        engine.train(round, {client: Message() for client in range(len(population.data))})
    return engine


def test_clients_of_one_architecture_start_alike_and_share_no_storage() -> None:
    clients = support.population("standalone", models=(support.Wide,))
    engine = SequentialEngine(clients)
    assert same(engine.get_state(0), engine.get_state(1))
    engine.train(1, {client: Message() for client in range(4)})
    places = [tensor.data_ptr() for client in range(4) for tensor in engine.get_state(client).values()]
    assert len(places) == len(set(places))
    assert not same(engine.get_state(0), engine.get_state(1))


def test_start_weights_of_their_own_are_an_option() -> None:
    alike = SequentialEngine(support.population("standalone", models=(support.Wide,)))
    own = SequentialEngine(support.population("standalone", models=(support.Wide,), start="client"))
    assert same(alike.get_state(0), alike.get_state(2))
    assert not same(own.get_state(0), own.get_state(2))
    assert same(own.get_state(2), own.get_state(2))


@pytest.mark.parametrize("engine", [SequentialEngine, ThreadsEngine])
def test_who_stays_home_keeps_its_state(engine: type[LocalEngine]) -> None:
    clients = support.population("standalone", models=(support.Normed,))
    running = engine(clients)
    first = {name: tensor.clone() for name, tensor in running.get_state(3).items()}
    running.train(1, {0: Message(), 1: Message()})
    running.evaluate(range(4), 1)
    kept = {name: tensor.clone() for name, tensor in running.get_state(1).items()}
    running.train(2, {0: Message(), 2: Message()})
    assert same(running.get_state(3), first)
    assert same(running.get_state(1), kept)
    assert running.changed_clients() == {0, 1, 2}
    running.close()


def test_evaluating_changes_nothing_and_a_download_counts() -> None:
    """A head that always says class 1 scores the share of class 1, and is forgotten afterwards."""
    clients = support.population("lg-fedavg", split="6:0:4")
    engine = trained(clients)
    before = {name: tensor.clone() for name, tensor in engine.get_state(0).items()}
    head = {name: torch.zeros_like(t) for name, t in before.items() if name.startswith("model.head.")}
    bias = next(name for name in head if name.endswith("bias"))
    head[bias][1] = 1.0
    score = engine.evaluate([0], 2, {0: Message(head)})[0]
    assert score.test_correct["classifier"] == int((clients.dataset.labels[clients.data[0].test] == 1).sum())
    assert same(engine.get_state(0), before)
    assert engine.evaluate([0], 2)[0] == engine.evaluate([0], 2)[0]


def test_a_client_without_samples_to_test_is_scored_as_unknown() -> None:
    clients = support.population("standalone", split="1:0")
    score = trained(clients).evaluate([0], 1)[0]
    assert (score.test, score.test_correct) == (0, {"classifier": 0})


def test_replies_come_in_the_order_of_client_numbers() -> None:
    engine = ThreadsEngine(support.population("standalone"), workers=3)
    done: list[int] = []
    replies = engine.train(1, {client: Message() for client in (3, 0, 2)}, done.append)
    assert [reply.client for reply in replies] == [0, 2, 3]
    assert sorted(done) == [0, 2, 3]
    engine.close()


def test_clients_with_the_most_work_come_first() -> None:
    """One worker, and clients with as many samples each: the wide networks, which would be last by name, go first."""
    clients = support.population("standalone", models=(support.Narrow, support.Wide), partition="iid")
    assert len({len(data.train) for data in clients.data.values()}) == 1
    engine = ThreadsEngine(clients, workers=1)
    begun: list[int] = []
    train = engine._train_one
    engine._train_one = lambda bench, client, *rest: (begun.append(client), train(bench, client, *rest))[1]  # type: ignore[method-assign]
    engine.train(1, {client: Message() for client in range(4)})
    assert begun == [1, 3, 0, 2]
    engine.close()


def test_there_are_as_many_workers_as_cores_that_the_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not as many as the machine has: a container or a batch system may have given it only some."""
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {4, 5, 6}, raising=False)
    engine = ThreadsEngine(support.population("standalone"))
    assert engine._pool._max_workers == 3
    engine.close()


def test_operations_are_counted_before_workers_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's counter hooks into the modules of every thread, so no client may train beside it."""
    threads: list[threading.Thread] = []
    count = base.measured_flops
    monkeypatch.setattr(base, "measured_flops", lambda *a: (threads.append(threading.current_thread()), count(*a))[1])
    engine = ThreadsEngine(support.population("standalone"), workers=2)
    engine.train(1, {client: Message() for client in range(4)})
    assert threads == [threading.current_thread()] * 2  # once per architecture
    engine.close()


def test_compute_threads_are_as_before() -> None:
    before = torch.get_num_threads()
    engine = ThreadsEngine(support.population("standalone"))
    engine.train(1, {0: Message()})
    assert torch.get_num_threads() == before
    engine.close()


def test_auto_takes_threads_on_a_cpu() -> None:
    clients = support.population("standalone")
    assert isinstance(new_engine("auto", clients), ThreadsEngine)
    assert isinstance(new_engine("sequential", clients), SequentialEngine)


class Tied(nn.Module):
    """A network whose layers share a weight, and whose modules share a buffer that no state dictionary holds."""

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(36, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.third.weight = self.second.weight
        self.register_buffer("scale", torch.full((1,), 2.0), persistent=False)
        self.first.register_buffer("same_scale", self.scale)
        self.out = nn.Linear(6, classes)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.second(self.first(x.flatten(1)).relu()).relu()
        logits: Tensor = self.out(self.third(hidden).relu() * self.scale)
        return logits


@pytest.mark.parametrize("method", ["standalone", "fedavg"])
def test_networks_with_tied_weights_train(tmp_path: Path, method: str) -> None:
    run = finished(tmp_path, ThreadsEngine, method, models=(Tied,), checkpoint_every=1)
    assert (run.folder.rounds().replies == 3).all()
    state = run.engine.get_state(0)
    network = Workbench(run.engine.population.new_network).network(0, "Tied", state)
    extractor = network.model.extractor
    assert extractor.second.weight is extractor.third.weight
    assert extractor.scale.data_ptr() == extractor.first.same_scale.data_ptr()
    assert "model.extractor.third.weight" not in state_of(network)


@pytest.mark.parametrize("engine", [SequentialEngine, VectorizedEngine])
def test_a_loss_that_has_run_away_stops_the_run_although_it_is_a_number(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clients = support.population("standalone", lr=1e-20)
    method = type(clients.method)
    monkeypatch.setattr(method, "loss", lambda self, net, batch: net(batch.x).square().sum(1) * 1e12)
    with pytest.raises(
        DivergedError, match=r"the loss of client 0 has grown to \d\.\de\+1\d in round 1, phase 'model'"
    ):
        engine(clients).train(1, {0: Message()})
