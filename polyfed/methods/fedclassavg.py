"""FedClassAvg: an averaged classifier and contrastive features (Jang et al., ICPP 2022)."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy

import torch
from pydantic import Field
from torch import Tensor, nn

from polyfed.errors import InputError
from polyfed.message import Message, State
from polyfed.methods.base import Batch, ClientNetwork, Knowledge, Method, Phase, SplitNetwork, Task, Training
from polyfed.methods.lg_fedavg import LGFedAvg
from polyfed.methods.parts.tools import cross_entropy


class FedClassAvg(LGFedAvg):
    """Like LG-FedAvg, with similar features for all views of a class and a head that stays near the one received."""

    name = "fedclassavg"
    title = "FedClassAvg"
    paper = "Jang et al., ICPP 2022"
    receives = ("model.head", "received")
    grid = {"weight": (0.01, 0.1, 1.0), "temperature": (0.07, 0.2, 0.5)}

    class Config(Method.Config):
        weight: float = Field(
            0.1, ge=0, description="weight of half the squared distance between the trained and the received head"
        )
        temperature: float = Field(
            0.07, gt=0, description="divides similarities in the contrastive loss; small: mostly near samples count"
        )
        normalise: bool = Field(True, description="compare only the directions of features, not their lengths")

    config: Config

    def __init__(self, config: Config, task: Task, training: Training) -> None:
        super().__init__(config, task, training)
        if len(task.input_shape) != 3:
            raise InputError(
                f"fedclassavg compares two augmented views of an image, but samples have shape {task.input_shape}; "
                "take images, or the method lg-fedavg, which needs no views."
            )

    def client_modules(self, model: SplitNetwork) -> dict[str, nn.Module]:
        return {"received": deepcopy(model.head)}

    def receive(self, state: Mapping[str, Tensor], message: Message, client: Knowledge) -> State:
        kept = {"received" + name.removeprefix(self.module): tensor for name, tensor in message.tensors.items()}
        return {**message.tensors, **kept}

    def phases(self) -> list[Phase]:
        return [Phase("model", trains=("model",), loss=self.loss, epochs=self.training.epochs, views=2)]

    def loss(self, net: ClientNetwork, batch: Batch) -> Tensor:
        assert batch.views is not None
        first, second = net.features(batch.views[:, 0]), net.features(batch.views[:, 1])
        # Views are for the contrast alone: a head that only ever sees augmented images would be compared with others
        # that do not, which says nothing about the method.
        classified = cross_entropy(net(batch.x), batch.y)
        if self.config.normalise:
            first, second = unit_length(first), unit_length(second)
        contrasted = contrastive_loss(first, second, batch.y, batch.mask, self.config.temperature)
        # The same for every sample, so the mean over a batch is the term itself.
        moved = squared_distance(net.model.head, net.received) / 2
        return contrasted + classified + self.config.weight * moved


def contrastive_loss(first: Tensor, second: Tensor, labels: Tensor, mask: Tensor | None, temperature: float) -> Tensor:
    """The supervised contrastive loss of two views of the same samples (Khosla et al., 2020), one value per sample.

    Each view of a sample is an anchor once; a sample's value is the mean over its two anchors. An anchor's partners
    are all other views of real samples, and its other view in any case: so even a batch of padding stays finite.
    """
    count = len(labels)
    views = torch.cat([first, second])
    sample = torch.arange(count, device=labels.device).repeat(2)
    same_sample = sample[:, None] == sample
    oneself = torch.eye(2 * count, dtype=torch.bool, device=labels.device)
    real = torch.ones_like(labels, dtype=torch.bool) if mask is None else mask.bool()
    partners = (same_sample | real.repeat(2)) & ~oneself
    positive = partners & (labels.repeat(2)[:, None] == labels.repeat(2))
    # logsumexp subtracts each row's maximum, so that a small temperature can't overflow.
    similarity = (views @ views.T / temperature).masked_fill(~partners, -torch.inf)
    log_share = similarity - similarity.logsumexp(1, keepdim=True)
    anchors = -torch.where(positive, log_share, 0.0).sum(1) / positive.sum(1)
    return (anchors[:count] + anchors[count:]) / 2


def unit_length(vectors: Tensor) -> Tensor:
    """The vectors' directions; one that is (nearly) zero has none and stays as it is, with a finite gradient."""
    squares = vectors.square().sum(1, keepdim=True)
    return vectors * torch.where(squares > 1e-12, squares, 1.0).rsqrt()


def squared_distance(one: nn.Module, other: nn.Module) -> Tensor:
    """The squared Euclidean distance of two modules' parameters."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return torch.stack([(a - b).square().sum() for a, b in pairs]).sum()
