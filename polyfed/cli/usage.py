"""What Typer says is wrong with a command line, in the voice of all other errors."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any


def usage(error: Any) -> str:
    """One of Typer's errors as a sentence, with the command that lists what there is."""
    command = error.ctx.command_path if getattr(error, "ctx", None) else "polyfed"
    words = _unknown_option(error) or " ".join(error.format_message().split()).rstrip(".")
    return f"{words[:1].lower()}{words[1:]}{'' if words.endswith('?') else ';'} `{command} --help` lists what there is."


def _unknown_option(error: Any) -> str:
    """What may have been meant by an option that does not exist; empty if nothing is near."""
    option, known = getattr(error, "option_name", None), getattr(error, "possibilities", None)
    if option is None or known is None:  # another error
        return ""
    context = getattr(error, "ctx", None)
    takes_settings = context is not None and any("--set" in each.opts for each in context.command.params)
    setting = _setting(option.removeprefix("--").replace("-", "_")) if takes_settings else ""
    near = get_close_matches(option, known, n=1, cutoff=0.0)
    if setting:
        return f"no such option '{option}': write --set {setting}=VALUE"
    return f"no such option '{option}': did you mean '{near[0]}'?" if near else ""


def _setting(name: str) -> str:
    """The setting of that name, in full; empty if there is none."""
    from polyfed.config import GROUPS, Experiment  # here, because most command lines have no such error
    from polyfed.methods import METHODS

    if name in Experiment.model_fields:
        return name
    groups = {group: set(model.model_fields) for group, model in GROUPS.items()}
    groups["method"] = {option for method in METHODS.values() for option in method.Config.model_fields}
    return next((f"{group}.{name}" for group, names in groups.items() if name in names), "")
