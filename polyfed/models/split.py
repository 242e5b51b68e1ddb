"""A network in two parts: an extractor that turns images into features, and a head that turns features into logits.

The methods need the split: some share the head, some the features' class means, some neither. Any network whose last
layer is linear can be split.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from polyfed.errors import InputError, first_line, unknown_name
from polyfed.models import ends
from polyfed.models.dropout import seed_dropout
from polyfed.models.dryrun import Call, Trace, copied, dry_run, example_images
from polyfed.models.ends import same
from polyfed.models.in_training import check_end, check_mean, reason
from polyfed.models.layers import Match, check_match, check_sizes, match_layer
from polyfed.shapes import as_shape


class SplitNetwork(nn.Module):
    """A network in two parts: an extractor to K features and a head to C logits.

    Its state has the names `extractor.…` and `head.…`.
    """

    def __init__(self, extractor: nn.Module, head: nn.Module, feature_size: int) -> None:
        super().__init__()
        self.extractor = extractor
        self.head = head
        self.feature_size = feature_size
        self.head_name = ""
        """What the head is called in the network that was split; empty if the head is new."""
        self.remarks: tuple[str, ...] = ()
        """What the split has changed about the network, for the run's record."""

    def features(self, x: Tensor) -> Tensor:
        """The features of a batch of images: [batch, K]."""
        features: Tensor = self.extractor(x)
        return features

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(x))
        return logits


def split_network(
    network: nn.Module,
    input_shape: Sequence[int],
    classes: int,
    *,
    head: str | None = None,
    features: int | None = None,
    match: Match = "pool",
    name: str = "",
) -> SplitNetwork:
    """Split a copy of a network at its last linear layer, or at the layer that `head` names.

    Dropout and activations after that layer become part of the head. A softmax or sigmoid at the end is left out,
    because the losses need raw logits, and a 1x1 convolution over which the mean is taken becomes a linear layer;
    `remarks` says so. If the network returns a dictionary or a tuple, its logits are found in it.

    A dry run checks the shapes and that the split network computes what the network computes. Where `features` is
    given and is not the network's own number, the extractor is followed by a pooling or a learned projection and the
    head is made anew. `name` is what errors call the network.

    >>> split_network(nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.Linear(20, 3)), (1, 8, 8), 3).feature_size
    20
    """
    check_sizes(classes, features)
    check_match(match)
    name = name or type(network).__name__
    _check_kind(network, name)
    network = seed_dropout(copied(network, name))
    images = example_images(network, as_shape(input_shape))
    if isinstance(network, SplitNetwork):
        return _checked(network, images, classes, features, name)
    trace = dry_run(network, images, name, lambda path, layer: ends.watched(path, layer, head))
    if not isinstance(trace.output, Tensor):
        named = ends.calls_of(trace, head)[-1:] if head else []
        pick = ends.Pick(ends.logits_key(trace, named[0] if named else None, len(images), classes, name))
        network.register_forward_hook(pick)
        output = pick(network, images, trace.output)
        # Only what leads to the logits counts: other heads may come later.
        trace = Trace(output, _until(trace.watched, output))
    convolution = ends.convolution_at_end(trace, classes) if head is None else None
    placeholder = nn.Identity()
    if convolution is not None:
        split = _split_at_convolution(network, trace, convolution, placeholder, images, name)
    else:
        split = _split_at_layer(network, trace, head, placeholder, images, classes, name)
    split.training = network.training
    if features is None or features == split.feature_size:
        return split
    return _with_features(split, placeholder, features, classes, match, images, name)


