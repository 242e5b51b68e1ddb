"""An experiment as one validated object: from a YAML file, from the command line or from Python; YAML out."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from polyfed.addresses import is_trusted, trusting
from polyfed.data.given_test import TestSet
from polyfed.data.partitions import Partition
from polyfed.errors import InputError, unknown_name
from polyfed.methods import METHODS, find_method
from polyfed.methods.base import Training
from polyfed.models.architectures import Assignment
from polyfed.models.layers import Match
from polyfed.registry import ENGINES, Registry
from polyfed.settings import Settings
from polyfed.yaml_text import RepeatedKey, parse_yaml

_RELEASED_CODE = {
    "epochs": 10, "batch_size": 512, "lr": 0.01, "momentum": 0.9, "weight_decay": 1e-3, "clip": 50.0, "augment": True,
}  # fmt: skip
PRESETS: dict[str, dict[str, Any]] = {
    "paper": {
        "epochs": 1, "batch_size": 64, "lr": 0.01, "momentum": 0.0, "weight_decay": 0.0, "clip": None, "augment": False,
    },
    "released-code": _RELEASED_CODE,
    "batch-64": {**_RELEASED_CODE, "batch_size": 64},
}  # fmt: skip
"""Training settings by name."""

PRESET_TITLES: dict[str, str] = {
    "paper": "plain SGD, as the papers' texts say, with batch 64",
    "released-code": "as pFedES's code, batch 512: one step per epoch with 100 clients on CIFAR-100",
    "batch-64": "released-code with batch 64, where the published gains appear",
}

SHORTCUTS = ("epochs", "batch_size", "lr")
"""Training settings that may stand at the top level of an experiment."""


class RaySettings(Settings):
    """Where the ray engine finds its hosts."""

    address: str | None = Field(
        None, min_length=1, description="HOST:PORT of the cluster to join; none: start Ray on this machine"
    )
    hosts: int | None = Field(
        None, ge=1, description="processes that train clients; none: one per GPU, or per CPU and at most 8 on a machine"
    )
    cpus: int | None = Field(
        None,
        ge=1,
        description="CPUs of each host, which trains that many clients at once; none: all, shared evenly",
    )
    gpus: int | None = Field(
        None, ge=0, le=1, description="GPUs of each host; none: 1 if the device is a GPU, otherwise 0"
    )


GROUPS: dict[str, type[BaseModel]] = {"training": Training, "ray": RaySettings}
"""Settings that are groups of settings."""


class Experiment(Settings):
    """Everything that determines a run's numbers, and a few settings that do not."""

    method: dict[str, Any] = Field(description="name and options of the method")
    data: str = Field("digits", description="a dataset's name, or npz:PATH")
    data_folder: Path | None = Field(None, description="where datasets are; none: $POLYFED_DATA or ./data")
    partition: Partition = Field("shares", description="how samples are distributed among clients")
    classes_per_client: int = Field(2, ge=1, description="classes of each client (shares, pathological)")
    alpha: float = Field(0.1, gt=0, description="concentration of the Dirichlet partition; small is uneven")
    min_samples: int | None = Field(
        None, ge=1, description="fewest samples per client; none: with dirichlet 40 or half an even share, otherwise 1"
    )
    split: str = Field("8:1:1", description="train:validation:test within each client, or a paper's name")
    test_set: TestSet = Field(
        "auto",
        description="whether a test set that comes with the data is kept apart or pooled with the rest; auto: apart "
        "for your own data, pooled for named datasets",
    )
    clients: int = Field(10, ge=1, description="clients in the federation")
    participation: float = Field(1.0, gt=0, le=1, description="share of the clients that take part in a round")
    models: str = Field("papers", description="a group, networks separated by commas, or package.module:factory")
    head: str | list[str] | dict[str, str] | None = Field(
        None,
        description="the layer that is the head in your own networks, or one for each of them, separated by commas; "
        "none: the last linear one",
    )
    assignment: Assignment = Field("cycle", description="how networks are distributed among clients")
    features: int | None = Field(None, ge=1, description="features every extractor gives; none: its own number")
    match_features: Match = Field(
        "pool", description="reach that number by pooling along features or by a learned projection"
    )
    auxiliary: str | None = Field(
        None,
        description="the small common network of mutual-learning methods; none: the group's, without one the smallest",
    )
    start: Literal["architecture", "client"] = Field(
        "architecture", description="clients of one architecture start from the same weights, or each from its own"
    )
    rounds: int = Field(20, ge=1, description="rounds of communication")
    training: Training = Field(default_factory=Training, description="how clients train")
    seed: int = Field(0, ge=0, description="determines everything random in the run")
    evaluate: Literal["after-training", "after-download"] = Field(
        "after-training", description="score clients as they are, or as if each had just received the next download"
    )
    eval_every: int = Field(1, ge=1, description="rounds between two evaluations of all clients")
    confusion: Literal["ends", "every", "none"] = Field(
        "ends", description="when to record what is predicted as what: in the last round and the best, or always"
    )
    devices: str | None = Field(
        None, min_length=1, description="simulate how long rounds take: uniform, three-tier or a CSV file's path"
    )
    deadline: float | None = Field(
        None, gt=0, description="simulated seconds after which a round ends without the replies that are missing"
    )
    min_replies: int = Field(1, ge=1, description="valid replies that a round needs")
    reply_bound: float | None = Field(
        100.0, gt=1, description="how many times as large as usual a reply may be; none: no limit"
    )
    count_bound: int | None = Field(
        None, ge=1, description="the most samples a reply may claim; none: as many as the largest client trains on"
    )
    engine: Annotated[str, ENGINES] = Field("auto", description="where clients train")
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N")
    tf32: bool = Field(
        True, description="on a GPU, multiply with 10 bits of mantissa instead of 23 where supported: much faster"
    )
    workers: int | None = Field(None, ge=1, description="threads of the threads engine; none: one per core")
    memory_budget: float | None = Field(
        None,
        gt=0,
        description="gigabytes of client states kept in memory; none: half of the machine's, a third of a GPU's",
    )
    ray: RaySettings = Field(default_factory=RaySettings, description="the cluster of the ray engine")
    checkpoint_every: int | None = Field(
        None, ge=1, description="rounds between checkpoints; none: chosen to take at most 3 % of the time"
    )

    @field_validator("method", mode="before")
    @classmethod
    def _complete_method(cls, value: object) -> dict[str, Any]:
        """A name alone means that method with its defaults; options are checked against the method's own config."""
        if isinstance(value, list | tuple | set):
            raise InputError("method is a list, but a run has one method: use one run per method.")
        given: dict[str, Any] = dict(value) if isinstance(value, Mapping) else {"name": value}
        name = given.pop("name", None)
        if METHODS.is_one(name):
            name = METHODS.register(name)
        elif name is not None and not isinstance(name, str):
            raise InputError(
                f"method is a value of type {type(name).__name__}, but must be a name, a subclass of polyfed.Method "
                "or a mapping with a name and options."
            )
        if not isinstance(name, str):
            raise InputError(
                "the experiment names no method; add 'method: fedproto' or another name from `polyfed methods`."
            )
        try:
            config = find_method(name).Config(**with_nones(find_method(name).Config, given))
        except ValidationError as error:
            raise one_sentence(error, find_method(name).Config, f"method.{{}} of {name}") from error
        return {"name": name, **config.model_dump(mode="json")}

    @field_validator("engine", mode="before")
    @classmethod
    def _known_engine(cls, value: object) -> str:
        """A name, or a class of the user's own. What a file names is looked for later, if it is needed."""
        if ENGINES.is_one(value):
            return ENGINES.register(value)  # type: ignore[arg-type]
        if not isinstance(value, str):
            raise InputError(
                f"engine is a value of type {type(value).__name__}, but must be a name, package.module:Class or a "
                "subclass of polyfed.Engine."
            )
        if value not in ENGINES.reserved and is_trusted("engine"):
            ENGINES.find(value)
        return value

    @field_validator("devices", mode="before")
    @classmethod
    def _path_as_text(cls, value: object) -> object:
        return str(value) if isinstance(value, Path) else value

    @model_validator(mode="before")
    @classmethod
    def _normal_form(cls, values: Any) -> Any:
        """Accept hyphens, training's shortcuts at the top level, a preset; drop what a run's record adds."""
        if not isinstance(values, Mapping):
            raise InputError("an experiment is a mapping of names to values, such as 'method: fedproto'.")
        normal = normal_form(values)
        for remark in ("versions", "tuned"):
            normal.pop(remark, None)
        normal.setdefault("method", None)  # so that the error says what to write
        nested = {name: with_nones(model, normal[name]) for name, model in GROUPS.items()}
        return {**with_nones(cls, normal), **nested}

    @model_validator(mode="after")
    def _enough_participants(self) -> Experiment:
        if self.min_replies > self.participants:
            raise InputError(
                f"min_replies is {self.min_replies}, but must be at most {self.participants}, "
                f"because that many of the {self.clients} clients take part in a round."
            )
        return self

    @model_validator(mode="after")
    def _deadline_needs_devices(self) -> Experiment:
        if self.deadline is not None and self.devices is None:
            raise InputError(
                f"deadline is {self.deadline:g}, but without devices no time is simulated: add devices, such as "
                "'devices: three-tier', or leave the deadline out."
            )
        return self

    @property
    def participants(self) -> int:
        """How many clients take part in a round: at least one."""
        return share_of(self.clients, self.participation)

    @property
    def options(self) -> dict[str, Any]:
        """The method's options without its name."""
        return {name: value for name, value in self.method.items() if name != "name"}

    def to_yaml(self) -> str:
        """The complete experiment, with the versions it ran on; `polyfed run` reads it."""
        versions = {name: version(name) for name in ("polyfed", "torch", "torchvision", "numpy")}
        content = {**self.model_dump(mode="json"), "versions": {"python": platform.python_version(), **versions}}
        return yaml.safe_dump(content, sort_keys=False)


