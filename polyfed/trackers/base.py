"""What a tracker is, and what it is told about a run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

State = Literal["finished", "interrupted", "failed"]


@dataclass(frozen=True)
class About:
    """The run that a tracker follows."""

    folder: Path
    id: str
    """Stays the same when the run is resumed, so that the tracker continues the same run."""
    first_round: int
    """The round that comes next; above 1 if the run is resumed."""
    settings: Mapping[str, Any]
    """All settings by name: `seed`, `training.lr`, `method.weight`."""

    @property
    def title(self) -> str:
        """The run by name: that of its folder."""
        return self.folder.resolve().name


class Tracker(ABC):
    """Shows a run's numbers elsewhere. All calls come from one thread; whatever they raise ends the tracker alone."""

    def __init__(self, about: About) -> None:
        self.about = about

    @abstractmethod
    def log(self, round: int, numbers: Mapping[str, float]) -> None:
        """Keep the numbers of an evaluated round; all are finite."""

    @abstractmethod
    def close(self, state: State, summary: Mapping[str, float]) -> None:
        """Write what is left; `summary` is empty unless the run is finished."""
