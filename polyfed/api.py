"""polyfed from Python: run an experiment, continue one, read one back."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from polyfed import confusion
from polyfed.addresses import PYTHON, trusting
from polyfed.assemble import assemble, facts, named_data, settled
from polyfed.compute import machine_name
from polyfed.config import Experiment, experiment, named_by
from polyfed.data import as_data, with_given, without_lists
from polyfed.engines import EngineSettings, new_engine
from polyfed.errors import InputError
from polyfed.export.card import run_card
from polyfed.export.rebuild import filled, last_server, with_last_knowledge
from polyfed.methods.base import Method, Server
from polyfed.methods.parts.network import ClientNetwork
from polyfed.models import Models, SplitNetwork, resolve
from polyfed.population import Population
from polyfed.predictions import Prediction, as_input, prediction
from polyfed.records import Restored, RunFolder
from polyfed.report.progress import watched
from polyfed.report.summary import result_html
from polyfed.resuming import (
    changed_settings,
    check_trusted,
    enough_memory,
    explained,
    given_parts,
    located,
    record_start,
)
from polyfed.server.federation import Federation, Watcher
from polyfed.server.scores import percent
from polyfed.trackers.fed import run_tracked

if TYPE_CHECKING:
    import pandas as pd


@dataclass
class Result:
    """A finished run: its numbers as frames, and the clients' models."""

    folder: RunFolder
    summary: dict[str, Any]
    _assemble: Callable[[], Population] = field(repr=False)
    """Numbers are read without data and networks; models need both."""
    _temporary: tempfile.TemporaryDirectory[str] | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        numbers = self.summary
        return (
            f"Result({numbers['method']}: accuracy {percent(numbers['accuracy_final'])} after {numbers['rounds']} "
            f"rounds, in '{self.folder.path}')"
        )

    def _repr_html_(self) -> str:
        """A small table, which a notebook shows."""
        return result_html(self.summary, self.folder.path)

    @cached_property
    def population(self) -> Population:
        """The clients with their data and networks."""
        return self._assemble()

    @cached_property
    def server(self) -> Server:
        """The server as it was at the end: its state (prototypes, rows, means) and the networks that it trained."""
        return last_server(self.population.method, self.folder, self.folder.config.seed, self.summary["rounds"])

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

    def confusion(self) -> pd.DataFrame:
        """How many test samples of a class each client predicts as which: a row per pair of classes that occurs.

        Of the last round and the one best on validation, or of every evaluation (`confusion="every"`).
        """
        return self.folder.confusion()

    def class_scores(self) -> pd.DataFrame:
        """Accuracy and F1 of each class of which a client has test samples, from `confusion()`."""
        return confusion.class_scores(self.confusion())

    def client_scores(self) -> pd.DataFrame:
        """Accuracy, balanced accuracy and macro-F1 of each client, from `confusion()`."""
        return confusion.client_scores(self.confusion())

    def network(self, client: int) -> ClientNetwork:
        """A client's private model and what the method keeps beside it, in evaluation mode.

        Where the method predicts with what the server knows (prototypes), that is what the server knew at the end, and
        no client received it during the run.
        """
        saved, method = self.folder.model_state(client), self.population.method
        network = self.population.new_network(client).cpu()
        if method.kept_fresh:
            knowledge = self.population.knowledge(client, self.server.round)
            saved = with_last_knowledge(method, self.server, client, saved, knowledge)
        return filled(network, saved, f"the model of client {client} in '{self.folder.path}'")

    def model(self, client: int) -> SplitNetwork:
        """A client's private model, in evaluation mode."""
        saved = {n: t for n, t in self.folder.model_state(client).items() if n.startswith("model.")}
        alone = ClientNetwork(self.population.new_network(client).cpu().model, {})
        return filled(alone, saved, f"the model of client {client} in '{self.folder.path}'").model

    def predict(self, client: int, x: Any) -> Prediction:
        """What a client predicts for one image or many, by the method's own rule: classes, names, probabilities.

        Images are raw (`uint8` arrays in any of the usual layouts, PIL pictures, lists of these), or floats that are
        normalised as the dataset's batches are; rows of a table are a frame with its columns.
        """
        dataset = self.population.dataset
        with torch.no_grad():
            scores = self.population.method.predict(self.network(client), as_input(x, dataset))
        return prediction(next(iter(scores.values())), dataset)

    @property
    def models(self) -> list[SplitNetwork]:
        """All clients' private models."""
        return [self.model(client) for client in range(len(self.folder.clients()))]


