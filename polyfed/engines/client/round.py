"""What one client does in a round, on any engine: receive, train, gather statistics, answer; and predict.

This is the reference for every engine: a plain PyTorch loop over one client's batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from polyfed.compute import all_to_device, out_of_memory, precision, to_device
from polyfed.confusion import Counts
from polyfed.data import ClientData
from polyfed.engines.client.batches import batches, fewest_for_norm
from polyfed.engines.client.flops import ClientFlops
from polyfed.engines.client.phases import phases_in
from polyfed.engines.client.probing import probe, probe_sizes
from polyfed.engines.client.sgd import sgd
from polyfed.engines.client.workbench import state_of
from polyfed.errors import ClientError, DivergedError, InputError, PolyfedError, clients_named, first_line, user_place
from polyfed.evaluation import Evaluation, Part
from polyfed.message import Message, State, largest
from polyfed.methods.base import Batch, Method, Phase, Reply, Trained
from polyfed.methods.parts.network import ClientNetwork
from polyfed.methods.parts.statistics import ClassStatistics, class_covariances, class_means, means_from_sums
from polyfed.metrics import auc, margins
from polyfed.models import set_generator
from polyfed.population import Population

Result = TypeVar("Result")

EVALUATION_BATCH = 64
LARGEST_LOSS = 1e9
"""A mean loss beyond this has diverged, although it is still a number."""


def silent(words: str) -> None:
    """Tell nobody."""


def receive(population: Population, client: int, state: State, message: Message, round: int) -> None:
    """Write a download into the client's state, in place; the state keeps no reference to the message."""
    for name, tensor in changes(population, client, state, message, round).items():
        state[name].copy_(to_device(tensor, state[name].device))


def changes(population: Population, client: int, state: State, message: Message, round: int) -> State:
    """The entries of a client's state that a download changes, all of which it has and may change.

    A sentence names no shape of the client's own: a site sends it to a server that may be hostile.
    """
    (arrived,) = on_device([message], population.device)
    return checked_changes(
        population.method, state, population.method.receive(state, arrived, population.knowledge(client, round))
    )


def checked_changes(method: Method, state: State, changed: State) -> State:
    """What a download changes, if the client has all of it and it may be changed."""
    fresh, allowed = method.kept_fresh, method.receivable
    for name, tensor in changed.items():
        if fresh and name.split(".")[0] not in fresh:
            raise InputError(
                f"{method.name} names {', '.join(fresh)} in kept_fresh, but its receive changes {name} too: "
                "leave kept_fresh empty, or receive nothing else."
            )
        what = f"a download of {method.name} changes '{name[:100]}'"
        if allowed is not None and not any(f"{name}.".startswith(f"{module}.") for module in allowed):
            raise InputError(f"{what}, but may change only {', '.join(allowed) or 'nothing'} (receives).")
        if name not in state:
            raise InputError(f"{what}, which is not in a client's state.")
        if tensor.shape != state[name].shape:
            raise InputError(f"{what}, but has shape {tuple(tensor.shape)}, which is not that of the client's.")
    return changed


def on_device(messages: Sequence[Message], device: torch.device) -> list[Message]:
    """The messages with their tensors on the compute device, moved there together."""
    moved = iter(
        all_to_device([t for m in messages for part in (m.tensors, m.metadata) for t in part.values()], device)
    )
    return [Message(*({name: next(moved) for name in part} for part in (m.tensors, m.metadata))) for m in messages]


