"""A generator of features: from a class and noise to what extractors might give for an image of that class."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from polyfed.compute import all_to_device
from polyfed.message import State
from polyfed.methods.parts.tools import module_state
from polyfed.server.kept import Kept
from polyfed.server.training import make_steps, worth_capturing

_CACHED = 250_000
"""Floats that stay in a core's cache while they are worked on."""
_WORTH_CAPTURING = 12
"""Steps from which a GPU graph of one pays off; making it takes about as long as five steps without it."""
_HEADS = "heads."
"""How names of the clients' stacked heads begin among a round's tensors."""


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
        sent = {name: tensor.cpu() for name, tensor in module_state("generator", self).items()}
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
    head: nn.Module,
    heads: Mapping[str, Tensor],
    counts: Tensor,
    *,
    steps: int,
    batch_size: int,
    lr: float,
    random: torch.Generator,
    notes: list[str],
    kept: Kept | None = None,
) -> float:
    """Train the generator, on its device, so that the clients' heads recognise the class of what it makes.

    `head` is a client's, `heads` are the states of all, stacked; `counts` [clients, classes] are the clients' samples,
    which weight each head for a class. Adam starts afresh: its moments of the last round belong to other heads. On a
    GPU, steps are captured in graphs, which `kept` keeps for later rounds with the same head and as many clients; if
    that fails, `notes` say so. Returns the mean loss of the heads.
    """
    device = generator.first.weight.device
    present = counts.sum(0).nonzero().flatten()  # there is nothing to learn about other classes
    chosen, noise = _drawn(len(present), generator.noise, steps, batch_size, random)
    given = {"labels": present[chosen], "noise": noise, "shares": shares_of(counts)}
    given |= {f"{_HEADS}{name}": tensor for name, tensor in heads.items()}
    rows = torch.arange(len(noise), device=device)[None]
    losses = noise.new_empty(len(noise), device=device)
    generator.train()
    spans = None
    if kept is not None and worth_capturing(rows, batch_size, _WORTH_CAPTURING):
        given["lr"] = torch.tensor(lr)  # it changes from round to round
        found = kept.steps("Adam", generator, given, partial(_AdamSteps, generator, head, lr), size=batch_size)
        step, spans = found.step, found.spans
        assert isinstance(step, _AdamSteps)
        step.reset()
    else:
        # All at once: two copies for every step would let a GPU wait for them.
        moved = dict(zip(given, all_to_device(list(given.values()), device), strict=True))
        step = _AdamSteps(generator, head, lr, moved)
    make_steps(step, rows, losses, size=batch_size, worth=_WORTH_CAPTURING, notes=notes, spans=spans)
    generator.eval().zero_grad()
    return float(losses.mean())  # this waits for a GPU, so that Adam's memory is no longer in use when it is freed


def _drawn(classes: int, size: int, steps: int, batch: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """For all steps of a round, one after another: the places of classes, and noise."""
    drawn = [
        (torch.randint(classes, (batch,), generator=random), torch.randn(batch, size, generator=random))
        for _ in range(steps)
    ]
    return torch.cat([places for places, _ in drawn]), torch.cat([noise for _, noise in drawn])


class _AdamSteps:
    """Steps of Adam on the labels and the noise in some rows; `memory` holds these and all else that a round brings."""

    def __init__(self, generator: ServerGenerator, head: nn.Module, lr: float, memory: State) -> None:
        self._generator = generator
        self._parameters = list(generator.parameters())
        self._labels, self._noise, self._shares = memory["labels"], memory["noise"], memory["shares"]
        self._logits_of = logits_of_all(
            head, {name.removeprefix(_HEADS): t for name, t in memory.items() if name.startswith(_HEADS)}
        )
        rate = memory.get("lr", lr)
        self._optimiser = torch.optim.Adam(self._parameters, rate, weight_decay=1e-2, capturable=self._noise.is_cuda)

    def reset(self) -> None:
        """Start afresh, in the same memory."""
        moments = [tensor for own in self._optimiser.state.values() for tensor in own.values()]
        if moments:
            torch._foreach_zero_(moments)

    def __call__(self, rows: Tensor, losses: Tensor) -> None:
        labels, noise = self._labels[rows], self._noise[rows]
        features = self._generator(noise, labels)
        values = teaching_loss(self._logits_of(features), labels, self._shares)
        # Not by `backward`, which would add them to those of the step before.
        gradients = torch.autograd.grad(values.mean() + sameness(noise, features), self._parameters)
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient
        self._optimiser.step()
        losses.copy_(values.detach())


def logits_of_all(head: nn.Module, heads: State) -> Callable[[Tensor], Tensor]:
    """From features [batch, K] to the logits [clients, batch, classes] of all heads, whose states are stacked."""
    device = next(iter(heads.values())).device
    frozen = deepcopy(head).to(device).eval().requires_grad_(False)
    return lambda features: vmap(lambda own: functional_call(frozen, own, features))(heads)


def shares_of(counts: Tensor) -> Tensor:
    """Each client's share of the samples of each class, [clients, classes]; zero for a class that nobody has."""
    return (counts / counts.sum(0).clamp(min=1)).float()


def teaching_loss(logits: Tensor, labels: Tensor, shares: Tensor) -> Tensor:
    """Cross entropy of all heads [clients, batch, classes], each weighted by its share of a label's samples."""
    losses = nn.functional.cross_entropy(logits.transpose(1, 2), labels.expand(len(logits), -1), reduction="none")
    return (shares[:, labels] * losses).sum(0)


def sameness(noise: Tensor, features: Tensor) -> Tensor:
    """Near one if different noise gives the same features, smaller the more they differ; over all pairs.

    Distances are means over their dimensions; sums would let the exponential vanish, and its gradient with it.
    """
    noise_apart = _joined([(rows[:, None] - noise).square_().mean(2) for rows in noise.split(_rows(noise))])
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
        return _joined([(rows[:, None] - vectors).abs_().mean(2) for rows in vectors.split(_rows(vectors))])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        vectors: Tensor = ctx.saved_tensors[0]
        count, size = vectors.shape
        share, pairs = (gradient / size)[:, :, None], vectors.new_empty(count, count, size)
        rows = _rows(vectors)
        for own, weights, part in zip(vectors.split(rows), share.split(rows), pairs.split(rows), strict=True):
            torch.sub(own[:, None], vectors, out=part).sgn_().mul_(weights)
        return pairs.sum(1) - pairs.sum(0)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """All parts one below the other; a single one, as always on a GPU, without a copy."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _rows(vectors: Tensor) -> int:
    """How many vectors to compare with all others at once: on a CPU so many that the differences fit into its cache."""
    if vectors.device.type != "cpu":
        return len(vectors)
    return max(1, _CACHED // max(1, vectors.numel()))
