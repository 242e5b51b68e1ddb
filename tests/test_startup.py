"""What a command imports: modules that take long to import are left to the commands that need them."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

import polyfed
from polyfed.cli import app
from polyfed.cli.lazy import COMMANDS, GROUPS, _load
from polyfed.data import sources

HEAVY = ["torch", "numpy", "pandas", "scipy", "sklearn", "sympy", "torchvision", "altair", "optuna", "flwr", "ray"]
COMPILER = ["torch._dynamo", "torch._inductor"]
REPORT = """
import atexit, json, sys
atexit.register(lambda: print(json.dumps([name for name in WATCHED if name in sys.modules]), file=sys.stderr))
sys.argv = ["polyfed", *ARGUMENTS]
from polyfed.__main__ import main
main()
"""


def imported(folder: Path, *arguments: str) -> set[str]:
    """Which of the watched modules a command has imported when it ends, in a process of its own."""
    script = f"WATCHED, ARGUMENTS = {[*HEAVY, *COMPILER]!r}, {arguments!r}\n{REPORT}"
    root = str(Path(polyfed.__file__).parent.parent)
    ended = subprocess.run(
        [sys.executable, "-c", script],
        cwd=folder, env={**os.environ, "PYTHONPATH": root}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    return set(json.loads(ended.stderr.splitlines()[-1]))


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_and_version_need_no_pytorch(tmp_path: Path, option: str) -> None:
    assert imported(tmp_path, option) == set()


def test_a_run_needs_pytorch_alone(tmp_path: Path) -> None:
    """From the first line to the last, the digits and the operations of the papers' networks included."""
    options = ("--rounds", "1", "--device", "cpu", "--quiet", "--set", "min_samples=2")
    assert imported(tmp_path, "run", "fedproto", *options) == {"torch", "numpy"}


def test_stand_ins_say_what_the_commands_say() -> None:
    """A command's help in the list of all commands comes from its source; the function has the same."""
    import typer

    group = typer.main.get_command(app)
    for name in [*COMMANDS, *GROUPS]:
        assert group.commands[name].help == _load(name).help is not None  # type: ignore[attr-defined]
        assert _load(name).name == name


def test_the_digits_are_those_of_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read from its file, or by its function where the file is not found."""
    pixels, labels = load_digits(return_X_y=True)
    for _ in range(2):
        mine, classes = sources._digits_of_sklearn()
        assert np.array_equal(mine, pixels) and np.array_equal(classes, labels)
        monkeypatch.setattr(sources, "find_spec", lambda name: None)


def test_nothing_is_collected_while_modules_are_imported(tmp_path: Path) -> None:
    """What was imported stays out of later collections, but not of the last one: extensions would report leaks."""
    script = """
import atexit, gc
atexit.register(lambda: print(gc.get_freeze_count()))  # the first registered is the last to be called
from polyfed.early import importing
with importing():
    print(gc.isenabled())
print(gc.isenabled(), gc.get_freeze_count() > 1000)
"""
    root = str(Path(polyfed.__file__).parent.parent)
    run = partial(subprocess.run, cwd=tmp_path, env={**os.environ, "PYTHONPATH": root}, check=True)
    ended = run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.stdout.splitlines() == ["False", "True True", "0"]
