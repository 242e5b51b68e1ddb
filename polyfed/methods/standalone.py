"""Standalone: every client trains alone; what any federation must beat."""

from __future__ import annotations

from polyfed.methods.base import Method


class Standalone(Method):
    """Each client minimises cross entropy on its own data and exchanges nothing."""

    name = "standalone"
    title = "Standalone"
    paper = "the baseline without a federation"
    sends = "nothing"
    reveals = "Nothing: no message leaves a client."
    receives = ()
