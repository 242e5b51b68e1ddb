"""What travels between a client and the server: named tensors, counted, checked and turned into safe bytes.

A message is the same object in a simulation and on a wire. Its floats are what papers call communication cost; labels
and counts travel with them as metadata and are never counted as floats. Bytes are safetensors, never pickle.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeAlias

import torch
from safetensors.torch import load, save
from torch import Tensor

from polyfed.compute import all_copied_to_cpu
from polyfed.errors import BadMessage

State: TypeAlias = dict[str, Tensor]
"""Flat named tensors: a client's personal state, the server's state, the content of a message."""

_METADATA = "metadata."
_DTYPES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.float16: "F16",
    torch.bfloat16: "BF16", torch.int32: "I32", torch.float32: "F32", torch.float64: "F64", torch.int64: "I64",
}  # fmt: skip
"""What safetensors calls the usual types, in the order in which it ranks them."""
_RANKS = {dtype: rank for rank, dtype in enumerate(_DTYPES)}

_LONGEST_NAMES = 100_000
"""Characters in all names of a message up to which its length is remembered: a sender chooses them."""
LARGEST_COUNT = 2**40
"""Nobody has more samples, and up to here sums and products of counts are exact in 64 bits."""


@dataclass(frozen=True)
class Message:
    """Named tensors that travel, with small integer metadata (labels, counts) beside them.

    >>> message = Message({"prototypes": torch.zeros(2, 500)}, {"labels": torch.tensor([3, 7])})
    >>> message.floats
    1000
    """

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    metadata: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def floats(self) -> int:
        """How many numbers travel, without metadata; anything but a plain tensor counts as none."""
        return sum(tensor.numel() for tensor in self.tensors.values() if is_plain(tensor))

    @property
    def nbytes(self) -> int:
        """The length of `to_bytes()`; an empty message is not sent and costs nothing.

        It never fails: what can't travel (sparse or meta tensors, or anything that is not a tensor) counts as nothing.
        """
        entries = {name: tensor for name, tensor in self._entries().items() if is_plain(tensor)}
        try:
            usual = all(tensor.dtype in _DTYPES for tensor in entries.values())
            return _length(entries) if usual else len(state_bytes(entries))
        except Exception:  # a name or a type that safetensors does not have: such a message is refused anyway
            return sum(tensor.numel() * tensor.element_size() for tensor in entries.values())

    @property
    def shapes(self) -> dict[str, list[int]]:
        """The shape of each entry that travels, metadata too, for records.

        >>> Message({"prototypes": torch.zeros(2, 500)}, {"labels": torch.tensor([3, 7])}).shapes
        {'prototypes': [2, 500], 'metadata.labels': [2]}
        """
        return {name: list(tensor.shape) for name, tensor in self._entries().items() if is_plain(tensor)}

    def to_bytes(self) -> bytes:
        """The message as safetensors bytes."""
        return state_bytes(self._entries())

    @staticmethod
    def from_bytes(data: bytes) -> Message:
        """Read what `to_bytes` wrote; bytes that are not a message raise `BadMessage`."""
        try:
            entries = load(data)
        except Exception as error:  # safetensors raises its own and ValueError, KeyError for malformed bytes
            raise BadMessage(
                f"the message's bytes are not a safetensors file ({error}); send what to_bytes() wrote."
            ) from error
        tensors = {name: tensor for name, tensor in entries.items() if not name.startswith(_METADATA)}
        metadata = {name.removeprefix(_METADATA): t for name, t in entries.items() if name.startswith(_METADATA)}
        return Message(tensors, metadata)

    def snapshot(self, unmoved: Collection[str] = ()) -> Message:
        """A copy that shares no storage with anyone's live state, on the CPU except for the entries named.

        Anything but a plain tensor is left as it is: the check refuses it.
        """

        def copied(name: str, tensor: Tensor) -> Tensor:
            if not is_plain(tensor):
                return tensor
            return tensor.detach().clone() if name in unmoved else tensor.detach().to("cpu", copy=True)

        return Message(
            {name: copied(name, tensor) for name, tensor in self.tensors.items()},
            {name: copied(name, tensor) for name, tensor in self.metadata.items()},
        )

    def _entries(self) -> State:
        return {**self.tensors, **{f"{_METADATA}{name}": tensor for name, tensor in self.metadata.items()}}


def snapshots(messages: Sequence[Message]) -> list[Message]:
    """A snapshot of each of these messages, on the CPU; what is small comes from a GPU in one transfer for all."""
    parts = [part for message in messages for part in (message.tensors, message.metadata)]
    plain = [(place, name) for place, part in enumerate(parts) for name, tensor in part.items() if is_plain(tensor)]
    copies = dict(zip(plain, all_copied_to_cpu([parts[place][name] for place, name in plain]), strict=True))
    found = [{n: copies.get((place, n), tensor) for n, tensor in part.items()} for place, part in enumerate(parts)]
    return [Message(tensors, metadata) for tensors, metadata in zip(found[::2], found[1::2], strict=True)]


def is_plain(tensor: object) -> bool:
    """Whether this is a tensor with all its values in memory: not sparse, nested, quantised or on `meta`."""
    return (
        isinstance(tensor, Tensor)
        and tensor.layout == torch.strided
        and tensor.device.type != "meta"
        and not tensor.is_nested
        and not tensor.is_quantized
    )


def largest(tensors: Iterable[Tensor]) -> Tensor:
    """The largest absolute value in all of these tensors, NaN if there is one; zero if they are empty."""
    # Finding the extremes is many times faster than isfinite on every value, and needs no copy.
    extremes = [extreme for tensor in tensors if tensor.numel() for extreme in torch.aminmax(tensor)]
    return torch.stack(extremes).abs().max() if extremes else torch.zeros(())


def largest_each(tensors: Sequence[Tensor]) -> list[float]:
    """The largest absolute value in each of these tensors, NaN if there is one; zero if it is empty.

    Every look at a value waits for a GPU, so there is only one for all tensors of a type on a device.
    """
    found = [0.0] * len(tensors)
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for place, tensor in enumerate(tensors):
        if tensor.numel():
            groups.setdefault((tensor.device, tensor.dtype), []).append(place)
    for places in groups.values():
        extremes = torch.stack([extreme for place in places for extreme in torch.aminmax(tensors[place])])
        for place, size in zip(places, extremes.abs().view(-1, 2).amax(1).tolist(), strict=True):
            found[place] = float(size)
    return found


def _length(entries: Mapping[str, Tensor]) -> int:
    """The length of `state_bytes`, without building them."""
    known = tuple((name, tensor.dtype, tensor.shape) for name, tensor in entries.items())
    short = sum(len(str(name)) for name in entries) <= _LONGEST_NAMES
    return _length_of(known) if short else _length_of.__wrapped__(known)


@lru_cache(256)  # most messages of a run look like an earlier one
def _length_of(entries: tuple[tuple[str, torch.dtype, torch.Size], ...]) -> int:
    """The same from names, types and shapes."""
    if not entries:
        return 0
    # safetensors: an 8-byte length, a JSON header padded to 8 bytes, the tensors sorted by type, then name.
    header: dict[str, object] = {}
    offset = 0
    for name, dtype, shape in sorted(entries, key=lambda entry: (-_RANKS[entry[1]], entry[0])):
        end = offset + shape.numel() * dtype.itemsize
        header[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    length = len(json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode())
    return 8 + -(-length // 8) * 8 + offset


def state_bytes(state: Mapping[str, Tensor]) -> bytes:
    """Named tensors as safetensors bytes."""
    # Copies, because safetensors refuses tensors that share storage, as tied weights do.
    return save({name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in state.items()})


def state_size(state: Mapping[str, Tensor]) -> int:
    """Bytes that a state's tensors take."""
    return sum(tensor.numel() * tensor.element_size() for tensor in state.values())


