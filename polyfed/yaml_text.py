"""YAML as users write it: nothing in it is run, 8:1:1 is a text, and no name may stand twice."""

from __future__ import annotations

import re
from typing import Any

import yaml


def parse_yaml(text: str) -> Any:
    """The content of a YAML text, where 8:1:1 is a string.

    >>> parse_yaml("split: 8:1:1")
    {'split': '8:1:1'}
    """
    return yaml.load(text, _Loader)


def parse_value(text: str) -> Any:
    """A value as it is typed on a command line: what is no YAML is a text.

    >>> parse_value("0.5"), parse_value("[")
    (0.5, '[')
    """
    try:
        return parse_yaml(text)
    except yaml.YAMLError:
        return text


def parse_values(text: str) -> list[Any]:
    """Several values, separated by commas; those that contain commas are written as a YAML list.

    >>> parse_values("0.1, 0.2"), parse_values("[cnn1, 'cnn1,cnn5']")
    ([0.1, 0.2], ['cnn1', 'cnn1,cnn5'])
    """
    listed = parse_value(text) if text.lstrip().startswith("[") else None
    return listed if isinstance(listed, list) else [parse_value(value.strip()) for value in text.split(",")]


def problem_of(error: Exception) -> str:
    """What is wrong with a YAML text, and where, on one line."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {' '.join(str(error.problem).split())}"
    return " ".join(str(error).replace('in "<unicode string>", ', "").split())


class RepeatedKey(yaml.YAMLError):
    """A name occurs twice in one mapping; YAML forbids that, but its reader silently uses the last one."""


class _Loader(yaml.SafeLoader):
    """The safe loader, without two surprises of YAML 1.1, and no name may occur twice.

    There, 8:1:1 is a number to base 60, and 010 is eight.
    """

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        lines: dict[str, int] = {}
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            name = str(key.value).replace("-", "_")  # the same setting may be written in both ways
            line = key.start_mark.line + 1
            if name in lines:
                raise RepeatedKey(f"gives '{key.value}' twice, in lines {lines[name]} and {line}")
            lines[name] = line
        return super().construct_mapping(node, deep=deep)


def _number(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> Any:
    if ":" in node.value:
        return node.value
    if re.fullmatch("[-+]?0[0-7_]+", node.value):  # the option --seed 010 is ten too
        return int(node.value.replace("_", ""))
    is_float = node.tag.endswith("float")
    return loader.construct_yaml_float(node) if is_float else loader.construct_yaml_int(node)


for _kind in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_kind}", _number)
