"""Steps of FedTGP's server by our own kernels, where a GPU can run them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from polyfed.compute import working_kernels
from polyfed.methods.parts.trainable import TrainablePrototypes


class SeparatingSteps:
    """Steps of SGD on the mean of `contrastive_loss`, with the gradient written by hand: few kernels, no autograd."""

    def __init__(
        self, kernels: Any, module: TrainablePrototypes, vectors: Tensor, labels: Tensor, lr: float, margin: Tensor
    ) -> None:
        self._kernels = kernels
        self._trained = module.vectors.detach()
        linear = [layer for layer in module.network if isinstance(layer, nn.Linear)]
        self._layers = [(layer.weight.detach(), layer.bias.detach()) for layer in linear]
        self._vectors, self._labels = vectors.contiguous(), labels.contiguous()
        self._lr = lr
        self._margin = margin.to(vectors)

    def __call__(self, rows: Tensor, losses: Tensor) -> None:
        """A step on the vectors in these rows; their losses are written into the second tensor."""
        kernels, trained, lr = self._kernels, self._trained, self._lr
        pulls = trained.new_empty(len(rows), len(trained))
        prototypes, hidden = trained, trained
        if self._layers:
            hidden, prototypes = torch.empty_like(trained), torch.empty_like(trained)
            kernels.linear(trained, *self._layers[0], hidden, relu=True)
            kernels.linear(hidden, *self._layers[1], prototypes, relu=False)
        kernels.distances(prototypes, self._vectors, self._labels, rows, self._margin, pulls, losses)
        if not self._layers:
            kernels.gradient(trained, self._vectors, rows, pulls, trained, lr)
            return
        slope, hidden_slope = torch.empty_like(trained), torch.empty_like(trained)
        kernels.gradient(prototypes, self._vectors, rows, pulls, slope)
        kernels.linear_step(slope, hidden, *self._layers[1], hidden_slope, lr)
        kernels.linear_step(hidden_slope, trained, *self._layers[0], trained, lr)


def separating_steps(
    module: nn.Module, vectors: Tensor, labels: Tensor, lr: float, *, margin: Tensor, notes: list[str]
) -> SeparatingSteps | None:
    """Steps by our kernels; None, with a note, if these can't run here, and None for too many features or classes."""
    assert isinstance(module, TrainablePrototypes)
    kernels, trouble = working_kernels("polyfed.methods.parts.prototype_kernels", _trial)
    if kernels is None:
        notes.append(f"the server's training is slower than it could be: our kernels can't run here ({trouble})")
        return None
    classes, size = module.vectors.shape
    if size > kernels.LARGEST or classes > kernels.MOST_CLASSES:
        return None
    return SeparatingSteps(kernels, module, vectors, labels, lr, margin)


def _trial(kernels: Any, device: str) -> None:
    """A step on one tiny vector, to see whether the kernels work."""
    with torch.random.fork_rng(devices=[]):  # a new module draws weights, which must not change other draws
        module = TrainablePrototypes(2, 2).to(device)
    labels = torch.zeros(1, dtype=torch.int64, device=device)
    step = SeparatingSteps(kernels, module, torch.ones(1, 2, device=device), labels, 0.1, torch.ones(()))
    step(labels, torch.empty(1, device=device))
