"""Try a network on two images and see what its layers do, without leaving a trace in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from polyfed.errors import InputError, first_line, user_place
from polyfed.seeds import others_restored
from polyfed.shapes import noise


@dataclass(eq=False)
class Call:
    """What went into a layer and came out of it."""

    name: str
    layer: nn.Module
    inputs: tuple[object, ...]
    output: object
    value: object
    """The output as it was then: it may have been changed in place since."""


@dataclass
class Trace:
    """What a dry run saw: the network's output, and the watched calls in the order in which they finished."""

    output: object = None
    watched: list[Call] = field(default_factory=list)


def dry_run(
    network: nn.Module,
    images: Tensor,
    name: str,
    watch: Callable[[str, nn.Module], bool] = lambda name, layer: False,
    *,
    training: bool = False,
) -> Trace:
    """Run a network on some images and keep the inputs and outputs of the layers that `watch` chooses."""
    trace, entered = Trace(), list[str]()
    hooks = []
    for path, layer in network.named_modules():
        hooks.append(layer.register_forward_pre_hook(partial(_enter, entered, path)))
        hooks.append(layer.register_forward_hook(partial(_leave, trace, entered, path, watch(path, layer))))
    try:
        with undisturbed(network, training=training):
            trace.output = network(images)
    except Exception as error:
        raise _failure(name, images, entered, error) from error
    finally:
        for hook in hooks:
            hook.remove()
    return trace


def copied(network: nn.Module, name: str) -> nn.Module:
    """A copy of a network; raises if it can't be copied."""
    try:
        return deepcopy(network)
    except Exception as error:
        raise InputError(f"{name} can't be copied, and every client needs a copy: {first_line(error)}.") from error


@contextmanager
def undisturbed(network: nn.Module, *, training: bool = False) -> Iterator[None]:
    """Evaluate a network inside the block and leave its buffers, its training flags and the global generators alone.

    With `training` it behaves as in training.
    """
    modules = list(network.modules())
    flags = [module.training for module in modules]
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in modules
        for name, buffer in module.named_buffers(recurse=False)
        if not is_lazy(buffer)
    ]
    device = device_of(network)
    network.train(training)
    try:
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), others_restored(), torch.no_grad():
            yield
    finally:
        for module, flag in zip(modules, flags, strict=True):
            module.training = flag
        for module, name, buffer, before in buffers:
            with torch.no_grad():
                buffer.copy_(before)
            setattr(module, name, buffer)  # a forward pass may have put another tensor in its place


def example_images(network: nn.Module, input_shape: tuple[int, ...]) -> Tensor:
    """Two samples of noise, always the same; zeros would hide a layer that acts on some values only, such as ReLU."""
    images = noise(2, input_shape, torch.Generator().manual_seed(0)).to(device_of(network))
    if not images.is_floating_point():
        return images
    kinds = (p.dtype for p in network.parameters() if p.is_floating_point())
    return images.to(next(kinds, torch.float32))


def device_of(network: nn.Module) -> torch.device:
    """Where a network's parameters live."""
    tensors = chain(network.parameters(), network.buffers())
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


def _enter(entered: list[str], path: str, layer: nn.Module, inputs: Any) -> None:
    entered.append(path)


def _leave(
    trace: Trace, entered: list[str], path: str, watched: bool, layer: nn.Module, inputs: Any, output: Any
) -> None:
    entered.pop()
    if watched:
        value = output.clone() if isinstance(output, Tensor) else output
        trace.watched.append(Call(path, layer, inputs, output, value))


def _failure(name: str, images: Tensor, entered: list[str], error: Exception) -> InputError:
    where = f" in its layer '{entered[-1]}'" if entered and entered[-1] else ""
    shape = tuple(images.shape[1:])
    said = f"{first_line(error)}{user_place(error)}"
    samples = "images" if images.is_floating_point() else "token ids"
    return InputError(f"{name} does not accept {samples} of shape {shape}: it fails{where} with: {said}.")
