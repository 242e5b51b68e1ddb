"""Where clients live and train. An engine is one file; `base.py` says what it answers to the federation."""

from __future__ import annotations

from polyfed.engines.base import Engine, EngineSettings, LocalEngine
from polyfed.engines.ray import RayEngine
from polyfed.engines.sequential import SequentialEngine
from polyfed.engines.threads import ThreadsEngine
from polyfed.engines.together import current_group
from polyfed.engines.vectorized import VectorizedEngine
from polyfed.evaluation import Evaluation
from polyfed.population import Population
from polyfed.registry import ENGINES

__all__ = [
    "ENGINES",
    "Engine",
    "EngineSettings",
    "Evaluation",
    "LocalEngine",
    "Population",
    "RayEngine",
    "SequentialEngine",
    "ThreadsEngine",
    "VectorizedEngine",
    "new_engine",
]


def new_engine(name: str, population: Population, settings: EngineSettings | None = None) -> Engine:
    """The engine of that name; `auto` is threads on a CPU and vectorized on a GPU.

    In a group of runs, the vectorized engine trains their clients together.
    """
    if name == "auto":
        name = "threads" if population.device.type == "cpu" else "vectorized"
    kind, settings, group = ENGINES.find(name), settings or EngineSettings(), current_group()
    if group is not None and kind is VectorizedEngine:
        runs, run = group
        return runs.engine(run, population, settings)
    return kind.create(population, settings)
