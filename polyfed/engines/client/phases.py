"""What a method trains in a round. Most of its phases' options may change from round to round, but not all.

What an engine finds out about a phase once, before the first round, must stay true: what it costs, whether batch norm
trains in it, and whether its clients can be stacked.
"""

from __future__ import annotations

from polyfed.errors import InputError
from polyfed.methods.base import Method, Phase


def phases_in(method: Method, round: int) -> list[Phase]:
    """The method's phases of a round; raises an `InputError` for one that `phases` does not name."""
    wanted = method.phases_in(round)
    if type(method).phases_in is Method.phases_in:
        return wanted
    named = {phase.name: phase for phase in method.phases()}
    for phase in wanted:
        usual = named.get(phase.name)
        if usual is None:
            raise InputError(
                f"in round {round} {method.name} has a phase '{phase.name}', which is none of its phases: let phases() "
                "return all of them, and phases_in() leave out what a round does without."
            )
        fixed = {
            "trains": phase.trains == usual.trains,
            "views": phase.views == usual.views,
            "draw": (phase.draw is None) == (usual.draw is None),
        }
        for option, stays in fixed.items():
            if not stays:
                raise InputError(
                    f"in round {round} {method.name} has another {option} in phase '{phase.name}' than phases() says: "
                    "make it a phase of its own there, and let phases_in() choose between them."
                )
    return wanted