def run(
    method: str | type[Method] | Mapping[str, Any],
    *,
    data: Any = "digits",
    models: Models | None = None,
    out: str | Path | Callable[[], Path] | None = None,
    watcher: Watcher | None = None,
    progress: bool | None = None,
    **settings: Any,
) -> Result:
    """Run one experiment and return its result.

    `method` is a name, a subclass of `polyfed.Method`, or a mapping with a `name` (either) and options. `data` is a
    name, a path, a `Dataset`, arrays (x, y) or (x, y, client), a frame, a torch or Hugging Face dataset, or a list with
    one of these per client; `models` are names, classes, factories or networks. `settings` are the fields of
    `polyfed.Experiment`, and `epochs`, `batch_size`, `lr` and `preset`; `partition` may also be a list with the indices
    of each client's samples, or a function that makes one from a dataset and the seed. `out` is the run's folder, or a
    function that names one when the run begins; without it the folder is temporary and lives as long as the result. On
    a terminal and in a notebook a bar shows the progress, unless `progress` is False or there is a `watcher`.

    >>> result = run("fedproto", clients=4, rounds=1)                       # doctest: +SKIP
    >>> result.clients[["architecture", "accuracy_final"]]                  # doctest: +SKIP
    """
    with watched(watcher, progress) as told:
        return _run(method, data, models, out, told, settings)


def _run(
    method: str | type[Method] | Mapping[str, Any],
    data: Any,
    models: Models | None,
    out: str | Path | Callable[[], Path] | None,
    watcher: Watcher,
    settings: Mapping[str, Any],
) -> Result:
    settings, lists = without_lists(settings)
    with enough_memory("the data"):
        data = as_data(data, settings)
    if out is not None and not str(out).strip():
        raise InputError("the run's folder (out) has an empty name: give it one, or leave it out.")
    config = experiment(
        method=method,
        data=data if isinstance(data, str) else PYTHON + data.name,
        **({} if models is None else {"models": _described(models)}),
        **settings,
    )
    own_models = None if isinstance(models, str) else models
    with enough_memory("the experiment"):
        dataset = with_given(named_data(config) if isinstance(data, str) else data, lists, config.seed)
        config = settled(config, dataset)
        population = assemble(config, dataset, own_models)
    temporary = tempfile.TemporaryDirectory(prefix="polyfed-run-") if out is None else None
    folder = _create(temporary.name if temporary else out, config, facts(population))
    with folder.owned():
        return _go(config, population, folder, watcher, temporary=temporary)


def _described(models: Models) -> str:
    return models if isinstance(models, str) else PYTHON + ",".join(each.name for each in resolve(models))


def resume(
    path: str | Path,
    *,
    data: Any = None,
    models: Models | None = None,
    partition: Any = None,
    watcher: Watcher | None = None,
    progress: bool | None = None,
    rounds: int | None = None,
    from_round: int | None = None,
    settings: Mapping[str, Any] | None = None,
    repair: bool = False,
    trust: bool = False,
) -> Result:
    """Continue an unfinished run; a finished one is only read. Pass `data` and `models` again if they came from Python.

    So must be a `partition` that was a list or a function.

    `rounds` lets the run, finished or not, continue to that many. `from_round` goes back to the checkpoint of that
    round. `settings` of the training or the method may change from there. `repair` lets clients whose states are lost
    start from their initial weights. `trust` allows polyfed to import the code that the run's settings name.
    """
    with watched(watcher, progress) as told:
        return _resume(
            path, data, models, partition, told, rounds, from_round, settings or {}, repair=repair, trust=trust
        )


