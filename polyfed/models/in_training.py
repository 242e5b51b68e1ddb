"""Whether a network ends in training as in evaluation.

A split replaces what comes last. What the network's forward does to its logits in training only would then be done to
its features, without an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor, nn

from polyfed.errors import InputError
from polyfed.models.dryrun import Call, Trace, copied, dry_run
from polyfed.models.ends import Tail, calls_of, described, end_of_mean, tail_of, watched


def check_end(network: nn.Module, head: Call, tail: Tail, images: Tensor, name: str) -> None:
    """Raise unless the network ends with its head in training too, and with the same layers after it."""
    trace = _trained(network, head, images, name)
    if trace is None:
        return
    calls = calls_of(trace, head.name)
    found = [tail_of(trace, call) for call in calls]
    tails = [end for end in found if isinstance(end, Tail)]
    where = f"{name} can't be split at {described(head)}, because"
    if not tails:
        remedy = "return raw logits there too, and use a layer (nn.Dropout) instead of a function"
        raise InputError(f"{where} {reason(calls, found, remedy, 'in training')}.")
    differences = [_difference(tail, end) for end in tails]
    if all(differences):
        raise InputError(f"{where} {differences[-1]}: call it in both (nn.Dropout does nothing in evaluation).")


def check_mean(network: nn.Module, head: Call, images: Tensor, name: str) -> None:
    """Raise unless the network returns in training too the mean over places of what its last convolution gives."""
    trace = _trained(network, head, images, name)
    if trace is None:
        return
    calls = calls_of(trace, head.name)
    found = [end_of_mean(trace, call) for call in calls]
    if True not in found:
        remedy = "return the mean of what it gives there too, with dropout before that layer"
        why = reason(calls, found, remedy, "in training")
        raise InputError(f"{name} can't be split at its last convolution '{head.name}', because {why}.")


def _trained(network: nn.Module, head: Call, images: Tensor, name: str) -> Trace | None:
    """What the network does in training; None where that is tried, and explained, before the first round."""
    try:  # a copy, because it may count how often it was trained
        trace = dry_run(copied(network, name), images, name, partial(watched, head=head.name), training=True)
    except InputError:
        return None
    return trace if isinstance(trace.output, Tensor) else None


def reason(calls: Sequence[Call], found: Sequence[object], remedy: str, when: str = "") -> str:
    """Why none of a layer's calls gives the network's output, and what to do; `found` is what follows each call."""
    during = f" {when}" if when else ""
    if not calls:
        return f"it does not call that layer{during}: call it there too, once, last"
    if len(calls) > 1:
        return (
            f"it calls that layer {len(calls)} times{during} and returns none of these outputs as it is: call it "
            "once, last"
        )
    follower = f"'{found[0].name}'" if isinstance(found[0], Call) else "something in its forward method"
    return f"{follower} changes that layer's output{during}: {remedy}"


def _difference(evaluated: Tail, trained: Tail) -> str:
    """Which layer follows the head in one mode only, in words; empty if that does no harm.

    What is left out of a split may be missing in training, but not the other way round.
    """
    before, after = ([*end.moved, *end.dropped] for end in (evaluated, trained))
    more, less = _missing(after, before), _missing(evaluated.moved, after)
    if not more and not less:
        return ""
    return f"'{(more or less)[0]}' follows that layer in {'training' if more else 'evaluation'} only"


def _missing(calls: Sequence[Call], others: Sequence[Call]) -> list[str]:
    """The layers of these calls that are not among the others."""
    return [call.name for call in calls if call.name not in {other.name for other in others}]
