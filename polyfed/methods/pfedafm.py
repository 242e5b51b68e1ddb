"""pFedAFM: features of a private and a shared extractor, mixed by learned weights (Yi et al., arXiv 2404.17847)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from pydantic import Field
from torch import Tensor, nn

from polyfed.message import Message, State
from polyfed.methods.base import Batch, ClientNetwork, Knowledge, Phase, SplitNetwork
from polyfed.methods.parts.shared_network import SharedNetwork
from polyfed.methods.parts.tools import cross_entropy, module_state


class Mixture(nn.Module):
    """A client's weight of each private feature, between 0 and 1; the rest goes to the shared feature."""

    scale: Tensor

    def __init__(self, features: int, scale: float) -> None:
        super().__init__()
        # The distance from "private only", so that weight decay, where training has it, pulls back to the start. Its
        # scale gives the weights their own learning rate: a step on `away` moves them by scale² times as much.
        self.away = nn.Parameter(torch.zeros(features))
        self.register_buffer("scale", torch.tensor(scale))

    @property
    def private_weights(self) -> Tensor:
        """The paper's alpha."""
        return 1 + self.scale * self.away

    def forward(self, private: Tensor, shared: Tensor) -> Tensor:
        """The mixed features."""
        return self.private_weights * private + (1 - self.private_weights) * shared


class PFedAFM(SharedNetwork):
    """The private head sees a weighted mixture of private and shared features, with weights of each client's own.

    The private model and the weights train first, with the shared extractor as it was received; then the shared
    extractor trains alone under the private head. Only the shared extractor travels.
    """

    name = "pfedafm"
    title = "pFedAFM"
    paper = "Yi et al., arXiv 2404.17847"
    sends = "a small common extractor"
    reveals = (
        "Next to what the server sent, these weights are an update from which images can in part be reconstructed; no "
        "head is sent, which would show the labels most directly. The number of training samples is sent too."
    )
    requires = ("features",)
    receives = ("shared", "received", "mixing")
    weighted = True
    grid = {"weight_lr": (1e-2, 1e-1, 1.0)}

    class Config(SharedNetwork.Config):
        weight_lr: float = Field(0.01, gt=0, description="learning rate of the weights that mix the features")

    config: Config

    @property
    def scale(self) -> float:
        """How far the mixing weights move when what is trained moves by one."""
        return float((self.config.weight_lr / self.training.lr) ** 0.5)

    def shared_network(self) -> SplitNetwork:
        # With as many features as the private ones, because they are mixed one by one. Its head is not used.
        return self.task.new_auxiliary(self.task.feature_size)

    def first_state(self) -> State:
        return module_state("shared", self.shared_network().extractor)

    def client_modules(self, model: SplitNetwork) -> dict[str, nn.Module]:
        # Two copies: one is trained and sent, the other stays as received, because head and weights were fitted to it.
        mixing = Mixture(model.feature_size, self.scale)
        shared, received = self.shared_network().extractor, self.shared_network().extractor
        return {"shared": shared, "received": received, "mixing": mixing}

    def receive(self, state: Mapping[str, Tensor], message: Message, client: Knowledge) -> State:
        received = {f"received.{name.removeprefix('shared.')}": tensor for name, tensor in message.tensors.items()}
        # A learning rate may change in the middle of a run; the mixing weights must not.
        scale = torch.full_like(state["mixing.scale"], self.scale)
        away = state["mixing.away"] * (state["mixing.scale"] / scale)
        return {**message.tensors, **received, "mixing.scale": scale, "mixing.away": away}

    def phases(self) -> list[Phase]:
        epochs, bounds = self.training.epochs, {"mixing.away": (-1 / self.scale, 0.0)}
        return [
            # As in the released code, whose limit is for networks. Here it would also depend on the scale.
            Phase(
                "model", trains=("model", "mixing"), loss=self.loss, epochs=epochs, bounds=bounds, unclipped=("mixing",)
            ),
            Phase("shared", trains=("shared",), loss=self.shared_loss, epochs=epochs),
        ]

    def loss(self, net: ClientNetwork, batch: Batch) -> Tensor:
        """The private head on the mixed features."""
        mixed = net.mixing(net.features(batch.x), net.received(batch.x))
        return cross_entropy(net.head(mixed), batch.y)

    def shared_loss(self, net: ClientNetwork, batch: Batch) -> Tensor:
        """The private head on the shared features alone."""
        return cross_entropy(net.head(net.shared(batch.x)), batch.y)

    def predict(self, net: ClientNetwork, x: Tensor) -> dict[str, Tensor]:
        # The private features alone too, which a client would be left with if nothing were shared.
        private = net.features(x)
        return {"mixed": net.head(net.mixing(private, net.received(x))), "classifier": net.head(private)}