@dataclass(frozen=True)
class Floats:
    """A float32 tensor of this shape with finite values; a name stands for a size that the sender chooses."""

    shape: tuple[int | str, ...]
    optional: bool = False
    negative: bool = True
    """Whether values below zero make sense; those of a variance do not."""


@dataclass(frozen=True)
class Labels:
    """Class labels, each at most once, in ascending order; `size` names how many there are."""

    classes: int
    size: str = "seen"
    optional: bool = False


@dataclass(frozen=True)
class Counts:
    """Sample counts of at least one and at most `LARGEST_COUNT`."""

    shape: tuple[int | str, ...]
    optional: bool = False


@dataclass(frozen=True)
class Schema:
    """What a message must look like; `check` raises `BadMessage` with the first difference.

    >>> schema = Schema({"prototypes": Floats(("seen", 4))}, {"labels": Labels(10)})
    >>> schema.check(Message({"prototypes": torch.zeros(2, 4)}, {"labels": torch.tensor([3, 7])}))
    """

    tensors: Mapping[str, Floats] = field(default_factory=dict)
    metadata: Mapping[str, Labels | Counts] = field(default_factory=dict)

    @property
    def largest(self) -> int | None:
        """Bytes that no valid message exceeds; None if the sender chooses a size freely.

        There are at most as many labels as classes, and a rank is at most the smaller side of its matrix.

        >>> Schema({"w": Floats((2, 3))}).largest >= Message({"w": torch.zeros(2, 3)}).nbytes
        True
        """
        sizes = {entry.size: entry.classes for entry in self.metadata.values() if isinstance(entry, Labels)}
        shapes = [(name, 4, entry.shape) for name, entry in self.tensors.items()]
        for name, entry in self.metadata.items():
            shapes.append((_METADATA + name, 8, (entry.size,) if isinstance(entry, Labels) else entry.shape))
        chosen: dict[str, int] = {}
        for _, _, shape in shapes:
            fixed = [side for side in shape if isinstance(side, int)]
            for side in shape:
                if isinstance(side, str) and side not in sizes and fixed:
                    chosen[side] = min(chosen.get(side, fixed[0]), *fixed)
        known = chosen | sizes
        if any(isinstance(side, str) and side not in known for _, _, shape in shapes for side in shape):
            return None
        return 1000 + sum(
            width * math.prod(known[side] if isinstance(side, str) else side for side in shape)
            + len(json.dumps(name))
            + 200  # its entry in the header
            for name, width, shape in shapes
        )

    def check(self, message: Message, unread: Collection[str] = ()) -> None:
        """Raise unless the message has exactly these entries, of these shapes and types, with valid values.

        The values of the entries named `unread` are not looked at.
        """
        sizes: dict[str, int] = {}
        _check_names("tensor", message.tensors, self.tensors)
        _check_names("metadata entry", message.metadata, self.metadata)
        for name, tensor in message.tensors.items():
            _check_type(name, tensor, torch.float32)
            _check_shape(name, tensor, self.tensors[name].shape, sizes)
            if name in unread:
                continue
            if not bool(largest([tensor]).isfinite()):
                raise BadMessage(f"'{name}' holds values that are not finite.")
            if not self.tensors[name].negative and bool((tensor < 0).any()):
                raise BadMessage(f"'{name}' holds a negative variance.")
        for name, tensor in message.metadata.items():
            entry = self.metadata[name]
            _check_type(name, tensor, torch.int64)
            _check_shape(name, tensor, (entry.size,) if isinstance(entry, Labels) else entry.shape, sizes)
            if name in unread:
                continue
            if isinstance(entry, Labels):
                _check_labels(name, tensor, entry.classes)
            else:
                _check_counts(name, tensor)

    def passes(self, messages: Sequence[Message]) -> bool:
        """Whether `check` passes every one of these messages, whose values are looked at all at once.

        >>> schema = Schema({"prototypes": Floats(("seen", 4))}, {"labels": Labels(10)})
        >>> sound = Message({"prototypes": torch.zeros(2, 4)}, {"labels": torch.tensor([3, 7])})
        >>> schema.passes([sound, sound]), schema.passes([sound, Message()])
        (True, False)
        """
        try:
            for message in messages:
                self.check(message, unread=(*self.tensors, *self.metadata))
            for name, entry in self.metadata.items():
                given = [message.metadata[name].flatten() for message in messages if name in message.metadata]
                if given and isinstance(entry, Labels):
                    _check_labels_of(name, given, entry.classes)
                elif given:
                    _check_counts(name, torch.cat(given))
        except BadMessage:
            return False
        tensors = [(name, tensor) for message in messages for name, tensor in message.tensors.items()]
        variances = [tensor.flatten() for name, tensor in tensors if not self.tensors[name].negative]
        if variances and bool((torch.cat(variances) < 0).any()):
            return False
        return all(map(math.isfinite, largest_each([tensor for _, tensor in tensors])))


