"""A worker's networks, and clients' states that are put into them without being copied."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from polyfed.message import State
from polyfed.methods.parts.network import ClientNetwork


def state_of(network: nn.Module) -> State:
    """A network's parameters and buffers as flat named tensors that share its storage."""
    return {**{n: p.detach() for n, p in network.named_parameters()}, **dict(network.named_buffers())}


def buffer_places(network: nn.Module) -> list[tuple[nn.Module, str, str]]:
    """Where each buffer is (module, attribute) and its name in the state; a shared one has one name."""
    names = {id(buffer): name for name, buffer in network.named_buffers()}
    return [
        (module, attribute, names[id(buffer)])
        for module in network.modules()
        for attribute, buffer in module._buffers.items()
        if buffer is not None
    ]


class Workbench:
    """One worker's networks, one per architecture; a client's state is put into one without copying it."""

    def __init__(self, network_of: Callable[[int], ClientNetwork]) -> None:
        self._network_of = network_of
        self._networks: dict[str, ClientNetwork] = {}
        self._buffers: dict[str, list[tuple[nn.Module, str, str]]] = {}

    def network(self, client: int, architecture: str, state: State) -> ClientNetwork:
        """The client's network; training it changes the tensors of `state` in place."""
        if architecture not in self._networks:
            self._networks[architecture] = self._network_of(client)
            self._buffers[architecture] = buffer_places(self._networks[architecture])
        network = self._networks[architecture]
        for key, parameter in network.named_parameters():
            parameter.data = state[key]
            parameter.grad = None
        for module, attribute, key in self._buffers[architecture]:
            module._buffers[attribute] = state[key]
        return network

    def release(self) -> None:
        """Release the last clients' tensors and gradients, so that their memory can be freed."""
        for network in self._networks.values():
            hollow(network)


def hollow(network: ClientNetwork) -> ClientNetwork:
    """The network without the memory of its parameters, ready for a client's state."""
    for parameter in network.parameters():
        parameter.data = torch.empty(0, device=parameter.device)
        parameter.grad = None
    return network
