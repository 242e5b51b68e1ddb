"""FedKD: a private and a shared network teach each other; changes of the shared one travel (Wu et al., 2022).

The server numbers no versions: a version's name is a hash of its weights. The server notes who has proved to hold which
version, by a reply that was fused, and sends changes only to a client that holds the version before; it forgets a
client whose reply failed. A client applies changes only to the version that they belong to. So neither a lost message,
nor a refused reply, nor a state restored from elsewhere can make the two sides disagree.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cached_property

import torch
from pydantic import Field
from torch import Tensor, nn

from polyfed.errors import InputError
from polyfed.message import Message, Schema, State
from polyfed.methods.base import Batch, ClientNetwork, Knowledge, Phase, Reply, Server, SplitNetwork, Trained
from polyfed.methods.parts.compression import changed, changes, check_forms, compress, compressed_schema, restore
from polyfed.methods.parts.distillation import kl_divergence
from polyfed.methods.parts.shared_network import SharedNetwork
from polyfed.methods.parts.tools import cross_entropy, distance, part_of, plain_mean

SMALLEST_LOSS = 0.01
"""Distillation is never weighted by more than one over this, however sure both networks are."""


class Received(nn.Module):
    """The shared network as the client received it last, and that version's hash; 0 before the first download."""

    version: Tensor

    def __init__(self, shared: SplitNetwork) -> None:
        super().__init__()
        self.network = deepcopy(shared)
        self.register_buffer("version", torch.zeros(1, dtype=torch.int64))


class FedKD(SharedNetwork):
    """Both networks learn from the labels and, the better they are, from each other's probabilities and features."""

    name = "fedkd"
    title = "FedKD"
    paper = "Wu et al., Nature Communications 2022"
    sends = "the changes of a small common network, compressed"
    reveals = (
        "The changes are an update from which images and labels can in part be reconstructed; compression blurs it, "
        "but is no protection."
    )
    depends_on_rounds = True
    uploads_in_threads = True  # each has eigenvectors to find
    receives = ("shared", "received")
    grid = {"energy_start": (0.8, 0.9, 0.95), "energy_end": (0.95, 0.98, 0.99)}

    class Config(SharedNetwork.Config):
        energy_start: float = Field(
            0.95,
            gt=0,
            le=1,
            description="share of the squared singular values of each matrix's change that travels initially",
        )
        energy_end: float = Field(
            0.98, gt=0, le=1, description="the same in the last round; in between it rises evenly"
        )

    config: Config

    def client_modules(self, model: SplitNetwork) -> dict[str, nn.Module]:
        shared = self.shared_network()
        # Turns the shared network's features into the private one's; it never leaves the client.
        projection = nn.Linear(shared.feature_size, model.feature_size, bias=False)
        return {"shared": shared, "projection": projection, "received": Received(shared)}

    def receive(self, state: Mapping[str, Tensor], message: Message, client: Knowledge) -> State:
        version = message.metadata["version"]
        new = message.tensors if "base" not in message.metadata else self._newer(state, message)
        return {**new, **{as_received(name): tensor for name, tensor in new.items()}, "received.version": version}

    def _newer(self, state: Mapping[str, Tensor], message: Message) -> State:
        """The version that a download of changes leads to."""
        held = {name: state[as_received(name)] for name in self._like}
        own = int(state["received.version"])
        if own == int(message.metadata["version"]):  # its answer was not fused, and it is asked once more
            return held
        if own != int(message.metadata["base"]):
            raise InputError(
                "the server sent changes to a version of the shared network that this client does not hold, because "
                "its state was lost or replaced; its next download brings the network itself."
            )
        return changed(held, restore(message.tensors, self._like))

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
        received = {name: client.state[as_received(name)] for name in self._like}
        return Message(compress(changes(self.sent(client.state), received), self.energy(client.round)))

    def energy(self, round: int) -> float:
        """The share of energy that what is factored in a round keeps."""
        start, end = self.config.energy_start, self.config.energy_end
        return start + round / self.task.rounds * (end - start)

    def start(self, server: Server) -> None:
        server.state.update({**self._like, "version": version_of(self._like), "previous": torch.zeros(1).long()})

    def download(self, server: Server, client: int, classes: Tensor | None) -> Message:
        version, held = {"version": server.state["version"]}, server.state.get(f"held.{client}")
        if held is None or not torch.equal(held, server.state["previous"]):
            return Message(part_of(server.state, self.module), version)
        update = part_of(server.state, "update")
        return Message({name.removeprefix("update."): t for name, t in update.items()}, {**version, "base": held})

    def schema(self) -> Schema:
        return compressed_schema(self._like)

    def check(self, message: Message) -> None:
        super().check(message)
        check_forms(message.tensors, self._like)

    def sized(self, message: Message) -> State:
        return restore(message.tensors, self._like)  # two factors of moderate size can have a huge product

    def forget(self, server: Server, clients: Iterable[int]) -> None:
        for client in clients:
            server.state.pop(f"held.{client}", None)

    @cached_property
    def _like(self) -> State:
        return self.first_state()

    def aggregate(self, server: Server, replies: Sequence[Reply]) -> None:
        restored = [replace(r, message=Message(restore(r.message.tensors, self._like))) for r in replies]
        mean = {name: tensor.to(server.device) for name, tensor in plain_mean(restored).items()}
        update = {name: tensor.cpu() for name, tensor in compress(mean, self.energy(server.round)).items()}
        # What the factors leave out is lost for the server too, so that it has what its clients will have.
        new = changed(part_of(server.state, self.module), restore(update, self._like))
        held = {name: tensor for name, tensor in server.state.items() if name.startswith("held.")}
        # Replaced as a whole, because a tensor may come in its other form next time.
        server.state = {
            **new,
            "version": version_of(new),
            "previous": server.state["version"],
            **held,
            **{f"held.{reply.client}": server.state["version"] for reply in replies},
            **{f"update.{name}": tensor for name, tensor in update.items()},
        }


def as_received(name: str) -> str:
    """Where a client keeps what it received of a tensor of its shared network."""
    return "received.network" + name.removeprefix(SharedNetwork.module)


def version_of(state: Mapping[str, Tensor]) -> Tensor:
    """A hash of all weights, greater than 0."""
    found = hashlib.blake2b(digest_size=7)
    for name in sorted(state):
        found.update(state[name].contiguous().numpy().data)
    return torch.tensor([1 + int.from_bytes(found.digest(), "little")])


def batch_mean(values: Tensor, mask: Tensor | None) -> Tensor:
    """The mean over the real samples of a batch."""
    if mask is None:
        return values.mean()
    return (values * mask).sum() / mask.sum().clamp(min=1)