def train(population: Population, client: int, network: ClientNetwork, round: int, flops: ClientFlops) -> Reply:
    """Train one client through the method's phases and return its answer; `network` holds the client's state."""
    method, data = population.method, population.data[client]
    set_generator(network, population.device_generator("dropout", round, client))
    phases = phases_in(method, round)
    results = []
    for phase in phases:
        with population.global_draws(phase.name, round, client):
            results.append(train_phase(population, client, network, phase, round))
    notes = [note for result in results for note in result.notes]
    network.eval()
    with torch.no_grad(), population.global_draws("answer", round, client):
        if type(method).inspect is not Method.inspect:
            some = population.dataset.batch(data.train[:EVALUATION_BATCH], population.device)
            notes += [remark for remark, true in method.inspect(network, Batch(*some)).items() if bool(true)]
        answer = Trained(
            population.counts[client],
            round,
            state=state_of(network),
            statistics=collect(population, data, network, notes.append),
            tracked=next((result.tracked for result in results if result.tracked), None),
            probed=probe(population, client, network, round),
        )
        check_statistics([answer], [client], round)
        message = upload(population, client, answer)
    losses = [r.loss for phase, r in zip(phases, results, strict=True) if "model" in phase.trains]
    visits = {phase.name: result.visited for phase, result in zip(phases, results, strict=True)}
    spent = flops.of_round(visits, len(data.train), probe_sizes(population, client))
    return Reply(client, message, losses[0] if losses else float("nan"), spent, tuple(notes))


def upload(population: Population, client: int, answer: Trained) -> Message:
    """What leaves a client, as a copy."""
    return new_upload(population, client, answer).snapshot(population.method.heavy)


def new_upload(population: Population, client: int, answer: Trained) -> Message:
    """What is about to leave a client: the one door through which every upload passes, whatever the engine.

    It may share memory with the client's state.
    """
    drawing = replace(answer, generator=population.generator("upload", answer.round, client))
    message = population.method.upload(drawing)
    for step in population.steps:
        message = step(message, answer.round, client)
    return message


@dataclass
class PhaseResult:
    """What came out of one phase: mean loss, how many samples were visited, class means of tracked vectors, remarks."""

    loss: float = float("nan")
    visited: int = 0
    tracked: ClassStatistics | None = None
    notes: list[str] = field(default_factory=list)


def train_phase(population: Population, client: int, net: ClientNetwork, phase: Phase, round: int) -> PhaseResult:
    """Minimise one phase's loss over the client's samples with SGD, from a fresh optimiser state."""
    training, device = population.training, population.device
    result = PhaseResult()
    groups = set_modes(net, phase)
    parameters = [parameter for group in groups.values() for parameter in group]
    clipped = [groups[module] for module in phase.clipped]
    start, stop = phase.edges(len(population.data[client].train))
    fewest = fewest_for_norm(stop - start, training.batch_size) if batch_norm_trains(net) else 1
    bounded = [(parameter, phase.bounds[name]) for name, parameter in net.named_parameters() if name in phase.bounds]
    visited, total = 0, torch.zeros((), device=device)
    sums: Tensor | None = None
    counts = torch.zeros(population.task.classes, dtype=torch.int64, device=device)
    shapes: list[str] = []
    when = f"round {round}, phase '{phase.name}'"
    lr, early = phase.lr or training.lr, population.is_ours(client)
    with explained(population, [client], when, shapes), sgd(parameters, lr, training, clipped, early=early) as step:
        for batch in batches(population, client, phase, round):
            shapes[:] = [f"{tuple(batch.x.shape)}"]
            if len(batch.y) < fewest:
                result.notes = [left_out(phase)]
                continue
            with precision(device, bf16=training.bf16):
                outcome = phase.loss(net, batch)
            values, vectors = outcome if isinstance(outcome, tuple) else (outcome, None)
            values.mean().backward()
            step()
            for parameter, (low, high) in bounded:
                parameter.data.clamp_(low, high)
            visited += len(batch.y)
            total += values.detach().sum()
            if vectors is not None:
                sums = torch.zeros(len(counts), vectors.shape[1], device=device).double() if sums is None else sums
                sums.index_add_(0, batch.y, vectors.detach().double())
                counts += torch.bincount(batch.y, minlength=len(counts))
    check_loss(float(total), visited, client, round, phase.name)
    net.requires_grad_(False)
    # No loss comes after the last step to show what it did.
    if not bool(largest(t for name, t in state_of(net).items() if is_trained(name, t, phase)).isfinite()):
        raise diverged("weights", client, round, phase.name)
    result.visited = visited
    result.loss = float(total) / visited if visited else float("nan")
    result.tracked = means_from_sums(sums, counts) if sums is not None else None
    return result


