"""Several runs at once: their clients train in the same cohorts, and each run has its own results and folder."""

from polyfed.engines.together.group import Group, current_group

__all__ = ["Group", "current_group"]