def _split_at_layer(
    network: nn.Module,
    trace: Trace,
    head: str | None,
    placeholder: nn.Module,
    images: Tensor,
    classes: int,
    name: str,
) -> SplitNetwork:
    """Split at a layer that receives features and returns logits; what follows it goes with it or is left out."""
    call = _head_call(network, trace, head, name)
    tail = _check_output(network, trace, call, len(images), classes, name)
    size = _feature_size(network, call, len(images), name)
    check_end(network, call, tail, images, name)
    for follower in (*tail.moved, *tail.dropped):
        _replace(network, follower.layer, nn.Identity())
    extractor = _replace(network, call.layer, placeholder)
    own = ends.untied(extractor, call.layer)
    last = call.layer if own is None else own
    moved = [follower.layer for follower in tail.moved]
    split = SplitNetwork(extractor, nn.Sequential(last, *moved) if moved else last, size)
    split.head_name = "" if moved else call.name
    _check_unchanged(split, images, tail.logits, call.name, name)
    if tail.dropped:
        kind = type(tail.dropped[0].layer).__name__
        split.remarks += (f"{name} ends with {kind}, which is left out, because the losses need raw logits",)
    if own is not None:
        split.remarks += (
            f"the head of {name} shares weights with its extractor; here each has its own, because the head may be "
            "trained and sent alone",
        )
    return split


def _split_at_convolution(
    network: nn.Module, trace: Trace, call: Call, placeholder: nn.Module, images: Tensor, name: str
) -> SplitNetwork:
    """Split where a 1x1 convolution gives logits at every place, of which the network takes the mean."""
    activation = ends.activation_after(trace, call)
    if activation is not None:
        _replace(network, activation, nn.Identity())
    expected = dry_run(network, images, name).output if activation is not None else trace.output
    check_mean(network, call, images, name)
    extractor = _replace(network, call.layer, ends.MeanOverPlaces(placeholder))
    head = ends.as_linear(call.layer)
    split = SplitNetwork(extractor, head, head.in_features)
    _check_unchanged(split, images, expected, call.name, name)
    split.remarks = (f"the last convolution of {name}, '{call.name}', is a linear head on the mean over places",)
    if activation is not None:
        kind = type(activation).__name__
        split.remarks += (f"{name} applies {kind} to its logits, which is left out, because logits have either sign",)
    return split


def _check_kind(network: nn.Module, name: str) -> None:
    """Refuse networks that can't be split, and those that do not compute in 32 bits."""
    if isinstance(network, torch.jit.ScriptModule):
        raise InputError(
            f"{name} is compiled by TorchScript, so it can't be split: give the network that it was compiled from."
        )
    kinds = {parameter.dtype for parameter in network.parameters() if parameter.is_floating_point()}
    others = sorted(str(kind).removeprefix("torch.") for kind in kinds - {torch.float32})
    if others:
        raise InputError(
            f"{name} has parameters of type {' and '.join(others)}, but clients train and send 32-bit floats: convert "
            "it with network.float() (training.bf16 still multiplies in half precision)."
        )


def _until(calls: list[Call], output: object) -> list[Call]:
    """The calls up to the one that gave this output; all if none did."""
    last = max((number for number, call in enumerate(calls) if call.output is output), default=len(calls) - 1)
    return calls[: last + 1]


def _head_call(network: nn.Module, trace: Trace, head: str | None, name: str) -> Call:
    """The last call of the layer that becomes the head, or the last one that gives the network's output."""
    calls = ends.calls_of(trace, head)
    if calls:
        return next((c for c in reversed(calls) if isinstance(ends.tail_of(trace, c), ends.Tail)), calls[-1])
    if head is None:
        raise InputError(
            f"{name} has no linear layer to split at ({ends.layers_shown(network)}): end it with nn.Linear or name the "
            "layer that is its head (--set head=NAME)."
        )
    names = [path for path, _ in network.named_modules() if path]
    if head not in names:
        raise unknown_name(f"layer of {name}", head, names)
    raise InputError(
        f"{name} never calls its layer '{head}', so that layer can't be its head: name the layer that it ends with."
    )


