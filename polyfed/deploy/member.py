"""One member of a federation, from its site.yaml: its samples, its network, and the site that answers the server."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from pydantic import Field, field_validator
from torch import nn

from polyfed.addresses import importable, names_code
from polyfed.assemble import check_head_trains, example_networks, find_device, gathered
from polyfed.compute import set_precision
from polyfed.config import read_yaml
from polyfed.data import ClientData, Dataset, chosen_test_set, describe_test_set, partition
from polyfed.data.given_test import TestSet
from polyfed.data.own import no_columns
from polyfed.data.splits import parse_split
from polyfed.deploy.checks import checked, checked_name, checked_place, located
from polyfed.deploy.groups import described
from polyfed.deploy.samples import agreed_samples, own_object
from polyfed.deploy.terms import Terms, read_terms
from polyfed.errors import InputError, counted
from polyfed.message import State
from polyfed.methods.base import Method
from polyfed.models import Architecture, SplitNetwork, resolve
from polyfed.population import Population
from polyfed.profile import network_profile
from polyfed.remote import Site
from polyfed.remote.site import Share
from polyfed.settings import Settings


class SiteSettings(Settings):
    """What a site's own file says; nothing of it leaves the site, except its name."""

    name: str = Field(description="the member's name in the terms")
    federation: Path = Field(
        Path("federation.yaml"), description="the terms that this site agrees to; the server must have the same"
    )
    server: str = Field(description="where the server listens, HOST:PORT")
    certificate: Path = Field(
        Path("ca.crt"), description="the certificate of the authority that signed the server's certificate"
    )
    key: Path | None = Field(
        None, description="this site's private key, readable by its owner only; none: NAME.key next to this file"
    )
    data: str = Field(
        description="npz:PATH, folder:PATH, table:PATH, a dataset's name, or package.module:function",
    )
    data_folder: Path | None = Field(None, description=described("data_folder"))
    label: str | None = Field(None, description=described("label"))
    split: str = Field("8:1:1", description="train:validation:test of these samples")
    test_set: TestSet = Field("auto", description=described("test_set"))
    network: str | None = Field(
        None, description="a network's name or package.module:Class; none: the one that the terms name"
    )
    head: str | None = Field(None, description="the layer that is the head of a network of your own; none: the last")
    folder: Path = Field(Path("state"), description="where this site keeps its state, its log and its model")
    share: Share = Field("scores", description="scores: accuracies and losses are sent; nothing: they stay here")
    device: str = Field("auto", description=described("device"))
    tf32: bool = Field(True, description=described("tf32"))

    @field_validator("name", mode="before")
    @classmethod
    def _usable_name(cls, value: object) -> str:
        return checked_name("name", value)

    @field_validator("server")
    @classmethod
    def _has_a_port(cls, value: str) -> str:
        return checked_place("server", value)


@dataclass(frozen=True)
class Member:
    """One member, with what it needs to take part."""

    settings: SiteSettings
    terms: Terms
    home: Path
    """The folder of its site.yaml, where modules and relative paths are looked for."""

    @property
    def name(self) -> str:
        return self.settings.name

    @property
    def number(self) -> int:
        """As which client it takes part."""
        return self.terms.agreement().number(self.name)

    @property
    def key(self) -> Path:
        """Where its private key is."""
        return self.settings.key or self.home / f"{self.name}.key"

    @cached_property
    def dataset(self) -> Dataset:
        """All its samples, with the agreed classes and normalisation."""
        own = self.settings
        if own.label is not None and not own.data.startswith("table:"):
            raise no_columns("label", own.label, own.data)
        common = self.terms.common
        return agreed_samples(own.data, common, self.home, data_folder=own.data_folder, label=own.label)

    @cached_property
    def data(self) -> ClientData:
        """Which of its samples train, validate and test."""
        own, dataset = self.settings, self.dataset
        (found,) = partition(dataset, "iid", 1, split=own.split, seed=self.terms.config.seed, test_set=own.test_set)
        if parse_split(own.split).test and len(found.test) == 0:
            raise InputError(
                f"'{dataset.name}' has {counted(len(dataset), 'sample')}, too few for the test part of split "
                f"{own.split}: give at least 2, or a split without that part, such as 1:0."
            )
        return found

    @cached_property
    def architecture(self) -> Architecture:
        """Its network."""
        own, common = self.settings, self.terms.common.network
        name = own.network or common
        if name is None:
            raise InputError("network is missing: name one, such as cnn2, or your own as package.module:Class.")
        if names_code(name):
            own_object(name, self.home)
        found = resolve(name, own.head)
        if len(found) != 1:
            raise InputError(f"network is '{name}', which stands for {len(found)} networks: name one.")
        if common is not None and found != resolve(common):
            raise InputError(
                f"network is '{name}', but the federation agreed on {common} (task.network): leave it out."
            )
        return found[0]

    def population(self) -> Population:
        """This one client, rehearsed; raises for what would not train."""
        own = self.settings
        device = find_device(own.device)
        set_precision(device, tf32=own.tf32)
        data = [self.data]
        found = _gathered(self.terms, self.dataset, {self.number: self.data}, {self.number: self.architecture}, device)
        return replace(
            found,
            test_set=chosen_test_set(self.dataset, own.split, own.test_set),
            notes=[*describe_test_set(self.dataset, own.split, own.test_set, data), *found.notes],
        )

    def site(
        self,
        population: Population | None = None,
        folder: Path | None = None,
        keep: Callable[[State], None] = lambda state: None,
    ) -> Site:
        """What answers the server; its state is in the member's folder, or in another."""
        own = self.settings
        return Site(
            self.name,
            self.terms.agreement(),
            population or self.population(),
            folder or own.folder / "rounds",
            share=own.share,
            terms=self.terms.difference,
            keep=keep,
        )


