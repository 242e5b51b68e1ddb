"""FML: a private and a shared network teach each other (federated mutual learning; Shen et al., arXiv 2006.16765)."""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from polyfed.methods.base import Batch, ClientNetwork, Phase
from polyfed.methods.parts.distillation import kl_divergence
from polyfed.methods.parts.shared_network import SharedNetwork
from polyfed.methods.parts.tools import cross_entropy


class FML(SharedNetwork):
    """Both networks learn from the labels and from each other's class probabilities; only the shared one travels."""

    name = "fml"
    title = "FML"
    paper = "Shen et al., arXiv 2006.16765"
    grid = {"private_labels": (0.3, 0.5, 0.7), "shared_labels": (0.3, 0.5, 0.7)}

    class Config(SharedNetwork.Config):
        private_labels: float = Field(
            0.5, ge=0, le=1, description="how much the private network learns from labels; the rest from the shared one"
        )
        shared_labels: float = Field(
            0.5, ge=0, le=1, description="how much the shared network learns from labels; the rest from the private one"
        )

    config: Config

    def phases(self) -> list[Phase]:
        return [Phase("model", trains=("model", "shared"), loss=self.loss, epochs=self.training.epochs)]

    def loss(self, net: ClientNetwork, batch: Batch) -> Tensor:
        # Teachers are detached, so one step on the sum is a step of each network on its own loss.
        private, shared = net(batch.x), net.shared(batch.x)
        learned_by_private = mutual_loss(private, shared, batch.y, self.config.private_labels)
        return learned_by_private + mutual_loss(shared, private, batch.y, self.config.shared_labels)


def mutual_loss(own: Tensor, teacher: Tensor, y: Tensor, labels: float) -> Tensor:
    """What one network learns, per sample: a share `labels` from the labels and the rest from the other network.

    KL is summed over classes; the mean over classes of some released code would weaken it by their number.
    """
    return labels * cross_entropy(own, y) + (1 - labels) * kl_divergence(teacher, own)
