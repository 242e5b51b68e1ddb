"""The tutorial's commands and programs work, one after another, and so does the page on exports."""

from __future__ import annotations

import re
import runpy
import shlex
from pathlib import Path

import pytest

from tests.shell import Shell

DOCS = Path(__file__).parents[2] / "docs"
STEP = re.compile(r"^    polyfed (?P<command>[^\n]+)$|^```python\n(?P<program>.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_tutorial_runs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    shell = Shell(capsys, monkeypatch)
    outputs = []
    for step in STEP.finditer((DOCS / "tutorial.md").read_text()):
        if step["command"]:
            ended = shell(*shlex.split(step["command"]))
            assert ended.status == 0, ended.error
            outputs.append(ended.output)
        else:
            Path("step.py").write_text(step["program"])
            runpy.run_path("step.py")
            outputs.append(capsys.readouterr().out)
    assert len(outputs) == 9
    label = outputs[2].removeprefix("its class is ").strip()
    assert outputs[3].startswith(f"digit.png  {label}  ")
    assert "on the 36 test samples of client 3" in outputs[4]
    assert outputs[6] == f"['{label}']\n" and outputs[8].startswith(f"{label} ")


def test_the_page_on_exports_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    programs = [step["program"] for step in STEP.finditer((DOCS / "export.md").read_text()) if step["program"]]
    Path("page.py").write_text("\n".join(programs))
    assert runpy.run_path("page.py")["model"].rule == "prototypes"
