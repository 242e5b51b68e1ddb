"""Methods without partners, to see how much of their gains needs other clients.

A client gets back what it sent itself, in the last round in which it took part. The server only keeps that for it, and
nobody ever receives anything of another client.

    polyfed run papers.alone:FedProtoAlone --data cifar100 --classes-per-client 10 --split fedssa --clients 100 \\
        --participation 0.1 --rounds 100 --epochs 10 --batch-size 64 --lr 0.01 --seed 2 --eval-every 10 \\
        --set training.momentum=0.9 --set training.weight_decay=0.001 --set training.clip=50 --set training.augment=true
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from polyfed.message import Message
from polyfed.methods.base import Reply, Server
from polyfed.methods.fedclassavg import FedClassAvg
from polyfed.methods.fedproto import FedProto
from polyfed.methods.fml import FML
from polyfed.methods.parts.averaged import Averaged
from polyfed.methods.parts.tools import part_of


class FedProtoAlone(FedProto):
    """FedProto in which every client has only its own prototypes."""

    name = "fedproto-alone"
    title = "FedProto without partners"
    paper = "an ablation of FedProto"

    def download(self, server: Server, client: int, classes: Tensor | None) -> Message:
        own, labels = (server.state.get(f"{part} of {client}") for part in ("prototypes", "labels"))
        return Message() if own is None or labels is None else Message({"prototypes": own}, {"labels": labels})

    def aggregate(self, server: Server, replies: Sequence[Reply]) -> None:
        for reply in replies:
            server.state[f"prototypes of {reply.client}"] = reply.message.tensors["prototypes"]
            server.state[f"labels of {reply.client}"] = reply.message.metadata["labels"]


class _NotAveraged(Averaged):
    """A method that averages a module of all clients, without the average."""

    def download(self, server: Server, client: int, classes: Tensor | None) -> Message:
        first = part_of(server.state, self.module)
        return Message({name: server.state.get(f"of {client}: {name}", tensor) for name, tensor in first.items()})

    def aggregate(self, server: Server, replies: Sequence[Reply]) -> None:
        for reply in replies:
            server.state |= {f"of {reply.client}: {name}": tensor for name, tensor in reply.message.tensors.items()}


class FMLAlone(_NotAveraged, FML):
    """FML in which a client's second network is its own."""

    name = "fml-alone"
    title = "FML without partners"
    paper = "an ablation of FML"


class FedClassAvgAlone(_NotAveraged, FedClassAvg):
    """FedClassAvg in which every client goes on with its own head."""

    name = "fedclassavg-alone"
    title = "FedClassAvg without partners"
    paper = "an ablation of FedClassAvg"
