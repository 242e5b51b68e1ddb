"""Memory that runs out or is left behind, simulated on a CPU: what is freed, what continues and what is said."""

from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from polyfed import compute
from polyfed.data import Dataset
from polyfed.engines import SequentialEngine, ThreadsEngine, VectorizedEngine, cohorts, stacked
from polyfed.engines.base import LocalEngine
from polyfed.engines.stacked.captured import CapturedStep
from polyfed.engines.stacked.round import CohortRound
from polyfed.errors import RunError
from polyfed.methods.base import Method, Phase
from polyfed.server.federation import Federation
from tests import support

CPU_SAYS = "[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory"


def notes(run: Federation) -> list[str]:
    return [event["note"] for event in run.folder.events() if event["event"] == "note"]


def table(run: Federation) -> Any:
    run.run()
    return run.folder.rounds().drop(columns="seconds")


def little_memory(monkeypatch: pytest.MonkeyPatch, most: int, error: Exception) -> list[int]:
    """From now on batches of more samples do not fit while nothing is trained; the sizes that were tried."""
    batch, tried = Dataset.batch, []

    def limited(self: Dataset, samples: torch.Tensor, *rest: Any) -> Any:
        if not torch.is_grad_enabled():
            tried.append(len(samples))
            if len(samples) > most:
                raise error
        return batch(self, samples, *rest)

    monkeypatch.setattr(Dataset, "batch", limited)
    return tried


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room"), RuntimeError(CPU_SAYS), MemoryError()])
@pytest.mark.parametrize("engine", [SequentialEngine, ThreadsEngine])
def test_passes_continue_with_smaller_batches_and_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: type[LocalEngine], error: Exception
) -> None:
    """64 samples at once are too many, so are 32, 16, 8 and 4; the numbers stay the same."""
    settings: dict[str, Any] = {"engine": engine, "rounds": 2, "split": "6:0:4"}
    expected = table(support.federation(tmp_path / "enough", "fedproto", **settings))
    tried = little_memory(monkeypatch, 3, error)
    run = support.federation(tmp_path / "little", "fedproto", **settings)
    actual = table(run)
    assert actual["accuracy_mean"].tolist() == expected["accuracy_mean"].tolist()
    assert actual["loss_mean"].tolist() == pytest.approx(expected["loss_mean"].tolist(), rel=1e-5)
    assert max(tried) > 3 and {2, 3} & set(tried)
    said = {note for note in notes(run) if "ran out of memory" in note}
    assert any("passes without training ran out of memory; they continue with 2 samples at once" in n for n in said)


def test_stacked_passes_say_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four clients of one architecture with 48 test samples each: 192 at once are too many, 128 are not."""
    settings: dict[str, Any] = {
        "engine": VectorizedEngine, "rounds": 1, "split": "6:0:4", "models": (support.Wide,),
        "dataset": support.tiny_dataset(per_class=120),
    }  # fmt: skip
    expected = table(support.federation(tmp_path / "enough", "standalone", **settings))
    little_memory(monkeypatch, 128, torch.OutOfMemoryError("no room"))
    run = support.federation(tmp_path / "little", "standalone", **settings)
    assert table(run)["accuracy_mean"].tolist() == expected["accuracy_mean"].tolist()
    assert sum("passes without training ran out of memory" in note for note in notes(run)) >= 1


def test_an_evaluation_that_never_fits_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = support.federation(tmp_path, "standalone", rounds=1)
    little_memory(monkeypatch, 0, torch.OutOfMemoryError("no room"))
    with pytest.raises(RunError, match="^the evaluation of round 1 does not fit into memory, not even sample by") as e:
        run._evaluate(1, set())
    assert isinstance(e.value.__cause__, torch.OutOfMemoryError)


@pytest.mark.parametrize("engine", [SequentialEngine, VectorizedEngine])
def test_heavy_messages_have_a_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: type[LocalEngine]
) -> None:
    """Room for two of a round's four covariances; the others are moved away, and no number changes."""
    expected = table(support.federation(tmp_path / "all", "dc-pfl", engine=engine, rounds=2))
    run = support.federation(tmp_path / "few", "dc-pfl", engine=engine, rounds=2)
    local, moved = run.engine, []
    assert isinstance(local, LocalEngine)
    first = local.train(1, {client: run.download(client) for client in local.population.clients})
    sizes = [reply.message.tensors["covariances"].nbytes for reply in first]
    run = support.federation(tmp_path / "again", "dc-pfl", engine=engine, rounds=2)
    local = run.engine
    assert isinstance(local, LocalEngine)
    local._message_budget = sum(sizes[:2])
    original = torch.Tensor.cpu

    def counted(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.nbytes == sizes[0]:
            moved.append(tensor.nbytes)
        return original(tensor)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "cpu", counted)
        actual = table(run)
    assert len(moved) >= 2 * 2  # two of four, in each of two rounds
    assert sum("some wait in the machine's own" in note for note in notes(run)) >= 1
    assert actual.equals(expected)


