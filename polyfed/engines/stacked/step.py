"""Clients of one architecture as one batched network: stacked states, one step for all of them at once.

Every loss, prediction and statistic runs under `torch.func.vmap` over the stacked states, through the same code as in
the plain loop. Batches are rows of sample numbers; −1 pads a short batch, and a client whose rows are all −1 has
finished and does not move. A single client goes without `vmap`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.utils._pytree import tree_leaves, tree_map

from polyfed.compute import precision, without_search
from polyfed.data import Dataset
from polyfed.engines.client.batches import IMAGE, VIEWS
from polyfed.engines.client.round import batch_norm_trains, set_modes
from polyfed.engines.stacked.chains import join_layers
from polyfed.engines.stacked.dropout import PREFIX, Masks, dropout_layers, find_calls, masked
from polyfed.engines.stacked.images import images
from polyfed.engines.stacked.layers import StackedLayers
from polyfed.engines.stacked.means import mean
from polyfed.engines.stacked.norms import MaskedNorms
from polyfed.engines.stacked.numbers import RATE, TRAINING, on
from polyfed.engines.stacked.sequences import keep_weights_apart
from polyfed.engines.stacked.sgd import Rates, some, update
from polyfed.message import State
from polyfed.methods.base import Batch, Loss, Phase
from polyfed.methods.parts.network import Applied, ClientNetwork
from polyfed.population import Population


class StackedApplied(Applied):
    """The same with our own kernels."""

    def __init__(self, network: ClientNetwork, function: Callable[..., object]) -> None:
        super().__init__(network, function)
        keep_weights_apart(network)
        join_layers(network)

    def forward(self, *arguments: object) -> object:
        before = list(self.network.buffers())
        with StackedLayers():
            result = super().forward(*arguments)
        if any(old is not new for old, new in zip(before, self.network.buffers(), strict=True)):
            raise RuntimeError("it replaces a buffer, which is lost after the call; change it in place (`copy_`)")
        return result


@dataclass(frozen=True, eq=False)
class Stack:
    """Clients' states, stacked, and each client's part in the same memory."""

    state: State
    parts: list[State]

    @classmethod
    def of(cls, states: Sequence[State]) -> Stack:
        state = {name: torch.stack([own[name] for own in states]) for name in states[0]}
        columns = {name: tensor.unbind() for name, tensor in state.items()}
        return cls(state, [{name: column[i] for name, column in columns.items()} for i in range(len(states))])


class PhaseStep:
    """One step of one phase for a whole cohort: batch, loss, gradient, update, in place on stacked tensors.

    `prepare` comes before the first step, and before `leading` makes a step for a part of the cohort. `exact`: it gets
    no padded batch, so PyTorch's own batch norm is right. `numbers` are those that differ between the clients; the
    caller fills them with the values of the clients that train.
    """

    def __init__(
        self,
        population: Population,
        network: ClientNetwork,
        phase: Phase,
        state: State,
        *,
        exact: bool = False,
        numbers: Mapping[str, Tensor] | None = None,
    ) -> None:
        training = population.training
        self._exact = exact
        set_modes(network, phase)
        self.trained = {n: state[n] for n, p in network.named_parameters() if p.requires_grad}
        self.numbers = {name: tensor.clone() for name, tensor in (numbers or {}).items()}
        self.frozen = self.numbers | {name: tensor for name, tensor in state.items() if name not in self.trained}
        groups = [[n for n in self.trained if n.startswith(f"{module}.")] for module in phase.clipped]
        network.requires_grad_(False)
        size = len(next(iter(state.values())))
        self._dataset: Dataset = population.dataset
        self.phase = phase
        self._method = population.method
        self._network = network
        self._classes = population.task.classes
        self._lr = phase.lr or training.lr
        self._training = training
        self.bf16 = training.bf16
        self._groups = groups
        self._dropout = dropout_layers(network)
        self.masks = Masks((), size, population.device)
        self._loss = StackedApplied(network, self._masked_loss)
        self._gradient = grad(self._client_loss, has_aux=True)
        moves = some(self._number("momentum"))
        self.momentum = {n: torch.zeros_like(t) for n, t in self.trained.items()} if moves else {}
        self.total = torch.zeros(size, device=population.device)
        self.sums: Tensor | None = None
        self._changing: list[str] = []
        """Buffers that the network changes itself, beside the statistics of batch norm."""

    def _number(self, name: str) -> float | Tensor:
        """A number of the training: a value for each client where they differ, otherwise the same for all."""
        common: float = getattr(self._training, name)
        return self.numbers.get(f"{TRAINING}{name}", common)

    def set_modes(self) -> None:
        """Set the network's modules to training or evaluation, as the phase wants them; others have changed them."""
        set_modes(self._network, self.phase)
        self._network.requires_grad_(False)

    @without_search()
    def prepare(self, inputs: State) -> None:
        """Learn from one client's first batch what all steps have in common; no state changes.

        That is which parameters the loss depends on, where it matters, the length of the vectors that it returns, and
        which masks it needs for dropout.
        """
        self.set_modes()
        decays = some(self._number("weight_decay"))
        trained = {name: tensor.clone().requires_grad_(decays) for name, tensor in _first(self.trained).items()}
        frozen = {name: tensor.clone() for name, tensor in _first(self.frozen).items()}  # batch norm would change it
        batch = _first(self._batch(inputs))
        samples = len(batch["y"])
        with torch.no_grad():
            of = partial(_resized, batch)
            calls = find_calls(self._dropout, samples, lambda count: self._client_loss(trained, frozen, of(count)))
        self.masks = Masks(calls, len(self.total), self.total.device)
        with torch.set_grad_enabled(decays):
            average, seen = self._client_loss(trained, frozen, batch | _first(self.masks.draw((), (), samples)))
        of_norms = _buffers_of_norms(self._network)
        self._changing = [name for name, tensor in frozen.items() if tensor._version and name not in of_norms]
        if decays:
            self._leave_out_unreached(trained, average)
        if "vectors" in seen:
            shape = (len(self.total), self._classes, seen["vectors"].shape[-1])
            self.sums = torch.zeros(shape, device=self.total.device, dtype=torch.float64)

    def check_masks(self, inputs: State) -> None:
        """Raise if masks in a padded batch would meet other samples than those they are drawn for.

        The gradient must be that of the batch without padding. It is not if the network arranges samples in an order
        that depends on their number.
        """
        self.set_modes()
        batch = _first(self._batch(inputs))
        samples = len(batch["y"])
        real = batch["mask"].new_ones(samples + 1)
        real[-1] = False
        short, padded = self.masks.trial(samples, samples + 1)
        batches = (batch | {"mask": real[:-1]} | short, _resized(batch, samples + 1) | {"mask": real} | padded)
        coarse, self.bf16 = self.bf16, False  # its rounding would hide small differences
        one, two = (self._learned(each)[0] for each in batches)
        self.bf16 = coarse
        if not bool((one - two).norm() <= 0.05 * one.norm()):
            raise RuntimeError("its dropout layers see the samples of a batch in an order that depends on their number")

    def check_padding(self, inputs: State, tolerance: float) -> None:
        """Raise if padding would change the gradient, or what the network writes into its buffers.

        It does if the network compares the samples of a batch, or the loss does so without regard to the mask.
        """
        self.set_modes()
        batch = _first(self._batch(inputs))
        samples = len(batch["y"])
        real = torch.arange(2 * samples, device=batch["mask"].device) < samples
        short, padded = self.masks.trial(samples, 2 * samples)
        twice = {name: torch.cat([tensor, tensor[:1].expand_as(tensor)]) for name, tensor in batch.items()}
        alone = batch | {"mask": real[:samples]} | short
        coarse, self.bf16 = self.bf16, False
        one, again, two = (self._learned(each) for each in (alone, alone, twice | {"mask": real} | padded))
        self.bf16 = coarse

        def differ(found: Tensor, other: Tensor) -> bool:
            return bool((found - other).norm() > tolerance * found.norm())

        if any(map(differ, one, again)):  # it counts its calls, for instance, so nothing can be said about padding
            return
        if any(map(differ, one, two)):
            raise RuntimeError(
                "what it learns from a sample depends on the others of the batch, so padding would change it"
            )

    def _learned(self, batch: State) -> tuple[Tensor, Tensor]:
        """The first client's gradient on its batch, and the buffers that change, each as one vector; on the CPU.

        A GPU may round more (TF32), which batch norm of few samples multiplies, and prepares for every new shape.
        """
        given = tree_map(lambda tensor: tensor.to("cpu", copy=True), (_first(self.trained), _first(self.frozen), batch))
        gradients, _ = grad(self._client_loss, has_aux=True)(*given)
        changed = {name: given[1][name] for name in self._changing}
        parts = ([tensor.double().flatten() for tensor in each.values()] for each in (gradients, changed))
        gradient, buffers = (torch.cat([torch.zeros(0), *part]) for part in parts)
        return gradient, buffers

    def reset(self) -> None:
        """Start a phase afresh."""
        self.total.zero_()
        if self.sums is not None:
            self.sums.zero_()
        for tensor in self.momentum.values():
            tensor.zero_()

    def leading(self, count: int) -> PhaseStep:
        """The same step for the first clients only, on the same tensors."""
        part = copy(self)
        part.trained, part.frozen, part.momentum, part.numbers = (
            {name: tensor[:count] for name, tensor in state.items()}
            for state in (self.trained, self.frozen, self.momentum, self.numbers)
        )
        part.total = self.total[:count]
        part.sums = None if self.sums is None else self.sums[:count]
        return part

    def __call__(self, inputs: State) -> None:
        batch = self._batch(inputs)
        active = _active(batch["mask"])
        before = {name: self.frozen[name].clone() for name in self._changing}
        gradients, seen = for_each(self._gradient, self.trained, self.frozen, batch)
        for name, tensor in before.items():  # a client that has finished learns nothing from the batch it gets anyway
            chosen = active.view(-1, *[1] * (tensor.ndim - 1))
            self.frozen[name].copy_(torch.where(chosen, self.frozen[name], tensor))
        self._update(gradients, active)
        self.total += seen["total"]
        if self.sums is not None:
            belongs = nn.functional.one_hot(batch["y"], self._classes) * batch["mask"][..., None]
            self.sums += belongs.double().mT @ seen["vectors"].double()

    def _batch(self, inputs: State) -> State:
        rows = inputs["rows"]
        flat = rows.clamp(min=0).flatten()
        draws: dict[str, State] = {}
        for name, tensor in inputs.items():
            purpose, _, kind = name.partition(".")
            if purpose in (IMAGE, *VIEWS):
                draws.setdefault(purpose, {})[kind] = tensor.flatten(0, 1)
        x, views = images(self._dataset, flat, draws)
        batch = {"x": x, "y": self._dataset.labels.index_select(0, flat)}
        if views is not None:
            batch["views"] = views
        batch = {name: tensor.unflatten(0, rows.shape) for name, tensor in batch.items()} | {"mask": rows >= 0}
        return batch | {name: tensor for name, tensor in inputs.items() if name.startswith(("drawn.", PREFIX))}

    def _masked_loss(self, network: ClientNetwork, batch: State) -> tuple[Tensor, State]:
        drawn = {n.removeprefix("drawn."): tensor for n, tensor in batch.items() if n.startswith("drawn.")}
        mask = batch["mask"]
        active = _active(mask)
        # A client that has finished gets a batch too, so that its loss is a number and its gradient exactly zero.
        shown = mask >= active
        given = Batch(batch["x"], batch["y"], shown, batch.get("views"), drawn)
        norms = nullcontext() if self._exact else MaskedNorms(network, shown, active)
        with precision(batch["x"].device, bf16=self.bf16), norms, masked(self._dropout, batch):
            outcome = self._own_loss()(network, given)
        values, vectors = outcome if isinstance(outcome, tuple) else (outcome, None)
        average, total = mean(values, mask, shown)
        return average, {"total": total} if vectors is None else {"total": total, "vectors": vectors}

    def _client_loss(self, trained: State, frozen: State, batch: State) -> tuple[Tensor, State]:
        outcome: tuple[Tensor, State] = on(self._loss, self._method, {**trained, **frozen})(batch)
        return outcome

    def _own_loss(self) -> Loss:
        """The phase's loss; asked for again where numbers differ, because it may have been made with them."""
        if not self.numbers:
            return self.phase.loss
        return next(phase.loss for phase in self._method.phases() if phase.name == self.phase.name)

    def _leave_out_unreached(self, trained: State, average: Tensor) -> None:
        """A parameter that the loss does not depend on has no gradient and does not decay either, as in the loop."""
        gradients = torch.autograd.grad(average, list(trained.values()), allow_unused=True)
        for name, gradient in zip(trained, gradients, strict=True):
            if gradient is None:
                self.frozen[name] = self.trained.pop(name)
                self.momentum.pop(name, None)
        self._groups = [[name for name in group if name in self.trained] for group in self._groups]

    def _update(self, gradients: State, active: Tensor) -> None:
        """SGD for clients with a batch in this step."""
        lr = self.numbers.get(f"{RATE}{self.phase.name}", self._lr)
        rates = Rates(lr, self._number("momentum"), self._number("weight_decay"), self._number("clip"))
        update(self.trained, gradients, self.momentum, rates, self._groups, active)
        for name, (low, high) in self.phase.bounds.items():
            (self.trained | self.frozen)[name].clamp_(low, high)


