"""What the settings for all tests promise."""

from __future__ import annotations

import random
import re
from typing import cast

import numpy as np
import pytest
import torch

import conftest


class Item:
    """A test that is about to run, as far as the seed is concerned."""

    def __init__(self) -> None:
        self.shown = ""

    def add_report_section(self, when: str, key: str, content: str) -> None:
        self.shown += content


def begin() -> tuple[str, tuple[float, ...]]:
    """The seed that a failing test would show, and what it would draw."""
    item = Item()
    conftest.pytest_runtest_setup(cast(pytest.Item, item))
    seed = re.search(r"POLYFED_TEST_SEED=(\d+)", item.shown)
    assert seed
    return seed[1], (random.random(), float(np.random.rand()), float(torch.rand(())))


def test_a_test_draws_anew_each_time_and_shows_the_seed_that_repeats_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POLYFED_TEST_SEED", raising=False)
    (seed, drawn), (other_seed, other_drawn) = begin(), begin()
    assert seed != other_seed and not set(drawn) & set(other_drawn)
    monkeypatch.setenv("POLYFED_TEST_SEED", seed)
    assert begin() == (seed, drawn)
