"""Clients of one architecture as one batched network: stacked states, one step for all of them at once.

Every loss, prediction and statistic runs under `torch.func.vmap` over the stacked states, through the same code as in
the plain loop. Batches are rows of sample numbers; −1 pads a short batch, and a client whose rows are all −1 has
finished and does not move.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from polyfed.compute import precision
from polyfed.data import Dataset
from polyfed.engines.batches import Epoch, augment, epochs
from polyfed.engines.layers import StackedLayers
from polyfed.engines.local import Evaluation, prepare
from polyfed.engines.population import Population
from polyfed.message import State
from polyfed.methods.base import Batch, Phase
from polyfed.methods.network import ClientNetwork
from polyfed.methods.statistics import ClassStatistics, group_covariances, means_from_sums

EVALUATION_SAMPLES = 8192
"""Samples of all clients together in one step of an evaluation."""


class Applied(nn.Module):
    """A function of a client network as a module, so that the network's state can be replaced for one call."""

    def __init__(self, network: ClientNetwork, function: Callable[..., object]) -> None:
        super().__init__()
        self.network = network
        self._function = function

    def forward(self, *arguments: object) -> object:
        with StackedLayers():
            return self._function(self.network, *arguments)

    def on(self, state: State) -> Callable[..., Any]:
        """The function with the network in this state."""
        named = {f"network.{name}": tensor for name, tensor in state.items()}
        return lambda *arguments: functional_call(self, named, arguments)


@dataclass(frozen=True)
class Plan:
    """The batches of a cohort in one phase, on the compute device: [steps, clients, batch, …]."""

    inputs: State
    """By name: `rows`, sample numbers, −1 where there is none; draws for them (`first.flip`, `drawn.noise`)."""
    active: list[int]
    """For each step, the number of clients up to the last one that has a batch."""

    def at(self, step: int) -> State:
        """The inputs of one step."""
        return {name: tensor[step] for name, tensor in self.inputs.items()}


def new_plan(population: Population, clients: Sequence[int], width: int, size: int, phase: Phase, round: int) -> Plan:
    """All batches of these clients in a phase, padded to a common number of steps and to `size` clients."""
    tables = [_table(list(epochs(population, client, phase, round)), width) for client in clients]
    steps = max((len(table["rows"]) for table in tables if table), default=0)
    inputs: State = {"rows": torch.full((steps, size, width), -1)}
    for column, table in enumerate(tables):
        for name, values in table.items():
            if name not in inputs:
                inputs[name] = values.new_zeros(steps, size, *values.shape[1:])
            inputs[name][: len(values), column] = values
    having = (inputs["rows"] >= 0).any(2)
    active = (having * torch.arange(1, size + 1)).amax(1).tolist() if steps else []
    return Plan({name: tensor.to(population.device) for name, tensor in inputs.items()}, active)


def _table(passes: Sequence[Epoch], width: int) -> State:
    """A client's passes over its samples, with all that was drawn for them, by name: [batches, width, …]."""
    named = []
    for epoch in passes:
        draws = {"rows": epoch.samples} | {f"drawn.{name}": tensor for name, tensor in epoch.drawn.items()}
        for view, changes in zip(("first", "second"), epoch.augmentations, strict=False):
            draws |= {f"{view}.{name}": tensor for name, tensor in changes.items()}
        named.append(draws)
    stacked = {name: torch.stack([draws[name] for draws in named]) for name in (named[0] if named else ())}
    return {name: _in_batches(values, width, -1 if name == "rows" else 0) for name, values in stacked.items()}