def _resume(
    path: str | Path,
    data: Any,
    models: Models | None,
    partition: Any,
    watcher: Watcher,
    rounds: int | None,
    from_round: int | None,
    settings: Mapping[str, Any],
    *,
    repair: bool,
    trust: bool,
) -> Result:
    if not isinstance(settings, Mapping):
        raise InputError(f"settings is {settings!r}, but must be a mapping, such as {{'training': {{'lr': 0.01}}}}.")
    if not isinstance(from_round, int | None) or isinstance(from_round, bool):
        raise InputError(f"from (the round to go back to) is {from_round!r}, but must be a whole number at least 0.")
    folder = RunFolder.open(Path(path))
    before = folder.read_config(trust=trust)
    typed = named_by(settings)
    with trusting(trust, typed):
        config = changed_settings(before, rounds, settings)
    given = typed if models is None else {*typed, "models"}

    def people() -> Population:
        check_trusted(config, folder.path / "config.yaml", trust=trust, given=given)
        with enough_memory("the experiment"), trusting(trust, typed):
            here = located(config, folder.began_in)
            return assemble(here, given_parts(here, data, partition), models)

    longer = rounds is not None and folder.finished and rounds > before.rounds
    if folder.finished and not longer:
        if rounds not in (None, before.rounds) or from_round is not None or settings:
            raise InputError(
                f"the run in '{path}' is finished, after round {before.rounds}: it can only continue to more rounds "
                f"(--rounds {2 * before.rounds}), or run again from its config.yaml."
            )
        folder.tidy()
        for problem in folder.damage():
            watcher.on_note(problem)
        return Result(folder, folder.summary(), people)
    folder.check_resumable()
    folder.check_settings(before)
    population = people()
    folder.check_facts(facts(population))
    with folder.owned():
        found = folder.reopen(repair=repair) if folder.finished and longer else []
        return _go(
            config, population, folder, watcher, before=before, from_round=from_round, repair=repair, found=found
        )


def _create(out: str | Path | Callable[[], Path] | None, config: Experiment, found: Mapping[str, str]) -> RunFolder:
    try:
        path = out() if callable(out) else Path(str(out))
    except OSError as error:
        raise InputError(f"can't make a folder for the run: {error}; choose another one (--out).") from error
    return RunFolder.create(path, config, found)


def _go(
    config: Experiment,
    population: Population,
    folder: RunFolder,
    watcher: Watcher | None,
    *,
    before: Experiment | None = None,
    from_round: int | None = None,
    repair: bool = False,
    found: Sequence[str] = (),
    temporary: tempfile.TemporaryDirectory[str] | None = None,
) -> Result:
    """Run all rounds that are left; `found` is what was wrong with the records before."""
    if folder.finished:  # by another process, while this one was getting ready
        return Result(folder, folder.summary(), lambda: population)
    with explained(folder, config):
        saved, problems = folder.restore(from_round, repair=repair)
        _check_rounds(config, saved)
        planned = folder.planned_rounds or (before or config).rounds
        if before is not None and before != config:
            folder.rewrite_config(config)
        if planned != config.rounds:  # also if they were edited in config.yaml
            folder.plan(config.rounds)
        budget = None if config.memory_budget is None else round(config.memory_budget * 1e9)
        settings = EngineSettings(config.workers, budget, config.tf32, config.ray)
        engine = new_engine(config.engine, population, settings)
        try:
            federation = Federation(
                config,
                population.method,
                engine,
                folder,
                watcher,
                device=population.device,
                devices=population.devices,
                card=run_card(config, population).model_dump(mode="json"),
            )
            if saved is not None:
                federation.restore(saved)
            record_start(federation, machine_name(population.device), before, planned)
            for problem in [*found, *problems]:
                federation.note(problem)
            summary = run_tracked(federation)
        finally:
            engine.close()
    return Result(folder, summary, lambda: population, temporary)


def _check_rounds(config: Experiment, saved: Restored | None) -> None:
    if saved is not None and saved.round > config.rounds:
        raise InputError(
            f"the run has already had {saved.round} rounds, more than {config.rounds}: give at least as many, or go "
            "back to an earlier checkpoint (--from)."
        )
