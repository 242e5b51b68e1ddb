"""Where clients live and train. An engine is one file; `base.py` says what it answers to the federation."""

from __future__ import annotations

from typing import get_args

from polyfed.config import EngineName, RaySettings
from polyfed.engines.base import Engine, LocalEngine
from polyfed.engines.ray import RayEngine
from polyfed.engines.sequential import SequentialEngine
from polyfed.engines.threads import ThreadsEngine
from polyfed.engines.vectorized import VectorizedEngine
from polyfed.errors import unknown_name
from polyfed.evaluation import Evaluation
from polyfed.population import Population

ENGINES: tuple[str, ...] = get_args(EngineName)

__all__ = [
    "ENGINES",
    "Engine",
    "Evaluation",
    "LocalEngine",
    "Population",
    "RayEngine",
    "SequentialEngine",
    "ThreadsEngine",
    "VectorizedEngine",
    "new_engine",
]


def new_engine(
    name: str,
    population: Population,
    *,
    workers: int | None = None,
    memory_budget: int | None = None,
    cluster: RaySettings | None = None,
    tf32: bool = True,
) -> Engine:
    """The engine of that name; `auto` is threads on a CPU and vectorized on a GPU."""
    if name not in ENGINES:
        raise unknown_name("engine", name, ENGINES)
    if name == "auto":
        name = "threads" if population.device.type == "cpu" else "vectorized"
    if name == "threads":
        return ThreadsEngine(population, workers=workers, memory_budget=memory_budget)
    if name == "vectorized":
        return VectorizedEngine(population, memory_budget=memory_budget)
    if name == "ray":
        return RayEngine(population, settings=cluster, tf32=tf32, memory_budget=memory_budget)
    return SequentialEngine(population, memory_budget=memory_budget)
