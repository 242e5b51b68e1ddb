"""The ray engine on a cluster of two nodes on loopback: a simulation's numbers bit by bit, whoever dies on the way."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import polyfed
from polyfed.config import RaySettings
from polyfed.engines import EngineSettings, SequentialEngine, ray_actors
from polyfed.engines.hosts import Host, HostTraits
from polyfed.engines.ray import RayEngine
from polyfed.engines.ray_actors import Actor
from polyfed.engines.ray_session import RaySession
from polyfed.errors import DivergedError, InputError, LostError, RunError
from polyfed.server.federation import Federation, Watcher
from tests import support
from tests.engines.test_hosts import compare
from tests.remote.support import same_rows

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # loopback alone
ray = pytest.importorskip("ray", reason="the ray engine needs the extra polyfed[ray]")
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # noqa: E402

NODE: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False}
SEVERAL: dict[str, Any] = {"clients": 6, "participation": 0.5, "rounds": 3, "split": "6:2:2"}
HEALTH = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 200, "health_check_failure_threshold": 3}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    found = Cluster(initialize_head=True, head_node_args={**NODE, "_system_config": HEALTH})
    found.add_node(**NODE)
    ray.init(address=found.address, log_to_driver=False, logging_level="ERROR")
    yield found
    ray.shutdown()
    found.shutdown()


class Reused(Host):
    """A host whose process serves one test after another: to import PyTorch takes longer than a tiny federation."""

    def __init__(self) -> None:
        pass

    def begin(self, population: Any, traits: HostTraits) -> None:
        super().__init__(population, traits)


def new_process(number: int) -> Any:
    """One on the node of that number."""
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    place = NodeAffinitySchedulingStrategy(nodes[number], soft=False)
    return ray.remote(Reused).options(num_cpus=0, max_restarts=0, scheduling_strategy=place).remote()


@pytest.fixture(scope="module")
def processes(cluster: Any) -> list[Any]:
    return [new_process(number) for number in range(2)]


class ReusingEngine(RayEngine):
    """The engine on processes that are there already; one that has died is replaced, for the tests that follow too."""

    name = "ray-reusing"

    def __init__(self, processes: list[Any], population: Any) -> None:
        self._processes = processes
        super().__init__(population, settings=RaySettings(hosts=len(processes), cpus=1))

    def _launch(self, actor: Actor) -> None:
        if actor.deaths:
            self._processes[actor.number] = new_process(actor.number)
        actor.handle = self._processes[actor.number]
        actor.handle.begin.remote(actor.data, self._traits)

    def _kill(self, actor: Actor) -> None:
        pass


def same_states(one: Any, other: Any, clients: int) -> None:
    for client in range(clients):
        mine, theirs = one.get_state(client), other.get_state(client)
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine), client


def finished(folder: Path, engine: Any, method: str = "fedproto", **settings: Any) -> Federation:
    federation = support.federation(folder, method, engine=engine, **{**SEVERAL, **settings})
    federation.run()
    return federation


@pytest.mark.parametrize("method", polyfed.METHODS)
def test_hosts_give_the_numbers_of_a_simulation(tmp_path: Path, processes: list[Any], method: str) -> None:
    """Every row and every client's state, those that never trained included, are `sequential`'s, bit by bit."""
    models = (support.Wide,) if "network" in polyfed.METHODS[method].requires else (support.Wide, support.Narrow)
    settings = {"models": models, "participation": 0.34}
    reference = finished(tmp_path / "one", SequentialEngine, method, **settings)
    hosts = finished(tmp_path / "two", partial(ReusingEngine, processes), method, **settings)
    same_rows(tmp_path / "one" / "run", tmp_path / "two" / "run")
    same_states(hosts.engine, reference.engine, 6)
    hosts.engine.close()


@pytest.mark.parametrize("evaluate", ["after-training", "after-download"])
def test_networks_that_draw_and_normalise_agree_too(tmp_path: Path, processes: list[Any], evaluate: str) -> None:
    settings = {"models": (support.Normed, support.Wide), "evaluate": evaluate, "start": "client", "eval_every": 2}
    reference = finished(tmp_path / "one", SequentialEngine, "lg-fedavg", **settings)
    hosts = finished(tmp_path / "two", partial(ReusingEngine, processes), "lg-fedavg", **settings)
    same_rows(tmp_path / "one" / "run", tmp_path / "two" / "run")
    same_states(hosts.engine, reference.engine, 6)
    hosts.engine.close()


def test_a_checkpoint_asks_each_host_once_for_many_states(
    tmp_path: Path, processes: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    copied = RayEngine._copied
    monkeypatch.setattr(
        RayEngine, "_copied", lambda self, number, c: (asked.append(number), copied(self, number, c))[1]
    )
    run = support.federation(tmp_path, "fedproto", partial(ReusingEngine, processes), **SEVERAL | {"participation": 1})
    run.round(1)
    run.checkpoint()
    assert asked == [0, 1]
    run.checkpoint()
    assert asked == [0, 1]
    assert run.engine.states.changed_clients() == set()


def test_states_that_do_not_fit_are_refused(processes: list[Any]) -> None:
    engine = ReusingEngine(processes, support.population("standalone"))
    state = engine.get_state(0)
    with pytest.raises(InputError, match="the checkpoint's state of client 3 does not fit"):
        engine.restore(1, {0: state, 3: state | {"more": torch.zeros(1)}})
    with pytest.raises(InputError, match="the checkpoint's state of client 9 does not fit"):
        engine.restore(1, {9: state})


def test_a_run_goes_on_from_a_checkpoint_of_another_engine(tmp_path: Path, processes: list[Any]) -> None:
    reference = finished(tmp_path / "one", SequentialEngine)
    begun = support.federation(tmp_path / "two", "fedproto", SequentialEngine, **SEVERAL)
    for number in (1, 2):
        begun.round(number)
    begun.checkpoint()
    people = support.population("fedproto", **SEVERAL)
    saved, _ = begun.folder.restore()
    assert saved is not None
    continued = Federation(begun.config, people.method, ReusingEngine(processes, people), begun.folder)
    continued.restore(saved)
    continued.run()
    same_rows(tmp_path / "one" / "run", tmp_path / "two" / "run")
    same_states(continued.engine, reference.engine, 6)


def test_divergence_is_the_error_of_a_simulation(tmp_path: Path, processes: list[Any]) -> None:
    """All clients diverge; the one that is named is the first."""
    errors = []
    for name, engine in {"one": SequentialEngine, "two": partial(ReusingEngine, processes)}.items():
        with pytest.raises(DivergedError) as caught:
            finished(tmp_path / name, engine, lr=1e26)
        errors.append(str(caught.value))
    assert errors[0] == errors[1]
    assert "client" in errors[0] and "round 1" in errors[0]


class Faulty(support.Wide):
    """Fails in training, but not when it is tried out on two samples."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training and len(x) > 2:
            raise ValueError("a mistake of the user's")
        return super().forward(x)