def _in_batches(values: Tensor, width: int, filler: int) -> Tensor:
    """Values of samples in several passes cut into batches [all batches, width, …], the last of a pass filled up."""
    passes, count = values.shape[:2]
    batches = -(-count // width)
    filled = torch.full((passes, batches * width, *values.shape[2:]), filler, dtype=values.dtype)
    filled[:, :count] = values
    return filled.view(passes * batches, width, *values.shape[2:])


class PhaseStep:
    """One step of one phase for a whole cohort: batch, loss, gradient, update, in place on stacked tensors."""

    def __init__(self, population: Population, network: ClientNetwork, phase: Phase, state: State) -> None:
        training = population.training
        prepare(network, phase)
        self.trained = {n: state[n] for n, p in network.named_parameters() if p.requires_grad}
        self.frozen = {name: tensor for name, tensor in state.items() if name not in self.trained}
        groups = [[n for n in self.trained if n.startswith(f"{module}.")] for module in phase.trains]
        network.requires_grad_(False)
        size = len(next(iter(state.values())))
        self._dataset: Dataset = population.dataset
        self._phase = phase
        self._network = network
        self._classes = population.task.classes
        self._lr = phase.lr or training.lr
        self._training = training
        self._groups = groups
        self._loss = Applied(network, self._masked_loss)
        self._gradient = vmap(grad(self._client_loss, has_aux=True))
        self.momentum = {n: torch.zeros_like(t) for n, t in self.trained.items()} if training.momentum else {}
        self.total = torch.zeros(size, device=population.device)
        self.sums: Tensor | None = None
        self._unsure = training.weight_decay > 0

    def set_modes(self) -> None:
        """Set the network's modules to training or evaluation, as the phase wants them; others have changed them."""
        prepare(self._network, self._phase)
        self._network.requires_grad_(False)

    def reset(self) -> None:
        """Start a phase anew."""
        self.total.zero_()
        if self.sums is not None:
            self.sums.zero_()
        for tensor in self.momentum.values():
            tensor.zero_()

    def leading(self, count: int) -> PhaseStep:
        """The same step for the first clients only, on the same tensors."""
        part = copy(self)
        part.trained, part.frozen, part.momentum = (
            {name: tensor[:count] for name, tensor in state.items()}
            for state in (self.trained, self.frozen, self.momentum)
        )
        part.total = self.total[:count]
        part.sums = None if self.sums is None else self.sums[:count]
        return part

    def __call__(self, inputs: State) -> None:
        rows = inputs["rows"]
        mask = rows >= 0
        batch = self._batch(rows, inputs) | {"mask": mask}
        if self._unsure:
            self._leave_out_unreached(batch)
        gradients, seen = self._gradient(self.trained, self.frozen, batch)
        self._update(gradients, mask.any(1))
        self.total += seen["total"]
        if "vectors" in seen:
            vectors = seen["vectors"]
            if self.sums is None:
                shape = (len(rows), self._classes, vectors.shape[-1])
                self.sums = torch.zeros(shape, device=vectors.device, dtype=torch.float64)
            belongs = nn.functional.one_hot(batch["y"], self._classes) * mask[..., None]
            self.sums += belongs.double().mT @ vectors.double()

    def _batch(self, rows: Tensor, inputs: State) -> State:
        flat = rows.clamp(min=0).flatten()
        x = self._dataset.normalise(self._dataset.images.index_select(0, flat))
        batch = {"y": self._dataset.labels.index_select(0, flat).view_as(rows)}
        for view, name in (("first", "x"), ("second", "view")):
            draws = {n.removeprefix(f"{view}."): t.flatten(0, 1) for n, t in inputs.items() if n.startswith(f"{view}.")}
            if draws or name == "x":
                batch[name] = (augment(x, draws) if draws else x).unflatten(0, rows.shape)
        return batch | {name: tensor for name, tensor in inputs.items() if name.startswith("drawn.")}

    def _masked_loss(self, network: ClientNetwork, batch: State) -> tuple[Tensor, State]:
        drawn = {n.removeprefix("drawn."): tensor for n, tensor in batch.items() if n.startswith("drawn.")}
        mask = batch["mask"]
        # A client that has finished gets a batch too, so that its loss is a number and its gradient exactly zero.
        given = Batch(batch["x"], batch["y"], mask | ~mask.any(), batch.get("view"), drawn)
        with precision(batch["x"].device, bf16=self._training.bf16):
            outcome = self._phase.loss(network, given)
        values, vectors = outcome if isinstance(outcome, tuple) else (outcome, None)
        total = torch.where(mask, values, 0.0).sum()
        mean = total / mask.sum().clamp(min=1)
        return mean, {"total": total} if vectors is None else {"total": total, "vectors": vectors}

    def _client_loss(self, trained: State, frozen: State, batch: State) -> tuple[Tensor, State]:
        outcome: tuple[Tensor, State] = self._loss.on({**trained, **frozen})(batch)
        return outcome

    def _leave_out_unreached(self, batch: State) -> None:
        """A parameter that the loss does not depend on has no gradient and does not decay either, as in the loop."""
        frozen, first = ({name: tensor[0] for name, tensor in state.items()} for state in (self.frozen, batch))
        trained = {name: tensor[0].clone().requires_grad_() for name, tensor in self.trained.items()}
        mean, _ = self._client_loss(trained, frozen, first)
        gradients = torch.autograd.grad(mean, list(trained.values()), allow_unused=True)
        for name, gradient in zip(trained, gradients, strict=True):
            if gradient is None:
                self.frozen[name] = self.trained.pop(name)
                self.momentum.pop(name, None)
        self._groups = [[name for name in group if name in self.trained] for group in self._groups]
        self._unsure = False

    def _update(self, gradients: State, active: Tensor) -> None:
        """SGD as torch.optim has it, for clients that have a batch in this step; a few kernels for all parameters."""
        training = self._training
        if training.clip is not None:
            gradients = self._clipped(gradients, training.clip)
        parameters = list(self.trained.values())
        directions = [gradients[name] for name in self.trained]
        if training.weight_decay:
            directions = list(torch._foreach_add(directions, parameters, alpha=training.weight_decay))
        if self.momentum:
            moments = list(self.momentum.values())
            torch._foreach_mul_(moments, training.momentum)
            torch._foreach_add_(moments, directions)
            directions = moments
        if training.weight_decay or self.momentum:  # which would move even a client without a gradient
            steps = -self._lr * active
            for parameter, direction in zip(parameters, directions, strict=True):
                parameter.addcmul_(direction, _column(steps, parameter))
        else:
            torch._foreach_add_(parameters, directions, alpha=-self._lr)
        for name, (low, high) in self._phase.bounds.items():
            (self.trained | self.frozen)[name].clamp_(low, high)

    def _clipped(self, gradients: State, largest: float) -> State:
        """Each client's gradient, shortened module by module where it is longer than that."""
        shortened: State = {}
        for group in self._groups:
            norms = [torch.linalg.vector_norm(gradients[name].reshape(len(self.total), -1), dim=1) for name in group]
            factor = (largest / (torch.linalg.vector_norm(torch.stack(norms), dim=0) + 1e-6)).clamp(max=1.0)
            shortened |= {name: gradients[name] * _column(factor, gradients[name]) for name in group}
        return shortened


def _column(values: Tensor, like: Tensor) -> Tensor:
    """One value per client, shaped to multiply a stacked tensor."""
    return values.view(-1, *(1,) * (like.dim() - 1))


def padded_rows(samples: Sequence[Tensor], device: torch.device) -> Tensor:
    """Sample numbers of several clients as one table, −1 where a client has fewer."""
    longest = max((len(each) for each in samples), default=0)
    table = torch.full((len(samples), longest), -1, dtype=torch.int64)
    for row, each in zip(table, samples, strict=True):
        row[: len(each)] = each
    return table.to(device)


def in_chunks(
    dataset: Dataset, network: ClientNetwork, state: State, rows: Tensor, function: Callable[..., object]
) -> list[tuple[Tensor, object]]:
    """A function of (network, images) for all clients over all their samples; pairs of rows and results."""
    applied = Applied(network, function)
    stacked = vmap(lambda own, x: applied.on(own)(x))
    width = max(1, EVALUATION_SAMPLES // max(1, len(rows)))
    results = []
    for chunk in rows.split(width, 1) if rows.shape[1] else ():
        x, _ = dataset.batch(chunk.clamp(min=0).flatten(), rows.device)
        results.append((chunk, stacked(state, x.unflatten(0, chunk.shape))))
    return results


def collect(
    population: Population, clients: Sequence[int], network: ClientNetwork, state: State
) -> list[ClassStatistics | None]:
    """The method's class statistics of all clients' training samples."""
    wanted = population.method.collect
    if wanted is None:
        return [None] * len(clients)
    rows = padded_rows([population.data[client].train for client in clients], population.device)
    parts = in_chunks(population.dataset, network, state, rows, wanted.of)
    vectors = torch.cat([part for _, part in parts if isinstance(part, Tensor)], 1).flatten(0, 1)
    classes, groups = population.task.classes, len(clients) * population.task.classes
    owner = torch.arange(len(clients), device=rows.device)[:, None]
    group = owner * classes + population.dataset.labels[rows.clamp(min=0)]
    group = torch.where(rows >= 0, group, groups).flatten()  # padding is a group of its own
    sums = torch.zeros(groups + 1, vectors.shape[-1], dtype=torch.float64, device=vectors.device)
    sums.index_add_(0, group, vectors.double())
    counts = torch.stack([population.counts[client] for client in clients])
    found = means_from_sums(sums[:-1].cpu(), counts.flatten())
    covariances: Sequence[Tensor | None] = [None] * len(clients)
    seen = (counts > 0).sum(1).tolist()
    if wanted.covariance:
        ordered = vectors[group.argsort(stable=True)[: int(counts.sum())]]
        middle = found.means.to(vectors.device)
        number = torch.arange(len(found.counts)).repeat_interleave(found.counts)
        covariances = group_covariances(ordered - middle[number.to(vectors.device)], found.counts).split(seen)
    labels, numbers, means = (part.split(seen) for part in (found.labels % classes, found.counts, found.means))
    return [ClassStatistics(*own) for own in zip(labels, numbers, means, covariances, strict=True)]


def evaluate(
    population: Population, clients: Sequence[int], network: ClientNetwork, state: State
) -> dict[int, Evaluation]:
    """Count right predictions on all clients' test and validation samples."""
    counts: list[dict[str, list[int]]] = []
    for part in ("test", "validation"):
        rows = padded_rows([getattr(population.data[client], part) for client in clients], population.device)
        right: dict[str, Tensor] = {}
        for chunk, scores in in_chunks(population.dataset, network, state, rows, population.method.predict):
            assert isinstance(scores, dict)
            labels = torch.where(chunk >= 0, population.dataset.labels[chunk.clamp(min=0)], -1)
            for rule, values in scores.items():
                hits = (values.argmax(-1) == labels).sum(1)
                right[rule] = right[rule] + hits if rule in right else hits
        counts.append({rule: hits.tolist() for rule, hits in right.items()})
    rules = list(counts[0] or counts[1]) or own_rules(population, clients[0], network, state)
    none = [0] * len(clients)
    return {
        client: Evaluation(
            len(population.data[client].test),
            len(population.data[client].validation),
            {rule: counts[0].get(rule, none)[i] for rule in rules},
            {rule: counts[1].get(rule, none)[i] for rule in rules},
        )
        for i, client in enumerate(clients)
    }


def own_rules(population: Population, client: int, network: ClientNetwork, state: State) -> list[str]:
    """The names of the method's ways to predict, from one training sample."""
    rows = population.data[client].train[:1].view(1, 1).to(population.device)
    first = {name: tensor[:1] for name, tensor in state.items()}
    ((_, scores),) = in_chunks(population.dataset, network, first, rows, population.method.predict)
    assert isinstance(scores, dict)
    return list(scores)


def remarks(
    population: Population, clients: Sequence[int], network: ClientNetwork, state: State
) -> list[tuple[str, ...]]:
    """What the method has to say about each client, from one batch of its samples."""
    # A client with fewer samples shows them several times, so that all have as many.
    own = [population.data[client].train for client in clients]
    rows = torch.stack([samples[torch.arange(64) % len(samples)] for samples in own]).to(population.device)
    x, y = population.dataset.batch(rows.flatten(), population.device)
    applied = Applied(network, lambda net, a, b: population.method.inspect(net, Batch(a, b)))
    found = vmap(lambda own, a, b: applied.on(own)(a, b))(state, x.unflatten(0, rows.shape), y.view_as(rows))
    assert isinstance(found, dict)
    truth = {remark: values.tolist() for remark, values in found.items()}
    return [tuple(remark for remark, values in truth.items() if values[i]) for i in range(len(clients))]
