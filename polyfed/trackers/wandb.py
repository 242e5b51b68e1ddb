"""Weights & Biases, offline: files in the run's folder, which `wandb sync` uploads if and when you want that."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from polyfed.trackers.base import About, State, Tracker

EXIT_CODES: dict[State, int] = {"finished": 0, "interrupted": 130, "failed": 1}


class WeightsAndBiases(Tracker):
    """Numbers with the round as step, settings as the run's configuration, the result as its summary."""

    def __init__(self, about: About) -> None:
        super().__init__(about)
        os.environ["WANDB_ERROR_REPORTING"] = "false"  # errors would be reported over the network, even offline
        import wandb

        quiet = wandb.Settings(silent=True, console="off", disable_git=True, save_code=False, x_disable_stats=True)
        run: Any = wandb.init(
            mode="offline",
            dir=str(about.folder),
            project="polyfed",
            name=about.title,
            id=about.id,
            resume="allow",
            config=dict(about.settings),
            settings=quiet,
        )
        self._run = run

    def log(self, round: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=round)

    def close(self, state: State, summary: Mapping[str, float]) -> None:
        for name, value in summary.items():
            self._run.summary[name] = value
        self._run.finish(exit_code=EXIT_CODES[state])
