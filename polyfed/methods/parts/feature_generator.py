"""A generator of features: from a class and noise to what extractors might give for an image of that class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from polyfed.message import State
from polyfed.methods.parts.tools import module_state

_CACHED = 250_000
"""Floats that stay in a core's cache while they are worked on."""


class FeatureGenerator(nn.Module):
    """One hidden layer with a normalisation, which differs between server and clients."""

    def __init__(self, classes: int, features: int, noise: int, hidden: int, norm: nn.Module) -> None:
        super().__init__()
        self.classes = classes
        self.noise = noise
        self.first = nn.Linear(noise + classes, hidden)
        self.norm = norm
        self.last = nn.Linear(hidden, features)

    def forward(self, noise: Tensor, labels: Tensor) -> Tensor:
        """Features [batch, K] from noise [batch, noise] and one class each."""
        given = torch.cat([noise, torch.eye(self.classes, device=noise.device)[labels]], dim=1)
        features: Tensor = self.last(torch.relu(self.norm(self.first(given))))
        return features


class Scale(nn.Module):
    """Batch norm with fixed statistics: one factor and one shift per unit."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + self.bias


class ServerGenerator(FeatureGenerator):
    """The generator as it is trained, with batch norm."""

    norm: nn.BatchNorm1d

    def __init__(self, classes: int, features: int, noise: int, hidden: int) -> None:
        super().__init__(classes, features, noise, hidden, nn.BatchNorm1d(hidden))

    def for_clients(self) -> State:
        """What a `ClientGenerator` is filled with: the statistics of batch norm go into its weight and bias."""
        sent = module_state("generator", self)
        mean, variance = sent.pop("generator.norm.running_mean"), sent.pop("generator.norm.running_var")
        factor = sent["generator.norm.weight"] / (variance + self.norm.eps).sqrt()
        shift = sent["generator.norm.bias"] - mean * factor
        return {**sent, "generator.norm.weight": factor, "generator.norm.bias": shift}


class ClientGenerator(FeatureGenerator):
    """The generator as a client uses it: with its known classes and its share of the loss."""

    known: Tensor
    weights: Tensor

    def __init__(self, classes: int, features: int, noise: int, hidden: int) -> None:
        super().__init__(classes, features, noise, hidden, Scale(hidden))
        self.register_buffer("known", torch.zeros(classes, dtype=torch.bool))
        self.register_buffer("weights", torch.zeros(2))

    def choose(self, chance: Tensor) -> Tensor:
        """A known class for each number in [0, 1), all classes equally likely; any class while none is known."""
        upto = self.known.cumsum(0)
        wanted = (chance * upto[-1]).floor()
        return (upto <= wanted[:, None]).sum(1).clamp(max=self.classes - 1)


def train_generator(
    generator: ServerGenerator,
    logits_of: Callable[[Tensor], Tensor],
    counts: Tensor,
    *,
    steps: int,
    batch_size: int,
    lr: float,
    random: torch.Generator,
) -> None:
    """Train the generator so that the clients' heads recognise the class of what it makes.

    `logits_of` gives the logits [clients, batch, classes] of all heads; `counts` [clients, classes] are the clients'
    samples, which weight each head for a class. Adam starts afresh: its moments of the last round belong to other
    heads.
    """
    present = counts.sum(0).nonzero().flatten()  # there is nothing to learn about other classes
    optimiser = torch.optim.Adam(generator.parameters(), lr, weight_decay=1e-2)
    generator.train()
    for _ in range(steps):
        labels = present[torch.randint(len(present), (batch_size,), generator=random).to(counts.device)]
        noise = torch.randn(batch_size, generator.noise, generator=random).to(counts.device)
        features = generator(noise, labels)
        loss = teaching_loss(logits_of(features), labels, counts).mean() + sameness(noise, features)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    generator.eval()


def teaching_loss(logits: Tensor, labels: Tensor, counts: Tensor) -> Tensor:
    """Cross entropy of all heads [clients, batch, classes], each weighted by its share of a label's samples."""
    weights = counts[:, labels] / counts[:, labels].sum(0).clamp(min=1)
    losses = nn.functional.cross_entropy(logits.transpose(1, 2), labels.expand(len(logits), -1), reduction="none")
    return (weights.float() * losses).sum(0)


def sameness(noise: Tensor, features: Tensor) -> Tensor:
    """Near one if different noise gives the same features, smaller the more they differ; over all pairs.

    Distances are means over their dimensions; sums would let the exponential vanish, and its gradient with it.
    """
    noise_apart = torch.cat([(rows[:, None] - noise).square_().mean(2) for rows in noise.split(_rows(noise))])
    features_apart: Tensor = MeanDifference.apply(features)
    pairs = len(noise) * (len(noise) - 1)
    return torch.exp(-(noise_apart * features_apart).sum() / pairs)


class MeanDifference(torch.autograd.Function):
    """The mean absolute difference of each pair of vectors [n, n], and its gradient.

    Autograd would make five tensors [n, n, size] one after another, and a CPU spends most of the time on their memory.
    Here there is one, in the gradient, because it is summed both ways: sums of parts would round in another way.
    """

    @staticmethod
    def forward(ctx: Any, vectors: Tensor) -> Tensor:
        ctx.save_for_backward(vectors)
        return torch.cat([(rows[:, None] - vectors).abs_().mean(2) for rows in vectors.split(_rows(vectors))])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        vectors: Tensor = ctx.saved_tensors[0]
        count, size = vectors.shape
        share, pairs = (gradient / size)[:, :, None], vectors.new_empty(count, count, size)
        rows = _rows(vectors)
        for own, weights, part in zip(vectors.split(rows), share.split(rows), pairs.split(rows), strict=True):
            torch.sub(own[:, None], vectors, out=part).sgn_().mul_(weights)
        return pairs.sum(1) - pairs.sum(0)


def _rows(vectors: Tensor) -> int:
    """How many vectors to compare with all others at once: on a CPU so many that the differences fit into its cache."""
    if vectors.device.type != "cpu":
        return len(vectors)
    return max(1, _CACHED // max(1, vectors.numel()))
