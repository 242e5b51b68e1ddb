"""Tensors on their way to a device, and captures of what is done there."""

import gc
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch

from polyfed.compute import _packed, all_copied_to_cpu, all_to_device, capturing, finish_gpu_work, first_cause
from tests.engines.pretended import OnGpu, Pretended

CPU = torch.device("cpu")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, where work is captured")


def test_packed_tensors_come_out_as_they_were() -> None:
    """A number, nothing, a transposed matrix and a part of a larger tensor, in one flat transfer."""
    wide = torch.arange(12.0).view(3, 4)
    given = [torch.tensor(7.0), torch.zeros(0, 5), wide.T, wide[:, 1:3]]
    found = _packed(given, CPU)
    for one, other in zip(found, given, strict=True):
        assert one.shape == other.shape
        assert torch.equal(one, other)
    assert len({one.untyped_storage().data_ptr() for one in found}) == 1
    wide.zero_()
    assert found[2][3, 2] == 11.0


def test_a_type_is_one_transfer_and_large_tensors_travel_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Moved to `meta`, which is no CPU either: floats of 2 + 3 numbers together, the large one and labels apart."""
    monkeypatch.setattr("polyfed.compute.SMALL_TRANSFER", 3)
    moved: list[int] = []

    def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        moved.append(tensor.numel())
        return tensor.to(device)

    monkeypatch.setattr("polyfed.compute.to_device", to_device)
    given = [torch.zeros(2), torch.zeros(1, dtype=torch.int64), torch.zeros(4), torch.zeros(3, 1)]
    found = all_to_device(given, torch.device("meta"))
    assert [(tensor.shape, tensor.dtype) for tensor in found] == [(tensor.shape, tensor.dtype) for tensor in given]
    assert sorted(moved) == [1, 4, 5]


def test_what_all_clients_receive_travels_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two clients get the same weights and labels of their own; a copy with equal values is another tensor."""
    moved: list[int] = []
    original = torch.cat

    def cat(tensors: list[torch.Tensor]) -> torch.Tensor:
        moved.append(sum(tensor.numel() for tensor in tensors))
        return original(tensors)

    monkeypatch.setattr(torch, "cat", cat)
    weights, labels = torch.zeros(5), [torch.tensor([1]), torch.tensor([1])]
    found = all_to_device([weights, labels[0], weights, labels[1]], torch.device("meta"))
    assert [tensor.shape for tensor in found] == [(5,), (1,), (5,), (1,)]
    assert found[0] is found[2] and found[1] is not found[3]
    assert sorted(moved) == [2, 5]


def test_copies_come_from_a_gpu_in_one_transfer_for_each_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """Floats of 2 + 3 numbers together, the large one by itself, labels, and what is on the CPU already."""
    monkeypatch.setattr("polyfed.compute.SMALL_TRANSFER", 3)
    moved: list[int] = []

    def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        moved.append(tensor.numel())
        return tensor.to(device)

    monkeypatch.setattr("polyfed.compute.to_device", to_device)
    given = [torch.tensor([1.0, 2.0]), torch.tensor([7]), torch.arange(4.0), torch.ones(3, 1), torch.tensor([5.0])]
    with Pretended():
        found = all_copied_to_cpu([*(OnGpu(tensor) for tensor in given[:-1]), given[-1]])
    assert sorted(moved) == [1, 5]
    for one, other in zip(found, given, strict=True):
        assert type(one) is torch.Tensor and torch.equal(one, other)
    assert len({tensor.untyped_storage().data_ptr() for tensor in [*found, *given]}) == 2 * len(given)


def test_tensors_on_the_cpu_stay_the_same_objects() -> None:
    given = [torch.zeros(2), torch.zeros(3)]
    assert all(one is other for one, other in zip(all_to_device(given, CPU), given, strict=True))


def test_garbage_is_collected_again_after_a_capture_that_could_not_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> None:
        raise RuntimeError("CUBLAS_STATUS_ALLOC_FAILED")

    class Graph:
        pass

    monkeypatch.setattr(torch.cuda, "current_blas_handle", full)
    with pytest.raises(RuntimeError, match="ALLOC_FAILED"), capturing(Graph()):  # type: ignore[arg-type]
        pass
    assert gc.isenabled()


