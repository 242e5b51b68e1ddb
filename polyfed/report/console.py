"""Where text for people is printed."""

from __future__ import annotations

from rich.console import Console


def plain_console(*, stderr: bool = False) -> Console:
    """A console that prints text unchanged: what a user typed may look like markup or like an emoji's name."""
    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)
