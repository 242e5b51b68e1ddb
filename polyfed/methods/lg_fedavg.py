"""LG-FedAvg: local extractors, one global head (Liang et al., 2020)."""

from __future__ import annotations

from polyfed.message import State
from polyfed.methods.parts.averaged import Averaged
from polyfed.methods.parts.tools import module_state


class LGFedAvg(Averaged):
    """Like FedAvg, but only the head travels, so extractors may differ as long as they give the same features."""

    name = "lg-fedavg"
    title = "LG-FedAvg"
    paper = "Liang et al., arXiv 2001.01523"
    sends = "the head"
    reveals = (
        "How far each class's row of the head has moved shows which classes a client holds. The number of training "
        "samples is sent too."
    )
    requires = ("features", "head")
    module = "model.head"

    def first_state(self) -> State:
        return module_state(self.module, self.task.new_head())
