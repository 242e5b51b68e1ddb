"""A generator of features: from a class and noise to what extractors might give for an image of that class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from polyfed.compute import to_device
from polyfed.message import State
from polyfed.methods.parts.tools import module_state
from polyfed.server.replay import Step
from polyfed.server.training import make_steps

_CACHED = 250_000
"""Floats that stay in a core's cache while they are worked on."""
_WORTH_CAPTURING = 12
"""Steps from which a GPU graph of one pays off; making it takes about as long as five steps without it."""


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
    notes: list[str],
) -> float:
    """Train the generator, on its device, so that the clients' heads recognise the class of what it makes.

    `logits_of` gives the logits [clients, batch, classes] of all heads; `counts` [clients, classes] are the clients'
    samples, which weight each head for a class. Adam starts afresh: its moments of the last round belong to other
    heads. On a GPU, steps are captured in graphs; if that fails, `notes` say so. Returns the mean loss of the heads.
    """
    device = generator.first.weight.device
    present = counts.sum(0).nonzero().flatten()  # there is nothing to learn about other classes
    chosen, noise = _drawn(len(present), generator.noise, steps, batch_size, random)
    # All at once: two copies for every step would let a GPU wait for them.
    labels, noise, counts = (to_device(each, device) for each in (present[chosen], noise, counts))
    losses = noise.new_empty(len(noise))
    generator.train()
    step = _adam_step(generator, logits_of, counts, labels, noise, lr)
    rows = torch.arange(len(noise), device=device)
    make_steps(step, rows[None], losses, size=batch_size, worth=_WORTH_CAPTURING, notes=notes)
    generator.eval().zero_grad()
    return float(losses.mean())  # this waits for a GPU, so that Adam's memory is no longer in use when it is freed


def _drawn(classes: int, size: int, steps: int, batch: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """For all steps of a round, one after another: the places of classes, and noise."""
    drawn = [
        (torch.randint(classes, (batch,), generator=random), torch.randn(batch, size, generator=random))
        for _ in range(steps)
    ]
    return torch.cat([places for places, _ in drawn]), torch.cat([noise for _, noise in drawn])


def _adam_step(
    generator: ServerGenerator,
    logits_of: Callable[[Tensor], Tensor],
    counts: Tensor,
    labels: Tensor,
    noise: Tensor,
    lr: float,
) -> Step:
    """A step of Adam on the labels and the noise in some rows."""
    parameters = list(generator.parameters())
    optimiser = torch.optim.Adam(parameters, lr, weight_decay=1e-2, capturable=noise.is_cuda)

    def step(rows: Tensor, losses: Tensor) -> None:
        own_labels, own_noise = labels[rows], noise[rows]
        features = generator(own_noise, own_labels)
        values = teaching_loss(logits_of(features), own_labels, counts)
        # Not by `backward`, which would add them to those of the step before.
        gradients = torch.autograd.grad(values.mean() + sameness(own_noise, features), parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimiser.step()
        losses.copy_(values.detach())

    return step


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