@contextmanager
def explained(population: Population, clients: Sequence[int], when: str, shapes: Sequence[str] = ()) -> Iterator[None]:
    """Inside, what goes wrong in a network, a loss or the data names the clients, the moment and the batch's shape.

    The error itself, with its traceback, is the new one's cause.
    """
    try:
        yield
    except (PolyfedError, OSError):
        raise
    except Exception as error:
        if out_of_memory(error):
            raise
        name = population.architectures[clients[0]].name
        batch = f" on a batch of shape {shapes[0]}" if shapes else ""
        raise ClientError(
            f"{clients_named(clients)} ({name}) failed in {when}{batch}: {first_line(error)}{user_place(error)}."
        ) from error


def check_loss(total: float, samples: int, client: int, round: int, phase: str) -> None:
    """Raise if training has diverged."""
    if not math.isfinite(total):
        raise diverged("loss", client, round, phase)
    if abs(total) > LARGEST_LOSS * max(1, samples):
        raise diverged("loss", client, round, phase, f"has grown to {total / samples:.1e}")


def is_trained(name: str, tensor: Tensor, phase: Phase) -> bool:
    """Whether an entry of a client's state can change in a phase and stop being finite."""
    return tensor.is_floating_point() and any(name.startswith(f"{module}.") for module in phase.trains)


def check_statistics(answers: Sequence[Trained], clients: Sequence[int], round: int) -> None:
    """Raise if what clients gathered is not finite, which happens if weights are finite but huge."""
    found = [[own for own in (answer.statistics, answer.tracked) if own is not None] for answer in answers]
    tensors = [[t for own in each for t in (own.means, own.covariances) if t is not None] for each in found]
    for own, answer in zip(tensors, answers, strict=True):
        own += [tensor for tensor in (answer.probed or {}).values() if tensor.is_floating_point()]
    devices = {tensor.device for own in tensors for tensor in own}
    if all(bool(largest(t for own in tensors for t in own if t.device == device).isfinite()) for device in devices):
        return
    broken = (any(not bool(largest([tensor]).isfinite()) for tensor in own) for own in tensors)
    raise diverged(
        "class statistics", next(c for c, is_broken in zip(clients, broken, strict=True) if is_broken), round
    )


def diverged(what: str, client: int, round: int, phase: str | None = None, how: str = "") -> DivergedError:
    """The error for a client's training that is no longer finite, or has gone wrong in some other way."""
    how = how or f"{'is' if what == 'loss' else 'are'} no longer finite"
    where = f"round {round}" + (f", phase '{phase}'" if phase else "")
    return DivergedError(
        f"the {what} of client {client} {how} in {where}: lower the learning rate (--lr) or limit "
        "the gradient (--set training.clip=10).",
        client,
    )


def set_modes(net: ClientNetwork, phase: Phase) -> dict[str, list[nn.Parameter]]:
    """Set the phase's modules to training and all others to evaluation and frozen; parameters by trained module.

    What the user froze or left in evaluation mode stays so.
    """
    net.eval().requires_grad_(False)
    frozen = {parameter for name, parameter in net.named_parameters() if name in net.rest.parameters}
    groups = {}
    for name in phase.trains:
        module = net.get_submodule(name).train()
        groups[name] = [parameter for parameter in module.parameters() if parameter not in frozen]
        for parameter in groups[name]:
            parameter.requires_grad_()
    for name in net.rest.modules:
        net.get_submodule(name).training = False
    return groups


