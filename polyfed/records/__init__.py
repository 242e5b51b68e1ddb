"""The run folder: written while a run is in progress, read by reports. Records know neither methods nor engines."""

from polyfed.records.checkpoint import Checkpoints, Restored
from polyfed.records.folder import RunFolder
from polyfed.records.rows import CLIENT_COLUMNS, EVALUATION_COLUMNS, ROUND_COLUMNS

__all__ = ["CLIENT_COLUMNS", "EVALUATION_COLUMNS", "ROUND_COLUMNS", "Checkpoints", "Restored", "RunFolder"]
