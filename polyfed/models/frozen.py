"""What a user has set to rest in a network: frozen parameters, and modules that were left in evaluation mode.

Both are read once, from the network as it was handed over; training changes the flags of the live network all the time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn
from torch.nn.modules.batchnorm import _NormBase


@dataclass(frozen=True)
class Rest:
    """Names of what rests in a network, whatever phase trains."""

    parameters: frozenset[str] = frozenset()
    """Frozen: `requires_grad` was false."""
    modules: frozenset[str] = frozenset()
    """They stay in evaluation mode, so that neither batch norm's statistics nor dropout come to life."""
    statistics: frozenset[str] = frozenset()
    """Buffers of norms that stay in evaluation mode: these never change."""

    @property
    def tensors(self) -> frozenset[str]:
        """All entries of the network's state that training never changes."""
        return self.parameters | self.statistics


def rest_of(network: nn.Module, prefix: str = "") -> Rest:
    """What rests in a network; `prefix` is put before every name.

    A network that is in evaluation mode as a whole was most likely just used for prediction; that alone asks for
    nothing. Of such a one only the parts whose parameters are all frozen stay in evaluation mode.

    >>> network = nn.Sequential(nn.Linear(2, 3).requires_grad_(False), nn.BatchNorm1d(3).eval())
    >>> sorted(rest_of(network).parameters), sorted(rest_of(network).modules)
    (['0.bias', '0.weight'], ['1'])
    """
    frozen = {name for name, parameter in network.named_parameters() if not parameter.requires_grad}
    resting = {name: module for name, module in network.named_modules() if not module.training}
    if not network.training:
        parts = [f"{name}." if name else "" for name, module in network.named_modules() if _is_frozen(module)]
        resting = {n: m for n, m in resting.items() if any(f"{n}.".startswith(part) for part in parts)}
    statistics = (
        _joined(name, buffer)
        for name, module in resting.items()
        if isinstance(module, _NormBase)
        for buffer, _ in module.named_buffers(recurse=False)
    )
    return Rest(
        frozenset(prefix + name for name in frozen),
        frozenset((prefix + name).rstrip(".") for name in resting),
        frozenset(prefix + name for name in statistics),
    )


def all_rests(networks: Iterator[tuple[str, nn.Module]]) -> Rest:
    """What rests in several networks that stand side by side under these names."""
    found = [rest_of(network, f"{name}.") for name, network in networks]
    return Rest(
        frozenset().union(*(rest.parameters for rest in found)),
        frozenset().union(*(rest.modules for rest in found)),
        frozenset().union(*(rest.statistics for rest in found)),
    )


def _is_frozen(module: nn.Module) -> bool:
    parameters = list(module.parameters())
    return bool(parameters) and not any(parameter.requires_grad for parameter in parameters)


def _joined(module: str, name: str) -> str:
    return f"{module}.{name}" if module else name
