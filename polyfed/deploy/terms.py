"""What the members of a federation agree on, from federation.yaml: the method, the task, and who takes part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from polyfed.addresses import PYTHON, importable, names_code, trusting
from polyfed.assemble import check_scored
from polyfed.config import Experiment, experiment, read_yaml
from polyfed.data.tables import read_constants
from polyfed.deploy.checks import checked, checked_name, located, public_key
from polyfed.deploy.groups import CommonTask, ServerSettings
from polyfed.errors import InputError, unknown_name
from polyfed.methods import find_method
from polyfed.methods.base import Method, Task
from polyfed.methods.parts.shared_network import SharedNetwork
from polyfed.models import Architecture, SplitNetwork, resolve
from polyfed.models.layers import Match
from polyfed.normal_form import normal_form
from polyfed.remote import Agreement
from polyfed.remote.agreement import first_difference

AGREED = (
    "method", "rounds", "seed", "training", "participation", "start", "evaluate", "eval_every", "min_replies",
    "reply_bound", "count_bound",
)  # fmt: skip
"""Settings of an experiment that all members share; the rest belongs to one side, or to simulations."""
OF_TASK = ("features", "match_features", "auxiliary")
OF_SERVER = ("device", "tf32", "tracker")
OF_SITES = ("data", "data_folder", "split", "test_set", "models", "network", "head", "label", "share", "folder")


@dataclass(frozen=True)
class Terms:
    """The terms of a federation, checked."""

    name: str
    """The run's name."""
    config: Experiment
    common: CommonTask
    members: Mapping[str, str]
    """Public keys by name; the order gives the clients' numbers."""
    server: ServerSettings

    def agreement(self) -> Agreement:
        """The terms as the remote engine and sites use them."""
        own = self.server
        return Agreement(
            self.name,
            {name: value for name, value in self.plain().items() if name in AGREED},
            self.common.count,
            self.common.sample_shape,
            {name: number for number, name in enumerate(self.members)},
            self.common.mean,
            self.common.std,
            dict(self.members),
            own.reply_timeout,
            own.enough_replies,
            own.grace,
            own.minimum_members,
            self.plain(),
        )

    def experiment(self) -> Experiment:
        """The experiment that the server runs: data and networks are the sites' own."""
        return self.config

    def task(self) -> Task:
        """The task as all sides know it; nobody's own network is part of it."""
        common, config = self.common, self.config
        task = Task(
            input_shape=common.sample_shape,
            classes=common.count,
            rounds=config.rounds,
            seed=config.seed,
            architecture=None if common.network is None else _one("network", common.network),
            auxiliary=_NO_AUXILIARY if common.auxiliary is None else _one("auxiliary", common.auxiliary),
            feature_size=common.features or 0,
            features=common.features,
            match=common.match_features,
        )
        if common.network is None or common.features is not None:
            return task
        return replace(task, feature_size=task.new_model().feature_size)

    def method(self) -> Method:
        """The method with its options, as the server and every site construct it."""
        chosen = find_method(str(self.config.method["name"]))
        return chosen(chosen.Config(**self.config.options), self.task(), self.config.training)

    def plain(self) -> dict[str, Any]:
        """What members agree on, as values for JSON; without the server's own settings."""
        dumped = self.config.model_dump(mode="json")
        return {
            "name": self.name,
            **{name: dumped[name] for name in AGREED},
            "task": self.common.model_dump(mode="json"),
            "members": dict(self.members),
        }

    def difference(self, other: Terms | Mapping[str, Any]) -> str | None:
        """The first value in which the other side's terms differ from these, in a sentence; None if none does."""
        own, theirs = self.plain(), other.plain() if isinstance(other, Terms) else other
        found = first_difference(own, theirs)
        if found is None and list(own["members"]) != list(theirs["members"]):
            found = f"members are {', '.join(own['members'])} here and {', '.join(theirs['members'])} at the server"
        return found


def read_terms(path: Path, *, trust: bool = False) -> Terms:
    """The terms in a file; `trust` allows to import the code that it names."""
    return terms_of(read_yaml(path, "federation"), source=path, trust=trust)


def terms_of(values: Mapping[str, Any], *, source: Path = Path("federation.yaml"), trust: bool = False) -> Terms:
    """Checked terms; relative paths begin where the file `source` is."""
    given = normal_form(values)
    if not given["ray"]:
        given.pop("ray")
    _check_names(given)
    name = checked_name("name", given.pop("name", None))
    server = checked(ServerSettings, _group(given, "server"), "server.{}")
    common = checked(CommonTask, _with_constants(_group(given, "task"), source.parent), "task.{}")
    members = _members(_group(given, "members"))
    _check_trusted(given, common, source, trust=trust)
    if trust:
        importable(source.parent.resolve())
    with trusting(trust):
        config = experiment(
            **given,
            data=f"{PYTHON}sites",
            models=f"{PYTHON}sites",
            clients=len(members),
            checkpoint_every=1,
            confusion="none",
            **{setting: getattr(common, setting) for setting in OF_TASK},
            **{setting: getattr(server, setting) for setting in OF_SERVER},
        )
    terms = Terms(name, config, common, members, located(server, source.parent))
    _check(terms)
    return terms


