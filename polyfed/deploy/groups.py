"""The two groups of settings in federation.yaml: the common task, and what only the server reads."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, field_validator, model_validator

from polyfed.config import Experiment
from polyfed.data.tables import Constants
from polyfed.deploy.checks import checked_place
from polyfed.errors import InputError
from polyfed.models.layers import Match
from polyfed.settings import Settings
from polyfed.shapes import TokenShape


def described(name: str) -> str:
    """What an experiment says about a setting of the same name."""
    return str(Experiment.model_fields[name].description)


class CommonTask(Settings):
    """The problem that all members work on."""

    classes: int | list[str] = Field(description="the names of the classes in the agreed order, or their number")
    input_shape: tuple[int, ...] = Field(
        description="shape of one sample: channels, height, width for images", min_length=1
    )
    mean: tuple[float, ...] = Field((), description="per channel, of pixels scaled to [0, 1]; none: float data")
    std: tuple[float, ...] = Field((), description="per channel, likewise")
    vocabulary: int | None = Field(None, ge=1, description="how many token ids there are; none: samples are no tokens")
    padding: int | None = Field(None, ge=0, description="the token id that fills short samples, if there is one")
    features: int | None = Field(
        None, ge=1, description="features that every network is brought to; needed where heads or features are shared"
    )
    match_features: Match = Field("pool", description=described("match_features"))
    auxiliary: str | None = Field(
        None, description="the small common network of fml, fedapen, fedkd, fedmrl and pfedafm"
    )
    network: str | None = Field(None, description="the network of all members, where the method needs the same one")
    constants: Constants | None = Field(
        None, description="for tables: the file that says how their columns become numbers; none: no tables"
    )

    @field_validator("classes", mode="before")
    @classmethod
    def _names_or_number(cls, value: object) -> object:
        given = value if isinstance(value, list | tuple) else None
        wrong = isinstance(value, bool) or not isinstance(value, int | list | tuple)
        if wrong or any(isinstance(name, bool) or not isinstance(name, str | int) for name in given or ()):
            raise InputError(
                f"task.classes is {value!r}, but must be a list of names, such as [cat, dog], or a number; put names "
                "that YAML reads as something else, such as yes and no, in quotes."
            )
        names = [str(name) for name in given or ()]
        repeated = next((name for name in names if names.count(name) > 1), None)
        if repeated is not None:
            raise InputError(f"task.classes has '{repeated}' twice: give every class its own name.")
        if (len(names) if given is not None else int(str(value))) < 2:
            raise InputError(f"task.classes is {value!r}, but there must be at least 2 classes.")
        return value if given is None else names

    @field_validator("mean", "std", mode="before")
    @classmethod
    def _none_is_empty(cls, value: object) -> object:
        return () if value is None or value == "none" else value

    @model_validator(mode="after")
    def _consistent(self) -> CommonTask:
        if self.constants is not None and self.input_shape != (self.constants.size,):
            raise InputError(
                f"task.input_shape is {list(self.input_shape)}, but the columns in task.constants become "
                f"{self.constants.size} numbers: write [{self.constants.size}]."
            )
        if min(self.input_shape) < 1:
            raise InputError(f"task.input_shape is {list(self.input_shape)}, but its sizes must be at least 1.")
        self._check_tokens()
        if not self.mean and not self.std:
            return self
        channels = self.input_shape[0] if len(self.input_shape) == 3 else None
        if channels is None:
            raise InputError(
                f"task.mean and task.std are for images [channels, height, width], but task.input_shape is "
                f"{list(self.input_shape)}: leave them out, and float data are used as they are."
            )
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) != channels:
                raise InputError(
                    f"task.{name} has {len(values)} value{'' if len(values) == 1 else 's'}, but images of shape "
                    f"{list(self.input_shape)} need {channels}, one for each channel."
                )
        if min(self.std) <= 0:
            raise InputError(f"task.std is {list(self.std)}, but every value must be above 0.")
        return self

    def _check_tokens(self) -> None:
        if self.vocabulary is None and self.padding is not None:
            raise InputError("task.padding is for token ids: give task.vocabulary too, or leave it out.")
        if self.vocabulary is None:
            return
        if len(self.input_shape) != 1:
            raise InputError(
                f"task.vocabulary is for token ids, whose shape is their length, but task.input_shape is "
                f"{list(self.input_shape)}: leave it out, or give one size."
            )
        if self.padding is not None and self.padding >= self.vocabulary:
            raise InputError(
                f"task.padding is {self.padding}, but must be one of the ids 0 to {self.vocabulary - 1} "
                "(task.vocabulary)."
            )

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """The shape of one sample, with what it says about token ids."""
        shape = self.input_shape
        return shape if self.vocabulary is None else TokenShape(shape, self.vocabulary, self.padding)

    @property
    def names(self) -> tuple[str, ...]:
        """The classes' names; empty if only their number is agreed on."""
        return () if isinstance(self.classes, int) else tuple(self.classes)

    @property
    def count(self) -> int:
        """How many classes there are."""
        return self.classes if isinstance(self.classes, int) else len(self.classes)


class ServerSettings(Settings):
    """What only the server reads."""

    listen: str = Field("0.0.0.0:9443", description="the address and port where sites reach the server")
    certificate: Path = Field(Path("keys/server.crt"), description="the server's certificate")
    key: Path = Field(Path("keys/server.key"), description="the server's private key, readable by its owner only")
    folder: Path = Field(Path("run"), description="the run's folder")
    minimum_members: int | None = Field(
        2, ge=1, description="with fewer members present, the run pauses; none: all are needed"
    )
    enough_replies: int | None = Field(
        None, ge=1, description="valid replies after which a round waits only for the grace; none: it waits for all"
    )
    grace: float = Field(10.0, ge=0, description="seconds that the others still have then")
    reply_timeout: float = Field(600.0, gt=0, description="seconds after which a round ends without a reply")
    device: str = Field("auto", description=described("device"))
    tf32: bool = Field(True, description=described("tf32"))
    tracker: str = Field("none", description=described("tracker"))

    @field_validator("listen")
    @classmethod
    def _has_a_port(cls, value: str) -> str:
        return checked_place("server.listen", value)