def _check_output(network: nn.Module, trace: Trace, call: Call, batch: int, classes: int, name: str) -> ends.Tail:
    """The network's output must be logits for these classes, from the head or from what can be moved with it."""
    layer = ends.described(call)
    assert isinstance(trace.output, Tensor)
    if trace.output.shape != (batch, classes):
        given = "".join(f", {side}" for side in trace.output.shape[1:])
        flat = trace.output.dim() <= 2
        remedy = f"give {layer} {classes} outputs" if flat else f"flatten what goes into {layer}"
        if trace.output.shape in ((batch,), (batch, 1)):
            remedy += ", one for each class, because the losses compare all of them"
        raise InputError(
            f"{name} returns outputs of shape [batch{given}], but {classes} classes need [batch, {classes}]: {remedy}."
        )
    tail = ends.tail_of(trace, call)
    if isinstance(tail, ends.Tail):
        return tail
    others = [
        other
        for other in trace.watched
        if other.name != call.name and isinstance(other.layer, nn.Linear) and same(trace.output, other.value)
    ]
    if others:
        raise InputError(
            f"{name} can't be split at {layer}, whose output it does not use: its logits come from "
            f"'{others[-1].name}', so name that as its head (--set head={others[-1].name})."
        )
    remedy = "end the network with that layer and return raw logits (the losses apply softmax themselves)"
    raise InputError(
        f"{name} can't be split at {layer}, because {reason(ends.calls_of(trace, call.name), [tail], remedy)}, or name "
        f"another layer as its head (--set head=NAME; {ends.layers_shown(network)})."
    )


def _feature_size(network: nn.Module, call: Call, batch: int, name: str) -> int:
    features = call.inputs[0] if call.inputs else None
    if not isinstance(features, Tensor) or features.dim() != 2 or len(features) != batch:
        shape = list(features.shape) if isinstance(features, Tensor) else type(features).__name__
        raise InputError(
            f"{name} can't be split at {ends.described(call)}, which receives {shape} for {batch} images: "
            f"it must receive one row of features per image, [{batch}, K] (to name another layer as its head, "
            f"--set head=NAME; {ends.layers_shown(network)})."
        )
    return features.shape[1]


def _replace(network: nn.Module, old: nn.Module, new: nn.Module) -> nn.Module:
    """The network with another layer in a layer's place, under every name that layer has."""
    if network is old:
        return new
    for path in [path for path, layer in network.named_modules(remove_duplicate=False) if layer is old]:
        network.set_submodule(path, new)
    return network


def _with_features(
    split: SplitNetwork, placeholder: nn.Module, features: int, classes: int, match: Match, images: Tensor, name: str
) -> SplitNetwork:
    """The same extractor, brought to another number of features where its head was, and a new linear head."""
    with images.device:
        matcher = match_layer(split.feature_size, features, match).float()
        head: nn.Module = nn.Linear(features, classes).float()
    if isinstance(split.head, nn.Sequential) and not split.head_name:  # what followed the last layer still does
        head = nn.Sequential(head, *list(split.head)[1:])
    matched = SplitNetwork(_replace(split.extractor, placeholder, matcher), head, features)
    matched.training, matched.remarks = split.training, split.remarks
    if split.head_name and type(split.head) is not nn.Linear:
        kind = type(split.head).__name__.removeprefix("Parametrized")
        matched.remarks += (
            f"the head '{split.head_name}' of {name} ({kind}) is a linear layer here, because it has {features} "
            f"features instead of {split.feature_size}",
        )
    return matched


def _check_unchanged(split: SplitNetwork, images: Tensor, expected: object, path: str, name: str) -> None:
    try:
        output = dry_run(split, images, name).output
    except InputError as error:
        reason = first_line(error.__cause__ if isinstance(error.__cause__, Exception) else error)
        raise InputError(
            f"{name} can't be split at its layer '{path}', because it fails without it: {reason}."
        ) from error
    if not same(expected, output):
        raise InputError(
            f"{name} can't be split at its layer '{path}', because the two parts together return a different output: "
            "call that layer once, last, and don't read its weights elsewhere."
        )


def _checked(network: SplitNetwork, images: Tensor, classes: int, features: int | None, name: str) -> SplitNetwork:
    """A network that its maker has split already is used as it is, once its shapes are right."""
    size = network.feature_size
    if features is not None and features != size:
        raise InputError(
            f"{name} is already split with {size} features, but features is set to {features}: "
            f"build it with {features} features, or set features to {size}."
        )
    trace = dry_run(network, images, name, lambda path, layer: layer is network.extractor)
    found = trace.watched[-1].output if trace.watched else None
    for part, output, columns in (("features", found, size), ("logits", trace.output, classes)):
        if not isinstance(output, Tensor) or output.shape != (len(images), columns):
            shape = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise InputError(f"{name} returns {part} {shape} for 2 images, but it should return [2, {columns}].")
    return network