def _group(given: dict[str, Any], name: str) -> Mapping[str, Any]:
    """Take a group of settings out."""
    values = given.pop(name, None)
    if not isinstance(values, Mapping | None):
        raise InputError(f"{name} is {values!r}, but must be names with values.")
    return values or {}


def _with_constants(task: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
    """The same with the content of the file that `constants` names: members agree on that, wherever they keep it."""
    named = task.get("constants")
    return {**task, "constants": read_constants(folder / named)} if isinstance(named, str) and named != "none" else task


def _check_names(given: Mapping[str, Any]) -> None:
    """Refuse what is no setting of a federation, and say where it belongs."""
    known = [*AGREED, "name", "task", "members", "server"]
    for name in given:
        if name in known:
            continue
        if name in OF_TASK or name in CommonTask.model_fields and name not in OF_SITES:
            raise InputError(f"{name} belongs in the group task: write it as task.{name}, indented below 'task:'.")
        if name in OF_SERVER or name in ServerSettings.model_fields and name not in OF_SITES:
            raise InputError(f"{name} belongs in the group server: indent it below 'server:'.")
        if name in OF_SITES:
            raise InputError(f"{name} belongs to every site's own file (site.yaml): leave it out of the terms.")
        if name in Experiment.model_fields:
            raise InputError(f"{name} is for simulations only: leave it out of the terms.")
        raise unknown_name("setting", name, known)


def _members(given: Mapping[str, Any]) -> dict[str, str]:
    members: dict[str, str] = {}
    owners: dict[str, str] = {}
    for name, line in given.items():
        name = checked_name("the name of a member", str(name))
        key = public_key(line, f"'{name}'")
        if key in owners:
            raise InputError(f"'{owners[key]}' and '{name}' have the same public key: every member needs its own.")
        owners[key] = name
        members[name] = key
    if len(members) < 2:
        raise InputError(
            f"members has {len(members)} {'entry' if len(members) == 1 else 'entries'}, but a federation needs at "
            "least 2: give each a line with its name and its public key."
        )
    return members


def _check_trusted(given: Mapping[str, Any], common: CommonTask, source: Path, *, trust: bool) -> None:
    method = given.get("method")
    named = [*(method.values() if isinstance(method, Mapping) else [method]), common.auxiliary, common.network]
    code = [value for value in named if names_code(value)]
    if code and not trust:
        raise InputError(
            f"'{source}' names code that would be run, '{code[0]}': if you trust it, say so with --trust (in Python "
            "with trust=True)."
        )


def _check(terms: Terms) -> None:
    """Refuse terms under which the method can't work, before anybody joins."""
    common, config, own = terms.common, terms.config, terms.server
    chosen = find_method(str(config.method["name"]))
    needed = chosen.needs(chosen.Config(**config.options))
    if common.features is None:
        if {"features", "head"} & set(needed):
            shared = "the same head" if "head" in needed else "the same number of features"
            raise InputError(
                f"{chosen.name} needs {shared} in every network: set task.features to the number that all networks "
                "are brought to, such as 64."
            )
        if config.options.get("shared_features", 0) is None:
            raise InputError(
                f"{chosen.name} needs to know how many features the shared network has: set method.shared_features, "
                "or task.features, of which it is a quarter by default."
            )
    if "network" in needed and common.network is None:
        raise InputError(f"{chosen.name} needs the same network in every site: name it in task.network.")
    if "network" not in needed and common.network is not None:
        raise InputError(
            f"task.network is '{common.network}', but {chosen.name} lets every site have its own network: leave it out."
        )
    if issubclass(chosen, SharedNetwork) and common.auxiliary is None:
        raise InputError(
            f"{chosen.name} trains a small common network beside every site's own: name it in task.auxiliary, such as "
            "cnn5."
        )
    if own.minimum_members is not None and own.minimum_members > len(terms.members):
        raise InputError(
            f"server.minimum_members is {own.minimum_members}, but the federation has {len(terms.members)} members."
        )
    terms.agreement()
    method = terms.method()
    check_scored(config, method)
    _ = method.agreed_schema  # builds what travels, so that a network that can't be built is refused here


def _one(what: str, name: str) -> Architecture:
    found = resolve(name)
    if len(found) != 1:
        raise InputError(f"task.{what} is '{name}', which stands for {len(found)} networks: name one.")
    return found[0]


def _no_auxiliary(
    name: str, input_shape: tuple[int, ...], classes: int, features: int | None, match: Match
) -> SplitNetwork:
    raise InputError("the method trains a small common network: name it in task.auxiliary, such as cnn5.")


_NO_AUXILIARY = Architecture("auxiliary", _no_auxiliary)
