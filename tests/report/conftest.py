"""Small runs that reports are made of."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from polyfed.api import run
from tests.support import DEFAULTS, Narrow, Wide, tiny_dataset


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """standalone-0 and -1, fedproto-0 and -1: two seeds each of four rounds, with all that a run can record."""
    folder = tmp_path_factory.mktemp("runs")
    settings = DEFAULTS | {"rounds": 4, "confusion": "every", "devices": "three-tier"}
    for method in ("standalone", "fedproto"):
        for seed in (0, 1):
            run(method, data=tiny_dataset(), models=[Wide, Narrow], out=folder / f"{method}-{seed}", seed=seed,
                progress=False, **settings)  # fmt: skip
    yield folder


@pytest.fixture(scope="session")
def four(runs: Path) -> list[Path]:
    """The folders of these runs."""
    return sorted(runs.iterdir(), reverse=True)


def unfinished(path: Path, folder: Path) -> Path:
    """A copy of a run as it was before its end."""
    running = folder / "running"
    shutil.copytree(path, running)
    content = json.loads((running / "run.json").read_text())
    del content["finished"]
    (running / "run.json").write_text(json.dumps(content))
    for name in ("clients.csv", "summary.json"):
        (running / name).unlink()
    return running
