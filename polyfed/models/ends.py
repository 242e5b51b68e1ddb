"""How networks end: what follows the head, which of several outputs are the logits, a head that is a convolution."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from polyfed.errors import InputError
from polyfed.models.dryrun import Call, Trace

Key = str | int
LOGITS = "logits"
# They change neither the largest logit nor what the losses need, which is the logits before them.
_OUTPUT_ONLY = (nn.Softmax, nn.LogSoftmax, nn.Sigmoid, nn.LogSigmoid)
_UNMOVED = (nn.Identity, nn.Flatten)
SHOWN_LAYERS = 8


class Pick:
    """A forward hook that passes on one entry of a network's output, if that holds several."""

    def __init__(self, key: Key) -> None:
        self.key = key

    def __call__(self, module: nn.Module, inputs: object, output: object) -> object:
        return dict(entries(output)).get(self.key, output)


def entries(output: object) -> list[tuple[Key, object]]:
    """The entries of a dictionary, a tuple or a list."""
    if isinstance(output, Mapping):
        return [(str(key), value) for key, value in output.items()]
    return list(enumerate(output)) if isinstance(output, tuple | list) else []


def logits_key(trace: Trace, head: Call | None, batch: int, classes: int, name: str) -> Key:
    """Where the logits are among several outputs: the entry called logits, or the only one that can be."""
    fitting = {
        key: value
        for key, value in entries(trace.output)
        if isinstance(value, Tensor) and value.shape == (batch, classes)
    }
    if LOGITS in fitting:
        return LOGITS
    if len(fitting) > 1 and head is not None:  # the user says which layer they come from
        fitting = {key: value for key, value in fitting.items() if same(value, head.value)}
    if len(fitting) == 1:
        return next(iter(fitting))
    kind = type(trace.output).__name__
    found = "none" if not fitting else " and ".join(str(key) for key in fitting)
    raise InputError(
        f"{name} must return one tensor of logits, [batch, {classes}], but it returns a value of type {kind} in which "
        f"{found} can be that: return the logits alone, or a dictionary with an entry '{LOGITS}'."
    )


@dataclass
class Tail:
    """The layers between the head's output and the network's."""

    moved: list[Call] = field(default_factory=list)
    """They belong to the head: dropout and activations."""
    dropped: list[Call] = field(default_factory=list)
    """They are for reading the output only."""
    logits: object = None
    """What the two parts together must give."""


def tail_of(trace: Trace, head: Call) -> Tail | Call | None:
    """What follows the head; the layer that can't be moved with it; or None if something else changes the output."""
    calls = trace.watched
    tail, last = Tail(logits=head.value), head
    for call in calls[calls.index(head) + 1 :]:
        if not call.inputs or call.inputs[0] is not last.output:
            continue
        last, layer = call, call.layer
        if isinstance(layer, _UNMOVED):
            continue
        movable = not any(True for _ in (*layer.parameters(), *layer.buffers())) and _shape(call.output) == _shape(
            head.output
        )
        once = sum(other.layer is layer for other in calls) == 1
        if not movable or not once or tail.dropped:
            return call
        if isinstance(layer, _OUTPUT_ONLY):
            tail.dropped.append(call)
        else:
            tail.moved.append(call)
            tail.logits = call.value
    return tail if same(trace.output, last.value) else None


def calls_of(trace: Trace, head: str | None) -> list[Call]:
    """The calls of the layer of that name, or of the last linear layer that was called; the last one comes last."""
    linear = [call.name for call in trace.watched if isinstance(call.layer, nn.Linear)]
    name = linear[-1] if head is None and linear else head
    return [call for call in trace.watched if call.name == name]


def described(call: Call) -> str:
    """A head in words."""
    if not call.name:  # the network is nothing but its head
        return "its only layer"
    return f"its last linear layer '{call.name}'" if isinstance(call.layer, nn.Linear) else f"its head '{call.name}'"


def convolution_at_end(trace: Trace, classes: int) -> Call | None:
    """The 1x1 convolution to classes with which a network ends, if it comes after every linear layer."""
    calls = [call for call in trace.watched if isinstance(call.layer, nn.Linear) or _classifies(call.layer, classes)]
    return calls[-1] if calls and not isinstance(calls[-1].layer, nn.Linear) else None


