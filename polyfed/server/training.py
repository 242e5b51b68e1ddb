"""Training on the server: a small module on vectors that clients sent, with plain SGD."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn

from polyfed.compute import capturing, compute_threads
from polyfed.errors import DivergedError
from polyfed.message import largest
from polyfed.methods.parts.tools import cross_entropy

SANE = 1e4
"""Features, logits and weights of networks whose training goes well are smaller than this."""
_eager = ContextVar("eager", default=False)
_WORTH_CAPTURING = 100
"""Steps from which capturing one as a GPU graph costs less than it saves."""
_WORTH_THREADS = 50_000_000
"""Multiplications in a step from which several CPU threads are quicker than one that never waits for another."""


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
    work: int | None = None,
) -> float:
    """Minimise the mean loss over the vectors in shuffled mini-batches; returns the mean loss of the last epoch.

    The loss gives one value per vector and is by default the cross entropy of the module's output. `work` is about how
    many multiplications a step takes; none: as if every weight were used for every vector, forward and backward.
    """
    work = work or 3 * batch_size * sum(parameter.numel() for parameter in module.parameters())

    def chunks() -> Iterator[Tensor]:
        for _ in range(epochs):
            yield from torch.randperm(len(vectors), generator=generator).to(vectors.device).split(batch_size)

    steps = epochs * -(-len(vectors) // batch_size)
    size = batch_size if steps >= _WORTH_CAPTURING else None
    values = take_steps(module, vectors, labels, chunks(), lr, loss=loss, captured=size, work=work)
    return float(torch.cat(values[-(steps // epochs) :]).mean())


def take_steps(
    module: nn.Module,
    vectors: Tensor,
    labels: Tensor,
    chunks: Iterable[Tensor],
    lr: float,
    *,
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor] | None = None,
    captured: int | None = None,
    work: int = 0,
) -> list[Tensor]:
    """A step of SGD on the vectors of each chunk; returns their losses.

    On a GPU, steps of the size `captured` become a graph. A step with little `work` is quickest on one thread.
    """
    loss_of = loss or classification_loss
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]

    def step(chunk: Tensor) -> Tensor:
        values = loss_of(module, vectors[chunk], labels[chunk])
        # Not by torch.optim, which takes longer than the arithmetic of a small step.
        gradients = torch.autograd.grad(values.mean(), parameters, allow_unused=True)
        pairs = [(p, g) for p, g in zip(parameters, gradients, strict=True) if g is not None]
        with torch.no_grad():
            torch._foreach_add_([p for p, _ in pairs], [g for _, g in pairs], alpha=-lr)
        return values.detach()

    run: Callable[[Tensor], Tensor] = step
    if vectors.is_cuda and captured and not _eager.get():
        run = _Replayed(step, captured)
    with compute_threads(1 if work < _WORTH_THREADS else torch.get_num_threads()):
        return [run(chunk) for chunk in chunks]


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


class _Replayed:
    """A step of fixed size as one graph on the GPU, because launching its small kernels takes longer than running them.

    The first steps run without a graph, because a capture needs that; so does a step of another size, such as an
    epoch's last.
    """

    def __init__(self, step: Callable[[Tensor], Tensor], size: int) -> None:
        self._step = step
        self._size = size
        self._plain_steps = 3
        self._side = torch.cuda.Stream()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._chunk = torch.empty(0)
        self._values = torch.empty(0)

    def __call__(self, chunk: Tensor) -> Tensor:
        if len(chunk) != self._size:
            return self._step(chunk)
        if self._plain_steps > 0:
            self._plain_steps -= 1
            return self._on_side_stream(chunk)
        if self._graph is None:
            self._graph = self._capture(chunk)
        self._chunk.copy_(chunk)
        self._graph.replay()
        return self._values.clone()

    def _on_side_stream(self, chunk: Tensor) -> Tensor:
        current = torch.cuda.current_stream()
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            values = self._step(chunk)
        current.wait_stream(self._side)
        return values

    def _capture(self, chunk: Tensor) -> torch.cuda.CUDAGraph:
        self._chunk = chunk.clone()
        graph = torch.cuda.CUDAGraph()
        with capturing(graph):
            self._values = self._step(self._chunk)
        return graph
