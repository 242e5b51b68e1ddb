"""Networks of other libraries by name: `torchvision:NAME`, `timm:NAME`, `hf:NAME`. Nothing is downloaded."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from polyfed.errors import InputError, first_line, unknown_name
from polyfed.models.encoders import encoder
from polyfed.models.layers import Match
from polyfed.models.networks import image_shape
from polyfed.models.split import SplitNetwork, split_network

EXTRAS = {"timm": ("timm", "timm"), "hf": ("transformers", "hf")}
"""By library, the package that it needs and the extra that installs it."""
OPTIONS = {"torchvision": ("weights",), "timm": ("weights",), "hf": ("rank",)}
RANK = 8


@dataclass(frozen=True)
class FromLibrary:
    """Builds a network that another library defines, with new weights or with those of a local file."""

    library: str
    network: str
    weights: str | None = None
    rank: int = RANK
    """Of the adapters that are trained beside a frozen encoder."""

    @property
    def title(self) -> str:
        """What names the network without its weights."""
        rank = f"?rank={self.rank}" if self.rank != RANK else ""
        return f"{self.library}:{self.network}{rank}"

    def __call__(
        self, name: str, input_shape: tuple[int, ...], classes: int, features: int | None, match: Match
    ) -> SplitNetwork:
        if self.library == "hf":
            network: nn.Module = encoder(self.network, input_shape, classes, self.rank, name)
        else:
            build = _torchvision if self.library == "torchvision" else _timm
            network = _built(build, self.network, input_shape, classes, name)
        if self.weights is not None:
            load_weights(network, Path(self.weights).expanduser(), classes, name)
        return split_network(network, input_shape, classes, features=features, match=match, name=name)


def from_library(text: str) -> FromLibrary:
    """What `library:NAME` or `library:NAME?option=value&option=value` names.

    >>> from_library("torchvision:resnet18?weights=mine.safetensors")
    FromLibrary(library='torchvision', network='resnet18', weights='mine.safetensors', rank=8)
    """
    library, _, rest = text.partition(":")
    network, _, query = rest.partition("?")
    if not network:
        raise InputError(f"'{text}' names no network: write {library}:NAME.")
    _check_installed(library)
    given = dict(part.partition("=")[::2] for part in query.split("&")) if query else {}
    for option, value in given.items():
        if option not in OPTIONS[library]:
            raise unknown_name(f"option of {library}:{network}", option, OPTIONS[library])
        if not value:
            raise InputError(f"'{text}' gives no value for {option}: write {option}=VALUE.")
    rank = given.get("rank", str(RANK))
    if not rank.isdecimal() or int(rank) < 1:
        raise InputError(
            f"the rank of the adapters of {library}:{network} must be a whole number from 1, not '{rank}'."
        )
    return FromLibrary(library, network, given.get("weights"), int(rank))


def _check_installed(library: str) -> None:
    package, extra = EXTRAS.get(library, ("torchvision", ""))
    if find_spec(package) is None:
        raise InputError(
            f"networks of {library} need the package {package}, which is not installed here: "
            f"pip install 'polyfed[{extra}]'."
        )


def _built(
    build: Callable[..., nn.Module], network: str, input_shape: tuple[int, ...], classes: int, name: str
) -> nn.Module:
    image_shape(input_shape, name)
    try:
        return build(network, input_shape, classes, name)
    except InputError:
        raise
    except Exception as error:  # of the library, about sizes that do not fit
        raise InputError(f"{name} can't be built for images of shape {input_shape}: {first_line(error)}.") from error


def _torchvision(network: str, input_shape: tuple[int, ...], classes: int, name: str) -> nn.Module:
    models: Any = import_module("torchvision.models")
    known = models.list_models(module=models)
    if network not in known:
        raise unknown_name("network of torchvision", network, known)
    if input_shape[0] != 3:
        raise InputError(
            f"{name} needs images with 3 channels, but they have {input_shape[0]}: repeat the channel, or use a "
            "network that accepts any number, such as resnet18 or one of timm."
        )
    extra: dict[str, Any] = {}
    if network in ("googlenet", "inception_v3"):
        extra = {"aux_logits": False, "init_weights": True}
    if network.startswith("vit_"):
        extra = {"image_size": input_shape[1]}
    made: nn.Module = models.get_model(network, weights=None, num_classes=classes, **extra)
    return made


def _timm(network: str, input_shape: tuple[int, ...], classes: int, name: str) -> nn.Module:
    timm: Any = import_module("timm")
    if not timm.is_model(network):
        raise unknown_name("network of timm", network, timm.list_models(f"{network[:4]}*") or timm.list_modules())
    options = {"pretrained": False, "num_classes": classes, "in_chans": input_shape[0]}
    try:
        made: nn.Module = timm.create_model(network, img_size=input_shape[1:], **options)
    except TypeError:  # most convolutional networks accept images of any size, and no such argument
        made = timm.create_model(network, **options)
    return made


def load_weights(network: nn.Module, path: Path, classes: int, name: str) -> None:
    """Fill a network with the tensors of a file; a last layer for other classes keeps its new weights."""
    given, own = read_weights(path, name), network.state_dict()
    if any(tensor.is_meta for tensor in own.values()):  # only its size is wanted
        return
    missing = sorted(own.keys() - given.keys())
    # Auxiliary classifiers, with which some networks of torchvision were trained, are not built here.
    unknown = sorted(key for key in given.keys() - own.keys() if not key.lower().startswith("aux"))
    if missing or unknown:
        which = f"lacks '{missing[0]}'" if missing else f"has '{unknown[0]}', which the network has not"
        raise InputError(f"'{path}' does not fit {name}: it {which}; give the state dictionary of this very network.")
    fitting: dict[str, Tensor] = {}
    for key, tensor in own.items():
        if given[key].shape == tensor.shape:
            fitting[key] = given[key]
        elif tensor.dim() == 0 or len(tensor) != classes or given[key].shape[1:] != tensor.shape[1:]:
            raise InputError(
                f"'{path}' does not fit {name}: '{key}' has the shape {tuple(given[key].shape)}, but these images and "
                f"classes need {tuple(tensor.shape)}."
            )
    network.load_state_dict(fitting, strict=False)


def read_weights(path: Path, name: str) -> Mapping[str, Tensor]:
    """The named tensors of a safetensors file or of a torch file, which is read without running code from it."""
    if not path.is_file():
        raise InputError(f"there is no file '{path}' with weights for {name}: give the path of one that exists.")
    remedy = "give a state dictionary (torch.save(network.state_dict(), path)) or a safetensors file"
    try:
        found: object = (
            load_file(path)
            if path.suffix == ".safetensors"
            else torch.load(path, map_location="cpu", weights_only=True)
        )
    except (OSError, RuntimeError, ValueError, EOFError, SafetensorError) as error:
        raise InputError(f"'{path}' can't be read as weights ({first_line(error)}): {remedy}.") from error
    except Exception as error:  # torch raises pickle's own errors, whose module we do not import
        raise InputError(f"'{path}' holds more than named tensors: {remedy}.") from error
    if not isinstance(found, Mapping) or not all(isinstance(tensor, Tensor) for tensor in found.values()):
        raise InputError(f"'{path}' holds something other than named tensors: {remedy}.")
    broken = next((key for key, tensor in found.items() if not math.isfinite(float(tensor.double().sum()))), None)
    if broken is not None:
        raise InputError(f"'{path}' has values in '{broken}' that are not finite: give other weights for {name}.")
    return found