def _classifies(layer: nn.Module, classes: int) -> bool:
    if not isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d) or layer.out_channels != classes or layer.groups != 1:
        return False
    return {*layer.kernel_size, *layer.stride} == {1} and set(layer.padding) <= {0}


def mean_over_places(x: object) -> Tensor | None:
    """The mean over all places of images or signals, [batch, channels]; of what has no places, the same."""
    if not isinstance(x, Tensor):
        return None
    return x.flatten(2).mean(2) if x.dim() > 2 else x


def end_of_mean(trace: Trace, head: Call) -> bool | Call:
    """Whether the network returns the mean over places of a convolution's answers, or the layer that changes it."""
    mean, last = mean_over_places(head.value), head
    for call in trace.watched[trace.watched.index(head) + 1 :]:
        if call.inputs and call.inputs[0] is last.output:
            last = call
            if not same(mean, mean_over_places(call.value)):
                return call
    return same(mean, trace.output)


class MeanOverPlaces(nn.Module):
    """The mean over all places of an image or a signal, which stays one, with a single place."""

    def __init__(self, match: nn.Module) -> None:
        super().__init__()
        self.match = match

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.match(x.flatten(2).mean(2))
        return features.view(*features.shape, *(1,) * (x.dim() - 2))


def as_linear(layer: nn.Module) -> nn.Linear:
    """A linear layer with the weights of a 1x1 convolution.

    A convolution and the mean over places can be exchanged, so the layer after the mean gives the mean of the answers.
    """
    assert isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    made = nn.Linear(layer.in_channels, layer.out_channels, layer.bias is not None, device=layer.weight.device)
    made.weight = nn.Parameter(layer.weight.detach().flatten(1).clone(), layer.weight.requires_grad)
    if layer.bias is not None:
        made.bias = nn.Parameter(layer.bias.detach().clone(), layer.bias.requires_grad)
    return made.train(layer.training)


def activation_after(trace: Trace, head: Call) -> nn.Module | None:
    """The activation between a convolution and the mean over places, if there is one that nothing else uses."""
    calls = trace.watched
    following = [call for call in calls[calls.index(head) + 1 :] if call.inputs and call.inputs[0] is head.output]
    layer = following[0].layer if following else None
    if not isinstance(layer, nn.ReLU | nn.ReLU6 | nn.SiLU | nn.GELU | nn.LeakyReLU):
        return None
    return layer if sum(call.layer is layer for call in calls) == 1 else None


def untied(extractor: nn.Module, head: nn.Module) -> nn.Module | None:
    """A copy of a head that shares weights with its extractor; None if it shares none."""
    own = {id(parameter) for parameter in extractor.parameters()}
    return deepcopy(head) if any(id(parameter) in own for parameter in head.parameters()) else None


def layers_shown(network: nn.Module) -> str:
    """The last layers of a network with their names, for an error."""
    named = [
        f"'{path}' ({_short(layer)})"
        for path, layer in network.named_modules()
        if path and _is_leaf(layer) and ".parametrizations." not in path
    ]
    if not named:
        return "it has no layers with names"
    earlier = "…, " if len(named) > SHOWN_LAYERS else ""
    return f"its last layers are {earlier}{', '.join(named[-SHOWN_LAYERS:])}"


def _short(layer: nn.Module) -> str:
    kind = type(layer).__name__.removeprefix("Parametrized" if is_parametrized(layer) else "")
    sizes = [getattr(layer, name, None) for name in ("in_features", "out_features")]
    if None in sizes:
        sizes = [getattr(layer, name, None) for name in ("in_channels", "out_channels")]
    return kind if None in sizes else f"{kind} {sizes[0]} to {sizes[1]}"


def _is_leaf(layer: nn.Module) -> bool:
    """Whether a layer is no box of others; what computes its weights, such as a weight norm, does not count."""
    return is_parametrized(layer) or next(layer.children(), None) is None


def watched(path: str, layer: nn.Module, head: str | None) -> bool:
    """Whether a dry run keeps what goes into and comes out of a layer."""
    return _is_leaf(layer) or path == head


def _shape(value: object) -> Sequence[int] | None:
    return value.shape if isinstance(value, Tensor) else None


def same(one: object, other: object) -> bool:
    """Whether two outputs are equal up to rounding."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor) or one.shape != other.shape:
        return False
    # A tensor on the "meta" device has a shape but no values to compare.
    return one.is_meta or torch.allclose(one, other, rtol=1e-4, atol=1e-6, equal_nan=True)
