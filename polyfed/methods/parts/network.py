"""What a loss sees of a client: its private model and the method's modules beside it, and batches of its data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.func import functional_call

from polyfed.errors import InputError
from polyfed.models import SplitNetwork
from polyfed.models.frozen import all_rests


class ClientNetwork(nn.Module):
    """A client's private model (`net.model`) and every module that the method puts beside it (`net.proxy`, …).

    `net(x)`, `net.features(x)` and `net.head(z)` are the private model's. The state of all of it is one flat mapping
    of names such as `model.head.weight` or `proxy.0.bias`.
    """

    def __init__(self, model: SplitNetwork, modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.model = model
        for name, module in modules.items():
            if hasattr(self, name):
                raise InputError(f"a method's module can't be called '{name}', which every client network already has.")
            self.add_module(name, module)
        self.rest = all_rests(self.named_children())
        """What the makers of these modules froze or left in evaluation mode; no phase changes it."""

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(x)
        return logits

    def features(self, x: Tensor) -> Tensor:
        """The private extractor's features [batch, K]."""
        return self.model.features(x)

    def head(self, z: Tensor) -> Tensor:
        """The private head's logits of features."""
        logits: Tensor = self.model.head(z)
        return logits

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


class Applied(nn.Module):
    """A function of a client network as a module, so that the network's state can be replaced for one call."""

    def __init__(self, network: ClientNetwork, function: Callable[..., object]) -> None:
        super().__init__()
        self.network = network
        self._function = function

    def forward(self, *arguments: object) -> object:
        return self._function(self.network, *arguments)

    def on(self, state: Mapping[str, Tensor]) -> Callable[..., Any]:
        """The function with these tensors in the network, in place of those of the same names."""
        named = {f"network.{name}": tensor for name, tensor in state.items()}
        return lambda *arguments: functional_call(self, named, arguments)


@dataclass(frozen=True)
class Batch:
    """A batch of one client's training samples, as its loss sees it.

    `mask` marks the real samples of a padded batch; None means that all are real. The engine averages over real
    samples, so only a loss that compares samples with each other needs it. `views` are two augmentations of the images
    [batch, 2, …], for phases with `views=2`; `drawn` is what the phase's own `draw` produced.
    """

    x: Tensor
    y: Tensor
    mask: Tensor | None = None
    views: Tensor | None = None
    drawn: Mapping[str, Tensor] = field(default_factory=dict)
