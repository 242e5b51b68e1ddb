"""Downloads that are read for many clients at once: each client gets its own, whatever the others get."""

from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from polyfed.engines.client import round as local
from polyfed.engines.client.workbench import state_of
from polyfed.engines.stacked.captured import Stream
from polyfed.engines.stacked.copies import copy_all, copy_states
from polyfed.engines.stacked.receiving import receive_all
from polyfed.engines.stacked.round import uploads
from polyfed.engines.together.joint import JoinedPopulation
from polyfed.message import Message, State
from polyfed.methods.base import Knowledge, Method, Trained
from polyfed.methods.fedproto import FedProto
from polyfed.methods.parts.tools import rows_of_all
from polyfed.methods.standalone import Standalone
from polyfed.population import Population
from tests import support

CLIENTS = (0, 2, 4)
ROUND = 2
LABELS = {0: [0, 3], 2: [1, 2, 3], 4: []}
"""The classes that each client is told about; nobody has all of them, and the last one gets an empty message."""


def population(method: Any) -> Population:
    return support.population(method, models=(support.Wide,), clients=6, classes_per_client=2)


def state(people: Population, client: int) -> State:
    """A state of the client's own: no value occurs in another client's."""
    generator = torch.Generator().manual_seed(client)
    known = state_of(people.new_network(client))
    return {
        name: torch.rand(t.shape, generator=generator) < 0.5 if t.dtype == torch.bool
        else torch.rand(t.shape, generator=generator).to(t.dtype)
        for name, t in known.items()
    }  # fmt: skip


def download(client: int) -> Message:
    labels = torch.tensor(LABELS[client], dtype=torch.int64)
    if not len(labels):
        return Message()
    values = 100.0 * client + torch.arange(len(labels) * support.FEATURES).reshape(-1, support.FEATURES)
    return Message({"prototypes": values}, {"labels": labels})


@pytest.mark.parametrize("method", ["fedproto", "protonorm"])
def test_each_client_receives_what_it_would_alone(method: str) -> None:
    people = population(method)
    downloads = {client: download(client) for client in CLIENTS}
    expected = [state(people, client) for client in CLIENTS]
    for client, own in zip(CLIENTS, expected, strict=True):
        local.receive(people, client, own, downloads[client], ROUND)
    found = [state(people, client) for client in CLIENTS]
    known = [people.knowledge(client, ROUND) for client in CLIENTS]
    assert people.method.receive_all(found, list(downloads.values()), known) is not None
    receive_all(people, CLIENTS, found, downloads, ROUND)
    for client, one, two in zip(CLIENTS, found, expected, strict=True):
        assert one.keys() == two.keys()
        assert all(torch.equal(one[key], two[key]) for key in one)
        changes = any(not torch.equal(one[key], tensor) for key, tensor in state(people, client).items())
        assert changes


def test_only_those_with_a_download_change() -> None:
    people = population("fedproto")
    found = [state(people, client) for client in CLIENTS]
    receive_all(people, CLIENTS, found, {2: download(2)}, ROUND)
    for place, client in enumerate(CLIENTS):
        same = all(torch.equal(found[place][key], tensor) for key, tensor in state(people, client).items())
        assert same == (client != 2)


def test_a_receive_of_ones_own_is_called_for_every_client() -> None:
    class Doubling(FedProto):
        def receive(self, state: Any, message: Message, client: Knowledge) -> State:
            changed = super().receive(state, message, client)
            return {**changed, "prototypes.vectors": 2 * changed["prototypes.vectors"]}

    people = population("fedproto")
    given: Method = people.method
    people = replace(people, method=Doubling(given.config, given.task, given.training))
    found, expected = ([state(people, client) for client in CLIENTS[:2]] for _ in range(2))
    downloads = {client: download(client) for client in CLIENTS[:2]}
    receive_all(people, CLIENTS[:2], found, downloads, ROUND)
    for client, one, two in zip(CLIENTS, found, expected, strict=False):
        row = LABELS[client][0]
        assert torch.equal(one["prototypes.vectors"][row], 2 * downloads[client].tensors["prototypes"][0])
        assert not torch.equal(one["prototypes.vectors"], two["prototypes.vectors"])


