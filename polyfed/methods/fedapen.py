"""FedAPEN: mutual learning, and a learned ensemble of the private and the shared network (Qin et al., KDD 2023)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from pydantic import Field
from torch import Tensor, nn

from polyfed.message import Message, State
from polyfed.methods.base import Batch, ClientNetwork, Knowledge, Loss, Part, Phase, SplitNetwork, edges
from polyfed.methods.parts.distillation import kl_divergence
from polyfed.methods.parts.shared_network import SharedNetwork
from polyfed.methods.parts.tools import cross_entropy


class Share(nn.Module):
    """A client's learned share of the private network in the ensemble."""

    def __init__(self) -> None:
        super().__init__()
        # The distance from equal shares, so that weight decay, where training has it, favours neither network.
        self.lean = nn.Parameter(torch.zeros(()))

    @property
    def private_share(self) -> Tensor:
        """The paper's lambda, between 0 and 1."""
        return 0.5 + self.lean

    def forward(self, private: Tensor, shared: Tensor) -> Tensor:
        """The ensemble's logits."""
        return self.private_share * private + (1 - self.private_share) * shared


class Mixing(Share):
    """The share that is learned once the shared network was averaged, and how often the client has taken part."""

    participations: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("participations", torch.zeros((), dtype=torch.int64))


class FedAPEN(SharedNetwork):
    """The private and the shared network teach each other and predict together; each client learns how to mix them."""

    name = "fedapen"
    title = "FedAPEN"
    paper = "Qin et al., KDD 2023"
    receives = ("shared", "mixing.participations")
    grid = {"mixing_lr": (1e-3, 1e-2, 1e-1)}

    class Config(SharedNetwork.Config):
        mixing_samples: float = Field(
            0.05, gt=0, lt=0.5, description="share of the training samples set aside to learn the mixing weight"
        )
        mixing_epochs: int = Field(10, ge=1, description="passes over these samples in one round")
        mixing_lr: float = Field(1e-3, gt=0, description="learning rate of the mixing weight")
        adapted_epochs: int = Field(
            10,
            ge=0,
            description="passes over these samples after local training too, for a second mixing weight that only "
            "scores (the rule adapted); 0: no such rule",
        )

    config: Config

    def misses(self, samples: int) -> str:
        start, stop = edges(self.set_aside, samples)
        if start < stop:
            return ""
        return "too few training samples to set one aside (mixing_samples), so the mixing weight stays at one half"

    @property
    def set_aside(self) -> Part:
        """The training samples on which mixing weights are learned, and networks are not."""
        return 1 - self.config.mixing_samples, 1.0

    def client_modules(self, model: SplitNetwork) -> dict[str, nn.Module]:
        adapted = {"adapted": Share()} if self.config.adapted_epochs else {}
        return {**super().client_modules(model), "mixing": Mixing(), **adapted}

    def receive(self, state: Mapping[str, Tensor], message: Message, client: Knowledge) -> State:
        return {**message.tensors, "mixing.participations": state["mixing.participations"] + 1}

    def phases(self) -> list[Phase]:
        config, rest = self.config, (0.0, self.set_aside[0])
        phases = [
            self.weighing("mixing", self.mixing_loss, config.mixing_epochs),
            Phase("model", trains=("model", "shared"), loss=self.loss, epochs=self.training.epochs, part=rest),
        ]
        if config.adapted_epochs:
            phases.append(self.weighing("adapted", self.adapted_loss, config.adapted_epochs))
        return phases

    def weighing(self, module: str, loss: Loss, epochs: int) -> Phase:
        """A phase that learns a mixing weight on the samples set aside, as they are."""
        return Phase(
            module, trains=(module,), loss=loss, epochs=epochs, lr=self.config.mixing_lr,
            bounds={f"{module}.lean": (-0.5, 0.5)}, part=self.set_aside, augment=False,
        )  # fmt: skip

    def mixing_loss(self, net: ClientNetwork, batch: Batch) -> Tensor:
        """The ensemble's cross entropy, once both networks are trained and the shared one was averaged."""
        ensemble = net.mixing(net(batch.x), net.shared(batch.x))
        return torch.where(net.mixing.participations > 1, cross_entropy(ensemble, batch.y), 0.0)

    def adapted_loss(self, net: ClientNetwork, batch: Batch) -> Tensor:
        """The cross entropy of the ensemble of the client's own two networks, right after they were trained."""
        return cross_entropy(net.adapted(net(batch.x), net.shared(batch.x)), batch.y)

    def loss(self, net: ClientNetwork, batch: Batch) -> Tensor:
        # Teachers are detached, so one step on the sum is a step of each network on its own loss.
        private, shared = net(batch.x), net.shared(batch.x)
        learned_by_private = taught(private, shared, batch.y) + cross_entropy(
            net.mixing(private, shared.detach()), batch.y
        )
        learned_by_shared = taught(shared, private, batch.y) + cross_entropy(
            net.mixing(private.detach(), shared), batch.y
        )
        return learned_by_private + learned_by_shared

    def predict(self, net: ClientNetwork, x: Tensor) -> dict[str, Tensor]:
        private, shared = net(x), net.shared(x)
        scores = {"ensemble": net.mixing(private, shared), "classifier": private, "shared": shared}
        return scores | ({"adapted": net.adapted(private, shared)} if self.config.adapted_epochs else {})


def taught(own: Tensor, teacher: Tensor, y: Tensor) -> Tensor:
    """What one network learns from the labels and from the other network, per sample."""
    return cross_entropy(own, y) + kl_divergence(teacher, own)
