"""What a round costs: floating-point operations, counted on the real networks, never estimated by hand.

`torch.utils.flop_counter` runs each phase's loss and its gradient once per architecture; a client's round is that
number times its samples and epochs. Matrix products and convolutions count (two operations per multiply-add);
element-wise work and the server's steps do not.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from polyfed.methods.base import Batch, Method, Phase, Probe
from polyfed.methods.parts.network import ClientNetwork
from polyfed.shapes import kind_of

_SAMPLES = 2  # batch norm needs two
_PROBED = ((1, 1), (2, 1), (1, 2))
"""Study and quiz samples of three probes, whose differences tell what one more of each costs."""


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


def count_flops(network: ClientNetwork, method: Method) -> ClientFlops:
    """Count one architecture's operations per sample; the network's state is spent by this, so pass a fresh one."""
    # These modules import this one for ClientFlops.
    from polyfed.engines.client.probing import ask
    from polyfed.engines.client.round import set_modes

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
        phases = {phase.name: _count(partial(step, phase)) for phase in method.phases()}
        collected = _count(gather)
        probed = [_count(partial(probe, method.probe, *sizes)) for sizes in _PROBED] if method.probe else [0.0] * 3
    if method.collect and method.collect.covariance:
        vectors = gather()
        assert vectors is not None
        collected += 2 * vectors.shape[1] ** 2  # a sample's product with itself
    per_sample = [_SAMPLES * (more - probed[0]) for more in probed[1:]]
    return ClientFlops(phases, collected, (per_sample[0], per_sample[1]))


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


def _count(work: Callable[[], object]) -> float:
    with FlopCounterMode(display=False) as counter:
        work()
    return float(counter.get_total_flops()) / _SAMPLES
