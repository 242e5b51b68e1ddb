"""The end of a run, as run.json lists it: every file that the run left, so that a finished run can be checked.

A run that gets more rounds continues from here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from polyfed.records.log import Extent
from polyfed.records.states import Damaged, Shard, StoredFile


@dataclass(frozen=True)
class Ending:
    """What a finished run consists of."""

    round: int
    progress: dict[str, Any]
    server: StoredFile
    clients: tuple[Shard, ...]
    records: Mapping[str, Extent]
    results: tuple[StoredFile, ...]
    card: StoredFile | None = None
    """What prediction needs besides the states; runs of polyfed 0.1 and of clients elsewhere have none."""

    @staticmethod
    def parse(values: Any, records: Collection[str], results: Sequence[str], optional: Collection[str] = ()) -> Ending:
        """Read what `to_dict` gave, of a run with these records and results; raises `Damaged` for anything else.

        `optional` records may be missing.
        """
        try:
            end = Ending(
                int(values["round"]),
                dict(values["progress"]),
                StoredFile.from_dict(values["server"]),
                tuple(Shard.from_dict(shard) for shard in values["clients"]),
                {str(name): Extent(**extent) for name, extent in values["records"].items()},
                tuple(StoredFile.from_dict(file) for file in values["results"]),
                StoredFile.from_dict(values["card"]) if values.get("card") else None,
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Damaged(f"the end of the run can't be read: {error}") from error
        if end.records.keys() | set(optional) != set(records) or [file.file for file in end.results] != list(results):
            raise Damaged("it lists other files than a run has")
        return end

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
