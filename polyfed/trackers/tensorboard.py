"""TensorBoard: event files in the run's folder; `tensorboard --logdir runs` shows all runs below."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyfed.trackers.base import About, State, Tracker


class TensorBoard(Tracker):
    """Curves under their columns' names, and the settings as text."""

    def __init__(self, about: About) -> None:
        super().__init__(about)
        from torch.utils.tensorboard import SummaryWriter

        # Rounds after the checkpoint run again: what an earlier process logged of them must not be shown twice.
        writer: Any = SummaryWriter(str(about.folder / "tensorboard"), purge_step=about.first_round)
        self._writer = writer
        lines = (f"    {name}: {value}" for name, value in about.settings.items())
        self._writer.add_text("settings", "\n".join(lines), about.first_round)

    def log(self, round: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, round)
        self._writer.flush()

    def close(self, state: State, summary: Mapping[str, float]) -> None:
        self._writer.close()
