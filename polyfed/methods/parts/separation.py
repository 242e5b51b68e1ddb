"""Steps of FedTGP's server by our own kernels, where a GPU can run them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from polyfed.compute import working_kernels
from polyfed.methods.parts.trainable import TrainablePrototypes

MANY = 64
"""Classes from which the network's layers are quicker as products of matrices, by PyTorch, than by our kernels."""


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
        self._ones = torch.ones_like(self._trained[:, 0])

    def __call__(self, rows: Tensor, losses: Tensor) -> None:
        """A step on the vectors in these rows; their losses are written into the second tensor."""
        kernels, trained = self._kernels, self._trained
        pulls = trained.new_empty(len(rows), len(trained))
        prototypes, hidden = trained, trained
        if self._layers:
            hidden = self._through(trained, *self._layers[0], relu=True)
            prototypes = self._through(hidden, *self._layers[1], relu=False)
        kernels.distances(prototypes, self._vectors, self._labels, rows, self._margin, pulls, losses)
        if not self._layers:
            kernels.gradient(trained, self._vectors, rows, pulls, trained, self._lr)
            return
        slope = torch.empty_like(trained)
        kernels.gradient(prototypes, self._vectors, rows, pulls, slope)
        hidden_slope = torch.empty_like(trained)
        self._change(slope, hidden, *self._layers[1], hidden_slope)
        self._change(hidden_slope, trained, *self._layers[0], trained)

    def _through(self, x: Tensor, weight: Tensor, bias: Tensor, *, relu: bool) -> Tensor:
        """A layer's output."""
        if len(x) >= MANY:
            y = torch.addmm(bias, x, weight.T)
            return y.relu_() if relu else y
        y = torch.empty_like(x)
        self._kernels.linear(x, weight, bias, y, relu=relu)
        return y

    def _change(self, slope: Tensor, x: Tensor, weight: Tensor, bias: Tensor, into: Tensor) -> None:
        """Change a layer by the gradient of its output for x.

        `into` becomes the gradient of what a ReLU turned into x. If it is x itself, x is a parameter and changed too.
        """
        if len(x) < MANY:
            self._kernels.linear_step(slope, x, weight, bias, into, self._lr)
            return
        through = slope @ weight
        weight.addmm_(slope.T, x, alpha=-self._lr)
        bias.addmv_(slope.T, self._ones, alpha=-self._lr)
        if into is x:
            x.add_(through, alpha=-self._lr)
        else:
            torch.ops.aten.threshold_backward.grad_input(through, x, 0.0, grad_input=into)


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
