"""Training on the server: a small module on vectors that clients sent, with plain SGD."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def train_on_vectors(
    module: nn.Module,
    vectors: Tensor,
    labels: Tensor,
    *,
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor] | None = None,
    epochs: int = 1,
    batch_size: int = 64,
    lr: float = 0.01,
    generator: torch.Generator,
) -> float:
    """Minimise the mean loss over the vectors in shuffled mini-batches; returns the mean loss of the last epoch.

    The loss gives one value per vector and is by default the cross entropy of the module's output.
    """
    loss = loss or classification_loss
    optimiser = torch.optim.SGD(module.parameters(), lr)
    total = 0.0
    for _ in range(epochs):
        order = torch.randperm(len(vectors), generator=generator).to(vectors.device)
        values = []
        for chunk in order.split(batch_size):
            value = loss(module, vectors[chunk], labels[chunk])
            optimiser.zero_grad()
            value.mean().backward()
            optimiser.step()
            values.append(value.detach())
        total = float(torch.cat(values).mean())
    return total


def classification_loss(module: nn.Module, vectors: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of the module's output, per vector."""
    return nn.functional.cross_entropy(module(vectors), labels, reduction="none")
