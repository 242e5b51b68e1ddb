"""LG-FedAvg: local extractors, one global head (Liang et al., 2020)."""

from __future__ import annotations

from polyfed.methods.fedavg import FedAvg


class LGFedAvg(FedAvg):
    """Like FedAvg, but only the head travels, so extractors may differ as long as they give the same features."""

    name = "lg-fedavg"
    title = "LG-FedAvg"
    paper = "Liang et al., arXiv 2001.01523"
    sends = "the head"
    requires = ("features", "head")
    module = "model.head"
