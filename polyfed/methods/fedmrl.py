"""FedMRL: representations of a private and a shared network, fused and nested (Yi et al., NeurIPS 2024)."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor, nn

from polyfed.errors import InputError
from polyfed.methods.base import Batch, ClientNetwork, Phase, SplitNetwork
from polyfed.methods.parts.shared_network import SharedNetwork
from polyfed.methods.parts.tools import cross_entropy


class FedMRL(SharedNetwork):
    """A personal projector fuses the features of both networks; the shared head sees the first part of the result.

    So the fused representation holds a small one inside, like a matryoshka: its first entries serve the shared head,
    all of them the private head. Only the shared network travels.
    """

    name = "fedmrl"
    title = "FedMRL"
    paper = "Yi et al., NeurIPS 2024"
    weighted = True

    class Config(SharedNetwork.Config):
        shared_features: int | None = Field(
            None, ge=1, description="features of the shared network; none: its own number"
        )

    config: Config

    def shared_network(self) -> SplitNetwork:
        return self.task.new_auxiliary(self.config.shared_features)

    def client_modules(self, model: SplitNetwork) -> dict[str, nn.Module]:
        shared = self.shared_network()
        own, common = model.feature_size, shared.feature_size
        if common > own:
            raise InputError(
                f"fedmrl nests the shared network's {common} features in the private network's, but a client has only "
                f"{own}: set method.shared_features to at most {own}."
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