def for_each(function: Callable[..., Any], *stacked: Any) -> Any:
    """A function of each client's part of stacked tensors, for all clients at once."""
    if len(tree_leaves(stacked)[0]) > 1:
        return vmap(function)(*stacked)
    return tree_map(lambda tensor: tensor[None], function(*map(_first, stacked)))


def _first(stacked: Any) -> Any:
    """The first client's part of stacked tensors, in the same memory."""
    return tree_map(lambda tensor: tensor[0], stacked)


def _active(mask: Tensor) -> Tensor:
    """Whether a client has a sample; in a plan, padding comes last."""
    return mask[..., 0]


def _resized(batch: State, samples: int) -> State:
    """The first samples of one client's batch, or all and the first one again."""
    return {name: torch.cat([tensor, tensor[:1]])[:samples] for name, tensor in batch.items()}


def unstackable(network: nn.Module) -> str | None:
    """What prevents a network from being stacked, and its step from being captured."""
    for module in network.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is None:
            return "it has batch norm without running statistics, which looks at all samples even in evaluation"
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.momentum is None:
            return "it has batch norm with momentum=None, which counts the batches it has seen"
        if isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.running_mean is not None:
            return "it has instance norm with running statistics, which a padded batch would change"
    return None


def _buffers_of_norms(network: nn.Module) -> set[str]:
    """The buffers of batch norms, by their names in a state."""
    norms = {id(b) for m in network.modules() if isinstance(m, nn.modules.batchnorm._NormBase) for b in m.buffers()}
    return {name for name, buffer in network.named_buffers() if id(buffer) in norms}


def normed_phases(network: ClientNetwork, phases: Sequence[Phase]) -> set[str]:
    """The phases in which batch norm trains."""
    found = set()
    for phase in phases:
        set_modes(network, phase)
        if batch_norm_trains(network):
            found.add(phase.name)
    network.requires_grad_(False)
    return found
