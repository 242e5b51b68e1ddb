"""ProtoNorm: mean prototypes, spread over a sphere and lengthened by the server (Lee et al., arXiv 2507.04310)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from pydantic import Field
from torch import Tensor

from polyfed.message import Message
from polyfed.methods.base import Batch, ClientNetwork, Method, Reply, Server
from polyfed.methods.parts.prototypes import PrototypeMethod
from polyfed.methods.parts.tools import ClassVectors, mean_by_class, store_vectors, unit_vectors

ITERATIONS, STEP, MOMENTUM, DECAY = 500, 0.1, 0.9, 0.95
"""How points are moved apart, as in the released code: at most so often; the step shrinks in every tenth iteration."""
SETTLED = 10
"""Iterations in a row without a change of the mean force, in its first four decimals, that end the movement."""
SAME = 1e-6
"""Directions closer than this do not push each other apart reliably."""


class ProtoNorm(PrototypeMethod):
    """Like FedProto, but the mean prototypes repel each other on a sphere before they are sent, much longer."""

    name = "protonorm"
    title = "ProtoNorm"
    paper = "Lee et al., arXiv 2507.04310"
    grid = {"weight": (0.1, 1.0, 10.0), "scale": (1.0, 10.0, 80.0)}

    class Config(Method.Config):
        weight: float | None = Field(
            None,
            ge=0,
            description="weight of the mean square difference to the prototype; none: 0.1 · (1 − momentum) / learning "
            "rate, the code's 10 at its 0 and 0.01",
        )
        scale: float = Field(80.0, gt=0, description="length of every global prototype")
        align: bool = Field(
            True, description="directions of prototypes are moved apart; false: they stay those of the class means"
        )

    config: Config

    def pull(self, net: ClientNetwork, features: Tensor, batch: Batch) -> Tensor:
        away: Tensor = net.prototypes.distance(features, batch.y, "mse")
        # The code's weight diverges in larger steps than its own: what matters is their product.
        weight = self.config.weight if self.config.weight is not None else 0.1 / self.training.reach
        return weight * away

    def sized(self, message: Message) -> Mapping[str, Tensor]:
        # From the second round on features are pulled to the prototypes' length, so up to it none is unusually large.
        return {"prototypes": message.tensors["prototypes"].abs().clamp(min=self.config.scale)}

    def start(self, server: Server) -> None:
        super().start(server)
        empty = ClassVectors(self.task.classes, self.task.feature_size)
        server.state.update({f"means.{name}": tensor for name, tensor in empty.state_dict().items()})

    def aggregate(self, server: Server, replies: Sequence[Reply]) -> None:
        vectors = torch.cat([reply.message.tensors["prototypes"] for reply in replies])
        labels = torch.cat([reply.message.metadata["labels"] for reply in replies])
        means, seen = mean_by_class(vectors, labels, torch.ones(len(labels)), self.task.classes)
        # A class that no participant of this round holds keeps its last mean, and all known ones are moved apart.
        server.state.update(store_vectors(server.state, "means", means, seen))
        known = server.state["means.known"].nonzero().flatten()
        if len(known) == 0:
            return
        directions = self.directions(server, server.state["means.vectors"][known])
        server.state.update(store_vectors(server.state, "prototypes", self.config.scale * directions, known))

    def directions(self, server: Server, means: Tensor) -> Tensor:
        """Unit vectors of the known classes, moved apart if asked for."""
        found, random = unit_vectors(means.double()), server.generator("directions")
        stuck = ~found.any(1)  # a mean of zero has no direction
        if self.config.align:
            apart = torch.cdist(found, found, compute_mode="donot_use_mm_for_euclid_dist")
            stuck |= (apart + torch.diag(torch.full_like(apart[:, 0], torch.inf)) < SAME).any(1)
        if bool(stuck.any()):
            noise = torch.randn(found.shape, generator=random, dtype=found.dtype)
            found = unit_vectors(torch.where(stuck[:, None], found + 1e-3 * noise, found))
        return spread(found) if self.config.align else found


def spread(points: Tensor, most: int = ITERATIONS) -> Tensor:
    """Points on the unit sphere after they have pushed each other apart; no randomness.

    The forces are those of the logarithmic energy, as in the released code. They stop well before the points have
    come to rest, because the mean force hardly changes.
    """
    speed, step, before, settled = torch.zeros_like(points), STEP, None, 0
    for iteration in range(most):
        force = repulsion(points)
        speed = MOMENTUM * speed + step * force
        points = unit_vectors(points + speed)
        if iteration % 10 == 0:
            step *= DECAY
        mean = round(float(force.norm(dim=1).mean()), 4)
        settled = settled + 1 if iteration > 10 and mean == before else 0
        before = mean
        if settled == SETTLED:
            break
    return points


def repulsion(points: Tensor) -> Tensor:
    """The force on each point: the sum over all others of the difference, divided by its squared length."""
    squares = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist").square()
    weights = (squares + 1e-10).reciprocal().fill_diagonal_(0.0)
    return points * weights.sum(1, keepdim=True) - weights @ points