class Recorder:
    """What stands for a graph: it notes when a capture begins and ends."""

    running = 0
    most = 0

    def __init__(self, trouble: str = "") -> None:
        self.seen: list[str] = []
        self._trouble = trouble

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"
        assert not gc.isenabled()
        Recorder.running += 1
        Recorder.most = max(Recorder.most, Recorder.running)
        self.seen.append(f"begin in {pool}")

    def capture_end(self) -> None:
        Recorder.running -= 1
        self.seen.append("end")
        if self._trouble:
            raise RuntimeError(self._trouble)


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What PyTorch is asked to do before a capture, on a machine that need not have a GPU."""
    asked: list[str] = []
    for name in ("current_blas_handle", "synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: asked.append(name))
    monkeypatch.setattr(Recorder, "running", 0)
    monkeypatch.setattr(Recorder, "most", 0)
    return asked


def test_a_small_capture_waits_for_nothing_and_frees_nothing(pretended: list[str]) -> None:
    graph = Recorder()
    with capturing(graph, pool=7, small=True):  # type: ignore[arg-type]
        graph.seen.append("work")
    assert graph.seen == ["begin in 7", "work", "end"]
    assert pretended == ["current_blas_handle"]
    assert gc.isenabled()


def test_a_capture_ends_after_an_error_and_the_first_cause_is_found(pretended: list[str]) -> None:
    """Ending a capture that has failed raises an error of its own, which must not hide that memory was short."""
    for trouble in ("", "operation failed due to a previous error during capture"):
        graph = Recorder(trouble)
        with pytest.raises(RuntimeError) as caught, capturing(graph, small=True):  # type: ignore[arg-type]
            raise torch.OutOfMemoryError("no room")
        assert isinstance(first_cause(caught.value), torch.OutOfMemoryError)
        assert graph.seen[-1] == "end"
        assert gc.isenabled()


def test_threads_capture_one_after_another(pretended: list[str]) -> None:
    """Garbage is not collected until the last of them has finished, and it is afterwards."""
    ready = Barrier(4)

    def work(number: int) -> bool:
        ready.wait()
        graph, collected = Recorder(), False
        for _ in range(50):
            with capturing(graph, small=True):  # type: ignore[arg-type]
                collected |= gc.isenabled()
        return collected

    with ThreadPoolExecutor(4) as pool:
        assert not any(pool.map(work, range(4)))
    assert Recorder.most == 1
    assert gc.isenabled()


@needs_gpu
def test_small_captures_leave_pytorch_s_memory_alone() -> None:
    """Those with room give it back. Both can be replayed, with what is in memory then."""
    x, side = torch.ones(64, 64, device="cuda"), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x @ x
    torch.cuda.current_stream().wait_stream(side)
    for small in (True, False):
        del_me = torch.empty(64 * 2**20, device="cuda")
        del del_me  # PyTorch keeps its memory
        reserved = torch.cuda.memory_reserved()
        graph = torch.cuda.CUDAGraph()
        with capturing(graph, stream=side, small=small):
            product = x @ x
        assert (torch.cuda.memory_reserved() >= reserved) == small
        for value in (1.0, 2.0):
            x.fill_(value)
            graph.replay()
            assert float(product[0, 0]) == 64 * value**2
    torch.cuda.synchronize()


AFTER_ERRORS = """
import torch
from polyfed.compute import capturing

x, side, before = torch.ones(8, device="cuda"), torch.cuda.Stream(), torch.cuda.current_stream()
for forbidden in (False, True, False):
    try:
        with capturing(torch.cuda.CUDAGraph(), stream=side, small=True):
            y = x + 1
            if forbidden:
                y.sum().item()
            raise ValueError("ours")
    except (ValueError, RuntimeError):
        pass
    else:
        raise SystemExit("no error")
    assert torch.cuda.current_stream() == before
    assert not torch.cuda.is_current_stream_capturing()
graph = torch.cuda.CUDAGraph()
with capturing(graph, stream=side, small=True):
    x += 1
graph.replay()
assert x.tolist() == [2.0] * 8
"""


@needs_gpu
def test_after_errors_in_small_captures_the_next_one_works() -> None:
    """Whether the GPU refuses what is done, or Python fails; in a process of its own, which a GPU's error may spoil."""
    subprocess.run([sys.executable, "-W", "ignore", "-c", AFTER_ERRORS], check=True)


@needs_gpu
def test_threads_capture_beside_each_other_on_a_gpu() -> None:
    """Each its own graph, many times, while the others allocate, compute and replay."""

    def work(number: int) -> bool:
        x, side, found = torch.full((32, 32), float(number), device="cuda"), torch.cuda.Stream(), []
        for _ in range(20):
            graph = torch.cuda.CUDAGraph()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                x @ x
            torch.cuda.current_stream().wait_stream(side)
            with capturing(graph, stream=side, small=True):
                y = x @ x
            graph.replay()
            found.append(float(y[0, 0]) == 32 * number**2)
            finish_gpu_work()
        return all(found)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(1, 5)))
