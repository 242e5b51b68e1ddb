"""FedMRL: representations of a private and a shared network, fused and nested (Yi et al., NeurIPS 2024)."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor, nn

from polyfed.errors import InputError
from polyfed.methods.base import Batch, ClientNetwork, Phase, SplitNetwork
from polyfed.methods.parts.shared_network import SharedNetwork
from polyfed.methods.parts.tools import cross_entropy

LARGEST_DEFAULT = 128


class FedMRL(SharedNetwork):
    """A personal projector fuses the features of both networks; the shared head sees the first part of the result.

    So the fused representation holds a small one inside, like a matryoshka: its first entries serve the shared head,
    all of them the private head. Only the shared network travels.
    """

    name = "fedmrl"
    title = "FedMRL"
    paper = "Yi et al., NeurIPS 2024"
    weighted = True
    reveals = f"{SharedNetwork.reveals} The number of training samples is sent too."
    grid = {"shared_features": (32, 64, 128)}

    class Config(SharedNetwork.Config):
        shared_features: int | None = Field(
            None, ge=1, description="features of the shared network; none: a quarter of the private's, at most 128"
        )

    config: Config

    def shared_network(self) -> SplitNetwork:
        # As many as the private network has would nest nothing.
        default = max(1, min(LARGEST_DEFAULT, self.task.feature_size // 4))
        return self.task.new_auxiliary(self.config.shared_features or default)

    def client_modules(self, model: SplitNetwork) -> dict[str, nn.Module]:
        shared = self.shared_network()
        own, common = model.feature_size, shared.feature_size
        # As many are allowed to someone who asks for them, as in the authors' code for different networks.
        if common > own or (common == own and self.config.shared_features is None):
            raise InputError(
                f"fedmrl nests the shared network's {common} features in the private network's, but a client has only "
                f"{own}: set method.shared_features to less than {own}, or to {own} to nest nothing."
            )
        return {"shared": shared, "projector": nn.Linear(common + own, own)}

    def phases(self) -> list[Phase]:
        trains = ("model", "shared", "projector")
        return [Phase("model", trains=trains, loss=self.loss, epochs=self.training.epochs)]

    def loss(self, net: ClientNetwork, batch: Batch) -> Tensor:
        outputs = nested_logits(net, batch.x)
        return cross_entropy(outputs["fused"], batch.y) + cross_entropy(outputs["shared"], batch.y)

    def predict(self, net: ClientNetwork, x: Tensor) -> dict[str, Tensor]:
        return nested_logits(net, x)


def nested_logits(net: ClientNetwork, x: Tensor) -> dict[str, Tensor]:
    """Logits of the private head on the fused representation and of the shared head on its first entries."""
    representation = net.projector(torch.cat([net.shared.features(x), net.features(x)], dim=1))
    inner = representation[:, : net.shared.feature_size]
    return {"fused": net.head(representation), "shared": net.shared.head(inner)}
