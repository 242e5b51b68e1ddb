"""polyfed from Python: run an experiment, go on with one, read one back."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from safetensors.torch import load_file

from polyfed.assemble import PYTHON, assemble
from polyfed.compute import machine_name
from polyfed.config import Experiment, experiment
from polyfed.data import Dataset, no_dataset
from polyfed.engines import Population, new_engine
from polyfed.engines.population import state_of
from polyfed.errors import InputError, RunError
from polyfed.federation import Federation, Watcher
from polyfed.methods.network import ClientNetwork
from polyfed.models import Models, SplitNetwork, resolve
from polyfed.predictions import Prediction, as_input, prediction
from polyfed.records import RunFolder
from polyfed.report.progress import watched
from polyfed.scores import percent


@dataclass
class Result:
    """A finished run: its numbers as frames, and the clients' models."""

    folder: RunFolder
    summary: dict[str, Any]
    population: Population = field(repr=False)
    _temporary: tempfile.TemporaryDirectory[str] | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        numbers = self.summary
        return (
            f"Result({numbers['method']}: accuracy {percent(numbers['accuracy_final'])} after {numbers['rounds']} "
            f"rounds, in '{self.folder.path}')"
        )

    @property
    def rounds(self) -> pd.DataFrame:
        """A row per evaluated round."""
        return self.folder.rounds()

    @property
    def evaluations(self) -> pd.DataFrame:
        """A row per evaluated round, part and rule of prediction."""
        return self.folder.evaluations()

    @property
    def clients(self) -> pd.DataFrame:
        """A row per client."""
        return self.folder.clients()

    def network(self, client: int) -> ClientNetwork:
        """A client's private model and what the method keeps beside it, in evaluation mode."""
        file = self.folder.path / "models" / f"client-{client:04d}.safetensors"
        if not file.exists():
            raise InputError(f"there is no client {client}; the run has {len(self.population.data)} clients, from 0.")
        network = self.population.new_network(client).cpu()
        saved = load_file(file)
        with torch.no_grad():
            for name, tensor in state_of(network).items():
                tensor.copy_(saved[name])
        return network.eval()

    def model(self, client: int) -> SplitNetwork:
        """A client's private model, in evaluation mode."""
        return self.network(client).model

    def predict(self, client: int, x: Any) -> Prediction:
        """What a client says of one image or many, by the method's own rule: classes, names, probabilities.

        Images are raw (`uint8` arrays in any of the usual layouts, PIL pictures, lists of these), or floats as the
        dataset's batches are, that is normalised.
        """
        dataset = self.population.dataset
        with torch.no_grad():
            scores = self.population.method.predict(self.network(client), as_input(x, dataset))
        return prediction(next(iter(scores.values())), dataset)

    @property
    def models(self) -> list[SplitNetwork]:
        """All clients' private models."""
        return [self.model(client) for client in range(len(self.population.data))]


def run(
    method: str | Mapping[str, Any],
    *,
    data: str | Dataset = "digits",
    models: Models = "papers",
    out: str | Path | None = None,
    watcher: Watcher | None = None,
    progress: bool | None = None,
    **settings: Any,
) -> Result:
    """Run one experiment and return its result.

    `method` is a name, or a mapping with a name and options. `data` is a name or a `Dataset` (`polyfed.from_arrays`
    makes one), `models` names, classes, factories or networks. `settings` are the fields of `polyfed.Experiment`,
    and `epochs`, `batch_size`, `lr` and `preset`. Without `out` the run's folder is temporary and lives as long as the
    result. On a terminal and in a notebook a bar shows how the run goes on, unless `progress` is False or `watcher`
    is told.

    >>> result = run("fedproto", clients=4, rounds=1)                       # doctest: +SKIP
    >>> result.clients[["architecture", "accuracy_final"]]                  # doctest: +SKIP
    """
    with watched(watcher, progress) as told:
        return _run(method, data, models, out, told, settings)


def _run(
    method: str | Mapping[str, Any],
    data: str | Dataset,
    models: Models,
    out: str | Path | None,
    watcher: Watcher,
    settings: Mapping[str, Any],
) -> Result:
    if not isinstance(data, str | Dataset):
        raise no_dataset(data)
    if out is not None and not str(out).strip():
        raise InputError("the run's folder (out) has an empty name: give it one, or leave it out.")
    config = experiment(
        method=method,
        data=data if isinstance(data, str) else PYTHON + data.name,
        models=models if isinstance(models, str) else PYTHON + ",".join(a.name for a in resolve(models)),
        **settings,
    )
    population = assemble(config, None if isinstance(data, str) else data, None if isinstance(models, str) else models)
    temporary = tempfile.TemporaryDirectory(prefix="polyfed-run-") if out is None else None
    folder = RunFolder.create(Path(temporary.name if temporary else str(out)), config)
    with folder.owned():
        return _go(config, population, folder, watcher, temporary)


def resume(
    path: str | Path,
    *,
    data: Dataset | None = None,
    models: Models | None = None,
    watcher: Watcher | None = None,
    progress: bool | None = None,
) -> Result:
    """Go on with an unfinished run; a finished one is only read. `data` and `models` as they were if from Python."""
    with watched(watcher, progress) as told:
        return _resume(path, data, models, told)


def _resume(path: str | Path, data: Dataset | None, models: Models | None, watcher: Watcher) -> Result:
    if not isinstance(data, Dataset | None):
        raise no_dataset(data)
    folder = RunFolder.open(Path(path))
    config = folder.config
    population = assemble(config, data, models)
    with folder.owned():
        if folder.finished:
            return Result(folder, folder.summary(), population)
        return _go(config, population, folder, watcher, None)


def _go(
    config: Experiment,
    population: Population,
    folder: RunFolder,
    watcher: Watcher | None,
    temporary: tempfile.TemporaryDirectory[str] | None,
) -> Result:
    budget = None if config.memory_budget is None else round(config.memory_budget * 1e9)
    engine = new_engine(config.engine, population, workers=config.workers, memory_budget=budget)
    try:
        federation = Federation(config, population, engine, folder, watcher)
        saved = folder.checkpoints.restore()
        if saved is not None:
            federation.restore(saved)
        start = saved.round if saved else 0
        folder.keep_until(start)
        before, machine = folder.starts(), machine_name(population.device)
        folder.add_start(start, engine.name, machine)
        if before and before[-1]["machine"] != machine:
            federation.note(f"until round {start} the run was on {before[-1]['machine']}; it goes on on {machine}")
        damaged = folder.checkpoints.damaged
        if damaged:
            federation.note(f"a checkpoint is damaged, so the run goes on after round {start}: {damaged}")
        summary = federation.run()
    except OSError as error:
        raise RunError(
            f"the run can't go on: {error.strerror or error}; when that is mended, `polyfed resume {folder.path}` goes "
            "on from the last checkpoint."
        ) from error
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise RunError(
            "the run does not fit into memory: take smaller batches (--batch-size) or networks, or keep fewer clients' "
            f"states in memory (--set memory_budget=4); `polyfed resume {folder.path}` goes on from its checkpoint."
        ) from error
    finally:
        engine.close()
    return Result(folder, summary, population, temporary)
