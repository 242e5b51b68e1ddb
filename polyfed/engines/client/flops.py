"""What a round costs: floating-point operations, counted on the real networks, never estimated by hand.

`torch.utils.flop_counter` runs each phase's loss and its gradient once per architecture; a client's round is that
number times its samples and epochs. Matrix products and convolutions count (two operations per multiply-add);
element-wise work and the server's steps do not.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from polyfed.methods.base import Batch, Method, Phase, Probe
from polyfed.methods.parts.network import ClientNetwork
from polyfed.shapes import kind_of

_SAMPLES = 2  # batch norm needs two
_PROBED = ((1, 1), (2, 1), (1, 2))
"""Study and quiz samples of three probes, whose differences tell what one more of each costs."""

Counting: TypeAlias = Callable[[Callable[[], object]], float]
"""Does some work and returns its operations."""


@dataclass(frozen=True)
class ClientFlops:
    """Operations per sample of each phase, of the pass for class statistics, and of the probe's study and quiz."""

    phases: dict[str, float]
    collect: float
    probe: tuple[float, float] = (0.0, 0.0)

    def of_round(self, visits: Mapping[str, int], samples: int, probed: tuple[int, int] = (0, 0)) -> int:
        """Operations of one client in one round, from the samples that were visited, owned and probed."""
        asked = sum(each * count for each, count in zip(self.probe, probed, strict=True))
        return round(asked + self.collect * samples + sum(self.phases[phase] * n for phase, n in visits.items()))


def measured_flops(build: Callable[[], ClientNetwork], method: Method) -> ClientFlops:
    """Count one architecture's operations per sample, with fresh networks.

    Most are counted with two samples on the CPU. Where kernels hide products there, tensors without content show them,
    but these need `torch.compile`, which takes two seconds to import. A network that looks at its data needs real
    tensors again, without the fused kernels.
    """
    attempts: tuple[tuple[Callable[[], ClientNetwork], Counting], ...] = (
        (lambda: build().cpu(), _quick),
        (lambda: build().to("meta"), _thorough),
    )
    for attempt, counting in attempts:
        with suppress(RuntimeError):  # NotImplementedError is one
            return count_flops(attempt(), method, counting)
    return count_flops(build(), method)


def count_flops(network: ClientNetwork, method: Method, counting: Counting | None = None) -> ClientFlops:
    """Count one architecture's operations per sample; the network's state is spent by this, so pass a fresh one."""
    # These modules import this one for ClientFlops.
    from polyfed.engines.client.probing import ask
    from polyfed.engines.client.round import set_modes

    count = counting or _thorough
    device = next(network.parameters()).device
    shape = method.task.input_shape
    x = torch.zeros(_SAMPLES, *shape, device=device, dtype=kind_of(shape))
    y = torch.zeros(_SAMPLES, dtype=torch.int64, device=device)

    def step(phase: Phase) -> None:
        set_modes(network, phase)
        drawn = phase.draw(torch.Generator().manual_seed(0), _SAMPLES) if phase.draw else {}
        views = torch.stack([x, x], 1) if phase.views == 2 else None
        outcome = phase.loss(network, Batch(x, y, views=views, drawn={k: v.to(device) for k, v in drawn.items()}))
        values = outcome[0] if isinstance(outcome, tuple) else outcome
        values.mean().backward()
        network.zero_grad(set_to_none=True)

    def gather() -> Tensor | None:
        with torch.no_grad():
            return method.collect.of(network.eval(), x) if method.collect else None

    def probe(wanted: Probe, *sizes: int) -> None:
        study, quiz = (Batch(x[:1].expand(n, *x.shape[1:]), y[:1].expand(n)) for n in sizes)
        with torch.no_grad():
            ask(wanted, network.eval(), study, quiz)

    with _unfused(network, device):
        phases = {phase.name: count(partial(step, phase)) / _SAMPLES for phase in method.phases()}
        collected = count(gather) / _SAMPLES
        probed = [count(partial(probe, method.probe, *sizes)) for sizes in _PROBED] if method.probe else [0.0] * 3
    if method.collect and method.collect.covariance:
        vectors = gather()
        assert vectors is not None
        collected += 2 * vectors.shape[1] ** 2  # a sample's product with itself
    return ClientFlops(phases, collected, (probed[1] - probed[0], probed[2] - probed[0]))


@contextmanager
def _unfused(network: ClientNetwork, device: torch.device) -> Iterator[None]:
    """Inside, recurrent and attention layers do without their fused kernels, whose products the counter does not see.

    Tensors without content never reach these kernels.
    """
    kinds = (nn.RNNBase, nn.MultiheadAttention)
    if device.type == "meta" or not any(isinstance(module, kinds) for module in network.modules()):
        yield
        return
    attends = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with warnings.catch_warnings(), torch.backends.cudnn.flags(enabled=False):
            warnings.simplefilter("ignore")  # about kinds of GPUs that are not there
            with torch.backends.mkldnn.flags(enabled=False):
                yield
    finally:
        torch.backends.mha.set_fastpath_enabled(attends)


def _thorough(work: Callable[[], object]) -> float:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        work()
    return float(counter.get_total_flops())


def _quick(work: Callable[[], object]) -> float:
    counter = _Sum()
    with counter:
        work()
    return counter.total


class _Sum(TorchDispatchMode):
    """Adds up torch's formulas, as its own counter does, but without importing `torch.compile`.

    Raises where the numbers would differ: operators of higher order, and kernels for attention and recurrent layers.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0.0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, so there is nothing to skip; torch would import the compiler to skip it."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch.utils.flop_counter import flop_registry

        given: dict[str, Any] = kwargs or {}
        if any(kind in str(func) for kind in ("attention", "rnn", "lstm", "gru")):
            raise NotImplementedError(f"{func} is fused")
        formula = flop_registry.get(func._overloadpacket)
        if formula is None:
            with self:  # it may consist of operators that have one
                made = func.decompose(*args, **given)
            return func(*args, **given) if made is NotImplemented else made
        made = func(*args, **given)
        self.total += formula(*args, **given, out_val=made)
        return made
