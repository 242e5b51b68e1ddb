"""What everyone in a federation knows: how clients train, and the common problem with its networks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from pydantic import Field
from torch import nn

from polyfed.errors import InputError
from polyfed.models import Architecture, SplitNetwork
from polyfed.models.catalogue import FromCatalogue
from polyfed.models.layers import Match
from polyfed.seeds import seeded
from polyfed.settings import Settings


class Training(Settings):
    """How every client trains; the same for all methods, so that they can be compared."""

    epochs: int = Field(1, ge=1, description="passes over a client's training samples in one round")
    batch_size: int = Field(16, ge=1, description="samples per step")
    lr: float = Field(0.05, gt=0, description="learning rate of plain SGD")
    momentum: float = Field(0.0, ge=0, lt=1, description="SGD momentum, reset in every round")
    weight_decay: float = Field(0.0, ge=0, description="L2 penalty added to the gradient")
    clip: float | None = Field(None, gt=0, description="largest gradient norm of a trained module; none: no clipping")
    augment: bool = Field(False, description="random flip, erasing and crop of training images")
    bf16: bool = Field(
        False,
        description="multiply in bfloat16 while training (weights stay 32-bit): faster on GPUs, less precise",
    )

    @property
    def reach(self) -> float:
        """How far one gradient moves a weight in all, as a multiple of it: momentum repeats it in the steps after."""
        return self.lr / (1 - self.momentum)


@dataclass(frozen=True)
class Task:
    """What every participant knows about the common problem."""

    input_shape: tuple[int, ...]
    classes: int
    rounds: int
    seed: int
    architecture: Architecture | None
    """The network that defines what clients have in common: all of it (FedAvg), its head, or its number of features.

    None on a server that knows no client's network: then the common head is one linear layer with a bias.
    """
    auxiliary: Architecture
    """The small homogeneous network of mutual-learning methods."""
    feature_size: int
    """How many features the clients' extractors have; the first client's number where they may differ."""
    features: int | None = None
    """How many features every network is brought to; none: each keeps its own number."""
    match: Match = "pool"

    def new_model(self, architecture: Architecture | None = None, *, variant: str | int = "shared") -> SplitNetwork:
        """A freshly initialised network; every caller that asks for the same variant gets the same weights."""
        chosen = architecture or self.architecture
        if chosen is None:
            raise InputError(
                "a network that all clients have in common is needed here, but none is known: name it (the network of "
                "the federation's task)."
            )
        with seeded(self.seed, "initial", chosen.name, variant):
            return chosen.build(self.input_shape, self.classes, self.features, self.match)

    def new_head(self) -> nn.Module:
        """The common head, freshly initialised: all that a server needs if clients differ.

        A linear head is drawn on its own, so that a server which knows no client's network draws the same. A user's
        head of another kind, or with weights of its own, is kept as it is.
        """
        if self.architecture is not None:
            head = self.new_model().head
            if not _is_plain(head) or self._is_given(head):
                return head
        with seeded(self.seed, "initial", "head"):
            return nn.Linear(self.feature_size, self.classes)

    def _is_given(self, head: nn.Module) -> bool:
        """Whether the head's weights are the user's, and not drawn: they are the same with another seed."""
        if self.architecture is None or isinstance(self.architecture.maker, FromCatalogue):
            return False
        other = self.new_model(variant="head").head.state_dict()
        return all(torch.equal(tensor, other[name]) for name, tensor in head.state_dict().items())

    def new_auxiliary(self, features: int | None = None) -> SplitNetwork:
        """The auxiliary network, freshly initialised, the same for every caller; with that many features if given."""
        with seeded(self.seed, "initial", self.auxiliary.name, "auxiliary"):
            return self.auxiliary.build(self.input_shape, self.classes, features or self.features, self.match)

    def seeded_module(self, build: Callable[[], nn.Module], purpose: str) -> nn.Module:
        """The method's own module, initialised in the same way for every caller."""
        with seeded(self.seed, "initial", purpose):
            return build()


def _is_plain(head: nn.Module) -> bool:
    """Whether a head is one linear layer with a bias, and all of it trains."""
    trains = all(parameter.requires_grad for parameter in head.parameters())
    return type(head) is nn.Linear and head.bias is not None and trains