class Graph:
    """Stands in for a captured graph."""


def test_workspaces_are_freed_once_no_graph_uses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: done.append("workspaces"), raising=False)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("cache"))
    graph = Graph()
    compute._GRAPHS.add(graph)  # type: ignore[arg-type]
    compute.free_gpu_memory()
    assert done == ["cache"]
    del graph
    compute.free_gpu_memory()
    assert done == ["cache", "workspaces", "cache"]


@pytest.mark.parametrize("own", [{}, {"MALLOC_TRIM_THRESHOLD_": "1"}, {"GLIBC_TUNABLES": "glibc.malloc.arena_max=1"}])
def test_the_c_library_keeps_memory_unless_the_user_has_set_it(
    own: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """glibc's malloc.h: M_TRIM_THRESHOLD is -1, M_MMAP_THRESHOLD is -3."""
    told: dict[int, int] = {}
    library = SimpleNamespace(mallopt=lambda name, value: told.__setitem__(name, value))
    monkeypatch.setattr("ctypes.CDLL", lambda name: library)
    for name in [name for name in os.environ if name.startswith("MALLOC_") or name == "GLIBC_TUNABLES"]:
        monkeypatch.delenv(name)
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    compute.reuse_memory()
    assert told == ({} if own else {-3: 33554432, -1: 134217728})


@pytest.fixture
def queued(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts waits for the GPU and steps that were freed, and fails if one was while its graph could still run.

    Steps are as if captured: they run from when they are queued until somebody waits for the results of their cohort,
    or for the GPU.
    """
    counted, running = Counter[str](), dict[int, stacked.PhaseStep]()
    make, queue, results = CapturedStep.__init__, CapturedStep.queued, CohortRound.results

    def freed(number: int) -> None:
        counted["freed"] += 1
        counted["freed while running"] += running.pop(number, None) is not None

    def init(self: CapturedStep, *given: Any) -> None:
        make(self, *given)
        weakref.finalize(self, freed, id(self))

    def begun(self: CapturedStep, *given: Any) -> Iterator[None]:
        running[id(self)] = self.step
        self._graphs[0] = Graph()  # type: ignore[assignment]
        yield from queue(self, *given)

    def finished(self: CohortRound) -> Any:
        for number in [number for number, step in running.items() if any(step is own for own in self.steps)]:
            del running[number]
        return results(self)

    def wait() -> None:
        counted["waits"] += 1
        running.clear()

    monkeypatch.setattr(CapturedStep, "__init__", init)
    monkeypatch.setattr(CapturedStep, "queued", begun)
    monkeypatch.setattr(CohortRound, "results", finished)
    monkeypatch.setattr(cohorts, "finish_gpu_work", wait)
    return counted


@pytest.mark.parametrize(("most", "freed"), [(4, 0), (3, 2), (1, 6)])
def test_no_captured_step_is_freed_while_it_may_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, queued: Counter[str], most: int, freed: int
) -> None:
    """Two networks train side by side in two phases, in three rounds: four steps, of which not all are kept."""
    monkeypatch.setattr(cohorts, "KEPT_STEPS", most)
    support.run(tmp_path, VectorizedEngine, "pfedes", rounds=3)
    assert queued["freed while running"] == 0
    assert queued["freed"] == freed
    assert queued["waits"] == (2 if freed else 0)  # between the rounds


class Changing(Method):
    """It trains twice in a round, under one name and with learning rates that are always others."""

    name, title, paper, sends = "changing", "Changing", "none", "nothing"

    def phases_in(self, round: int) -> list[Phase]:
        return [replace(phase, lr=0.1 / (round + part)) for phase in self.phases() for part in (0.0, 0.5)]


def test_nor_is_one_whose_phase_has_changed(tmp_path: Path, queued: Counter[str]) -> None:
    *_, run = support.run(tmp_path, VectorizedEngine, {"name": Changing}, rounds=2)
    assert queued["freed"] == 6 and queued["freed while running"] == 0
    run.engine.close()