def check_download_metadata(metadata: Mapping[str, Tensor], classes: int) -> None:
    """Raise `BadMessage` for metadata that no download has: they are rows of integers from 0; labels are classes."""
    for name, tensor in metadata.items():
        _check_type(name[:100], tensor, torch.int64)
        if tensor.dim() != 1:
            raise BadMessage(f"'{name[:100]}' has shape {tuple(tensor.shape)}, but is not a row of numbers.")
        if name == "labels":
            _check_labels(name, tensor, classes)
        elif bool((tensor < 0).any()):
            raise BadMessage(f"'{name[:100]}' holds a number below 0.")


def _check_names(kind: str, found: Mapping[str, Tensor], expected: Mapping[str, Floats | Labels | Counts]) -> None:
    unknown = sorted(set(found) - set(expected), key=str)
    missing = sorted(name for name, entry in expected.items() if name not in found and not entry.optional)
    if unknown:
        raise BadMessage(f"the message has an unexpected {kind} '{unknown[0]}'.")
    if missing:
        raise BadMessage(f"the message lacks the {kind} '{missing[0]}'.")


def _check_type(name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    if not is_plain(tensor):
        raise BadMessage(f"'{name}' is not a plain tensor, dense and with its values in memory.")
    if tensor.dtype != dtype:
        raise BadMessage(f"'{name}' is {tensor.dtype}, not {dtype}.")


def _check_shape(name: str, tensor: Tensor, shape: tuple[int | str, ...], sizes: dict[str, int]) -> None:
    fits = tensor.dim() == len(shape) and all(
        actual == (sizes.setdefault(size, actual) if isinstance(size, str) else size)
        for size, actual in zip(shape, tensor.shape, strict=True)
    )
    if not fits:
        expected = tuple(sizes.get(size, size) if isinstance(size, str) else size for size in shape)
        raise BadMessage(f"'{name}' has shape {tuple(tensor.shape)}, not {expected}.")


def _check_counts(name: str, counts: Tensor) -> None:
    if bool((counts < 1).any()):
        raise BadMessage(f"'{name}' holds a count below 1.")
    if bool((counts > LARGEST_COUNT).any()):
        raise BadMessage(f"'{name}' holds a count above {LARGEST_COUNT}.")


def _check_labels(name: str, labels: Tensor, classes: int) -> None:
    _check_labels_of(name, [labels], classes)


def _check_labels_of(name: str, messages: Sequence[Tensor], classes: int) -> None:
    """Check the labels of several messages at once."""
    labels = torch.cat(list(messages))
    if labels.numel() == 0:
        return
    low, high = torch.stack(torch.aminmax(labels)).tolist()
    if low < 0 or high >= classes:
        raise BadMessage(f"'{name}' holds a class outside 0..{classes - 1}.")
    if len(messages) > 1:  # each message's classes come after those of the one before
        sizes = torch.tensor([len(own) for own in messages])
        labels = labels + (classes * torch.arange(len(sizes)).repeat_interleave(sizes)).to(labels.device)
    if bool((labels[1:] <= labels[:-1]).any()):
        raise BadMessage(f"'{name}' is not in ascending order without repetition.")