def test_downloads_of_other_settings_are_read_by_their_own_method() -> None:
    """Runs that differ in their seed have the same settings; a number of the method, or of training, makes others."""
    given: list[tuple[Any, dict[str, Any]]] = [
        ("fedproto", {}), ("fedproto", {"seed": 1}), ({"name": "fedproto", "weight": 3.0}, {}),
        ("fedproto", {"lr": 0.5}),
    ]  # fmt: skip
    runs = [support.population(method, models=(support.Wide,), **settings) for method, settings in given]
    known = {each.name: getattr(runs[0], each.name) for each in fields(runs[0]) if each.init}
    people = JoinedPopulation(**known, homes={number: (run, 0) for number, run in enumerate(runs)})
    methods = [run.method for run in runs]
    assert [methods.index(people.reader(client)) for client in range(4)] == [0, 0, 2, 3]


def test_a_method_may_use_its_tensors_again_for_the_next_client() -> None:
    """Uploads are moved from a GPU together, but copied one by one."""

    class Reusing(Standalone):
        used = torch.zeros(1)

        def upload(self, client: Trained) -> Message:
            return Message({"value": self.used.add_(1)}, {"labels": self.used.long()})

    people = population("standalone")
    people = replace(people, method=Reusing(*(getattr(people.method, n) for n in ("config", "task", "training"))))
    answers = [Trained(people.knowledge(client, ROUND).counts, ROUND, state(people, client)) for client in CLIENTS]
    on_gpu = SimpleNamespace(method=people.method, device=torch.device("cuda"), home=lambda client: (people, client))
    found = list(uploads(on_gpu, CLIENTS, answers, Stream(torch.device("cpu"))))  # type: ignore[arg-type]
    assert [message.tensors["value"].item() for message in found] == [1.0, 2.0, 3.0]
    assert [message.metadata["labels"].item() for message in found] == [1, 2, 3]


def test_a_class_that_does_not_exist_is_not_written_to_the_next_client() -> None:
    people = population("fedproto")
    found = [state(people, client) for client in CLIENTS[:2]]
    wrong = Message({"prototypes": torch.zeros(1, support.FEATURES)}, {"labels": torch.tensor([people.task.classes])})
    with pytest.raises(IndexError):
        receive_all(people, CLIENTS[:2], found, {0: wrong, 2: wrong}, ROUND)


def test_copies_of_all_kinds_arrive_where_they_belong() -> None:
    """Of another type, in another order in memory, and empty."""
    targets = [torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2, dtype=torch.bool), torch.zeros(0), torch.zeros(())]
    sources = [
        torch.arange(6.0).view(3, 2).T, torch.ones(2, 3), torch.tensor([True, False]), torch.zeros(0), torch.tensor(7),
    ]  # fmt: skip
    copy_all(targets, sources)
    for target, source in zip(targets, sources, strict=True):
        assert torch.equal(target, source.to(target.dtype))


def test_rows_belong_to_their_messages() -> None:
    owners, labels = rows_of_all([torch.tensor([2]), torch.zeros(0, dtype=torch.int64), torch.tensor([0, 1])])
    assert owners.tolist() == [0, 2, 2]
    assert labels.tolist() == [2, 0, 1]


def test_states_are_copied_by_name_and_client_whatever_their_order() -> None:
    people = population("fedproto")
    sources = [state(people, client) for client in CLIENTS]
    targets = [{name: torch.zeros_like(own[name]) for name in reversed(list(own))} for own in sources]
    copy_states(targets, sources)
    for one, two in zip(targets, sources, strict=True):
        assert all(torch.equal(one[key], two[key]) for key in two)
    copy_states([], [])
