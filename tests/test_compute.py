"""Tensors on their way to a device."""

import gc

import pytest
import torch

from polyfed.compute import _packed, all_copied_to_cpu, all_to_device, capturing
from tests.engines.pretended import OnGpu, Pretended

CPU = torch.device("cpu")


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
