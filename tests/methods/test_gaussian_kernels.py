"""DC-PFL's factors by one kernel for all steps, against the steps by PyTorch's operations."""

import pytest
import torch
from torch import Tensor

from polyfed import compute
from polyfed.methods.parts import gaussians
from polyfed.methods.parts.gaussians import factors, pack
from tests.methods.test_gaussians import no_covariance

triton = pytest.importorskip("triton")
if not torch.cuda.is_available() and tuple(map(int, triton.__version__.split(".")[:2])) < (3, 3):
    pytest.skip("this Triton's interpreter does not know loops of computed length", allow_module_level=True)

from polyfed.methods.parts import gaussian_kernels  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FLOOR = 10 * torch.finfo(torch.float64).eps


def covariances(size: int, *counts: int) -> Tensor:
    """Packed covariances of so many samples each, in float64."""
    generator = torch.Generator().manual_seed(size)
    drawn = [torch.randn(count, size, generator=generator, dtype=torch.float64) for count in counts]
    return pack(torch.stack([torch.cov(each.T).view(size, size) for each in drawn])).to(DEVICE)


def by_kernel(triangles: Tensor, size: int, rank: int) -> Tensor:
    found = torch.zeros(len(triangles), rank, size, dtype=torch.float64, device=DEVICE)
    gaussian_kernels.factor(triangles, found, FLOOR)
    return found


def by_operations(triangles: Tensor, size: int, rank: int) -> Tensor:
    found = torch.zeros(len(triangles), rank, size, dtype=torch.float64, device=DEVICE)
    gaussians._factor(triangles, found, FLOOR)
    return found


@pytest.mark.parametrize(
    ("size", "counts"), [(1, (2, 9)), (7, (5, 3, 2)), (40, (12, 30)), (33, (50, 4))], ids=["one", "few", "some", "full"]
)
@pytest.mark.parametrize("entries", [64, 8192])
@pytest.mark.parametrize("scale", [1.0, 1e-14])
def test_rows_are_those_of_the_operations(
    size: int, counts: tuple[int, ...], entries: int, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with rows in several blocks, of matrices with fewer rows than others, and of small ones."""
    monkeypatch.setattr(gaussian_kernels, "ENTRIES", entries)
    triangles, rank = scale * covariances(size, *counts), min(size, max(counts) - 1)
    found = by_kernel(triangles, size, rank)
    torch.testing.assert_close(found, by_operations(triangles, size, rank), rtol=0, atol=1e-9 * scale**0.5)
    torch.testing.assert_close(pack(found.mT @ found), triangles, rtol=0, atol=1e-9 * scale)


def test_rows_beyond_the_rank_stay_zero() -> None:
    """Three samples, all alike in the second matrix: two rows and none."""
    triangles = covariances(6, 3, 3)
    triangles[1] = 0
    found = by_kernel(triangles, 6, 5)
    assert found.abs().sum(2).gt(0).sum(1).tolist() == [2, 0]


def test_what_is_no_covariance_stays_as_small() -> None:
    triangles, deviation = no_covariance(24)
    triangles = triangles.double().to(DEVICE)
    found = by_kernel(triangles, 24, 24)
    assert float(found.abs().max()) <= 1.1 * deviation
    torch.testing.assert_close(found, by_operations(triangles, 24, 24), rtol=0, atol=1e-6)


@pytest.mark.skipif(DEVICE == "cpu", reason="only a GPU uses the kernel by itself")
def test_a_gpu_uses_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gaussians, "_factor", None)
    triangles = covariances(7, 5).float()
    found = factors(triangles, 7, 4)
    torch.testing.assert_close(pack(found.mT @ found).float(), triangles, rtol=0, atol=1e-6)


def test_without_triton_the_operations_do_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(f"no module named {name}")

    monkeypatch.setattr(gaussians, "working_kernels", compute.working_kernels.__wrapped__)  # whatever was found before
    monkeypatch.setattr("polyfed.compute.import_module", missing)
    assert gaussians._kernels() is None
