"""Training on the server: a small module on vectors that clients sent, with plain SGD; and steps of any other kind."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import partial

import torch
from torch import Tensor, nn

from polyfed.compute import compute_threads
from polyfed.errors import DivergedError
from polyfed.losses import cross_entropy
from polyfed.message import largest
from polyfed.server.heads import MOST_WORK, is_plain, train_by_one_kernel
from polyfed.server.kept import Kept
from polyfed.server.replay import Replayed, Spans, Step, in_batches

Loss = Callable[..., Tensor]
"""From (module, vectors, labels), and further tensors by name, to one value per vector."""
FusedSteps = Callable[..., Step | None]
"""Makes a step of (module, vectors, labels, learning rate), and further tensors by name, that needs few kernels.

None: there is no such step here."""
SANE = 1e4
"""Features, logits and weights of networks whose training goes well are smaller than this."""
_eager = ContextVar("eager", default=False)
_WORTH_CAPTURING = 100
"""Steps from which capturing some as a GPU graph costs less than it saves."""


def train_on_vectors(
    module: nn.Module,
    vectors: Tensor,
    labels: Tensor,
    *,
    loss: Loss | None = None,
    epochs: int = 1,
    batch_size: int = 64,
    lr: float = 0.01,
    generator: torch.Generator,
    work: int | None = None,
    fused: FusedSteps | None = None,
    given: Mapping[str, Tensor] | None = None,
    kept: Kept | None = None,
    notes: list[str] | None = None,
    device: torch.device | None = None,
) -> float:
    """Minimise the mean loss over the vectors in shuffled mini-batches; returns the mean loss of the last epoch.

    The loss gives one value per vector and is by default the cross entropy of the module's output. `work` is about how
    many multiplications a step takes; none: as if every weight were used for every vector, forward and backward. On a
    GPU, steps are captured in graphs, and `fused` may make the same steps with fewer kernels. What is slower than it
    could be is added to `notes`.

    `kept` lets later rounds replay this one's graphs, where the loss and `fused` are the same and the module stays
    where it is. All tensors that they use beside the vectors and labels, and that differ from round to round, are
    `given` by name then: others would stay those of this round.

    `device` may be a GPU for a plain linear layer that stays on the CPU: many steps of it are made there, aside from
    what else this process does on the GPU if there is `kept`.
    """
    work = work or 3 * batch_size * sum(parameter.numel() for parameter in module.parameters())
    orders = torch.stack([torch.randperm(len(vectors), generator=generator) for _ in range(epochs)])
    if device is not None and loss is None and not _eager.get():
        mean = train_by_one_kernel(
            module, vectors, labels, orders, lr=lr, size=batch_size, device=device, kept=kept,
            notes=[] if notes is None else notes,
        )  # fmt: skip
        if mean is not None:
            return mean
    orders = orders.to(vectors.device)  # all at once: a copy for every epoch would let the GPU wait for it
    named = {"vectors": vectors, "labels": labels, **(given or {})}

    def new_step(memory: Mapping[str, Tensor]) -> Step:
        x, y, *_ = memory.values()
        further = {name: memory[name] for name in given or {}}
        step = fused(module, x, y, lr, **further) if fused and quick(x) else None
        return step or sgd_step(module, x, y, lr, partial(loss, **further) if loss and further else loss)

    losses = vectors.new_empty(len(vectors))
    with _few_threads(work):
        if kept is not None and worth_capturing(orders, batch_size):
            found = kept.steps(("SGD", lr), module, named, new_step, size=batch_size, rows=("vectors", "labels"))
            make_steps(found.step, orders, losses, size=batch_size, notes=notes, spans=found.spans)
        else:
            make_steps(new_step(named), orders, losses, size=batch_size, notes=notes)
    return float(losses.mean())


def worth_capturing(orders: Tensor, size: int, worth: int = _WORTH_CAPTURING) -> bool:
    """Whether steps on batches of so many rows, in these orders, are many enough for a graph, and on a GPU."""
    epochs, samples = orders.shape
    return quick(orders) and epochs * -(-samples // size) >= worth


def make_steps(
    step: Step,
    orders: Tensor,
    losses: Tensor,
    *,
    size: int,
    worth: int = _WORTH_CAPTURING,
    notes: list[str] | None = None,
    spans: Spans | None = None,
) -> None:
    """Steps on batches of so many rows, in the order [epochs, rows] of each epoch; `losses` get those of the last.

    On a GPU they are captured in graphs if there are at least `worth`; `spans` are those that this step has already. It
    may still be at work when this returns.
    """
    epochs, samples = orders.shape
    epoch: Step = partial(in_batches, step, size=size)
    if worth_capturing(orders, size, worth):
        notes = [] if notes is None else notes
        epoch = Replayed(spans or Spans(step, size), samples=samples, epochs=epochs, notes=notes).epoch
    for order in orders:
        epoch(order, losses)


def quick(tensor: Tensor) -> bool:
    """Whether what the server does with this tensor may be captured, or done by kernels of our own."""
    return on_gpu(tensor) and not _eager.get()


def on_gpu(vectors: Tensor) -> bool:
    return vectors.is_cuda


def take_steps(module: nn.Module, vectors: Tensor, labels: Tensor, chunks: Iterable[Tensor], lr: float) -> None:
    """A step of SGD on the cross entropy of the module's output for the vectors of each chunk, one after another."""
    step = sgd_step(module, vectors, labels, lr)
    with _few_threads(0):
        for rows in chunks:
            step(rows, vectors.new_empty(len(rows)))


