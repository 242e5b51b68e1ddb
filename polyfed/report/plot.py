"""A curve as text, for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

BLOCKS = " ▁▂▃▄▅▆▇█"
HEIGHT = 6


def plot(curve: Mapping[int, float], width: int = 80) -> str:
    """Accuracies by round as columns of blocks, between the lowest and the highest.

    >>> print(plot({1: 0.2, 2: 0.6, 3: 1.0}, 40))
    100.0 % │  █
            │  █
            │  █
            │ ██
            │ ██
     20.0 % │▁██
             round 1 to 3
    """
    room = width - 9
    rounds, values = list(curve), shrunk(list(curve.values()), room)
    low, high = min(values), max(values)
    steps = HEIGHT * (len(BLOCKS) - 1)
    # The lowest value still has a block, so that every round can be seen.
    levels = [1 + round((steps - 1) * (value - low) / (high - low)) if high > low else steps // 2 for value in values]
    lines = []
    for row in reversed(range(HEIGHT)):
        blocks = "".join(BLOCKS[min(max(level - row * 8, 0), 8)] for level in levels)
        label = f"{100 * high:5.1f} %" if row == HEIGHT - 1 else f"{100 * low:5.1f} %" if row == 0 else " " * 7
        lines.append(f"{label} │{blocks}".rstrip())
    return "\n".join([*lines, f"{' ' * 9}round {rounds[0]} to {rounds[-1]}"])


def shrunk(values: Sequence[float], most: int) -> list[float]:
    """At most that many values: means over neighbours of equal number, as far as possible.

    >>> shrunk([1, 3, 5, 7], 2), shrunk([1, 2], 5)
    ([2.0, 6.0], [1, 2])
    """
    if len(values) <= most:
        return list(values)
    edges = [place * len(values) // most for place in range(most + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in zip(edges, edges[1:], strict=False)]
