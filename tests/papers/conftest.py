"""A small campaign, for the tests of its commands and of its page."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.papers.tiny import TINY


@pytest.fixture
def papers(tmp_path: Path) -> Path:
    """A folder like papers/, with a campaign of two methods and three seeds."""
    (tmp_path / "words").mkdir()
    (tmp_path / "results").mkdir()
    (tmp_path / "campaign.yaml").write_text(TINY)
    return tmp_path
