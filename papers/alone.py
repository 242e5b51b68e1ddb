"""FedProto without partners, to see how much of its gain needs other clients.

Each client is pulled towards its own class means of the last round in which it took part. The server only keeps them
for it, and nobody ever receives anything of another client.

    polyfed run papers.alone:FedProtoAlone --data cifar100 --classes-per-client 10 --split fedssa --clients 100 \\
        --participation 0.1 --rounds 100 --epochs 10 --batch-size 64 --lr 0.01 --seed 2 --eval-every 10 \\
        --set training.momentum=0.9 --set training.weight_decay=0.001 --set training.clip=50 --set training.augment=true
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from polyfed.message import Message
from polyfed.methods.base import Reply, Server
from polyfed.methods.fedproto import FedProto


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
