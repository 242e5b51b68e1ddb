"""FedKD: a private and a shared network teach each other; the shared one travels compressed (Wu et al., 2022)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from pydantic import Field
from torch import Tensor, nn

from polyfed.message import Message, Schema, State
from polyfed.methods.base import Batch, ClientNetwork, Knowledge, Phase, Reply, Server, SplitNetwork, Trained
from polyfed.methods.parts.compression import check_forms, compress, compressed_schema, restore
from polyfed.methods.parts.distillation import kl_divergence
from polyfed.methods.parts.shared_network import SharedNetwork
from polyfed.methods.parts.tools import cross_entropy, distance, plain_mean

SMALLEST_LOSS = 0.01
"""Distillation is never weighted by more than one over this, however sure both networks are."""


class FedKD(SharedNetwork):
    """Both networks learn from the labels and, the better they are, from each other's probabilities and features."""

    name = "fedkd"
    title = "FedKD"
    paper = "Wu et al., Nature Communications 2022"
    sends = "a small network, compressed"
    depends_on_rounds = True

    class Config(SharedNetwork.Config):
        energy_start: float = Field(
            0.95,
            gt=0,
            le=1,
            description="share of each matrix's squared singular values that travels initially",
        )
        energy_end: float = Field(
            0.98, gt=0, le=1, description="the same in the last round; in between it rises evenly"
        )

    config: Config

    def client_modules(self, model: SplitNetwork) -> dict[str, nn.Module]:
        shared = self.shared_network()
        # Turns the shared network's features into the private one's; it never leaves the client.
        return {"shared": shared, "projection": nn.Linear(shared.feature_size, model.feature_size, bias=False)}

    def receive(self, state: Mapping[str, Tensor], message: Message, client: Knowledge) -> State:
        return restore(message.tensors, self.sent(state))

    def phases(self) -> list[Phase]:
        trains = ("model", "shared", "projection")
        return [Phase("model", trains=trains, loss=self.loss, epochs=self.training.epochs)]

    def loss(self, net: ClientNetwork, batch: Batch) -> Tensor:
        # What a network learns from is detached, so one step on the sum is a step of each on its own loss.
        private, shared = self.losses(net, batch)
        return private + shared

    def losses(self, net: ClientNetwork, batch: Batch) -> tuple[Tensor, Tensor]:
        """What the private network, and what the shared network and the projection minimise, per sample."""
        features, other_features = net.features(batch.x), net.shared.features(batch.x)
        logits, other_logits = net.head(features), net.shared.head(other_features)
        projected = net.projection(other_features)
        own, other = cross_entropy(logits, batch.y), cross_entropy(other_logits, batch.y)
        # Adaptive distillation: divided by the task losses of the batch. They are detached: otherwise both networks
        # could lower the quotient by getting worse at the task, and the private loss would reach the shared network.
        sureness = 1 / batch_mean(own + other, batch.mask).detach().clamp(min=SMALLEST_LOSS)
        for_private = kl_divergence(other_logits, logits) + distance(features, projected.detach(), "mse")
        for_shared = kl_divergence(logits, other_logits) + distance(features.detach(), projected, "mse")
        return own + sureness * for_private, other + sureness * for_shared

    def upload(self, client: Trained) -> Message:
        return Message(compress(self.sent(client.state), self.energy(client.round)))

    def energy(self, round: int) -> float:
        """The share of energy that what is factored in a round keeps."""
        start, end = self.config.energy_start, self.config.energy_end
        return start + round / self.task.rounds * (end - start)

    def start(self, server: Server) -> None:
        server.state.update(compress(self._like, self.energy(0)))

    def schema(self) -> Schema:
        return compressed_schema(self._like)

    def check(self, message: Message) -> None:
        super().check(message)
        check_forms(message.tensors, self._like)

    def sized(self, message: Message) -> State:
        return restore(message.tensors, self._like)  # two factors of moderate size can have a huge product

    @cached_property
    def _like(self) -> State:
        return self.first_state()

    def aggregate(self, server: Server, replies: Sequence[Reply]) -> None:
        restored = [replace(r, message=Message(restore(r.message.tensors, self._like))) for r in replies]
        # Replaced as a whole, because a tensor may come in its other form next time.
        server.state = compress(plain_mean(restored), self.energy(server.round))


def batch_mean(values: Tensor, mask: Tensor | None) -> Tensor:
    """The mean over the real samples of a batch."""
    if mask is None:
        return values.mean()
    return (values * mask).sum() / mask.sum().clamp(min=1)