def share_of(clients: int, participation: float) -> int:
    """How many of these clients take part: at least one."""
    return max(1, math.floor(participation * clients + 1e-9))


def experiment(**values: Any) -> Experiment:
    """A checked experiment; an error is one sentence.

    >>> experiment(method="fedproto", rounds=5, lr=0.1).training.lr
    0.1
    """
    try:
        return Experiment(**values)
    except ValidationError as error:
        raise one_sentence(error, Experiment, "{}") from error


def read_experiment(path: str | Path, *, trust: bool = False, **changes: Any) -> Experiment:
    """The experiment in a YAML file, with some values replaced; `trust` allows to import the code that it names."""
    content = read_yaml(Path(path))
    with trusting(trust, named_by(changes)):
        return experiment(**merged(content, changes))


def read_yaml(path: Path) -> dict[str, Any]:
    """The names and values in an experiment's file."""
    try:
        content = parse_yaml(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"can't read the experiment '{path}': {getattr(error, 'strerror', None) or error}.") from error
    except RepeatedKey as error:
        raise InputError(f"'{path}' {error}: keep one of them.") from error
    except (yaml.YAMLError, RecursionError) as error:
        detail = " ".join(str(error).split())
        raise InputError(f"'{path}' is not valid YAML: {detail}.") from error
    if not isinstance(content, dict):
        raise InputError(f"'{path}' is not an experiment; it needs names and values, such as 'method: fedproto'.")
    return content


