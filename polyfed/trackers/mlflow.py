"""MLflow: a run in a local store, in the run's folder or where MLFLOW_TRACKING_URI says; never on a server."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from polyfed.errors import InputError
from polyfed.trackers.base import About, State, Tracker

TAG = "polyfed.id"
EXPERIMENT = "polyfed"
STATUS: dict[State, str] = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
MOST_PARAMS = 100
"""As many as MLflow accepts at once."""


class MLflow(Tracker):
    """Numbers as metrics with the round as step, settings as parameters, the result as metrics named summary.NAME."""

    def __init__(self, about: About) -> None:
        super().__init__(about)
        # MLflow reports its use over the network, and refuses to write files, unless told otherwise.
        os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric = Metric
        self._client = MlflowClient(tracking_uri=store_of(about))
        self._run = self._found() or self._new()
        if about.first_round == 1:
            params = [Param(name, str(value)[:500]) for name, value in about.settings.items()]
            for start in range(0, len(params), MOST_PARAMS):
                self._client.log_batch(self._run, params=params[start : start + MOST_PARAMS])

    def _found(self) -> str | None:
        """The run of an earlier process, which this one continues."""
        experiment = self._client.get_experiment_by_name(EXPERIMENT)
        if experiment is None:
            return None
        runs = self._client.search_runs([experiment.experiment_id], f"tags.`{TAG}` = '{self.about.id}'")
        if not runs:
            return None
        self._client.update_run(runs[0].info.run_id, status="RUNNING")
        return str(runs[0].info.run_id)

    def _new(self) -> str:
        experiment = self._client.get_experiment_by_name(EXPERIMENT)
        number = experiment.experiment_id if experiment else self._client.create_experiment(EXPERIMENT)
        run: Any = self._client.create_run(number, run_name=self.about.title, tags={TAG: self.about.id})
        return str(run.info.run_id)

    def log(self, round: int, numbers: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        self._client.log_batch(self._run, metrics=[self._metric(n, v, now, round) for n, v in numbers.items()])

    def close(self, state: State, summary: Mapping[str, float]) -> None:
        if summary:
            self.log(int(summary.get("rounds", 0)), {f"summary.{name}": value for name, value in summary.items()})
        self._client.set_terminated(self._run, STATUS[state])


def store_of(about: About) -> str:
    """The address of a local store; raises for one elsewhere."""
    wanted = os.environ.get("MLFLOW_TRACKING_URI", "").strip()
    if not wanted:
        return (about.folder / "mlflow").resolve().as_uri()
    address = urlsplit(wanted)
    if not address.scheme:  # as a URI, so that MLflow does not read a name such as databricks as a server's
        return Path(wanted).resolve().as_uri()
    if address.scheme not in ("file", "sqlite") or address.netloc not in ("", "localhost"):
        raise InputError(
            f"MLFLOW_TRACKING_URI is '{wanted}', but polyfed writes to local stores alone: use a path or file:///PATH."
        )
    return wanted