def batch_norm_trains(net: nn.Module) -> bool:
    """Whether a sample's result depends on the others in its batch; then it takes several to train on."""
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training for module in net.modules())


def left_out(phase: Phase) -> str:
    """The remark on samples that were too few for a batch."""
    return f"phase '{phase.name}': a last batch was left out because it was too small for batch norm"


def collect(
    population: Population, data: ClientData, net: ClientNetwork, say: Callable[[str], None] = silent
) -> ClassStatistics | None:
    """The method's class statistics over all training samples, as they are (not augmented)."""
    wanted = population.method.collect
    if wanted is None:
        return None
    found = in_batches(population, data.train, partial(wanted.of, net), say)
    vectors, labels = (torch.cat(part) for part in zip(*found, strict=True))
    gather = class_covariances if wanted.covariance else class_means
    return gather(vectors, labels, population.task.classes)


def in_batches(
    population: Population, samples: Tensor, work: Callable[[Tensor], Result], say: Callable[[str], None]
) -> list[tuple[Result, Tensor]]:
    """What a function of images gives for these samples, batch by batch, each with its labels.

    Where memory runs out it continues with batches of half the size, and says so.
    """
    size, start = EVALUATION_BATCH, 0
    results: list[tuple[Result, Tensor]] = []
    while start < len(samples) or not results:
        try:
            x, y = population.dataset.batch(samples[start : start + size], population.device)
            results.append((work(x), y))
            start += size
            continue
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error) or size == 1:
                raise
        size //= 2  # out here, the error no longer holds on to the memory of what failed
        say(smaller_batches(size))
    return results


def smaller_batches(size: int) -> str:
    """The remark on a pass over samples that ran out of memory and could continue."""
    return f"passes without training ran out of memory; they continue with {size} samples at once"


def evaluate(
    population: Population, client: int, net: ClientNetwork, say: Callable[[str], None] = silent
) -> Evaluation:
    """Count what is predicted as what, of the client's test and validation samples."""
    data = population.data[client]
    net.eval()
    with torch.no_grad():
        count = partial(predictions, population, net, say=say)
        test, validation = count(data.test), count(data.validation)
        rules = test.counts or validation.counts or count(data.train[:1]).counts
    none = dict.fromkeys(rules, Counts.of_cells([()]))
    aucs: dict[Part, dict[str, list[float | None]]] = {"test": test.aucs, "validation": validation.aucs}
    given = aucs if population.task.classes == 2 else None
    return Evaluation.of(test.counts or none, validation.counts or none, given)[0]


@dataclass(frozen=True)
class Predictions:
    """By rule, what samples of one client are predicted as, and with two classes the AUC."""

    counts: dict[str, Counts] = field(default_factory=dict)
    aucs: dict[str, list[float | None]] = field(default_factory=dict)


def predictions(population: Population, net: ClientNetwork, samples: Tensor, say: Callable[[str], None]) -> Predictions:
    """What each rule predicts these samples as, counted by class; empty if there are no samples."""
    if not len(samples):
        return Predictions()
    two = population.task.classes == 2

    def predict(x: Tensor) -> dict[str, tuple[Tensor, Tensor | None]]:
        found = population.method.predict(net, x)
        return {rule: (scores.argmax(1), margins(scores) if two else None) for rule, scores in found.items()}

    found = in_batches(population, samples, predict, say)
    rules = list(found[0][0])
    columns = [[y for _, y in found], *([own[rule][0] for own, _ in found] for rule in rules)]
    tables = torch.stack([torch.cat(column) for column in columns]).cpu().numpy()
    counts = {rule: Counts.of(tables[:1], own[None]) for rule, own in zip(rules, tables[1:], strict=True)}
    preferred = {rule: [m for own, _ in found if (m := own[rule][1]) is not None] for rule in rules if two}
    aucs = {rule: [auc(tables[0], torch.cat(own).double().cpu().numpy())] for rule, own in preferred.items()}
    return Predictions(counts, aucs)
