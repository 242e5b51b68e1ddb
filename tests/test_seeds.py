"""Seeds: every part of an address matters, and nothing outside it does."""

import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polyfed.seeds import derive, numpy_generator, seeded, torch_generator


def test_the_same_address_gives_the_same_seed_on_any_machine() -> None:
    """A constant, because runs of another version or machine must draw the same."""
    assert derive(0, "batches", 3, 7) == 420336543251626121


@given(st.integers(0, 99), st.integers(0, 99), st.integers(0, 99))
def test_every_part_of_the_address_matters(seed: int, round: int, client: int) -> None:
    here = derive(seed, "batches", round, client)
    assert 0 <= here < 2**63
    others = {
        derive(seed + 1, "batches", round, client),
        derive(seed, "dropout", round, client),
        derive(seed, "batches", round + 1, client),
        derive(seed, "batches", round, client + 1),
        derive(seed, "batches", round),
        derive(seed, "batches", int(f"{round}{client}")),
    }
    assert here not in others


def test_generators_repeat_their_draws() -> None:
    draws = [torch.rand(3, generator=torch_generator(1, "x")) for _ in range(2)]
    assert torch.equal(*draws)
    assert np.array_equal(numpy_generator(1, "x").random(3), numpy_generator(1, "x").random(3))
    assert not np.array_equal(numpy_generator(1, "x").random(3), numpy_generator(2, "x").random(3))


def test_seeded_leaves_the_global_generator_as_it_was() -> None:
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    with pytest.raises(ValueError), seeded(0, "initial"):
        first = torch.rand(2)
        raise ValueError
    assert torch.equal(torch.rand(2), expected)
    with seeded(0, "initial"):
        assert torch.equal(torch.rand(2), first)


def test_seeded_blocks_of_two_threads_do_not_mix() -> None:
    def draw(purpose: str, results: dict[str, torch.Tensor]) -> None:
        with seeded(0, purpose):
            results[purpose] = torch.cat([torch.rand(1) for _ in range(300)])

    alone: dict[str, torch.Tensor] = {}
    together: dict[str, torch.Tensor] = {}
    purposes = ("a", "b", "c")
    for purpose in purposes:
        draw(purpose, alone)
    threads = [threading.Thread(target=draw, args=(purpose, together)) for purpose in purposes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(alone[purpose], together[purpose]) for purpose in purposes)