def sgd_step(module: nn.Module, vectors: Tensor, labels: Tensor, lr: float, loss: Loss | None = None) -> Step:
    """A step of plain SGD on the vectors in some rows, by autograd; a plain linear layer's without."""
    if loss is None and type(module) is nn.Linear and is_plain(module):
        return partial(_linear_step, module.weight.detach(), module.bias.detach(), vectors, labels, lr)
    loss_of = loss or classification_loss
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]

    def step(rows: Tensor, losses: Tensor) -> None:
        values = loss_of(module, vectors[rows], labels[rows])
        # Not by torch.optim, which takes longer than the arithmetic of a small step.
        gradients = torch.autograd.grad(values.mean(), parameters, allow_unused=True)
        pairs = [(p, g) for p, g in zip(parameters, gradients, strict=True) if g is not None]
        with torch.no_grad():
            torch._foreach_add_([p for p, _ in pairs], [g for _, g in pairs], alpha=-lr)
        losses.copy_(values.detach())

    return step


@torch.no_grad()
def _linear_step(
    weight: Tensor, bias: Tensor, vectors: Tensor, labels: Tensor, lr: float, rows: Tensor, losses: Tensor
) -> None:
    """A linear layer's step on the mean cross entropy: the operations of autograd, in a fifth of its time."""
    x, y = vectors[rows], labels[rows, None]
    logs = torch.addmm(bias, x, weight.T).log_softmax(1)
    losses.copy_(logs.gather(1, y)[:, 0].neg_())
    of_logs = torch.zeros_like(logs).scatter_(1, y, -1 / len(x))
    slope = torch._log_softmax_backward_data(of_logs, logs, 1, logs.dtype)
    weight.add_(slope.T @ x, alpha=-lr)
    bias.add_(slope.sum(0), alpha=-lr)


def _few_threads(work: int) -> AbstractContextManager[None]:
    """Inside, a step with little work uses one thread, which is quickest."""
    return compute_threads(1 if work < MOST_WORK else torch.get_num_threads())


@contextmanager
def eager() -> Iterator[None]:
    """Inside, the server launches its kernels one by one, as a plain loop does; for comparisons."""
    token = _eager.set(True)
    try:
        yield
    finally:
        _eager.reset(token)


def classification_loss(module: nn.Module, vectors: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of the module's output, per vector."""
    return cross_entropy(module(vectors), labels)


def check_finite(module: nn.Module, what: str, round: int, lr: float, received: Iterable[Tensor]) -> None:
    """Raise if training on the server has broken a module; the advice depends on what the clients had sent."""
    if bool(largest(t.detach() for t in (*module.parameters(), *module.buffers()) if t.is_floating_point()).isfinite()):
        return
    sent = float(largest(received))
    advice = (
        f"lower the learning rate there (--set method.server_lr={lr / 10:g})"
        if sent < SANE
        else f"clients sent values of up to {sent:.1e}, so their training has diverged; lower its learning "
        "rate (--lr) or limit the gradient (--set training.clip=10)"
    )
    raise DivergedError(f"the weights of the server's {what} are no longer finite in round {round}: {advice}.")