def test_an_error_in_the_users_code_keeps_its_sentence(tmp_path: Path, processes: list[Any]) -> None:
    errors = []
    for name, engine in {"one": SequentialEngine, "two": partial(ReusingEngine, processes)}.items():
        with pytest.raises(RunError) as caught:
            finished(tmp_path / name, engine, models=(Faulty,))
        errors.append(str(caught.value))
    assert errors[0] == errors[1]
    assert "a mistake of the user's (tests/engines/test_ray.py, line" in errors[0]


class Killing(Watcher):
    """Kills a host when the first client of a round has answered, and between two rounds."""

    def __init__(self, during: int, after: int) -> None:
        self.during, self.after = during, after
        self.engine: Any = None
        self.killed: list[int] = []

    def on_client(self, round: int, client: int) -> None:
        if round == self.during:
            self.during = 0
            self._kill(1 if client in self.engine._actors[0].clients else 0)

    def on_round(self, round: int, row: Mapping[str, Any] | None) -> None:
        if round == self.after:
            self._kill(0)

    def _kill(self, number: int) -> None:
        self.killed.append(self.engine._actors[number].process)
        os.kill(self.killed[-1], signal.SIGKILL)


def test_killed_workers_are_revived_and_change_no_bit(
    tmp_path: Path, processes: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One dies before there are copies, in the middle of a round; one after, with rounds to repeat since."""
    monkeypatch.setattr(ray_actors, "COPIED_AFTER", 2)
    monkeypatch.setattr(ray_actors, "CHUNK", 2)
    settings = {"participation": 1.0, "rounds": 4}
    reference = finished(tmp_path / "one", SequentialEngine, **settings)
    run = support.federation(tmp_path / "two", "fedproto", partial(ReusingEngine, processes), **{**SEVERAL, **settings})
    run.watcher = watcher = Killing(during=1, after=3)
    watcher.engine = run.engine
    run.run()
    same_rows(tmp_path / "one" / "run", tmp_path / "two" / "run")
    same_states(run.engine, reference.engine, 6)
    notes = [event["note"] for event in run.folder.events() if event["event"] == "note"]
    assert len([note for note in notes if "died and was revived" in note]) == len(set(watcher.killed)) == 2
    run.engine.close()
    assert ray.is_initialized()  # it was not ours
    assert len(RaySession(RaySettings()).nodes) == 2


def test_a_host_of_the_engines_own_agrees_with_vectorized(tmp_path: Path, cluster: Any) -> None:
    """The way of `test_a_gpu_host_agrees_with_vectorized`, without a GPU."""
    compare(tmp_path, "cpu", {"hosts": 1, "gpus": 0})


class Losing(Watcher):
    """Takes a whole node away after a round."""

    def __init__(self, round: int, cluster: Any) -> None:
        self.round, self.cluster = round, cluster

    def on_round(self, round: int, row: Mapping[str, Any] | None) -> None:
        if round == self.round:
            self.cluster.remove_node(next(iter(self.cluster.worker_nodes)), allow_graceful=False)


def test_a_lost_node_ends_in_a_sentence_and_the_run_can_be_resumed(
    tmp_path: Path, cluster: Any, processes: list[Any]
) -> None:
    """The last test with these processes: one of them goes with its node."""

    class Engine(ReusingEngine):
        @classmethod
        def create(cls, population: Any, settings: EngineSettings) -> Any:
            return cls(processes, population)

    values: dict[str, Any] = {**support.DEFAULTS, **SEVERAL, "method": "fedproto", "checkpoint_every": 1}
    given = {"data": support.tiny_dataset(), "models": [support.Wide, support.Narrow]}
    polyfed.run(**{**values, "engine": "sequential"}, **given, out=tmp_path / "one")
    watcher = Losing(2, cluster)
    with pytest.raises(LostError, match=r"the machine of host . \(clients .*\) is gone, .* `polyfed resume .*` contin"):
        polyfed.run(**{**values, "engine": Engine}, **given, out=tmp_path / "two", watcher=watcher)
    cluster.add_node(**NODE)
    polyfed.resume(tmp_path / "two", **given, settings={"engine": "sequential"})
    same_rows(tmp_path / "one", tmp_path / "two")
    for file in sorted((tmp_path / "one" / "models").iterdir()):
        assert file.read_bytes() == (tmp_path / "two" / "models" / file.name).read_bytes(), file.name


def lines_until(process: subprocess.Popen[str], wanted: Callable[[str], bool]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if wanted(line):
            return
    raise AssertionError("the process ended early")


def children(process: int) -> set[int]:
    """All processes that descend from this one."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(entry.parent.name)] = int(entry.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found = {process}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {process}


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
def test_the_command_line_starts_ray_and_ends_it_when_asked_to_stop(tmp_path: Path) -> None:
    """SIGTERM is ours, not Ray's: the run ends with a checkpoint, and nothing that it started is left."""
    out = tmp_path / "run"
    arguments = ["run", "standalone", "--engine", "ray", "--rounds", "1000", "--out", str(out), "--models", "cnn5"]
    process = subprocess.Popen(
        [sys.executable, "-m", "polyfed", *arguments, "--set", "ray.hosts=1", "--clients", "2"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    lines_until(process, lambda line: line.startswith("round 1/"))
    begun = children(process.pid)
    assert begun
    process.terminate()
    _, words = process.communicate(timeout=60)
    assert process.returncode == 143, words
    assert "stopped after round" in words and len(words.splitlines()) == 1
    end = time.monotonic() + 20
    while (left := {child for child in begun if Path(f"/proc/{child}").exists()}) and time.monotonic() < end:
        time.sleep(0.1)
    assert not left


def test_what_the_cluster_can_not_hold_is_refused(cluster: Any) -> None:
    people = support.population("standalone", clients=6)
    with pytest.raises(InputError, match="6 hosts need 6 CPUs, but the Ray cluster has 2 CPUs: ask for fewer hosts"):
        RayEngine(people, settings=RaySettings(hosts=6))
    with pytest.raises(InputError, match="2 hosts need 2 GPUs and 2 CPUs, but the Ray cluster has 0 GPUs and 2 CPUs"):
        RayEngine(people, settings=RaySettings(hosts=2, gpus=1))


def test_an_address_where_nobody_answers_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    expected = {"127.0.0.1:1": "can't join the Ray cluster at", "ray://there:1": "must be the HOST:PORT"}
    for address, words in expected.items():
        with pytest.raises(InputError, match=words):
            RayEngine(support.population("standalone"), settings=RaySettings(address=address))
