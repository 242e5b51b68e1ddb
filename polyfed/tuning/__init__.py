"""Search for a method's best settings by its validation accuracy: the same number of trials for every method."""

from polyfed.tuning.records import Trial, Tuned
from polyfed.tuning.search import tune
from polyfed.tuning.space import Choices, Range, parse_search, search_space

__all__ = ["Choices", "Range", "Trial", "Tuned", "parse_search", "search_space", "tune"]
