"""Where clients live and train. An engine is one file; `base.py` says what it answers to the federation."""

from __future__ import annotations

from polyfed.engines.base import Engine, LocalEngine
from polyfed.engines.sequential import SequentialEngine
from polyfed.engines.threads import ThreadsEngine
from polyfed.engines.vectorized import VectorizedEngine
from polyfed.evaluation import Evaluation
from polyfed.population import Population

ENGINES = ("auto", "sequential", "threads", "vectorized")

__all__ = [
    "ENGINES",
    "Engine",
    "Evaluation",
    "LocalEngine",
    "Population",
    "SequentialEngine",
    "ThreadsEngine",
    "VectorizedEngine",
    "new_engine",
]


def new_engine(
    name: str, population: Population, *, workers: int | None = None, memory_budget: int | None = None
) -> Engine:
    """The engine of that name; `auto` takes threads on a CPU and vectorized on a GPU."""
    if name == "threads" or (name == "auto" and population.device.type == "cpu"):
        return ThreadsEngine(population, workers=workers, memory_budget=memory_budget)
    if name in ("vectorized", "auto"):
        return VectorizedEngine(population, memory_budget=memory_budget)
    return SequentialEngine(population, memory_budget=memory_budget)