def read_member(path: Path, *, trust: bool = False) -> Member:
    """The member that a site.yaml describes.

    Its own code (data, network) is its owner's and is imported. `trust` allows to import code that the terms name.
    """
    return member_of(read_yaml(path, "site"), path.parent, trust=trust)


def member_of(values: Mapping[str, Any], home: Path, *, trust: bool = False) -> Member:
    """The member with these settings; relative paths begin in `home`."""
    settings = located(checked(SiteSettings, values), home)
    importable(home.resolve())
    terms = read_terms(settings.federation, trust=trust)
    if settings.name not in terms.members:
        raise InputError(
            f"name is '{settings.name}', which is not a member in '{settings.federation}'; members are "
            f"{', '.join(terms.members)}."
        )
    return Member(settings, terms, home)


def simulated(members: Sequence[Member], device: str = "cpu") -> Population:
    """All members of a federation as clients of one simulation.

    Each keeps its own samples, split and network. A sequential run has the numbers of the federation.
    """
    terms = members[0].terms
    for member in members:
        difference = terms.difference(member.terms)
        if difference is not None:
            raise InputError(f"'{members[0].name}' and '{member.name}' have different terms: {difference}.")
    numbers = [member.number for member in members]
    if sorted(numbers) != list(range(len(terms.members))):
        raise InputError(
            f"a simulation needs every member once ({', '.join(terms.members)}), but was given "
            f"{', '.join(member.name for member in members)}."
        )
    _check_networks(members)
    starts = [0]
    for member in members:
        starts.append(starts[-1] + len(member.dataset))
    together = Dataset(
        terms.name,
        torch.cat([member.dataset.images for member in members]),
        torch.cat([member.dataset.labels for member in members]),
        terms.common.count,
        terms.common.mean,
        terms.common.std,
        class_names=terms.common.names,
    )
    data = {
        m.number: ClientData(*(part + start for part in m.data.parts))
        for m, start in zip(members, starts[:-1], strict=True)
    }
    owned = {member.number: member.architecture for member in members}
    return _gathered(terms, together, dict(sorted(data.items())), dict(sorted(owned.items())), find_device(device))


def _gathered(
    terms: Terms,
    dataset: Dataset,
    data: Mapping[int, ClientData],
    owned: Mapping[int, Architecture],
    device: torch.device,
) -> Population:
    common, method = terms.common, terms.method()
    examples = example_networks(owned, dataset, terms.config.training, common.features, common.match_features)
    for name, example in examples.items():
        check_head_trains(type(method), name, example)
        _check_head(method, name, example)
    return gathered(terms.config, dataset, data, owned, method, device, examples)


def _check_head(method: Method, name: str, network: SplitNetwork) -> None:
    """The server builds the common head without knowing anybody's network, so all heads must be like that one."""
    if "head" not in method.requires:
        return
    common = method.task.new_head()
    agreed = network_profile("", SplitNetwork(nn.Identity(), common, network.feature_size))
    own = network_profile(name, network)
    if own.head != agreed.head:
        raise InputError(
            f"{method.name} needs the same head in every site, {agreed.head}, but that of {name} has {own.head}: "
            "choose a network that ends with one linear layer with a bias."
        )
    if own.frozen != agreed.frozen:
        raise InputError(
            f"{method.name} shares the head, but of that of {name} {own.frozen} is frozen: leave its parameters "
            "trainable (requires_grad=True)."
        )


def _check_networks(members: Sequence[Member]) -> None:
    first: dict[str, Member] = {}
    for member in members:
        other = first.setdefault(member.architecture.name, member)
        if other.architecture != member.architecture:
            raise InputError(
                f"'{other.name}' and '{member.name}' have different networks called {member.architecture.name}: a "
                "simulation needs different names for them."
            )
