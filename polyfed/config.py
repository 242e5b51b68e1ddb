"""An experiment as one validated object: from a YAML file, from the command line or from Python; YAML out."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

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
from polyfed.normal_form import SHORTCUTS, normal_form, with_nones
from polyfed.ranges import allowed
from polyfed.registry import ENGINES
from polyfed.settings import Settings
from polyfed.trackers import checked_trackers
from polyfed.yaml_text import RepeatedKey, parse_yaml, problem_of


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
    data: str = Field(
        "digits", description="a dataset's name, or your own as npz:PATH, folder:PATH, table:PATH; hf:NAME from the hub"
    )
    label: str | None = Field(
        None,
        min_length=1,
        coerce_numbers_to_str=True,
        description="the column that holds the classes, in data with columns",
    )
    client: str | None = Field(
        None, min_length=1, coerce_numbers_to_str=True, description="the column that says whose a sample is"
    )
    image: str | None = Field(
        None,
        min_length=1,
        coerce_numbers_to_str=True,
        description="the column that holds the samples; none: it is found",
    )
    data_folder: Path | None = Field(None, description="where datasets are; none: $POLYFED_DATA or ./data")
    partition: Partition = Field(
        "shares",
        description="how samples are distributed among clients; natural, if the data say whose they are; given: lists "
        "of indices, from Python only",
    )
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
    clients: int = Field(10, ge=1, description="clients in the federation; with natural, as many as the data have")
    participation: float = Field(1.0, gt=0, le=1, description="share of the clients that take part in a round")
    models: str = Field(
        "papers",
        description="a group, networks separated by commas, or package.module:factory; left out: papers for images, "
        "signal4, text4 or tabular4 for other samples",
    )
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
    tracker: str = Field(
        "none", description="where to follow the run: tensorboard, mlflow, wandb, or several, separated by commas"
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

    @field_validator("tracker", mode="before")
    @classmethod
    def _known_trackers(cls, value: object) -> str:
        return checked_trackers(value)

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
    def given(self) -> dict[str, Any]:
        """What was set, without what is only a default."""
        return self.model_dump(exclude_unset=True)

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


_WRITTEN_BY = {
    "experiment": "`polyfed init {}` writes one to start from",
    "site": "`polyfed site init {}` writes one to start from",
    "federation": "its coordinator writes it with `polyfed server init`",
}
"""By the kind of a file, how to come by one that does not exist."""


def read_yaml(path: Path, kind: Literal["experiment", "site", "federation"] = "experiment") -> dict[str, Any]:
    """The names and values in the file of an experiment, or of something else whose settings are written like that."""
    try:
        content = parse_yaml(path.read_text())
    except OSError as error:
        remedy = f"; {_WRITTEN_BY[kind].format(path)}" if isinstance(error, FileNotFoundError) else ""
        raise InputError(f"can't read the {kind} '{path}': {error.strerror or error}{remedy}.") from error
    except UnicodeDecodeError as error:
        raise InputError(f"can't read the {kind} '{path}': it is not text in UTF-8.") from error
    except RepeatedKey as error:
        raise InputError(f"'{path}' {error}: keep one of them.") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise InputError(f"'{path}' is not valid YAML: {problem_of(error)}.") from error
    if not isinstance(content, dict):
        article, example = ("an", "method: fedproto") if kind == "experiment" else ("a", "name: amber")
        raise InputError(f"'{path}' is not {article} {kind}; it needs names and values, such as '{example}'.")
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
        setting, of, whose = name.partition(" of ")
        return InputError(str(problem).replace(f"'{path[-1]}'", f"'{setting}'{of}{whose}", 1))
    if first["type"] == "missing":
        return InputError(f"{name} is missing.")
    accepted = allowed(model, path, first["msg"])
    if first["type"] == "finite_number":
        accepted = accepted.replace("a number", "a finite number", 1)
    return InputError(f"{name} is {_shown(first['input'])}, but {accepted}.")


def _shown(value: object) -> str:
    """A value in a message; one that takes more than a line, such as an array, only by its type."""
    text = repr(value)
    return text if len(text) <= 80 and "\n" not in text else f"a value of type {type(value).__name__}"
