"""Factors of matrices: the rank by hand, the energy and the number of floats as properties, the odd cases."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polyfed.errors import BadMessage
from polyfed.message import Message
from polyfed.methods.parts.compression import (
    changed,
    changes,
    check_forms,
    compress,
    compressed_schema,
    factorise,
    needed_rank,
    restore,
)


def floats(state: dict[str, torch.Tensor]) -> int:
    return sum(tensor.numel() for tensor in state.values())


def diagonal(*values: float, size: int = 6) -> torch.Tensor:
    matrix = torch.zeros(size, size)
    matrix.diagonal()[: len(values)] = torch.tensor(values)
    return matrix


@pytest.mark.parametrize(("energy", "rank"), [(0.6, 1), (9 / 14, 1), (0.65, 2), (13 / 14, 2), (0.95, 3), (1.0, 3)])
def test_rank_is_the_smallest_that_reaches_the_energy(energy: float, rank: int) -> None:
    """Singular values 3, 2, 1 have squares 9, 4, 1 of 14: shares 0.643, 0.929 and 1. Reaching it exactly is enough."""
    assert needed_rank(torch.tensor([9.0, 4.0, 1.0, 0.0], dtype=torch.float64), energy) == rank


def test_smaller_form_travels() -> None:
    """A 6 x 6 matrix has 36 floats, its factors 12 per rank: rank 1 and 2 are smaller, rank 3 is not: sent exactly."""
    matrix = diagonal(3.0, 2.0, 1.0)
    for energy, expected, kept in ((0.6, 12, (3.0,)), (0.9, 24, (3.0, 2.0)), (0.95, 36, (3.0, 2.0, 1.0))):
        sent = compress({"weight": matrix}, energy)
        assert floats(sent) == expected
        torch.testing.assert_close(restore(sent, {"weight": matrix})["weight"], diagonal(*kept))


def test_full_rank_is_restored_and_never_becomes_zeros() -> None:
    """A search for the rank that stops before the last singular value would leave nothing of this matrix."""
    matrix = torch.randn(40, 30, generator=torch.Generator().manual_seed(0))
    sent = compress({"weight": matrix}, 1 - 1e-9)
    assert floats(sent) == matrix.numel()
    assert torch.equal(restore(sent, {"weight": matrix})["weight"], matrix)


@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.integers(1, 9), min_size=0, max_size=4),
    energy=st.floats(0.01, 1.0),
    rank=st.integers(0, 9),
    seed=st.integers(0, 1000),
)
def test_energy_is_kept_with_no_more_floats_than_raw(shape: list[int], energy: float, rank: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows, columns = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))
    tensor = torch.randn(rows, rank, generator=generator) @ torch.randn(rank, columns, generator=generator)
    state = {"weight": tensor.view(shape)}
    sent = compress(state, energy)
    restored = restore(sent, state)["weight"]
    assert floats(sent) <= tensor.numel()
    assert restored.shape == state["weight"].shape
    lost = (restored - state["weight"]).square().sum()
    assert lost <= (1 - energy) * tensor.square().sum() * 1.0001 + 1e-6
    compressed_schema(state).check(Message(sent))
    check_forms(sent, state)


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(2, 40), columns=st.integers(3, 40), energy=st.floats(0.3, 0.99), seed=st.integers(0, 1000))
def test_rank_is_that_of_a_singular_value_decomposition(rows: int, columns: int, energy: float, seed: int) -> None:
    """Whether the diagonal tells it at once or not; the factors multiply to the best approximation of that rank."""
    generator = torch.Generator().manual_seed(seed)
    scales = torch.rand(columns, generator=generator) ** int(torch.randint(0, 9, (1,), generator=generator))
    matrix = torch.randn(rows, columns, generator=generator) * scales
    u, values, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    rank = needed_rank(values.square(), energy)
    found = factorise(matrix, energy)
    if rank * (rows + columns) >= rows * columns:
        assert found is None
        return
    assert found is not None
    assert (found[0].shape, found[1].shape) == ((rows, rank), (rank, columns))
    best = (u[:, :rank] * values[:rank]) @ v[:rank]
    lost, least = (float((matrix - each).square().sum()) for each in (found[0] @ found[1], best))
    assert lost == pytest.approx(least, rel=1e-4, abs=1e-9 * float(values.square().sum()))


@pytest.mark.parametrize(
    ("matrix", "calls"),
    [
        (diagonal(3.0, 2.0), ["eigh"]),  # the diagonal has squares 9 and 4: both are needed, and rank 2 is smaller
        (diagonal(*[1.0] * 6), ["eigvalsh"]),  # of six equal ones all are needed
        (torch.ones(6, 6), ["eigvalsh", "eigh"]),  # six equal entries on the diagonal too, but its rank is 1
    ],
)
def test_vectors_are_computed_only_if_they_pay_off(
    matrix: torch.Tensor, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And eigenvalues alone only where the diagonal can't tell."""
    made = []

    def recorded(name: str, actual: Callable[..., Any]) -> Callable[..., Any]:
        def call(gram: torch.Tensor) -> Any:
            made.append(name)
            return actual(gram)

        return call

    for name in ("eigvalsh", "eigh"):
        monkeypatch.setattr(torch.linalg, name, recorded(name, getattr(torch.linalg, name)))
    factors = factorise(matrix, 0.95)
    assert made == calls
    assert (factors is None) == (calls == ["eigvalsh"])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("shape", [(16, 75), (500, 120), (90, 500)])
