"""Many clients at once: those of one architecture train as one batched network. README.md shows the path of a batch."""

from polyfed.engines.stacked.copies import copy_states
from polyfed.engines.stacked.norms import OtherRows
from polyfed.engines.stacked.passes import Collected, Predicted, collect, inspect, own_rules, predict, probe, remarks
from polyfed.engines.stacked.step import PhaseStep, Stack, normed_phases, unstackable

__all__ = [
    "Collected",
    "OtherRows",
    "PhaseStep",
    "Predicted",
    "Stack",
    "collect",
    "copy_states",
    "inspect",
    "normed_phases",
    "own_rules",
    "predict",
    "probe",
    "remarks",
    "unstackable",
]
