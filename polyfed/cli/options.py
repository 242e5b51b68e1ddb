"""The options that describe an experiment, written once for every command that runs one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Annotated, Any, get_type_hints

import typer
from pydantic import BaseModel

from polyfed.config import GROUPS, Experiment, merged
from polyfed.errors import InputError
from polyfed.methods.base import Training
from polyfed.normal_form import PRESET_TITLES, normal_form
from polyfed.ranges import describe_range, typed
from polyfed.yaml_text import parse_value

NESTED = ", ".join(f"{group}.NAME" for group in ("method", *GROUPS))
NAMES = (
    "data", "label", "client", "partition", "classes_per_client", "alpha", "split", "test_set", "clients",
    "participation", "models", "features", "rounds", "epochs", "batch_size", "lr", "preset", "seed", "engine",
    "device", "devices", "eval_every", "checkpoint_every",
)  # fmt: skip
"""Settings with an option of their own; --set reaches all others."""


def experiment_options(*left_out: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of an experiment in the place of its parameter `changes`, which gets what they say."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        names = [name for name in NAMES if name not in left_out]
        shared = [_parameter(name, _annotation(name)) for name in names] + [_parameter("settings", SET)]

        def wrapped(**given: Any) -> None:
            options = {name: given.pop(name) for name in names}
            command(changes=changes_of(options, given.pop("settings")), **given)

        hints = get_type_hints(command, include_extras=True)
        parameters: list[inspect.Parameter] = []
        for name, parameter in inspect.signature(command).parameters.items():
            own = parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
            parameters += shared if name == "changes" else [own]
        wrapped.__name__, wrapped.__doc__ = command.__name__, command.__doc__
        wrapped.__annotations__ = {}  # Typer reads those of the signature
        wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return wrapped

    return decorate


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _annotation(name: str) -> Any:
    """An option documented by the experiment's own field; nothing given means: as the experiment says."""
    if name == "preset":
        help_text = "training settings: " + "; ".join(f"{name}: {title}" for name, title in PRESET_TITLES.items())
        return Annotated[str | None, typer.Option(metavar="TEXT", help=help_text)]
    model = _home(name)
    info, values = model.model_fields[name], describe_range(model, name)
    choices = f"; {values}" if values.startswith("one of") else ""
    metavar = "NUMBER" if values.startswith(("a number", "a whole number")) else "TEXT"
    text = f"{info.description}{choices} (default: {typed(info.default)})"
    return Annotated[str | None, typer.Option(help=text, metavar=metavar, show_default=False)]


SET = Annotated[list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help=f"{NESTED} or any setting")]


def _home(name: str) -> type[BaseModel]:
    return Experiment if name in Experiment.model_fields else Training


def changes_of(options: Mapping[str, str | None], settings: list[str] | None) -> dict[str, Any]:
    """What options and --set say together."""
    # Numbers come as texts, so that they are checked with everything else, in the same words.
    given = {name: as_number(name, value) for name, value in options.items() if value is not None}
    return together(given, parse_settings(settings or []))


def as_number(name: str, text: str) -> Any:
    """The value of an option: a number if the setting is one and the text too."""
    model = _home(name)
    if name not in model.model_fields or not describe_range(model, name).startswith(("a number", "a whole number")):
        return text
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def together(options: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """What options and --set say; neither wins if they disagree. A preset is what the others are laid over."""
    presets = [{"preset": given["preset"]} for given in (options, settings) if "preset" in given]
    before, after = (
        normal_form({name: value for name, value in given.items() if name != "preset"}) for given in (options, settings)
    )
    for said, also in ((before, after), *((before[group], after[group]) for group in GROUPS)):
        for name in said.keys() & also.keys() - GROUPS.keys():
            if said[name] != also[name]:
                raise InputError(
                    f"{name} is {typed(said[name])} as an option and {typed(also[name])} by --set: keep one of them."
                )
    return merged(merged(presets[-1] if presets else {}, before), after)


def parse_settings(pairs: list[str]) -> dict[str, Any]:
    """`method.weight=0.5` and the like as nested settings."""
    changes: dict[str, Any] = {}
    for pair in pairs:
        name, separator, text = pair.partition("=")
        if not separator or not name:
            raise InputError(f"--set takes NAME=VALUE, such as --set training.momentum=0.9, not '{pair}'.")
        group, _, inner = name.rpartition(".")
        if group not in ("", "method", *GROUPS):
            raise InputError(f"--set accepts {NESTED} and plain settings, not '{name}'.")
        value = parse_value(text)
        key = inner.replace("-", "_")
        if group:
            changes.setdefault(group, {})[key] = value
        else:
            changes[key] = value
    return changes
