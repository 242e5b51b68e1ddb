"""Stand-ins for the packages of trackers, which note what they are told and fail where a test wants that."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest


class Fakes:
    """What the stand-ins were told, as (tracker, call, details); a call named in `fails` raises."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str, Any]] = []
        self.fails: dict[tuple[str, str], BaseException] = {}
        self.stored: list[types.SimpleNamespace] = []
        """The runs in MLflow's store, which outlive a process."""

    def tell(self, tracker: str, call: str, details: Any = None) -> None:
        self.told.append((tracker, call, details))
        if (tracker, call) in self.fails:
            raise self.fails[tracker, call]

    def of(self, tracker: str, call: str) -> list[Any]:
        return [details for who, what, details in self.told if (who, what) == (tracker, call)]

    def rounds(self, tracker: str) -> list[int]:
        """The rounds that a tracker was told of, each once, in order."""
        return list(dict.fromkeys(step for step, _ in self.of(tracker, "log") if step is not None))


def install(monkeypatch: pytest.MonkeyPatch) -> Fakes:
    """Put the stand-ins in the place of the real packages."""
    fakes = Fakes()
    for module in (*tensorboard(fakes), *mlflow(fakes), *wandb(fakes)):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return fakes


def module(name: str, **members: Any) -> types.ModuleType:
    made = types.ModuleType(name)
    for member, value in members.items():
        setattr(made, member, value)
    return made


def tensorboard(fakes: Fakes) -> list[types.ModuleType]:
    class SummaryWriter:
        def __init__(self, folder: str, purge_step: int) -> None:
            fakes.tell("tensorboard", "start", (folder, purge_step))

        def add_text(self, name: str, text: str, step: int) -> None:
            fakes.tell("tensorboard", "settings", text)

        def add_scalar(self, name: str, value: float, step: int) -> None:
            fakes.tell("tensorboard", "log", (step, {name: value}))

        def flush(self) -> None: ...

        def close(self) -> None:
            fakes.tell("tensorboard", "close")

    return [module("torch.utils.tensorboard", SummaryWriter=SummaryWriter)]


def mlflow(fakes: Fakes) -> list[types.ModuleType]:
    class MlflowClient:
        def __init__(self, tracking_uri: str) -> None:
            fakes.tell("mlflow", "start", tracking_uri)

        def get_experiment_by_name(self, name: str) -> Any:
            return types.SimpleNamespace(experiment_id="7") if fakes.stored else None

        def create_experiment(self, name: str) -> str:
            return "7"

        def search_runs(self, experiments: list[str], filter_string: str) -> list[Any]:
            return [run for run in fakes.stored if f"'{run.tags['polyfed.id']}'" in filter_string]

        def create_run(self, experiment: str, run_name: str, tags: dict[str, str]) -> Any:
            info = types.SimpleNamespace(run_id=f"run{len(fakes.stored)}")
            fakes.stored.append(types.SimpleNamespace(info=info, tags=tags))
            return fakes.stored[-1]

        def update_run(self, run: str, status: str) -> None: ...

        def log_batch(self, run: str, metrics: Any = (), params: Any = ()) -> None:
            if params:
                fakes.tell("mlflow", "settings", dict(params))
            if metrics:
                fakes.tell("mlflow", "log", (metrics[0][3], {name: value for name, value, _, _ in metrics}))

        def set_terminated(self, run: str, status: str) -> None:
            fakes.tell("mlflow", "close", (run, status))

    def plain(*values: Any) -> tuple[Any, ...]:
        return values

    return [
        module("mlflow"),
        module("mlflow.entities", Metric=plain, Param=plain),
        module("mlflow.tracking", MlflowClient=MlflowClient),
    ]


def wandb(fakes: Fakes) -> list[types.ModuleType]:
    class Run:
        summary: dict[str, float] = {}

        def log(self, numbers: dict[str, float], step: int) -> None:
            fakes.tell("wandb", "log", (step, numbers))

        def finish(self, exit_code: int) -> None:
            fakes.tell("wandb", "close", (exit_code, dict(self.summary)))

    def init(**given: Any) -> Run:
        fakes.tell("wandb", "start", given)
        return Run()

    return [module("wandb", Settings=dict, init=init)]
