"""Who knows whom: the package's modules, drawn as a graph from their imports."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import polyfed

ROOT = Path(polyfed.__file__).parent


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for path in ROOT.rglob("*.py")}


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def imports(tree: ast.Module, *, inside: bool) -> set[str]:
    """The modules that are imported at the top level, or `inside` functions and for types too."""
    nodes: list[ast.AST] = []
    for statement in tree.body:
        if inside or not isinstance(statement, ast.FunctionDef | ast.ClassDef) and not is_for_types(statement):
            nodes += ast.walk(statement)
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            members = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {member if member in FILES else node.module for member in members}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & FILES.keys()


def graph(*, inside: bool = False) -> dict[str, set[str]]:
    return {name: imports(ast.parse(path.read_text()), inside=inside) - {name} for name, path in FILES.items()}


def known(name: str, edges: dict[str, set[str]]) -> set[str]:
    """All that a module knows, directly or through others."""
    seen: set[str] = set()
    waiting = [name]
    while waiting:
        for other in edges[waiting.pop()] - seen:
            seen.add(other)
            waiting.append(other)
    return seen


def room(name: str) -> str:
    """The part of the house that a module is in."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else ""


def test_no_module_imports_itself_by_way_of_others() -> None:
    edges = graph()
    assert [name for name in edges if name in known(name, edges)] == []


def test_a_method_of_one_s_own_may_import_the_server_s_training_first() -> None:
    """Importing a module also imports the package it is in; that of all methods imports methods that train there."""
    subprocess.run([sys.executable, "-W", "ignore", "-c", "import polyfed.server.training"], check=True)


def test_methods_know_no_engine_and_records_know_neither() -> None:
    """Not even inside a function: what a method or a record says must hold for every engine."""
    edges = graph(inside=True)
    forbidden = {
        "methods": {"engines", "remote", "records", "api", "cli", "data"},
        "records": {"engines", "remote", "methods", "server", "api", "cli", "data"},
        "models": {"engines", "remote", "records", "methods", "server", "api", "cli", "data"},
        "data": {"engines", "remote", "methods", "models", "server", "api", "cli"},
    }
    broken = [
        f"{name} imports {other}"
        for name, others in edges.items()
        for other in others
        if room(other) in forbidden.get(room(name), set())
    ]
    assert broken == []


def test_the_server_knows_no_dataset_and_no_client() -> None:
    edges = graph(inside=True)
    direct = {other for name, others in edges.items() if room(name) == "server" for other in others}
    assert {other for other in direct if room(other) in {"data", "population", "assemble", "models"}} == set()
    assert {other for other in direct if room(other) == "engines"} == {"polyfed.engines.base"}


def test_only_the_command_line_prints() -> None:
    """The library speaks through watchers, errors and records."""
    printing = {
        name
        for name, path in FILES.items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    }
    assert {room(name) for name in printing} <= {"cli", "__main__"}