def test_factors_of_a_gpu_are_those_of_the_cpu(shape: tuple[int, int]) -> None:
    """Small matrices visit the CPU on the way."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(*shape, generator=generator) * torch.rand(shape[1], generator=generator) ** 12
    there, here = factorise(matrix.cuda(), 0.97), factorise(matrix, 0.97)
    assert there is not None and here is not None
    assert there[0].shape == here[0].shape
    assert there[0].is_cuda and there[1].is_cuda
    products = [left.double().cpu() @ right.double().cpu() for left, right in (there, here)]
    torch.testing.assert_close(products[0], products[1], rtol=1e-4, atol=1e-5)


def test_convolutions_are_matrices_of_filters_by_the_rest() -> None:
    filters = torch.randn(8, 1, generator=torch.Generator().manual_seed(1))
    kernel = torch.randn(1, 3 * 5 * 5, generator=torch.Generator().manual_seed(2))
    weight = (filters @ kernel).view(8, 3, 5, 5)
    sent = compress({"weight": weight}, 0.99)
    assert {name: tuple(tensor.shape) for name, tensor in sent.items()} == {
        "weight.left": (8, 1),
        "weight.right": (1, 75),
    }
    torch.testing.assert_close(restore(sent, {"weight": weight})["weight"], weight)


@pytest.mark.parametrize("tensor", [torch.ones(7), torch.tensor(2.0), torch.ones(1, 9), torch.full((6, 6), math.nan)])
def test_what_has_no_smaller_factors_travels_as_it_is(tensor: torch.Tensor) -> None:
    """Vectors and single rows have no smaller factors; NaN is left for the receiver to refuse."""
    assert list(compress({"weight": tensor}, 0.5)) == ["weight"]


def test_a_matrix_that_did_not_change_costs_one_rank() -> None:
    """Its change is all zeros, which have no energy to reach; factors of rank one, 6 + 6 floats, are exact."""
    sent = compress({"weight": torch.zeros(6, 6)}, 0.5)
    assert floats(sent) == 12
    assert torch.equal(restore(sent, {"weight": torch.zeros(6, 6)})["weight"], torch.zeros(6, 6))


def test_changes_are_differences_of_matrices_and_values_of_vectors() -> None:
    """From 1 to 3 a matrix changes by 2; a vector travels as 3, so that a negative variance shows."""
    old, new = ({"weight": v * torch.ones(2, 2), "running_var": v * torch.ones(2)} for v in (1.0, 3.0))
    found = changes(new, old)
    assert (found["weight"].unique().tolist(), found["running_var"].unique().tolist()) == ([2.0], [3.0])
    assert all(torch.equal(tensor, new[name]) for name, tensor in changed(old, found).items())


def test_messages_with_wrong_forms_are_refused() -> None:
    like = {"weight": torch.zeros(6, 4), "bias": torch.zeros(6)}
    bias, raw = {"bias": torch.zeros(6)}, {"weight": torch.ones(6, 4)}

    def factors(left: int, right: int, value: float = 1.0) -> dict[str, torch.Tensor]:
        return {"weight.left": torch.full((6, left), value), "weight.right": torch.full((right, 4), value)}

    def check(tensors: dict[str, torch.Tensor]) -> None:
        compressed_schema(like).check(Message(tensors))
        check_forms(tensors, like)

    check({**bias, **raw})
    check({**bias, **factors(1, 1)})
    check({**bias, **factors(4, 4)})
    check({**bias, **factors(2, 2, 1e19)})
    for tensors, reason in (
        ({**bias}, "either"),
        ({**bias, **raw, **factors(1, 1)}, "either"),
        ({**bias, "weight.left": torch.ones(6, 1)}, "either"),
        ({**bias, **factors(0, 0)}, "rank 0"),
        ({**bias, **factors(5, 5)}, "rank 5"),
        ({**bias, **factors(1, 2)}, "shape"),
        ({**bias, **factors(1, 1, 1e30)}, "not finite"),
        ({**bias, **factors(4, 4, 1e19)}, "not finite"),  # four times 1e38, each of which is finite
        ({**bias, **factors(1, 1, math.nan)}, "not finite"),
        ({**bias, "weight": torch.ones(4, 6)}, "shape"),
        ({**raw}, "lacks"),
    ):
        with pytest.raises(BadMessage, match=reason):
            check(tensors)