def named_by(changes: Mapping[str, Any]) -> set[str]:
    """The settings whose code is what these changes say, not what a file says."""
    method = changes.get("method")
    options = set(method) - {"name"} if isinstance(method, Mapping) else set()
    renamed = method is not None and (not isinstance(method, Mapping) or "name" in method)
    return {*(changes.keys() - {"method"}), *options, *(["method"] if renamed else [])}


def merged(content: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The content with the changes applied; options of the method and settings in groups are replaced one by one.

    >>> merged({"method": "fedproto", "lr": 0.1}, {"training": {"lr": 0.2}})
    {'method': {'name': 'fedproto'}, 'training': {'lr': 0.2}, 'ray': {}}
    """
    before, after = normal_form(content), normal_form(changes)
    result = {**before, **after, **{group: {**before[group], **after[group]} for group in GROUPS}}
    old, new = before.get("method"), after.get("method")
    if isinstance(old, Mapping) and isinstance(new, Mapping) and new.get("name", old.get("name")) == old.get("name"):
        result["method"] = {**old, **new}
    return result


def normal_form(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same with underscores for hyphens, the method as a mapping, preset and shortcuts as part of the training."""
    flat = _underscored(values)
    method, preset = flat.get("method"), flat.pop("preset", None)
    if method is not None:
        flat["method"] = {"name": method} if isinstance(method, str) else method
    if isinstance(method, Mapping):
        flat["method"] = _underscored(method)
    nested, ray = _group(flat, "training", "lr: 0.1"), _group(flat, "ray", "hosts: 2")
    if preset is not None and preset not in PRESETS:
        raise unknown_name("preset", str(preset), PRESETS)
    shortcuts = {name: flat.pop(name) for name in SHORTCUTS if name in flat}
    given = {name: value for name, value in shortcuts.items() if value is not None}
    for name in given.keys() & nested.keys():
        if given[name] != nested[name]:
            raise InputError(
                f"{name} is {given[name]!r} at the top level and {nested[name]!r} under training: keep one of them."
            )
    return {**flat, "training": {**PRESETS.get(preset, {}), **nested, **given}, "ray": ray}


def _group(flat: dict[str, Any], name: str, example: str) -> dict[str, Any]:
    """Take a group of settings out."""
    values = flat.pop(name, None)
    if isinstance(values, BaseModel):
        values = values.model_dump()
    if not isinstance(values, Mapping | None):
        raise InputError(f"{name} is {values!r}, but must be names with values, such as '{example}'.")
    return _underscored(values or {})


def with_nones(model: type[BaseModel], values: Mapping[str, Any]) -> dict[str, Any]:
    """Read the word none as no value where a setting may have none; YAML itself has only null."""
    optional = {name for name, info in model.model_fields.items() if type(None) in get_args(info.annotation)}
    return {
        name: None if name in optional and isinstance(value, str) and value.lower() == "none" else value
        for name, value in values.items()
    }


def _underscored(values: Mapping[str, Any]) -> dict[str, Any]:
    return {str(name).replace("-", "_"): value for name, value in values.items()}


def one_sentence(error: ValidationError, model: type[BaseModel], label: str) -> InputError:
    """The first complaint of a validation as one sentence that names the field, the value and what is allowed."""
    first = error.errors()[0]
    # After a setting's name, pydantic may add the type that it tried, which means nothing to a user.
    path = [str(part) for part in first["loc"]][: 2 if first["loc"][:1] and first["loc"][0] in GROUPS else 1]
    name = label.format(".".join(path) or "value")
    if first["type"] == "extra_forbidden":
        known = list((model if len(path) == 1 else GROUPS[path[0]]).model_fields)
        if model is Experiment and len(path) == 1:
            known += [
                *SHORTCUTS,
                "preset",
                *(f"{group}.{name}" for group in GROUPS for name in GROUPS[group].model_fields),
            ]
        problem = unknown_name("setting", path[-1], known)
        return InputError(str(problem).replace(f"'{path[-1]}'", f"'{name}'", 1))
    if first["type"] == "missing":
        return InputError(f"{name} is missing.")
    return InputError(f"{name} is {first['input']!r}, but {allowed(model, path, first['msg'])}.")


def allowed(model: type[BaseModel], path: list[str], message: str) -> str:
    """What a field accepts, in words: its range or its choices."""
    for part in path[:-1]:
        nested = model.model_fields[part].annotation if part in model.model_fields else None
        if isinstance(nested, type) and issubclass(nested, BaseModel):
            model = nested
    described = describe_range(model, path[-1]) if path[-1] in model.model_fields else ""
    return f"must be {described}" if described else message[:1].lower() + message[1:]


def typed(value: object) -> str:
    """A value as a user would type it.

    >>> typed(None), typed(True), typed(0.1), typed("8:1:1")
    ('none', 'true', '0.1', '8:1:1')
    """
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def describe_range(model: type[BaseModel], name: str) -> str:
    """The values a field accepts, in words.

    >>> describe_range(Experiment, "participation"), describe_range(Experiment, "assignment")
    ('a number greater than 0 and at most 1', 'one of cycle, random')
    """
    info = model.model_fields[name]
    for names in info.metadata:
        if isinstance(names, Registry):
            return f"one of {', '.join(names.choices)}, or package.module:Class"
    choices = [c for c in (info.annotation, *get_args(info.annotation)) if getattr(c, "__origin__", None) is Literal]
    if choices:
        return "one of " + ", ".join(str(choice) for choice in get_args(choices[0]))
    types = {info.annotation, *get_args(info.annotation)}
    kinds = {bool: "true or false", int: "a whole number", float: "a number", str: "text", Path: "a path"}
    noun = next((noun for kind, noun in kinds.items() if kind in types), "")
    words = {"gt": "greater than", "ge": "at least", "lt": "less than", "le": "at most"}
    limits = [
        f"{word} {getattr(limit, key):g}"
        for limit in info.metadata
        for key, word in words.items()
        if hasattr(limit, key)
    ]
    text = " ".join(part for part in (noun, " and ".join(limits)) if part)
    return f"{text}, or none" if text and type(None) in types else text
