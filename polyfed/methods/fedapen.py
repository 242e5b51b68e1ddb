"""FedAPEN: mutual learning, and a learned ensemble of the private and the shared network (Qin et al., KDD 2023)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from pydantic import Field
from torch import Tensor, nn

from polyfed.message import Message, State
from polyfed.methods.base import Batch, ClientNetwork, Knowledge, Phase, SplitNetwork
from polyfed.methods.parts.distillation import kl_divergence
from polyfed.methods.parts.shared_network import SharedNetwork
from polyfed.methods.parts.tools import cross_entropy


class Mixing(nn.Module):
    """A client's learned share of the private network in the ensemble."""

    participations: Tensor

    def __init__(self) -> None:
        super().__init__()
        # The distance from equal shares, so that weight decay, where training has it, favours neither network.
        self.lean = nn.Parameter(torch.zeros(()))
        self.register_buffer("participations", torch.zeros((), dtype=torch.int64))

    @property
    def private_share(self) -> Tensor:
        """The paper's lambda, between 0 and 1."""
        return 0.5 + self.lean

    def forward(self, private: Tensor, shared: Tensor) -> Tensor:
        """The ensemble's logits."""
        return self.private_share * private + (1 - self.private_share) * shared


class FedAPEN(SharedNetwork):
    """The private and the shared network teach each other and predict together; each client learns how to mix them."""

    name = "fedapen"
    title = "FedAPEN"
    paper = "Qin et al., KDD 2023"

    class Config(SharedNetwork.Config):
        mixing_samples: float = Field(
            0.05, gt=0, lt=0.5, description="share of the training samples set aside to learn the mixing weight"
        )
        mixing_epochs: int = Field(10, ge=1, description="passes over these samples in one round")
        mixing_lr: float = Field(1e-3, gt=0, description="learning rate of the mixing weight")

    config: Config

    def client_modules(self, model: SplitNetwork) -> dict[str, nn.Module]:
        return {**super().client_modules(model), "mixing": Mixing()}

    def receive(self, state: Mapping[str, Tensor], message: Message, client: Knowledge) -> State:
        return {**message.tensors, "mixing.participations": state["mixing.participations"] + 1}

    def phases(self) -> list[Phase]:
        config, edge = self.config, 1 - self.config.mixing_samples
        return [
            Phase(
                "mixing", trains=("mixing",), loss=self.mixing_loss, epochs=config.mixing_epochs, lr=config.mixing_lr,
                bounds={"mixing.lean": (-0.5, 0.5)}, part=(edge, 1.0), augment=False,
            ),
            Phase(
                "model", trains=("model", "shared"), loss=self.loss, epochs=self.training.epochs, part=(0.0, edge)
            ),
        ]  # fmt: skip

    def mixing_loss(self, net: ClientNetwork, batch: Batch) -> Tensor:
        """The ensemble's cross entropy, once both networks are trained and the shared one was averaged."""
        ensemble = net.mixing(net(batch.x), net.shared(batch.x))
        return torch.where(net.mixing.participations > 1, cross_entropy(ensemble, batch.y), 0.0)

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
        return {"ensemble": net.mixing(private, shared), "classifier": private, "shared": shared}


def taught(own: Tensor, teacher: Tensor, y: Tensor) -> Tensor:
    """What one network learns from the labels and from the other network, per sample."""
    return cross_entropy(own, y) + kl_divergence(teacher, own)
