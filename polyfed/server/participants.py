"""Who takes part in a round."""

from __future__ import annotations

from collections.abc import Collection

from polyfed.config import share_of
from polyfed.seeds import numpy_generator


def participants(seed: int, round: int, there: Collection[int], share: float) -> list[int]:
    """A share of the clients that are there, drawn anew in every round, in ascending order.

    >>> participants(0, 3, [4, 1, 2], 1.0)
    [1, 2, 4]
    """
    ordered = sorted(there)
    count = min(share_of(len(ordered), share), len(ordered))
    if count == len(ordered):
        return ordered
    draw = numpy_generator(seed, "participants", round)
    return [ordered[place] for place in sorted(draw.choice(len(ordered), count, replace=False).tolist())]
