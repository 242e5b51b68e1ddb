"""FedAvg: the mean of all networks, for clients that have the same one (McMahan et al., AISTATS 2017)."""

from __future__ import annotations

from typing import ClassVar

from polyfed.message import State
from polyfed.methods.base import Common
from polyfed.methods.parts.averaged import Averaged
from polyfed.methods.parts.tools import module_state, part_of


class FedAvg(Averaged):
    """Clients train the global network on their data; the server averages the results, weighted by samples."""

    name = "fedavg"
    title = "FedAvg"
    paper = "McMahan et al., AISTATS 2017"
    sends = "the whole network"
    requires: ClassVar[tuple[Common, ...]] = ("network",)
    module = "model"

    def first_state(self) -> State:
        return part_of(module_state("model", self.task.new_model()), self.module)
