"""What tests of several files need."""

from __future__ import annotations

import pytest

from polyfed.engines.together import joint


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The clients, numbered through, of every common training."""
    seen: list[list[int]] = []
    answers = joint.JointEngine.answers
    monkeypatch.setattr(
        joint.JointEngine,
        "answers",
        lambda self, round, downloads: (seen.append(sorted(downloads)), answers(self, round, downloads))[1],
    )
    return seen
