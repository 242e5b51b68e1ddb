"""What prediction needs besides tensors, as JSON: inputs, class names, the method, and how networks are rebuilt.

A run writes one card for all its clients (models/card.json); an exported model has its own.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import torch
from pydantic import Field, ValidationError

import polyfed
from polyfed.addresses import PYTHON
from polyfed.config import Experiment
from polyfed.data import Constants, Dataset
from polyfed.data.tables import Table
from polyfed.errors import InputError
from polyfed.models import Architecture
from polyfed.models.catalogue import FromCatalogue
from polyfed.models.libraries import FromLibrary
from polyfed.population import Population
from polyfed.settings import Settings
from polyfed.shapes import TokenShape, kind_of

FORMAT: Literal[1] = 1
C = TypeVar("C", bound="Blueprint")


class Inputs(Settings):
    """What a model accepts, and what its outputs are called."""

    data: str
    """The name of the data that it was trained on."""
    shape: tuple[Annotated[int, Field(ge=1)], ...]
    """Of one sample: channels, height, width for images."""
    pixels: bool
    """Whether samples are `uint8` images, to be normalised as (pixel / 255 − mean) / std; otherwise as they are."""
    vocabulary: int | None = Field(None, ge=1)
    """How many token ids there are, where samples are such; otherwise none."""
    padding: int | None = None
    """The token id that fills short samples."""
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    classes: int = Field(ge=1)
    class_names: tuple[str, ...] = ()
    """Empty: classes are called by their numbers."""
    table: Constants | None = None
    """How rows of a table become samples, if the run trained on one."""

    @staticmethod
    def of(dataset: Dataset) -> Inputs:
        """The inputs of networks that are trained on these data."""
        return Inputs(
            data=dataset.name,
            shape=dataset.input_shape,
            pixels=dataset.images.dtype == torch.uint8,
            vocabulary=dataset.vocabulary,
            padding=dataset.padding,
            mean=dataset.mean,
            std=dataset.std,
            classes=dataset.classes,
            class_names=dataset.class_names,
            table=None if dataset.table is None else dataset.table.constants,
        )

    def example(self) -> Dataset:
        """A dataset of this kind with a single blank sample, which normalises and names like the real one."""
        kind = torch.uint8 if self.pixels else kind_of(self.input_shape)
        blank, label = torch.zeros(1, *self.shape, dtype=kind), torch.zeros(1, dtype=torch.int64)
        return Dataset(
            self.data,
            blank,
            label,
            self.classes,
            self.mean,
            self.std,
            class_names=self.class_names,
            vocabulary=self.vocabulary,
            padding=self.padding,
            table=None if self.table is None else Table.without_rows(self.table),
        )

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one sample, with what it says about token ids."""
        return self.shape if self.vocabulary is None else TokenShape(self.shape, self.vocabulary, self.padding)


class NetworkCard(Settings):
    """Where a network comes from."""

    kind: Literal["named", "address", "python"]
    """One of polyfed's own by its name, the user's own by the address of its code, or one that was passed in Python."""
    source: str
    """The setting that names it, alone or among others."""
    head_name: str = ""
    """What `model.head` is called in the network that was split at it, in which `model.extractor.X` is X.

    Empty if the head is new.
    """


class ClientCard(Settings):
    """One client of a run."""

    network: str
    counts: tuple[int, ...] = ()
    """Training samples per class, where the method needs them to fetch the server's last knowledge; otherwise empty."""


class Blueprint(Settings):
    """How a client's network and its rule of prediction are rebuilt."""

    format: Literal[1] = FORMAT
    polyfed: str = polyfed.__version__
    inputs: Inputs
    method: dict[str, Any]
    """Its name and its options."""
    training: dict[str, Any]
    rounds: int
    seed: int
    common: str | None
    """The network that defines what clients have in common: the first client's; None where none is known."""
    auxiliary: str
    """The small common network of methods that have one."""
    feature_size: int = Field(ge=0)
    """0 where no common number is agreed on."""
    features: int | None = None
    match: Literal["pool", "project"] = "pool"
    heads: str | list[str | None] | dict[str, str] | None = None
    """The setting `head`: at which layers networks of the user's own are split."""
    networks: dict[str, NetworkCard]


class RunCard(Blueprint):
    """What all models of a run have in common, and each client's network."""

    clients: dict[int, ClientCard]


class ModelCard(Blueprint):
    """An exported model, for people and for `polyfed predict`."""

    file: str
    """The file with the model, in the card's folder."""
    network: str
    client: int
    rule: str
    """The method's own rule of prediction."""
    layers: dict[str, str] = {}
    """What tensors of the private model are called in the network that was split into extractor and head.

    Empty where the head is new.
    """
    accuracy: float | None
    """Share of its test samples that this client predicted correctly in the run's last evaluation."""
    test_samples: int | None
    """How many test samples it has."""
    accuracy_exported: float | None = None
    """The same for the exported model, where the data were there; some rules use what the server learnt last."""
    checked_on: str
    """What the exported model was checked on."""
    licence: str = ""
    must_not_be_used_for: str = ""


def run_card(config: Experiment, population: Population) -> RunCard:
    """The card of a run with these clients."""
    task, method = population.task, population.method
    counts = population.counts if method.kept_fresh else {}
    owned = population.architectures
    known = {each.name: each for each in (*owned.values(), task.architecture, task.auxiliary) if each is not None}
    return RunCard(
        inputs=Inputs.of(population.dataset),
        method=config.model_dump(mode="json")["method"],
        training=config.training.model_dump(mode="json"),
        rounds=config.rounds,
        seed=config.seed,
        common=None if task.architecture is None else task.architecture.name,
        auxiliary=task.auxiliary.name,
        feature_size=task.feature_size,
        features=task.features,
        match=task.match,
        heads=config.model_dump(mode="json")["head"],
        networks={
            name: _network(each, config, population.heads.get(name, ""), is_member=each in owned.values())
            for name, each in known.items()
        },
        clients={
            client: ClientCard(network=each.name, counts=counts[client].tolist() if counts else ())
            for client, each in owned.items()
        },
    )


def _network(architecture: Architecture, config: Experiment, head_name: str, *, is_member: bool) -> NetworkCard:
    if isinstance(architecture.maker, FromCatalogue):
        return NetworkCard(kind="named", source=architecture.name, head_name=head_name)
    if isinstance(architecture.maker, FromLibrary):  # without its file of weights: the model has its own
        return NetworkCard(kind="named", source=architecture.maker.title, head_name=head_name)
    source = config.models if is_member or config.auxiliary is None else config.auxiliary
    kind: Literal["address", "python"] = "python" if source.startswith(PYTHON) else "address"
    return NetworkCard(kind=kind, source=source, head_name=head_name)


def parse_card(kind: type[C], content: bytes | str, where: str) -> C:
    """A card from JSON; one that can't be read is refused in one sentence."""
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        if first["loc"][:1] == ("format",):
            raise InputError(
                f"{where} has a format that this version of polyfed can't read: use a newer one."
            ) from None
        raise InputError(f"{where} is damaged ({place or 'JSON'}: {first['msg'].lower()}): restore it.") from None
