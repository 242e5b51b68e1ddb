"""A client's network and rule of prediction, from a card and named tensors: no data and no other clients are needed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

import torch
from pydantic import ValidationError
from torch import Tensor

from polyfed.addresses import names_code, trusting
from polyfed.compute import out_of_memory
from polyfed.engines.client.workbench import state_of
from polyfed.errors import InputError, first_line
from polyfed.export.card import Blueprint, RunCard
from polyfed.message import State
from polyfed.methods import find_method
from polyfed.methods.base import Knowledge, Method, Server, Task, Training
from polyfed.methods.parts.network import ClientNetwork
from polyfed.models import Architecture, Models, SplitNetwork, resolve
from polyfed.models.layers import Match
from polyfed.records import RunFolder


@dataclass(frozen=True)
class Missing:
    """Stands for a network that can't be built here; a client that does not need it is not affected."""

    reason: str

    def __call__(
        self, name: str, input_shape: tuple[int, ...], classes: int, features: int | None, match: Match
    ) -> SplitNetwork:
        return self._refuse()

    def _refuse(self) -> NoReturn:
        raise InputError(self.reason)


def rebuilt(
    card: Blueprint, network: str, models: Models | None, *, trust: bool, where: str
) -> tuple[Method, ClientNetwork]:
    """The method, and a new network of this name with the method's modules beside it; `where` is what errors name."""
    with trusting(trust):
        found = {name: _architecture(card, name, models, trust, where) for name in card.networks}
        unknown = {network, card.common or network, card.auxiliary} - found.keys()
        if unknown:
            raise InputError(f"{where} is damaged (it describes no network '{sorted(unknown)[0]}'): restore it.")
        inputs = card.inputs
        task = Task(
            input_shape=inputs.input_shape,
            classes=inputs.classes,
            rounds=card.rounds,
            seed=card.seed,
            architecture=found[card.common] if card.common else None,
            auxiliary=found[card.auxiliary],
            feature_size=card.feature_size,
            features=card.features,
            match=card.match,
        )
        chosen = find_method(str(card.method.get("name")))
        options = {name: value for name, value in card.method.items() if name != "name"}
        try:
            method = chosen(chosen.Config(**options), task, Training(**card.training))
        except ValidationError as error:
            raise InputError(f"{where} is damaged ({error.errors()[0]['msg'].lower()}): restore it.") from None
        try:
            model = task.new_model(found[network])
            return method, ClientNetwork(model, method.client_modules(model)).cpu()
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            raise InputError(f"{where} describes a network that does not fit into memory.") from error


def _architecture(card: Blueprint, name: str, models: Models | None, trust: bool, where: str) -> Architecture:
    described = card.networks[name]
    if described.kind == "named" and not names_code(described.source):
        return resolve(described.source)[0]
    if models is not None:
        given = {architecture.name: architecture for architecture in resolve(models, card.heads)}
        known = ", ".join(sorted(given))
        return given.get(name) or Architecture(
            name, Missing(f"the network '{name}' is not among the models given ({known}): pass what the run was given.")
        )
    if described.kind == "python":
        return Architecture(
            name,
            Missing(f"the network '{name}' was passed in Python; pass it again: polyfed.load_client(…, models=…)."),
        )
    if not trust:
        reason = (
            f"{where} names code that would be run, '{described.source}': if you trust it, say so with --trust (in "
            "Python with trust=True)."
        )
        return Architecture(name, Missing(reason))
    found = {architecture.name: architecture for architecture in resolve(described.source, card.heads)}
    return found.get(name) or Architecture(name, Missing(f"'{described.source}' has no network '{name}' any more."))


def filled(network: ClientNetwork, state: Mapping[str, Tensor], where: str) -> ClientNetwork:
    """The network with these tensors, in evaluation mode; they must be exactly its own."""
    own = state_of(network)
    for name in sorted(own.keys() | state.keys()):
        if name not in own or name not in state:
            raise unfit(where, "its network", f"'{name}' is {'new' if name in state else 'missing'}")
        if own[name].shape != state[name].shape or own[name].dtype != state[name].dtype:
            raise unfit(where, "its network", f"'{name}' has another shape or type")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(state[name])
    return network.eval()


def unfit(where: str, what: str, difference: str) -> InputError:
    """The error for a saved state that is not of the form that this version of polyfed makes."""
    return InputError(
        f"{where} does not fit {what}: {difference}; if another version of polyfed made it, read it with that one."
    )


def with_last_knowledge(
    method: Method, server: Server, client: int, state: Mapping[str, Tensor], knowledge: Knowledge
) -> State:
    """A client's state after one more download, as far as it holds nothing but the server's knowledge."""
    download = method.download(server, client, knowledge.classes if method.announces_classes else None)
    return method.refreshed(state, download, knowledge)


def last_server(method: Method, folder: RunFolder, seed: int, rounds: int) -> Server:
    """The server as it was at the end of a run."""
    server = Server(seed, round=rounds)
    method.start(server)
    try:
        server.load(folder.server_state())
    except RuntimeError as error:
        raise unfit(f"the server's state in '{folder.path}'", "its method", first_line(error)) from error
    return server


def client_of_run(
    folder: RunFolder, card: RunCard, client: int, models: Models | None, *, trust: bool
) -> tuple[Method, ClientNetwork]:
    """A client of a finished run: the method, and its network with what the server knew at the end."""
    state = folder.model_state(client)
    own = card.clients[client]
    where = f"'{folder.path / 'models' / 'card.json'}'"
    method, network = rebuilt(card, own.network, models, trust=trust, where=where)
    if method.kept_fresh:
        knowledge = Knowledge(torch.tensor(own.counts, dtype=torch.int64), card.rounds)
        server = last_server(method, folder, card.seed, card.rounds)
        state = with_last_knowledge(method, server, client, state, knowledge)
    return method, filled(network, state, f"the model of client {client} in '{folder.path}'")
