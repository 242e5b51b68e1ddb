"""Commands that are imported when they are called, because PyTorch takes seconds: `polyfed --help` needs none of it."""

from __future__ import annotations

import ast
from functools import cache
from importlib import import_module
from inspect import signature, unwrap
from pathlib import Path
from typing import Any, get_args

import typer
from typer.core import TyperCommand, TyperGroup
from typer.models import ArgumentInfo

from polyfed.early import importing

COMMANDS = {
    "run": "runs:run",
    "resume": "runs:resume",
    "show": "show:show",
    "list": "show:list_runs",  # a function called list would hide Python's own
    "compare": "compare:compare",
    "tune": "tune:tune",
    "report": "report:report",
    "reproduce": "reproduce:reproduce",
    "export": "export:export",
    "predict": "export:predict",
    "methods": "lists:methods",
    "models": "lists:models",
    "datasets": "lists:datasets",
    "config": "lists:config",
    "init": "lists:init",
    "bench": "lists:bench",
}
"""By name, in the order of `polyfed --help`: the module in this package and the function."""
GROUPS = {
    "server": "Coordinate a real federation: its terms, its keys, its server.",
    "site": "Take part in a real federation, with your own data and network.",
}
"""Groups of commands, each the `app` of the module of that name, and their help."""


class PlainCommand(TyperCommand):
    """A command with plain and complete help, whatever versions of Typer and Click there are.

    Some escape `[default: …]` for Rich even where markup is off, and some lose the help of arguments.
    """

    def get_help(self, ctx: Any) -> str:
        given = signature(unwrap(self.callback), eval_str=True).parameters if self.callback else {}
        hints = {name: each.annotation for name, each in given.items()}
        parameter: Any  # older versions of Click have no `help`
        for parameter in self.params:
            told = [each.help for each in get_args(hints.get(parameter.name)) if isinstance(each, ArgumentInfo)]
            if told:
                parameter.help = told[0]
        return super().get_help(ctx).replace("\\[", "[")

    def format_arguments(self, ctx: Any, formatter: Any) -> None:
        """Newer versions of Click list the arguments here; Typer lists them too, with the options."""


class Commands(TyperGroup):
    """The group of all commands. Each is a stand-in with a name and a help text until it is called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        return name, command if name is None else _load(name), rest


def add_commands(app: typer.Typer) -> None:
    """Give the application a stand-in for every command."""
    for name, home in COMMANDS.items():
        module, _, function = home.partition(":")
        app.command(name, help=_docstrings(module)[function])(_stand_in)
    for name, words in GROUPS.items():
        app.command(name, help=words)(_stand_in)


def _stand_in() -> None:
    raise AssertionError("the command was not loaded")


@cache
def _docstrings(module: str) -> dict[str, str | None]:
    """The docstrings of a module's functions, read from its source without importing it."""
    tree = ast.parse(Path(__file__).with_name(f"{module}.py").read_text(encoding="utf-8"))
    return {node.name: ast.get_docstring(node) for node in tree.body if isinstance(node, ast.FunctionDef)}


def _load(name: str) -> Any:
    if name in GROUPS:
        group = typer.main.get_command(_imported(name, "app"))
        group.name, group.help = name, GROUPS[name]
        return group
    own = typer.Typer(add_completion=False, rich_markup_mode=None)
    own.command(name, cls=PlainCommand)(_imported(*COMMANDS[name].split(":")))
    return typer.main.get_command(own)


def _imported(module: str, name: str) -> Any:
    with importing():
        return getattr(import_module(f"polyfed.cli.{module}"), name)
