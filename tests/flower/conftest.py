"""A federation on loopback for every test that asks for one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.flower import support


@pytest.fixture
def people(tmp_path: Path) -> Iterator[support.Federation]:
    from tests.flower import support  # here, because the tests are skipped where Flower is not installed

    with support.federation(tmp_path / "keys") as found:
        yield found
