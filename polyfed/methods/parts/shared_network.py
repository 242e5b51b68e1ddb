"""A small network that every client has beside its private one, and that travels and is averaged."""

from __future__ import annotations

from torch import nn

from polyfed.message import State
from polyfed.methods.base import SplitNetwork
from polyfed.methods.parts.averaged import Averaged
from polyfed.methods.parts.tools import module_state


class SharedNetwork(Averaged):
    """Base of methods whose private networks learn through a homogeneous one, `net.shared`."""

    sends = "a small common network"
    reveals = (
        "Next to what the server sent, these weights are an update from which images and labels can in part be "
        "reconstructed."
    )
    module = "shared"
    weighted = False

    def shared_network(self) -> SplitNetwork:
        """The network that travels, with its initial weights."""
        return self.task.new_auxiliary()

    def first_state(self) -> State:
        return module_state("shared", self.shared_network())

    def client_modules(self, model: SplitNetwork) -> dict[str, nn.Module]:
        return {"shared": self.shared_network()}
