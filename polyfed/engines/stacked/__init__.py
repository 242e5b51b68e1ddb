"""Many clients at once: those of one architecture train as one batched network. README.md shows the path of a batch."""

from polyfed.engines.stacked.passes import collect, evaluate, own_rules, probe, remarks
from polyfed.engines.stacked.step import PhaseStep, Stack, copy_states, normed_phases, unstackable

__all__ = [
    "PhaseStep",
    "Stack",
    "collect",
    "copy_states",
    "evaluate",
    "normed_phases",
    "own_rules",
    "probe",
    "remarks",
    "unstackable",
]
